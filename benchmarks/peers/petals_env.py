"""The virtual environment of Petals: made on request, checked before use.

Petals 2.2.0 wants hivemind 1.1.10, whose package downloads the libp2p daemon while it is
installed; where that can't be reached, hivemind 1.1.12 brings the daemon along. Names that it
keeps elsewhere are put back by `petals_side`; its `pydantic.v1` is in pydantic 1.10.17 as well.
Nothing of Petals is changed.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PETALS = "petals==2.2.0.post1"
# Torch first: the build that stands here, so that no other one is fetched for it.
WITH_DEPENDENCIES = (
    *("numpy<2", "transformers==4.34.1", "accelerate==0.23.0", "hivemind==1.1.12"),
    *("speedtest-cli==2.1.3", "humanfriendly", "async-timeout>=4.0.2", "sentencepiece>=0.1.99"),
    *("Dijkstar>=2.6.0", "cpufeature>=0.2.0", "setuptools<81"),
)
ALONE = ("tensor-parallel==1.0.23", "peft==0.5.0", "bitsandbytes==0.41.1", "pydantic>=1.10.17,<2")
STEP_S, CHECK_S = 1200.0, 120.0


@dataclass(frozen=True, slots=True)
class PetalsEnvironment:
    """A folder for the environment, and a checkout to install instead of PyPI's release."""

    folder: Path
    checkout: Path | None = None

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def install(self, report: Callable[[str], None]) -> None:
        """Make it. Raises SettingsError, with pip's last lines, when a step fails."""
        report(f"installing Petals into {self.folder}: about 2 GB, some minutes")
        _run([sys.executable, "-m", "venv", str(self.folder)])
        torch = "torch==" + version("torch").partition("+")[0]
        self._pip(torch)
        self._pip(torch, *WITH_DEPENDENCIES)
        self._pip("--no-deps", *ALONE)
        self._pip("--no-deps", PETALS if self.checkout is None else str(self.checkout))

    def _pip(self, *arguments: str) -> None:
        _run([str(self.python), "-m", "pip", "install", "--quiet", *arguments])

    def obstacle(self) -> str:
        """Why Petals doesn't run there, or nothing."""
        if not self.python.exists():
            return f"Petals is not installed in {self.folder}; add --install"
        from benchmarks.peers.petals import SIDE

        command = [str(self.python), "-P", str(SIDE), "check"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
        if found.returncode == 0:
            return ""
        last = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"Petals in {self.folder} can't be imported ({last}); remove it and add --install"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S)
    if done.returncode != 0:
        lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise SettingsError(f"Petals can't be installed: {' '.join(command[3:])} failed:\n{lines}")
