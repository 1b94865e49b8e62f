"""Opens and steps are judged by tables of rules, before anything changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bloombee.core import Span
from bloombee.errors import BloomBeeError, ProtocolError, RequestError, StaleEpoch, Unsupported
from bloombee.protocol.messages import Hop, Open, Operations, Payload, Sampling, Step
from bloombee.server.sequences import SequenceBook, Taken
from bloombee.server.token_rules import check_tokens
from bloombee.server.validation import (
    Limits,
    Offer,
    StepContext,
    Terms,
    check_open,
    check_step,
    touched,
)

OFFER = Offer(fingerprint="f" * 64, span=Span(2, 8), hidden_size=16, max_length=100)
LIMITS = Limits(max_sequences=4, max_step_tokens=32)
TERMS = Terms(epoch=3, span=Span(2, 8), sequences=4, max_length=50)
CONTEXT = StepContext(TERMS, hidden_size=16, max_step_tokens=32)
ID = bytes(16)
HOP = Hop(peer="next", address="127.0.0.1:1", certificate_hash=b"")


def opening(**changes: Any) -> Open:
    base = Open(
        session=ID,
        secret=ID,
        epoch=3,
        fingerprint="f" * 64,
        start=2,
        end=8,
        sequences=4,
        max_length=50,
        dtype="float32",
    )
    return msgspec.structs.replace(base, **changes)


def step(
    number: int,
    rows: dict[int, tuple[int, int]],
    operations: Operations = Operations(),  # noqa: B008 - frozen
    **changes: Any,
) -> Step:
    """A step over `rows`: sequence -> (first position, count)."""
    base = Step(
        session=ID,
        epoch=3,
        step=number,
        phase="decode",
        sequences=tuple(rows),
        first_positions=tuple(first for first, _ in rows.values()),
        counts=tuple(count for _, count in rows.values()),
        payload=Payload("rows", "float32", sum(count for _, count in rows.values()), 16),
        operations=operations,
    )
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"fingerprint": "0" * 64}, RequestError, "another model"),
        ({"start": 0}, RequestError, "blocks 0:8 are not served here, 2:8 are"),
        ({"end": 9}, RequestError, "not served here"),
        ({"start": 5, "end": 5}, RequestError, "not served here"),
        ({"start": 6, "end": 4}, RequestError, "not served here"),
        ({"sequences": 0}, RequestError, "allows 1 to 4"),
        ({"sequences": 5}, RequestError, "allows 1 to 4"),
        ({"max_length": 0}, RequestError, "1 to 100"),
        ({"max_length": 101}, RequestError, "1 to 100"),
        ({"dtype": "int32"}, RequestError, "not int32"),
        ({"ring": HOP, "next": HOP}, RequestError, "only the last stage of several"),
        ({"stages": 0}, RequestError, "no stages"),
    ],
)
def test_open_is_refused(changes: dict[str, Any], error: type[BloomBeeError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        check_open(opening(**changes), OFFER, LIMITS)
    assert type(caught.value) is error and "\n" not in str(caught.value)


def test_open_gives_terms_also_for_a_part_of_the_span() -> None:
    assert check_open(opening(), OFFER, LIMITS) == TERMS
    part = check_open(opening(start=3, end=4), OFFER, LIMITS)
    assert part.span == Span(3, 4)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"epoch": 2}, StaleEpoch, "epoch 2"),
        ({"epoch": 4}, ProtocolError, "open that epoch first"),
        ({"step": 0}, ProtocolError, "from 1"),
        ({"sampling": (Sampling(1),)}, RequestError, "sampling for 1 of 2 sequences"),
        ({"loop": True, "sampling": (Sampling(1), None)}, RequestError, "for all"),
        (
            {"sampling": (Sampling(1, logprobs=1 << 15), Sampling(1, logprobs=1))},
            RequestError,
            "log",
        ),
        ({"loop": True, "sampling": (Sampling(1), Sampling(51))}, RequestError, "to 51 tokens"),
        ({"loop": True, "phase": "verify"}, Unsupported, "verifies, and asks for tokens"),
        ({"sampling": (None, None), "replay": True, "until": 8}, Unsupported, "replays"),
        ({"replay": True, "until": 7}, ProtocolError, "up to block 7 came to a stage of"),
        (
            {"replay": True, "until": 8, "operations": Operations(forks=((1, 0),))},
            Unsupported,
            "replays with forks",
        ),
        ({"write_kv": False}, Unsupported, "recomputation"),
        ({"operations": Operations(accepted=((0, (1,)),))}, Unsupported, "acceptance"),
        ({"payload": Payload("ids", "int32", 2, 1)}, RequestError, "for the first stage"),
        ({"payload": Payload("rows", "int32", 2, 16)}, Unsupported, "int32"),
        ({"payload": Payload("logits", "float32", 2, 16)}, Unsupported, "logits"),
        ({"payload": Payload("rows", "float32", 2, 15)}, RequestError, "rows of width 15"),
        ({"payload": Payload("rows", "float32", 33, 16)}, RequestError, "at most 32"),
        ({"payload": Payload("rows", "float32", 3, 16)}, ProtocolError, "3 rows for 2 tokens"),
        ({"sequences": (0, 0)}, ProtocolError, "distinct"),
        ({"sequences": (0,)}, ProtocolError, "equally many"),
        ({"counts": (0, 2)}, ProtocolError, "positive"),
        ({"parents": (-1,)}, ProtocolError, "parents"),
        ({"parents": (-1, 3)}, ProtocolError, "precede"),
    ],
)
def test_step_is_refused(changes: dict[str, Any], error: type[BloomBeeError], says: str) -> None:
    message = step(1, {0: (0, 1), 1: (0, 1)}, **changes)
    with pytest.raises(error, match=says) as caught:
        check_step(message, CONTEXT)
        check_tokens(message, CONTEXT, looped=False)
    assert type(caught.value) is error and "\n" not in str(caught.value)


FIRST = StepContext(Terms(3, Span(0, 8), 4, 50), hidden_size=16, max_step_tokens=32, vocab_size=9)
IDS = Payload("ids", "int32", 2, 1)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"payload": Payload("ids", "float32", 2, 1)}, Unsupported, "ids of float32"),
        ({"payload": Payload("ids", "int32", 2, 1, "split")}, Unsupported, "coded as split"),
        ({"payload": Payload("ids", "int32", 2, 2)}, RequestError, "ids of width 2"),
        ({"loop": True}, ProtocolError, "begins a loop without sampling"),
    ],
)
def test_ids_are_for_the_first_stage(
    changes: dict[str, Any], error: type[BloomBeeError], says: str
) -> None:
    plain: dict[str, Any] = {"payload": IDS}
    check_step(step(1, {0: (0, 1), 1: (0, 1)}, **plain), FIRST)
    message = step(1, {0: (0, 1), 1: (0, 1)}, **(plain | changes))
    with pytest.raises(error, match=says):
        check_step(message, FIRST)
        check_tokens(message, FIRST, looped=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loop": False}, "does not just go on"),
        ({"sampling": (Sampling(1), Sampling(1))}, "does not just go on"),
        ({"operations": Operations(releases=(2,))}, "does not just go on"),
        ({"payload": Payload("rows", "float32", 2, 16)}, "one id a sequence"),
    ],
)
def test_the_last_stage_sends_nothing_but_loops(changes: dict[str, Any], says: str) -> None:
    plain: dict[str, Any] = {"payload": IDS, "loop": True}
    check_tokens(step(1, {0: (0, 1), 1: (0, 1)}, **plain), FIRST, looped=True)
    with pytest.raises(ProtocolError, match=says):
        message = step(1, {0: (0, 1), 1: (0, 1)}, **(plain | changes))
        check_tokens(message, FIRST, looped=True)


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(ProtocolError, match="equally many"):
        check_step(step(1, {}), CONTEXT)


def test_a_sound_step_gives_its_table() -> None:
    table = check_step(step(1, {0: (0, 3), 2: (5, 1)}), CONTEXT)
    assert (table.sequences, table.first_positions, table.counts) == ((0, 2), (0, 5), (3, 1))


class TestSequences:
    def test_lengths_follow_steps(self) -> None:
        book = SequenceBook(TERMS)
        assert book.take(step(1, {0: (0, 5), 2: (0, 7)})) is Taken.NEW
        assert book.take(step(2, {2: (7, 1)})) is Taken.NEW
        assert book.lengths == (5, 0, 8, 0)

    def test_exact_repeats_change_nothing(self) -> None:
        book = SequenceBook(TERMS)
        first = step(1, {0: (0, 5)}, Operations(releases=(3,)))
        assert book.take(first) is Taken.NEW
        assert book.take(first) is Taken.REPEATED
        assert book.take(step(2, {0: (5, 1)})) is Taken.NEW
        assert book.lengths == (6, 0, 0, 0)

    def test_sequences_advance_independently(self) -> None:
        book = SequenceBook(TERMS)
        book.take(step(2, {1: (0, 4)}))
        assert book.take(step(1, {0: (0, 3)})) is Taken.NEW

    @pytest.mark.parametrize(
        ("message", "error", "says"),
        [
            (step(1, {0: (0, 5)}), ProtocolError, "after step 2"),
            (step(2, {0: (5, 2)}), ProtocolError, "after step 2"),
            (step(2, {0: (5, 1), 1: (0, 1)}), ProtocolError, "after step 2"),
            (step(3, {0: (5, 1)}), ProtocolError, "starts at 5 in sequence 0, which holds 6"),
            (step(3, {0: (7, 1)}), ProtocolError, "holds 6"),
            (step(3, {4: (0, 1)}), RequestError, "session of 4"),
            (step(3, {0: (6, 45)}), RequestError, "max_length 50"),
            (step(3, {3: (0, 1)}), RequestError, "sequence 3 was released"),
            (step(3, {0: (6, 1)}, Operations(forks=((3, 0),))), RequestError, "released"),
            (step(3, {0: (6, 1)}, Operations(forks=((0, 9),))), RequestError, "session of 4"),
            (step(3, {0: (6, 1)}, Operations(forks=((1, 0), (1, 2)))), RequestError, "two forks"),
            (step(3, {0: (7, 1)}, Operations(truncates=((0, 7),))), RequestError, "truncate"),
            (step(3, {0: (6, 1)}, Operations(releases=(0,))), RequestError, "extends it"),
            (step(3, {0: (6, 1)}, Operations(releases=(3,))), RequestError, "released"),
        ],
    )
    def test_refused_steps_change_nothing(
        self, message: Step, error: type[BloomBeeError], says: str
    ) -> None:
        book = SequenceBook(TERMS)
        book.take(step(1, {0: (0, 5)}, Operations(releases=(3,))))
        book.take(step(2, {0: (5, 1)}))
        with pytest.raises(error, match=says):
            book.take(message)
        assert book.lengths == (6, 0, 0, 0)
        assert book.take(step(3, {0: (6, 1)})) is Taken.NEW

    def test_a_reorder_reads_all_sources_before_it_writes(self) -> None:
        book = SequenceBook(TERMS)
        book.take(step(1, {0: (0, 5), 1: (0, 7)}))
        swap = Operations(forks=((0, 1), (1, 0)), truncates=((0, 6),))
        assert book.take(step(2, {0: (6, 1), 1: (5, 1)}, swap)) is Taken.NEW
        assert book.lengths == (7, 6, 0, 0)


def test_operations_count_as_touched() -> None:
    operations = Operations(forks=((1, 2),), truncates=((3, 0),), releases=(5,))
    assert touched(step(1, {0: (0, 1)})) == {0}
    assert touched(step(1, {0: (0, 1)}, operations)) == {0, 1, 2, 3, 5}
