"""Several swarms side by side in one emulated network, each with its own way to send rows.

Servers hold their codec for life, so each codec has a swarm: its stages and its client, in hosts
of their own, so that nothing one swarm sends while it idles is on another's links. Only one
works at a time. Devices are paced (see `bloombee/server/pacing.py`), and after a warm-up
all swarms' devices are alike: a stage takes for so many rows what it needed at least in any swarm,
times the pace, whatever the context.

Prompts are computed once, before links have a rate; servers keep their KV (see the README), so
all but the last token of each is there when a measured run begins. So links keep their
rate from one run to the next, and what measures them has something steady to measure.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import psutil

from benchmarks.emulation.network import Emulation
from benchmarks.pipelined.analysis import Link, Shown, shown
from benchmarks.pipelined.client import First, Job, Request
from benchmarks.pipelined.process import ClientProcess
from benchmarks.shaped.environments import rate_mbps
from bloombee.cli.local_swarm import LocalSwarm
from bloombee.config.networks import NetworkFile
from bloombee.server.pacing import read_diary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from benchmarks.emulation.network import Traffic
    from benchmarks.pipelined.client import Answer
    from benchmarks.shaped.environments import Environment, Wire
    from bloombee.server.pacing import Pass

WIDTH, ITEM_BYTES = 576, 2
"""SmolLM2 in bfloat16."""
QUEUE_MS, MTU = 2000.0, 1500
"""A full batch fits into the queue of the slowest link: what is measured isn't its losses."""
WARM_TOKENS = 24
PREFIX_BYTES = 512 << 20


@dataclass(frozen=True)
class Setup:
    """What all swarms have in common, and what a run asks for; `trace` goes to their clients."""

    model: str
    spans: tuple[str, ...]
    batch: int
    prompt: int
    pace: float
    trace: bool = False

    @property
    def hop_bytes(self) -> int:
        """Raw bytes of a full-batch decode hop."""
        return self.batch * WIDTH * ITEM_BYTES


@dataclass(frozen=True)
class Setting:
    """One way to decode: the servers' codec, and how many micro-batches (0: as they like)."""

    name: str
    codec: str
    groups: int


FIXED = (
    Setting("baseline", "raw", 1),
    Setting("+codec", "split", 1),
    Setting("+micro-batches", "raw", 4),
    Setting("+both", "split", 4),
)
AUTO = Setting("auto", "auto", 0)


@dataclass(frozen=True)
class Run:
    """What came of a run. `row_bytes` are those of each hop, all that travelled included."""

    setting: Setting
    answer: Answer
    figures: Shown
    row_bytes: tuple[int, ...]
    cores: float

    @property
    def tokens_per_s(self) -> float:
        """Of decoding, after the first token."""
        return self.figures.tokens_per_s


def least_us(passes: Sequence[Pass]) -> dict[int, int]:
    """The least processor time of passes of as many rows, prompts left out."""
    least: dict[int, int] = {}
    for each in passes:
        if each.decode_tokens and not each.prompt_tokens:
            rows = each.decode_tokens
            least[rows] = min(each.cpu_us, least.get(rows, each.cpu_us))
    return least


def alike(stages: Sequence[dict[int, int]]) -> dict[int, int]:
    """What the same stage of several swarms needs: the least of all; more rows never need less."""
    found: dict[int, int] = {}
    for rows in sorted({rows for stage in stages for rows in stage}, reverse=True):
        least = min(stage[rows] for stage in stages if rows in stage)
        found[rows] = min([least, *found.values()])
    return found


class Lane:
    """One swarm in its hosts, and its client."""

    def __init__(self, index: int, codec: str, setup: Setup) -> None:
        self.codec = codec
        self.setup = setup
        self.hosts = (f"client-{index}", *(f"{codec}-{i}" for i in range(len(setup.spans))))

    def start(self, network: Emulation, stack: ExitStack) -> None:
        """Start all processes. Raises SwarmError when one doesn't come up."""
        setup = self.setup
        self._network = network
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = [network.place(host) for host in self.hosts]
        tokens = 4 * setup.batch * (setup.prompt + 512)
        flags = ("--dtype", "bfloat16", "--threads", "1", "--codec", self.codec)
        flags += ("--pace", str(setup.pace), "--diary", str(self._folder))
        flags += ("--kv-tokens", str(tokens), "--prefix-bytes", str(PREFIX_BYTES))
        self.swarm = stack.enter_context(
            LocalSwarm(setup.model, setup.spans, server_flags=flags, places=places)
        )
        job = Job(setup.model, "bfloat16", self.swarm.initial_peers, setup.trace)
        self._client = stack.enter_context(ClientProcess(job, places[0].prefix))

    def warm_up(self, group_counts: Sequence[int]) -> None:
        """Compute the prompts, and passes of all sizes until their least time is known."""
        for groups in group_counts:
            self.ask(self.request(groups, WARM_TOKENS))

    def least_us(self) -> list[dict[int, int]]:
        """What passes of each stage needed at least, by rows."""
        return [least_us(passes) for passes in self.passes()]

    def tell(self, needs: Sequence[dict[int, int]]) -> None:
        """What passes of each stage need from now on, by rows."""
        for span, stage in zip(self.swarm.spans, needs, strict=True):
            file = self._folder / f"{span.replace(':', '-')}.needs.json"
            whole = file.with_suffix(".new")
            whole.write_bytes(msgspec.json.encode(sorted(stage.items())))
            whole.replace(file)

    def request(self, groups: int, new_tokens: int, seconds: float = 0.0) -> Request:
        """What the client is asked for."""
        setup = self.setup
        return Request("server", setup.batch, groups, setup.prompt, new_tokens, seconds)

    def ask(self, request: Request, at_first: Callable[[First], None] | None = None) -> Answer:
        """Run it; `at_first` is called when every row has a token."""
        return self._client.ask(request, at_first)

    def passes(self) -> list[list[Pass]]:
        """The diaries of the stages."""
        spans = [span.replace(":", "-") for span in self.swarm.spans]
        return [read_diary(self._folder / f"{span}.jsonl") for span in spans]

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        pids = [child.pid for child in self.swarm.servers] + [self._client.process.pid]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(each.user + each.system for each in times)


class Bench:
    """The network, and a lane for each codec."""

    def __init__(self, setup: Setup, codecs: Sequence[str], stack: ExitStack) -> None:
        self.setup = setup
        self.lanes = {codec: Lane(index, codec, setup) for index, codec in enumerate(codecs)}
        hosts = [{"name": host} for lane in self.lanes.values() for host in lane.hosts]
        file = NetworkFile.model_validate({"hosts": hosts, "queue_ms": QUEUE_MS, "mtu": MTU})
        self.network = stack.enter_context(Emulation(file))
        self._environment: Environment | None = None
        self.stage_s = 0.0
        """What one stage needs alone for the full batch; after `warm_up`."""
        for lane in self.lanes.values():
            lane.start(self.network, stack)

    def warm_up(self, settings: Sequence[Setting]) -> None:
        """Warm all lanes for their settings, and make their devices alike."""
        for codec, lane in self.lanes.items():
            lane.warm_up([1, *sorted({s.groups for s in settings if s.codec == codec} - {1})])
        found = [lane.least_us() for lane in self.lanes.values()]
        needs = [alike(stages) for stages in zip(*found, strict=True)]
        for lane in self.lanes.values():
            lane.tell(needs)
        whole_us = [stage[self.setup.batch] for stage in needs]
        self.stage_s = self.setup.pace * median(whole_us) / 1e6

    def rate(self, wire: Wire) -> float | None:
        """Mbit/s of a wire, by the measured speed of the stages."""
        return rate_mbps(wire.ratio, self.setup.hop_bytes, self.stage_s)

    def shape(self, environment: Environment) -> None:
        """All lanes' links from now on."""
        self._environment = environment
        for lane in self.lanes.values():
            for one, other, wire in environment.pairs:
                self.shape_pair(lane, one, other, wire)

    def shape_pair(self, lane: Lane, one: int, other: int, wire: Wire) -> None:
        """One link of one lane from now on."""
        ends = (lane.hosts[one], lane.hosts[other])
        self.network.set_path_rate(*ends, self.rate(wire))
        self.network.set_delay(*ends, wire.rtt_ms / 2)

    def settle(self, setting: Setting, seconds: float) -> None:
        """Work for a while, unmeasured, so that what chooses by itself has chosen."""
        lane = self.lanes[setting.codec]
        lane.ask(lane.request(setting.groups, 1 << 10, seconds))

    def run(self, setting: Setting, new_tokens: int) -> Run:
        """One batch over the links as they are."""
        lane, began = self.lanes[setting.codec], time.perf_counter()
        marks: list[tuple[float, Traffic]] = []

        def mark(first: First) -> None:
            marks.append((first.first_s, self.network.traffic()))

        cpu_s = lane.cpu_s()
        answer = lane.ask(lane.request(setting.groups, new_tokens), mark)
        after = self.network.traffic()
        cores = (lane.cpu_s() - cpu_s) / (time.perf_counter() - began)
        (first_s, before) = marks[0]
        return self._made(setting, answer, first_s, after.since(before), cores)

    def _made(
        self, setting: Setting, answer: Answer, first_s: float, moved: Traffic, cores: float
    ) -> Run:
        lane = self.lanes[setting.codec]
        if self._environment is None:
            raise RuntimeError("links have no environment yet; call `shape` before `run`")
        stages = [[p for p in passes if p.decode_tokens] for passes in lane.passes()]
        ends = [*lane.hosts[1:], lane.hosts[1]]
        sent = [moved.pairs[pair].bytes for pair in zip(ends, ends[1:], strict=False)]
        links = list[Link]()
        hops = zip(self._environment.hops, sent, stages, strict=True)
        for index, (wire, count, passes) in enumerate(hops):
            rows = sum(p.decode_tokens for p in passes if p.ended_us / 1e6 >= first_s)
            rate = self.rate(wire)
            bits = None if rate is None else rate * 1e6
            links.append(Link(f"link {index}", bits, round(count / max(1, rows))))
        found = shown(answer, stages, links, first_s)
        figures = replace(found, busy={**found.busy, "cores": cores / (os.cpu_count() or 1)})
        return Run(setting, answer, figures, tuple(link.row_bytes for link in links), cores)
