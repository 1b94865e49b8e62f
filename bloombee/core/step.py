"""What identifies one row of one step, and which phase a step belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a step does: read a prompt, decode a token, or verify a draft tree."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """Names the new tokens of one sequence in one step (within one session).

    Two steps with equal identities are repeats of each other: the second is
    acknowledged and dropped. Order matters per sequence only.
    """

    epoch: int
    step: int
    sequence: int
    first_position: int
    count: int
