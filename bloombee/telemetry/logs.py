"""Logging set up once per process: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

# Their warnings matter, their chatter doesn't.
THIRD_PARTIES = ("hivemind", "transformers", "huggingface_hub", "httpx", "grpc", "asyncio")


def configure_logging(level: str = "info") -> None:
    """Log from `level` on ("debug", "info", "warning", "error") to standard error.

    Modifies the root logger, the levels of third parties, and where Python's
    warnings go; calling it again replaces what an earlier call set.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=threshold, handlers=[_handler()], force=True)
    logging.captureWarnings(capture=True)
    for name in THIRD_PARTIES:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        return RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%X]")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
