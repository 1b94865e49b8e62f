"""The stream's state machine: total, symmetric, and true to the protocol's story."""

from __future__ import annotations

import itertools
import typing

import pytest

from bloombee.core import SessionId
from bloombee.errors import ProtocolError
from bloombee.protocol import messages as m
from bloombee.protocol.machine import TABLE, Direction, Machine, Role, State

SESSION = SessionId(b"s" * 16)
PAYLOAD = m.Payload("rows", "float32", 1, 2)
MESSAGES: tuple[m.AnyMessage, ...] = (
    m.Challenge((1,), "peer", bytes(16), 0.0),
    m.Hello(1, "peer", b"", 0.0, b""),
    m.Open(SESSION, bytes(16), 0, "print", 0, 1, 1, 8, "float32"),
    m.Opened(SESSION, 0, (0,), 0, 1),
    m.Attach(SESSION, bytes(16), 0),
    m.Attached(SESSION, 0),
    m.Close(SESSION),
    m.Closed(SESSION),
    m.Beat(SESSION, 1),
    m.Leaving(SESSION, 0, 1.0, 1.0),
    m.Standby(SESSION, m.Hop("peer", "here", b"")),
    m.Step(SESSION, 0, 1, "decode", (0,), (0,), (1,), PAYLOAD),
    m.Replay(SESSION, 1, 1, (0,), (0,), (1,), 2, 0),
    m.Output(SESSION, 0, 1, PAYLOAD),
    m.Acknowledged(SESSION, 0, 1),
    m.Failed(SESSION, 0, 0, "error", ""),
    m.Fetch(SESSION, bytes(16), 0, 0, 1),
    m.Pages(SESSION, "kv", 0, 0, 0, 1, "float32", 8),
    m.HandedOver(SESSION, (1,), (1,), (False,)),
    m.Describe(),
    m.Description("p", "1", "m", "f", 0, 1, "float32", "cpu", 1, 1, 0, 0, 0.0),
)
BY_NAME = {type(message).__name__: message for message in MESSAGES}


def test_the_samples_are_all_messages() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(m.AnyMessage))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", State)
def test_every_message_in_every_state_is_in_the_table_or_refused(role: Role, state: State) -> None:
    for message, direction in itertools.product(MESSAGES, Direction):
        machine = Machine(role, state)
        following = TABLE.get((role, state, type(message), direction))
        if following is None:
            with pytest.raises(ProtocolError, match=f"{type(message).__name__} {direction}"):
                machine.advance(message, direction)
            assert machine.state is state
        else:
            assert machine.advance(message, direction) is machine.state is following


def test_what_one_end_may_send_the_other_may_receive() -> None:
    other = {Role.DIALER: Role.LISTENER, Role.LISTENER: Role.DIALER}
    flip = {Direction.SENT: Direction.RECEIVED, Direction.RECEIVED: Direction.SENT}
    for (role, state, kind, direction), following in TABLE.items():
        assert TABLE[other[role], state, kind, flip[direction]] is following


def test_every_state_can_be_reached_and_only_the_last_is_final() -> None:
    reached = {State.START}
    while more := {to for (_, at, _, _), to in TABLE.items() if at in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert set(State) - {at for (_, at, _, _) in TABLE} == {State.OVER}


STORIES = {
    "a session": (
        "<Challenge >Hello >Open <Opened >Step >Step <Output <Acknowledged <Failed >Close "
        "<Output <Closed",
        State.OVER,
    ),
    "signs of life": (
        "<Challenge >Hello >Open >Beat <Beat <Opened >Beat >Step <Beat <Output >Close <Beat "
        "<Closed",
        State.OVER,
    ),
    "a sign of life that crosses a refusal": (
        "<Challenge >Hello >Open <Failed >Beat <Beat >Open <Opened",
        State.SESSION,
    ),
    "a replay": (
        "<Challenge >Hello >Open <Opened >Open <Opened >Replay <Output >Step <Output",
        State.SESSION,
    ),
    "a hand-over": ("<Challenge >Hello >Fetch <Pages <Pages <HandedOver", State.GREETED),
    "a refused hand-over": ("<Challenge >Hello >Fetch <Failed >Describe", State.ASKED),
    "a spare of the next stage": (
        "<Challenge >Hello >Open <Opened >Standby >Open >Standby <Opened",
        State.SESSION,
    ),
    "a stage that leaves": ("<Challenge >Hello >Open <Opened <Leaving >Close <Closed", State.OVER),
    "a hop": ("<Challenge >Hello >Attach <Attached >Step <Acknowledged >Step <Failed", State.HOP),
    "a question": ("<Challenge >Hello >Describe <Description >Describe", State.ASKED),
    "full, then opened": ("<Challenge >Hello >Open <Failed >Open <Opened", State.SESSION),
    "a new epoch while an output is under way": (
        "<Challenge >Hello >Open <Opened >Step >Open <Output <Opened >Step <Output",
        State.SESSION,
    ),
    "a close that crosses the opening": (
        "<Challenge >Hello >Open >Close <Opened <Closed",
        State.OVER,
    ),
    "a refused hello": ("<Challenge >Hello <Failed", State.OVER),
    "a full server": ("<Failed", State.OVER),
}


@pytest.mark.parametrize("story", STORIES)
def test_stories_of_the_protocol(story: str) -> None:
    """`>` is said by the dialer, `<` by the listener; both ends agree on the way."""
    words, end = STORIES[story]
    dialer, listener = Machine(Role.DIALER), Machine(Role.LISTENER)
    for word in words.split():
        message = BY_NAME[word[1:]]
        speaker, hearer = (dialer, listener) if word[0] == ">" else (listener, dialer)
        speaker.advance(message, Direction.SENT)
        hearer.advance(message, Direction.RECEIVED)
    assert dialer.state is listener.state is end


@pytest.mark.parametrize(
    "words",
    [
        ">Hello",
        "<Challenge >Open",
        "<Challenge >Hello >Step",
        "<Challenge >Hello >Open >Step",
        "<Challenge >Hello >Open <Opened >Attach",
        "<Challenge >Hello >Open <Opened <Opened",
        "<Challenge >Hello >Open <Opened <Step",
        "<Challenge >Hello >Open <Opened >Close >Step",
        "<Challenge >Hello >Open <Opened >Close <Closed >Open",
        "<Challenge >Hello >Attach <Attached <Output",
        "<Challenge >Hello >Attach <Attached >Replay",
        "<Challenge >Hello >Open >Replay",
        "<Challenge >Hello >Fetch <Pages >Open",
        "<Challenge >Hello <Failed >Open",
        "<Challenge <Challenge",
        "<Challenge >Hello >Hello",
    ],
)
def test_the_last_word_comes_out_of_order(words: str) -> None:
    machine = Machine(Role.LISTENER)
    *before, last = words.split()
    for word in before:
        direction = Direction.RECEIVED if word[0] == ">" else Direction.SENT
        machine.advance(BY_NAME[word[1:]], direction)
    with pytest.raises(ProtocolError, match="out of order"):
        machine.advance(BY_NAME[last[1:]], Direction.RECEIVED if last[0] == ">" else Direction.SENT)
