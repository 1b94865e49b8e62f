"""`bloombee-server`: serve a span of a model's blocks."""

from __future__ import annotations

import contextlib
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
from bloombee.config.flags import USAGE_ERROR, parse
from bloombee.config.settings import DrainSettings, ServerSettings
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.server.server import Serving

PROG = "bloombee-server"

_STARTING = {
    "--" + name.replace("_", "-")
    for name in ServerSettings.model_fields.keys() - DrainSettings.model_fields.keys()
}
"""Flags of a server that starts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if (mistake := misused(words)) is not None:
        print(f"{PROG}: {mistake}", file=sys.stderr)
        return USAGE_ERROR
    if "--drain" in words:
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

    served: list[Serving] = []

    def report(serving: Serving) -> None:
        served.append(serving)
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
    if served and code == 0:
        with contextlib.suppress(BrokenPipeError):  # whoever read may have gone first
            last = served[-1]
            print(f"left: blocks {last.span} of {last.model}, served no more", flush=True)
    gc.freeze()  # else the interpreter takes seconds to look for garbage in torch
    _end_if_computing(code)
    return code


def misused(words: Sequence[str]) -> str | None:
    """What is wrong with how `--drain` and `--pid` stand in a command line, if anything."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if "--drain" not in flags:
        if "--pid" in flags:
            return "--pid names the server that --drain is for: write --drain --pid N"
        return None
    if "--drain" not in words:
        return "--drain takes no value: write --drain, alone or with --pid N"
    strange = [flag for flag in flags if flag in _STARTING]
    if strange:
        return (
            f"{strange[0]} starts a server, --drain ends those that run: "
            "write --drain, alone or with --pid N"
        )
    return None


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
