"""House rules that no linter states: file length, pure modules, no unfinished or silenced code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bloombee"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))

LONGEST_FILE_LINES = 400
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "info", "data"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError)\b")

# What decides takes time, randomness and bytes as arguments.
PURE = (
    *("core", "protocol", "planner", "speculation"),
    *("server/fair_queue.py", "server/scheduler.py", "client/routing.py"),
)
IMPURE_MODULES = {
    *("asyncio", "concurrent", "ctypes", "glob", "http", "io", "logging", "multiprocessing", "os"),
    *("pathlib", "random", "secrets", "select", "selectors", "shutil", "signal", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
    *("bloombee.telemetry", "bloombee.transport", "grpc", "hivemind", "huggingface_hub", "psutil"),
    *("requests", "rich", "transformers", "uvloop"),
}
SHAPED_PACKAGES = ("kv", "models", "client", "server")


def _in(path: Path, places: tuple[str, ...]) -> bool:
    inside = path.relative_to(PACKAGE)
    return any(inside == Path(place) or Path(place) in inside.parents for place in places)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _is_impure(imported: str) -> bool:
    return any(imported == name or imported.startswith(f"{name}.") for name in IMPURE_MODULES)


def _type_checking_imports(tree: ast.Module) -> set[str]:
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ]
    return {name for block in blocks for name in _imports(block)}


@pytest.mark.parametrize("path", [p for p in SOURCES if _in(p, PURE)], ids=_name)
def test_what_decides_imports_no_io_clock_or_randomness(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = _imports(tree) - _type_checking_imports(tree)
    assert not {name for name in used if _is_impure(name)}


@pytest.mark.parametrize("path", [p for p in SOURCES if _in(p, SHAPED_PACKAGES)], ids=_name)
def test_names_in_shapes_exist_at_run_time(path: Path) -> None:
    """A shape whose names are imported for type checking only is silently unchecked."""
    hidden = _type_checking_imports(ast.parse(path.read_text()))
    if not any(name.startswith("jaxtyping") for name in _imports(ast.parse(path.read_text()))):
        return
    assert not {name for name in hidden if name.split(".")[0] in ("jaxtyping", "torch", "numpy")}


@pytest.mark.parametrize("path", [*SOURCES, *TESTS, *SCRIPTS], ids=_name)
def test_a_file_fits_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE_LINES
    assert not VAGUE_NAMES & {path.stem, path.parent.name}


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=_name)
def test_nothing_is_left_unfinished(path: Path) -> None:
    assert not UNFINISHED.findall(path.read_text())


@pytest.mark.parametrize("path", TESTS, ids=_name)
def test_skips_give_a_reason_and_nothing_is_expected_to_fail(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or node.attr not in ("skip", "skipif", "xfail"):
            continue
        line = ast.get_source_segment(path.read_text(), node)
        assert node.attr != "xfail", f"{line}: mend what fails instead"
        assert _call_has_reason(ast.parse(path.read_text()), node), f"{line} without a reason"


def _call_has_reason(tree: ast.Module, attribute: ast.Attribute) -> bool:
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.lineno, node.func.col_offset) == (attribute.lineno, attribute.col_offset)
    ]
    return any(keyword.arg == "reason" for call in calls for keyword in call.keywords) or any(
        call.args and attribute.attr == "skip" for call in calls
    )


def test_importing_bloombee_is_light() -> None:
    program = (
        "import sys, bloombee\n"
        "heavy = {'torch', 'transformers', 'hivemind', 'grpc', 'pydantic', 'numpy'}\n"
        "assert not heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


def test_reading_flags_needs_no_torch() -> None:
    """So that `--help` and a wrong flag answer at once."""
    program = (
        "import sys, bloombee.config.flags, bloombee.config.settings\n"
        "assert not {'torch', 'transformers', 'hivemind', 'grpc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
