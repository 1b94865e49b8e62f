"""What holds for every test: one compute thread, checked tensor shapes, a marker per folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported here or in a child: threads that spin starve each other on few cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import jaxtyping
import pytest
import torch

import tests.shapes

# Precedes every import of these packages, or their shapes stay unchecked.
jaxtyping.install_import_hook(tests.shapes.CHECKED_PACKAGES, "tests.shapes.check_shapes")
torch.set_num_threads(1)

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
FOLDERS = ("unit", "swarm", "parity", "e2e")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fault-seed N`: of the seeded faults of tests/swarm/test_chaos.py run only these."""
    parser.addoption("--fault-seed", type=int, help="run one seed of test_chaos, with its full log")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder is the marker; a test outside of them is a mistake."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in FOLDERS:
            raise pytest.UsageError(f"{item.nodeid}: tests live in tests/{{{','.join(FOLDERS)}}}")
        item.add_marker(folder)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands that run in this process set up logging; the next test hears all of it again."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
