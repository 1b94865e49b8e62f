"""`bloombee-dht`: a DHT node that others join the swarm by."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bloombee.cli.serving import ReadyReport, run_until_stopped, write_ready_file
from bloombee.config.flags import parse
from bloombee.config.settings import DhtSettings
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "bloombee-dht"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = parse(
        DhtSettings, argv, prog=PROG, description="Run a DHT node for others to join a swarm by."
    )
    configure_logging(settings.log_level)
    return run_until_stopped(PROG, serve(settings))


async def serve(settings: DhtSettings) -> None:
    """Take part in the DHT until cancelled; prints one line when ready.

    Raises SettingsError and SwarmError as SwarmNode.start does, and SwarmError when
    the libp2p daemon ends.
    """
    # hivemind takes seconds to import: not for --help or a wrong flag.
    from bloombee.swarm.identity import Identity
    from bloombee.swarm.node import NodeOptions, SwarmNode

    options = NodeOptions(
        initial_peers=settings.initial_peers,
        host=settings.host,
        port=settings.dht_port,
        announce=settings.announce,
    )
    node = await SwarmNode.start(options, Identity.load_or_create(settings.identity))
    try:
        print(f"ready: join with --initial-peers {' '.join(node.maddrs)}", flush=True)
        if settings.ready_file is not None:
            report = ReadyReport(node.peer_id, node.maddrs, os.getpid())
            write_ready_file(settings.ready_file, report)
        raise await node.lost()
    finally:
        await node.close()


if __name__ == "__main__":
    sys.exit(main())
