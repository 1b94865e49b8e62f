"""Errors of our tree as messages, and back."""

from __future__ import annotations

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, StepFailed, from_code
from bloombee.protocol.messages import Failed
from bloombee.protocol.text import one_line

NO_SESSION = SessionId(bytes(16))
"""The session of a `Failed` that is about the stream itself."""

_MAX_TEXT = 2000


def to_message(
    error: BaseException, *, session: SessionId = NO_SESSION, epoch: int = 0, step: int = 0
) -> Failed:
    """What to tell the other side of `error`; one from outside our tree is a StepFailed."""
    code = error.code if isinstance(error, BloomBeeError) else StepFailed.code
    text = str(error) or type(error).__name__
    return Failed(session, epoch, step, code, one_line(text, _MAX_TEXT))


def to_error(failed: Failed) -> BloomBeeError:
    """The error that the other side told us of."""
    return from_code(failed.code, one_line(failed.message, _MAX_TEXT))


def is_about_stream(failed: Failed) -> bool:
    """Whether it concerns the whole stream (a refused handshake) and no session."""
    return failed.session == NO_SESSION
