"""`bloombee-generate`: ask a swarm for a text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from bloombee.cli.serving import read_swarm_key, run_to_end
from bloombee.config.client import ClientSettings
from bloombee.config.environment import use_passive_threads, use_quiet_grpc
from bloombee.config.flags import parse
from bloombee.config.settings import GenerateSettings
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "bloombee-generate"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = parse(GenerateSettings, argv, prog=PROG, description="Generate a text with a swarm.")
    use_passive_threads()
    use_quiet_grpc()
    configure_logging(settings.log_level)
    return run_to_end(PROG, lambda: generate(settings))


def generate(settings: GenerateSettings) -> None:
    """Print the text as it comes, or one JSON object.

    Raises what loading, joining and generating raise.
    """
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    from bloombee.cli.answering import answer
    from bloombee.client import AutoDistributedModelForCausalLM

    model = AutoDistributedModelForCausalLM.from_pretrained(
        settings.model,
        initial_peers=settings.initial_peers,
        dtype=settings.dtype,
        swarm_key=read_swarm_key(settings.swarm_key),
        identity=settings.identity,
        settings=ClientSettings(emulate_link=settings.emulate_link),
    )
    try:
        if settings.json_output:
            print(json.dumps(asdict(answer(model, settings.prompt, settings))))
        else:
            try:
                answer(model, settings.prompt, settings, stream)
            finally:
                print()  # an error starts on a line of its own
    finally:
        model.close()


def stream(text: str) -> None:
    """Print a piece of the text at once."""
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
