"""`scripts/emulate`: a swarm in an emulated network and a command in the client's host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from benchmarks.emulation import leftovers, unprivileged
from benchmarks.emulation.network import Emulation, missing
from benchmarks.emulation.tables import AccuracyTable, print_traffic
from bloombee.cli.local_swarm import LocalSwarm, equal_spans
from bloombee.cli.serving import run_to_end
from bloombee.config.base import Settings
from bloombee.config.environment import use_passive_threads, use_quiet_grpc
from bloombee.config.flags import parse
from bloombee.config.networks import CLIENT, read_network
from bloombee.errors import SettingsError
from bloombee.swarm import tether

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.cli.child import Place
    from bloombee.config.networks import NetworkFile

PROG = "scripts/emulate"
DESCRIPTION = """Run a swarm in an emulated network, and `-- COMMAND...` in the client's host.
In COMMAND, {peers}, {model} and each {HOST} stand for the swarm's addresses to join by, the
model, and the hosts' addresses. Without COMMAND the client asks --prompt. Without root every
process plays its own line instead; {link} is then the client's, for its --emulate-link."""


class EmulateSettings(Settings):
    """`scripts/emulate`."""

    network: str | None = Field(
        default=None, description="network file, or the name of one in configs/networks"
    )
    servers: int | None = Field(
        default=None, ge=0, description="servers to start, one a host; 0: no swarm, only hosts"
    )
    model: str = Field(default="smollm2", min_length=1, description="the model they serve")
    dtype: str = Field(default="auto", description="type of weights and activations")
    prompt: str = Field(
        default="In three sentences: why do bees dance?", description="the text to answer"
    )
    check: bool = Field(
        default=False, description="measure how exact rates and round trips are, and end"
    )
    clean: bool = Field(default=False, description="end what killed emulations left in their hosts")

    @model_validator(mode="after")
    def _something_to_do(self) -> EmulateSettings:
        if self.network is None and not (self.check or self.clean):
            raise ValueError("give --network FILE (or e1 to e6, home, mobile), --check or --clean")
        return self


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    settings = parse(EmulateSettings, words[:split], prog=PROG, description=DESCRIPTION)
    use_passive_threads()
    use_quiet_grpc()
    # So that a plain `kill` also stops what was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    codes: list[int] = []
    failed = run_to_end(PROG, lambda: codes.append(run(settings, words[split + 1 :])))
    return failed or codes[0]


def run(settings: EmulateSettings, command: Sequence[str]) -> int:
    """Clean, check, or run; returns the exit code of the command, or 0.

    Raises SettingsError where the machine can't emulate or the file is wrong, SwarmError
    when a server does not come up.
    """
    network = None if settings.network is None else read_network(settings.network)
    reason = missing()
    if reason and (network is None or settings.check or settings.clean):
        raise SettingsError(reason)
    if settings.clean:
        clean()
    if settings.check:
        with AccuracyTable() as table:
            table.check(network)
    elif network is not None:
        return _emulate(network, settings, command, reason)
    return 0


def clean() -> None:
    """End the processes in hosts of emulations that are no more."""
    found = leftovers.find()
    for each in found:
        print(f"ended {each.pid}: {each.command}")
    leftovers.end(found)
    if not found:
        print("nothing is left of any emulation")


def _emulate(
    network: NetworkFile, settings: EmulateSettings, command: Sequence[str], reason: str
) -> int:
    """A swarm and a command in the network, or in its shadow when there is a `reason`."""
    hosts = _server_hosts(network, settings, command)
    with ExitStack() as stack:
        if reason:
            client = unprivileged.place_at(network, CLIENT)
            places = [unprivileged.place_at(network, host) for host in hosts]
            _report(_told(network, reason))
            peers = _start_swarm(settings, places, stack)
            names = dict.fromkeys(network.host_names, client.host)
            link = unprivileged.line_at(network, CLIENT)
            return _run(client, _words(settings, command, link), names, peers)
        emulation = stack.enter_context(Emulation(network))
        peers = _start_swarm(settings, [emulation.place(host) for host in hosts], stack)
        before = emulation.traffic()
        names = {host: emulation.address(host) for host in emulation.hosts}
        code = _run(emulation.place(CLIENT), _words(settings, command), names, peers)
        print_traffic(emulation.traffic().since(before))
    return code


def _told(network: NetworkFile, reason: str) -> str:
    unplayed = unprivileged.differs(network)
    but = f"; not played: {unplayed}" if unplayed else ""
    return f"{reason}: every process plays its own line instead, over 127.0.0.1{but}"


def _server_hosts(
    network: NetworkFile, settings: EmulateSettings, command: Sequence[str]
) -> list[str]:
    """The hosts that get a server. Raises SettingsError."""
    if CLIENT not in network.host_names:
        raise SettingsError(f"--network {settings.network}: no host is called {CLIENT!r}")
    hosts = [host for host in network.host_names if host != CLIENT]
    count = len(hosts) if settings.servers is None else settings.servers
    if count > len(hosts):
        raise SettingsError(
            f"--servers {count}: the network has {len(hosts)} hosts besides the client's"
        )
    if not count and not command:
        raise SettingsError("--servers 0: give a command after --, or there is nothing to run")
    return hosts[:count]


def _start_swarm(settings: EmulateSettings, places: list[Place], stack: ExitStack) -> list[str]:
    """A server at each place, and a node of the DHT beside the first; where to join."""
    if not places:
        return []
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    from bloombee.models import open_source

    try:
        spans = equal_spans(open_source(settings.model).num_blocks, len(places))
    except ValueError as error:
        raise SettingsError(f"--servers {len(places)}: {error}; start fewer") from None
    swarm = LocalSwarm(
        settings.model,
        spans,
        server_flags=("--dtype", settings.dtype, "--threads", "1"),
        places=[places[0], *places],
        report=_report,
    )
    return stack.enter_context(swarm).initial_peers


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _words(settings: EmulateSettings, command: Sequence[str], link: str = "") -> list[str]:
    """The command, or one that asks the prompt, with the model and the client's line."""
    if not command:
        flags = ("--model", "{model}", "--dtype", settings.dtype, "--initial-peers", "{peers}")
        played = ("--emulate-link", link) if link else ()
        generate = (sys.executable, "-m", "bloombee.cli.generate")
        command = [*generate, *flags, *played, "--", settings.prompt]
    return [word.replace("{model}", settings.model).replace("{link}", link) for word in command]


def _run(place: Place, command: list[str], names: dict[str, str], peers: list[str]) -> int:
    """The exit code of a command at a place; it dies with us."""
    words = [word for each in command for word in _filled(each, names, peers)]
    program = shutil.which(words[0])
    if program is None:
        raise SettingsError(f"-- {words[0]}: no such command")
    inside = [*place.prefix, program, *words[1:]]
    if sys.platform == "linux":
        tied = (sys.executable, "-I", "-S", str(tether.__file__), "signal")
        inside = [*tied, str(os.getpid()), "-1", *inside]
    return subprocess.run(inside, check=False).returncode


def _filled(word: str, names: dict[str, str], peers: list[str]) -> list[str]:
    """A word of the command with its `{NAME}`s filled in; `{peers}` alone becomes many."""
    if word == "{peers}":
        return peers
    for name, value in names.items():
        word = word.replace(f"{{{name}}}", value)
    return [word]


if __name__ == "__main__":
    sys.exit(main())
