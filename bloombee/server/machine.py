"""Which machine this is, and how many of its cores there are to share: by stages of one route."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Machine:
    """`name` is the same for all processes of a machine, and tells nothing else; "" is unknown.

    A `pace` above 1 plays a slower device, which leaves the cores to others meanwhile.
    """

    name: str = ""
    cores: int = 0
    pace: float = 1.0


UNKNOWN = Machine()


def this_machine(*, uses_cores: bool, pace: float = 1.0, boot_id: Path = BOOT_ID) -> Machine:
    """This one; unknown where stages don't share what they compute on, or it can't be told."""
    if not uses_cores:
        return Machine(pace=pace)
    try:
        boot = boot_id.read_bytes()
    except OSError:
        return Machine(pace=pace)
    name = hashlib.sha256(b"bloombee machine " + boot).hexdigest()[:16]
    return Machine(name, len(os.sched_getaffinity(0)), pace)
