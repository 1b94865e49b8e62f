"""The state machine of one stream, as one table: who may say what, when.

Both ends run it over what they send and what they receive. Messages cross on the
wire, so a state allows whatever the other side may still have said before it
learned of the change (outputs after Close, steps after a second Open).

    START -Challenge-> CHALLENGED -Hello-> GREETED
    GREETED -Open-> OPENING -Opened-> SESSION -Close-> CLOSING -Closed-> OVER
    GREETED -Attach-> ATTACHING -Attached-> HOP
    GREETED -Describe-> ASKED -Description-> GREETED
    GREETED -Fetch-> FETCHING -HandedOver-> GREETED
    SESSION -Open-> REOPENING -Opened-> SESSION      a later epoch of the session
    Failed ends the stream (OVER) until the session stands, and is news afterwards;
    a failed Open goes back to GREETED, so that the client may ask again.
"""

from __future__ import annotations

from enum import StrEnum

from bloombee.errors import ProtocolError
from bloombee.protocol import messages as m


class Role(StrEnum):
    """Which end of the stream we are."""

    DIALER = "dialer"
    LISTENER = "listener"


class Direction(StrEnum):
    """Whether we send or receive the message."""

    SENT = "sent"
    RECEIVED = "received"


class State(StrEnum):
    """Where the stream stands; both ends count the same states."""

    START = "start"
    CHALLENGED = "challenged"
    GREETED = "greeted"
    ASKED = "asked"
    OPENING = "opening"
    SESSION = "session"
    REOPENING = "reopening"
    CLOSING = "closing"
    FETCHING = "fetching"
    ATTACHING = "attaching"
    HOP = "hop"
    OVER = "over"


MessageType = type[m.AnyMessage]
Key = tuple[Role, State, MessageType, Direction]

_D, _L, _S = Role.DIALER, Role.LISTENER, State

_SPOKEN: tuple[tuple[Role, State, tuple[MessageType, ...], State], ...] = (
    (_L, _S.START, (m.Challenge,), _S.CHALLENGED),
    (_L, _S.START, (m.Failed,), _S.OVER),
    (_D, _S.CHALLENGED, (m.Hello,), _S.GREETED),
    (_D, _S.CHALLENGED, (m.Failed,), _S.OVER),
    (_L, _S.CHALLENGED, (m.Failed,), _S.OVER),
    (_L, _S.GREETED, (m.Failed,), _S.OVER),
    (_D, _S.GREETED, (m.Failed,), _S.OVER),
    # What crossed the refusal of an Open
    (_D, _S.GREETED, (m.Beat,), _S.GREETED),
    (_L, _S.GREETED, (m.Beat,), _S.GREETED),
    # Questions
    (_D, _S.GREETED, (m.Describe,), _S.ASKED),
    (_L, _S.ASKED, (m.Description,), _S.GREETED),
    (_L, _S.ASKED, (m.Failed,), _S.OVER),
    # A client's session
    (_D, _S.GREETED, (m.Open,), _S.OPENING),
    (_L, _S.OPENING, (m.Opened,), _S.SESSION),
    (_L, _S.OPENING, (m.Failed,), _S.GREETED),
    (_D, _S.OPENING, (m.Beat,), _S.OPENING),
    (_L, _S.OPENING, (m.Beat,), _S.OPENING),
    (_D, _S.OPENING, (m.Close,), _S.CLOSING),
    (_D, _S.SESSION, (m.Step, m.Replay, m.Beat, m.Failed, m.Standby), _S.SESSION),
    (_L, _S.SESSION, (m.Output, m.Acknowledged, m.Failed, m.Beat, m.Leaving), _S.SESSION),
    (_D, _S.SESSION, (m.Open,), _S.REOPENING),
    (_D, _S.SESSION, (m.Close,), _S.CLOSING),
    (_D, _S.REOPENING, (m.Open, m.Beat, m.Failed, m.Standby), _S.REOPENING),
    (_L, _S.REOPENING, (m.Output, m.Acknowledged, m.Failed, m.Beat, m.Leaving), _S.REOPENING),
    (_L, _S.REOPENING, (m.Opened,), _S.SESSION),
    (_D, _S.REOPENING, (m.Close,), _S.CLOSING),
    (
        _L,
        _S.CLOSING,
        (m.Opened, m.Output, m.Acknowledged, m.Failed, m.Beat, m.Leaving),
        _S.CLOSING,
    ),
    (_L, _S.CLOSING, (m.Closed,), _S.OVER),
    # The hop from a stage to the next
    (_D, _S.GREETED, (m.Attach,), _S.ATTACHING),
    (_L, _S.ATTACHING, (m.Attached,), _S.HOP),
    (_L, _S.ATTACHING, (m.Failed,), _S.GREETED),
    (_D, _S.HOP, (m.Step, m.Beat, m.Failed), _S.HOP),
    (_L, _S.HOP, (m.Acknowledged, m.Beat, m.Failed), _S.HOP),
    # A session's hand-over to the server that takes its place
    (_D, _S.GREETED, (m.Fetch,), _S.FETCHING),
    (_L, _S.FETCHING, (m.Pages, m.Output), _S.FETCHING),
    (_L, _S.FETCHING, (m.HandedOver, m.Failed), _S.GREETED),
)


def _expand() -> dict[Key, State]:
    """Each spoken message as both ends see it: sent by the speaker, received by the other."""
    table: dict[Key, State] = {}
    for speaker, state, types, following in _SPOKEN:
        hearer = _L if speaker is _D else _D
        for kind in types:
            table[speaker, state, kind, Direction.SENT] = following
            table[hearer, state, kind, Direction.RECEIVED] = following
    return table


TABLE = _expand()
"""(our role, state, message type, direction) -> the state that follows; all else is refused."""


class Machine:
    """Where one stream stands, seen from one end."""

    def __init__(self, role: Role, state: State = State.START) -> None:
        self.role = role
        self.state = state

    def advance(self, message: m.AnyMessage, direction: Direction) -> State:
        """Take one message; changes and returns the state.

        Raises ProtocolError, and changes nothing, when the message may not come here.
        """
        kind = type(message)
        following = TABLE.get((self.role, self.state, kind, direction))
        if following is None:
            raise ProtocolError(
                f"{kind.__name__} {direction} out of order by the {self.role}: "
                f"the stream is in state {self.state}"
            )
        self.state = following
        return following
