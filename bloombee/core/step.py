"""Which phase a step belongs to."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a step does: read a prompt, decode a token, or verify a draft tree."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
