"""`bloombee-server`: serve a span of a model's blocks."""

from __future__ import annotations

import gc
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from bloombee.cli.drain import DRAIN_SIGNAL, drain
from bloombee.cli.running import registered
from bloombee.cli.serving import (
    ReadyReport,
    read_swarm_key,
    run_to_end,
    run_until_stopped,
    write_ready_file,
)
from bloombee.config.environment import use_passive_threads, use_quiet_grpc
from bloombee.config.flags import parse
from bloombee.config.settings import DrainSettings, ServerSettings
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.server.server import Serving

PROG = "bloombee-server"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    if "--drain" in (sys.argv[1:] if argv is None else argv):
        return _drain(argv)
    settings = parse(
        ServerSettings, argv, prog=PROG, description="Serve a part of a model to a swarm."
    )
    use_passive_threads()
    use_quiet_grpc()
    configure_logging(settings.log_level)
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    import uvloop

    from bloombee.server.server import run_server

    def report(serving: Serving) -> None:
        print(f"ready: {serving}", flush=True)
        if settings.ready_file is not None:
            write_ready_file(
                settings.ready_file,
                ReadyReport(
                    peer=serving.peer,
                    maddrs=serving.maddrs,
                    pid=os.getpid(),
                    endpoint=serving.endpoint,
                    span=str(serving.span),
                ),
            )

    async def serve() -> None:
        swarm_key = read_swarm_key(settings.swarm_key)
        with registered(settings.model, settings.drain_s):
            await run_server(settings, report, swarm_key=swarm_key)

    code = run_until_stopped(PROG, serve(), uvloop.new_event_loop, also=DRAIN_SIGNAL)
    gc.freeze()  # else the interpreter takes seconds to look for garbage in torch
    _end_if_computing(code)
    return code


def _drain(argv: Sequence[str] | None) -> int:
    settings = parse(
        DrainSettings, argv, prog=PROG, description="Have running servers hand over and end."
    )
    configure_logging(settings.log_level)
    return run_to_end(PROG, lambda: drain(settings.pid, partial(print, flush=True)))


def _end_if_computing(code: int) -> None:
    """A thread left behind inside torch would abort the interpreter's own shutdown."""
    if any(thread.name in ("compute", "background") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
