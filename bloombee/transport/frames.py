"""Joining the parts of a frame, and the checks every transport makes on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloombee.errors import RequestError
from bloombee.transport.interface import END, KEEP_ALIVE, Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence


def join(parts: Sequence[Buffer], max_frame_bytes: int) -> bytes:
    """One frame of `parts`; a single `bytes` is not copied.

    Raises RequestError when it is over `max_frame_bytes` (before it is joined) or
    is one of the transport's own.
    """
    size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
    if size > max_frame_bytes:
        raise RequestError(
            f"a frame of {size} bytes is over the limit of {max_frame_bytes}: send smaller steps"
        )
    only = parts[0] if len(parts) == 1 else None
    frame = only if isinstance(only, bytes) else b"".join(parts)
    if frame in (KEEP_ALIVE, END):
        raise RequestError("frames of one or two zero bytes are the transport's own")
    return frame
