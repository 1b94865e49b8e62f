"""One small tree of errors: what went wrong, whose fault, and whether to retry.

Every error that leaves a package of ours is one of these. The message is one
line that says what, where and how to mend it. On the wire an error travels as
its `code`, and `from_code` builds it again on the other side.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    """Who has to change something for the call to succeed."""

    CALLER = "caller"
    PEER = "peer"
    NETWORK = "network"
    OURS = "ours"


class BloomBeeError(Exception):
    """Root of the tree. `code` names the class on the wire."""

    code: ClassVar[str] = "error"
    fault: ClassVar[Fault] = Fault.OURS
    retry: ClassVar[bool] = False


class SettingsError(BloomBeeError):
    """A flag, a settings file or an argument is wrong."""

    code = "settings"
    fault = Fault.CALLER


class ModelError(BloomBeeError):
    """A model can't be found, read, or served: wrong path, missing tensors, unknown family."""

    code = "model"
    fault = Fault.CALLER


class RequestError(BloomBeeError):
    """The request can't be served as asked: too long, bad shapes, unsupported field."""

    code = "request"
    fault = Fault.CALLER


class Unsupported(RequestError):
    """The protocol has the field, this version does not act on it."""

    code = "unsupported"


class KVFull(BloomBeeError):
    """No room for a session now: too few free KV tokens (says how many), or all sessions taken."""

    code = "kv-full"
    fault = Fault.PEER
    retry = True


class ProtocolError(BloomBeeError):
    """A frame or a message breaks the protocol: truncated, malformed, out of order."""

    code = "protocol"
    fault = Fault.PEER


class VersionMismatch(ProtocolError):
    """The two sides speak no common protocol version."""

    code = "version"


class StaleEpoch(ProtocolError):
    """A message of an earlier epoch of the session: the route changed since."""

    code = "stale-epoch"


class AuthError(BloomBeeError):
    """A signature, certificate or identity does not check out."""

    code = "auth"
    fault = Fault.PEER


class TransportError(BloomBeeError):
    """A connection can't be made, broke, or was closed by the other side."""

    code = "transport"
    fault = Fault.NETWORK
    retry = True


class Refused(TransportError):
    """Nobody listens at the address: whoever did has ended, or moved."""

    code = "refused"


class DeadlineExceeded(TransportError):
    """A peer did not answer in time."""

    code = "deadline"


class HopLost(TransportError):
    """A stage has lost, or can't reach, the stage after it; both may live."""

    code = "hop-lost"


class PeerStopping(BloomBeeError):
    """The server is shutting down and takes no new work."""

    code = "stopping"
    fault = Fault.PEER
    retry = True


class SwarmError(BloomBeeError):
    """The DHT can't be reached, or no server holds some of the blocks."""

    code = "swarm"
    fault = Fault.NETWORK
    retry = True


class StepFailed(BloomBeeError):
    """A server's forward pass raised; the message carries what it said."""

    code = "step-failed"
    fault = Fault.PEER


def _subclasses(root: type[BloomBeeError]) -> list[type[BloomBeeError]]:
    return [root, *(c for child in root.__subclasses__() for c in _subclasses(child))]


_BY_CODE = {cls.code: cls for cls in _subclasses(BloomBeeError)}


def from_code(code: str, message: str) -> BloomBeeError:
    """The error that `code` names, or the root when this version doesn't know it."""
    return _BY_CODE.get(code, BloomBeeError)(message)
