"""`bloombee-status`: which models a swarm serves, who holds what, and what is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from bloombee.cli.serving import read_swarm_key, run_until_stopped
from bloombee.config.flags import parse
from bloombee.config.settings import StatusSettings
from bloombee.errors import ModelError, SettingsError
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bloombee.cli.status_report import SwarmStatus
    from bloombee.core import PeerId
    from bloombee.swarm.describe import Answer
    from bloombee.swarm.view import SwarmSnapshot

PROG = "bloombee-status"
_ASK_DEADLINE_S = 3.0
_WIDTH_IN_PIPES = 160


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = parse(StatusSettings, argv, prog=PROG, description="Show what a swarm serves.")
    configure_logging(settings.log_level)
    return run_until_stopped(PROG, show(settings))


async def show(settings: StatusSettings) -> None:
    """Print the status of the swarm once.

    Raises SettingsError without peers, SwarmError when none answers, ModelError when
    the model asked for isn't in the swarm.
    """
    if not settings.initial_peers:
        raise SettingsError(
            "give --initial-peers MADDR ... as bloombee-dht and bloombee-server print them"
        )
    status = await _look(settings)
    if settings.plot is not None and status.traces:
        from bloombee.cli.trace_figure import draw_traces

        draw_traces({trace.phase: trace for trace in status.traces}, settings.plot)
    if settings.json_output:
        print(json.dumps(asdict(status), indent=2))
    else:
        from bloombee.cli.status_report import render

        width = None if sys.stdout.isatty() else _WIDTH_IN_PIPES
        Console(width=width).print(render(status))


async def _look(settings: StatusSettings) -> SwarmStatus:
    # hivemind takes seconds to import: not for --help or a wrong flag.
    from bloombee.cli.status_links import links_of
    from bloombee.cli.status_report import report
    from bloombee.cli.status_traces import told_by, traces_of
    from bloombee.protocol.messages import Describe
    from bloombee.swarm.connection import ConnectionSettings
    from bloombee.swarm.describe import describe_all
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.node import NodeOptions, SwarmNode
    from bloombee.transport.direct import DirectDialer
    from bloombee.transport.fallback import FallbackDialer
    from bloombee.transport.p2p import P2PDialer

    identity = Identity.load_or_create(None)
    options = NodeOptions(initial_peers=settings.initial_peers, client_mode=True)
    node = await SwarmNode.start(options, identity)
    dialer = FallbackDialer(DirectDialer(), P2PDialer(node.control))
    try:
        snapshot = _narrow(await node.snapshot(), settings.model)
        connection = ConnectionSettings(read_swarm_key(settings.swarm_key), _ASK_DEADLINE_S)

        async def ask(asked: Describe) -> Mapping[PeerId, Answer]:
            return await describe_all(snapshot.records, dialer, identity, connection, asked)

        answers = await ask(Describe(topics=("links",) if settings.links else ()))
        status = report(snapshot, answers, node.clock_skew_s)
        if settings.links:
            status = replace(status, links=links_of(answers))
        if settings.trace:
            traced = Describe(topics=("traces",))
            ids = [bytes.fromhex(session) for session in settings.trace]
            said = [await ask(msgspec.structs.replace(traced, session=each)) for each in ids]
            status = replace(status, traces=traces_of(told_by(said)))
        return status
    finally:
        await dialer.close()
        await node.close()


def _narrow(snapshot: SwarmSnapshot, model: str | None) -> SwarmSnapshot:
    """Only the models of this name, or whose fingerprint begins so."""
    if model is None:
        return snapshot
    models = tuple(
        entry
        for entry in snapshot.models
        if model.lower() == entry.model.lower() or entry.fingerprint.startswith(model)
    )
    if not models:
        known = ", ".join(entry.model for entry in snapshot.models) or "none"
        raise ModelError(f"no server of this swarm serves {model!r}; it serves: {known}")
    kept = {entry.fingerprint for entry in models}
    narrowed = snapshot.select(where=lambda record: record.fingerprint in kept)
    return replace(narrowed, models=models)


if __name__ == "__main__":
    sys.exit(main())
