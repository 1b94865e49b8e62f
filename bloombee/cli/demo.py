"""`scripts/demo`: a swarm of servers on this machine answers one prompt."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from bloombee.cli.local_swarm import LocalSwarm, equal_spans
from bloombee.cli.serving import run_to_end
from bloombee.config.environment import use_passive_threads, use_quiet_grpc
from bloombee.config.flags import parse
from bloombee.config.settings import DemoSettings
from bloombee.errors import SettingsError
from bloombee.telemetry import Stopwatch, configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.client.auto import LocalShare

PROG = "scripts/demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    settings = parse(
        DemoSettings, argv, prog=PROG, description="Start a swarm on this machine and ask it."
    )
    use_passive_threads()
    use_quiet_grpc()
    configure_logging(settings.log_level)
    # So that a plain `kill` also stops what was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_to_end(PROG, lambda: run(settings))


def run(settings: DemoSettings) -> None:
    """Start, ask, print, stop.

    Raises SettingsError for more servers than blocks, SwarmError with a child's last
    lines when it does not come up, and what loading and generating raise.
    """
    watch = Stopwatch()

    def report(text: str) -> None:
        print(f"[{watch.elapsed_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    report(f"looking at {settings.model}")
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    from bloombee.cli.answering import answer
    from bloombee.cli.generate import stream
    from bloombee.models import open_source

    spans = _spans(open_source(settings.model).num_blocks, settings.servers)
    server_flags = ("--dtype", settings.dtype, "--threads", "1")
    with ThreadPoolExecutor(1, thread_name_prefix="loading") as pool:
        loading = pool.submit(_load, settings)
        with LocalSwarm(settings.model, spans, server_flags=server_flags, report=report) as swarm:
            model = loading.result().join(tuple(swarm.initial_peers))
            try:
                report(f"asking: {settings.prompt}")
                if settings.json_output:
                    print(json.dumps(asdict(answer(model, settings.prompt, settings))))
                    return
                found = answer(model, settings.prompt, settings, stream)
                print("\n", flush=True)
                print(found.summary(), file=sys.stderr)
            finally:
                model.close()


def _spans(blocks: int, servers: int) -> list[str]:
    try:
        return equal_spans(blocks, servers)
    except ValueError as error:
        raise SettingsError(f"--servers {servers}: {error}; start fewer") from None


def _load(settings: DemoSettings) -> LocalShare:
    """The client's share of the model, while the servers load theirs."""
    from bloombee.client.auto import LocalShare
    from bloombee.models import open_source, resolve_dtype

    source = open_source(settings.model)
    return LocalShare.load(source, resolve_dtype(settings.dtype, source, "cpu"), "cpu")


if __name__ == "__main__":
    sys.exit(main())
