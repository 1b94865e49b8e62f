"""Swarms of paced servers in an emulated network: started, asked what they cost, measured."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.emulation.network import Emulation
from benchmarks.pipelined.analysis import steady, tokens_in
from benchmarks.pipelined.client import Job, Request
from benchmarks.pipelined.process import ClientProcess
from benchmarks.predicted import asker
from benchmarks.process import LineProcess
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.config.networks import NetworkFile
from bloombee.core import PeerId, Span
from bloombee.planner.observed import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

QUEUE_MS, MTU = 2000.0, 1500
DTYPE = "bfloat16"
PREFIX_BYTES = 512 << 20
CLIENT = "client"


@dataclass(frozen=True)
class Setup:
    """What all swarms have in common. `profile_s` is spent by each server for its table."""

    model: str = "smollm2"
    prompt: int = 128
    batch: int = 32
    profile_s: float = 2.5


@dataclass(frozen=True)
class Member:
    """A server: its blocks, how many times slower than this machine it is."""

    span: str
    pace: float


class Running:
    """One swarm that serves, its client, and who asks it."""

    def __init__(
        self, swarm: LocalSwarm, client: ClientProcess, questions: LineProcess, setup: Setup
    ) -> None:
        self._swarm = swarm
        self._client = client
        self._questions = questions
        self._setup = setup

    def seen(self) -> list[Seen]:
        """What the servers tell now, in the order of their start. Raises RuntimeError for none."""
        self._questions.write(asker.Ask())
        told = self._questions.read(asker.Told)
        if told.silent:
            raise RuntimeError(f"servers gave no answer: {told.silent}")
        order = [server.peer for server in self._swarm.servers]
        servers = sorted(told.servers, key=lambda server: order.index(server.peer))
        return [
            Seen(PeerId(s.peer), Span(s.start, s.end), s.costs, s.links, s.rtt_s) for s in servers
        ]

    def settle(self, batch: int, groups: int, seconds: float) -> None:
        """Work unmeasured: prompts are kept from then on, and links are known."""
        self._client.ask(self._request(batch, groups, seconds))

    def tokens_per_s(self, batch: int, groups: int, seconds: float) -> float:
        """Decode tokens a second, from when all rows decode until the first is done."""
        answer = self._client.ask(self._request(batch, groups, seconds))
        window = steady(answer, 0.0)
        return tokens_in(answer, window) / window.length_s

    def _request(self, batch: int, groups: int, seconds: float) -> Request:
        return Request("server", batch, groups, self._setup.prompt, 1 << 9, seconds)


class Bed:
    """An emulated network with a client and places for servers."""

    def __init__(self, setup: Setup, servers: int, stack: ExitStack) -> None:
        self.setup = setup
        self.hosts = tuple(f"server-{index}" for index in range(servers))
        hosts = [{"name": name} for name in (CLIENT, *self.hosts)]
        file = NetworkFile.model_validate({"hosts": hosts, "queue_ms": QUEUE_MS, "mtu": MTU})
        self.network = stack.enter_context(Emulation(file))

    def unshape(self) -> None:
        """No limits anywhere: what starts and loads is not measured."""
        self.shape(None, 0.0)

    def shape(self, mbps: float | None, rtt_ms: float) -> None:
        """All pairs alike from now on."""
        names = (CLIENT, *self.hosts)
        for index, one in enumerate(names):
            for other in names[index + 1 :]:
                self.network.set_path_rate(one, other, mbps)
                self.network.set_delay(one, other, rtt_ms / 2)

    @contextmanager
    def swarm(self, members: Sequence[Member | None], codec: str = "raw") -> Iterator[Running]:
        """Start one, each server in its host; they are pinned. A host without one stays idle.

        Raises SwarmError when one does not come up.
        """
        setup = self.setup
        places = [self.network.place(CLIENT)]
        present: list[Member] = []
        for host, member in zip(self.hosts, members, strict=False):
            if member is None:
                continue
            present.append(member)
            place = self.network.place(host)
            places.append(replace(place, flags=(*place.flags, "--pace", str(member.pace))))
        tokens = 4 * setup.batch * (setup.prompt + 512)
        flags = ("--dtype", DTYPE, "--threads", "1", "--codec", codec, "--kv-tokens", str(tokens))
        flags += ("--prefix-bytes", str(PREFIX_BYTES), "--profile", "fresh")
        flags += ("--profile-s", str(setup.profile_s))
        with ExitStack() as stack:
            swarm = stack.enter_context(
                LocalSwarm(
                    setup.model, [m.span for m in present], server_flags=flags, places=places
                )
            )
            job = Job(setup.model, DTYPE, swarm.initial_peers)
            client = stack.enter_context(ClientProcess(job, places[0].prefix))
            questions = stack.enter_context(
                LineProcess(
                    "benchmarks.predicted.asker",
                    asker.Job(swarm.initial_peers),
                    places[0].prefix,
                )
            )
            yield Running(swarm, client, questions, setup)
