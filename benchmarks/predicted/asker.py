"""Asks the servers of a swarm for their costs and links, from a host of its own.

JSON lines: a `Job` in, then one `Ask` a line, each answered by `Told`.
"""

from __future__ import annotations

import sys

import msgspec

from bloombee.protocol.report_messages import CostTable, LinkReport


class Job(msgspec.Struct, frozen=True):
    """Which swarm."""

    initial_peers: list[str]


class Ask(msgspec.Struct, frozen=True):
    """Ask all of them now."""


class Server(msgspec.Struct, frozen=True):
    """What one server told."""

    peer: str
    start: int
    end: int
    costs: CostTable | None
    links: tuple[LinkReport, ...]
    rtt_s: float


class Told(msgspec.Struct, frozen=True):
    """All that answered, by span; one line for each that didn't."""

    servers: list[Server]
    silent: list[str]


def main() -> None:
    """Serve questions from standard input."""
    from bloombee.cli.observing import ask_swarm
    from bloombee.config.settings import StatusSettings

    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    settings = StatusSettings(initial_peers=tuple(job.initial_peers))
    print("ready", flush=True)
    for _ in sys.stdin:
        heards = ask_swarm(settings, None)
        servers = [
            Server(
                h.record.peer,
                h.record.span.start,
                h.record.span.end,
                h.description.costs,
                h.description.links,
                h.rtt_s,
            )
            for h in heards.answers
        ]
        print(msgspec.json.encode(Told(servers, list(heards.silent))).decode(), flush=True)


if __name__ == "__main__":
    main()
