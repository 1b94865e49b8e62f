"""What the last stage keeps of a loop, and the mail to a client that is slow."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from bloombee.core import PackedTable
from bloombee.errors import ProtocolError, RequestError, StepFailed
from bloombee.models.sampling import Chooser, Chosen
from bloombee.protocol.messages import Operations, Output, Payload, Sampling
from bloombee.server.looping import Looping, Tokens, tokens_of
from bloombee.server.mail import Mail
from tests.unit.test_sessions_validation import step

VOCABULARY = 100
BOTH = (Sampling(5, context=bytes(12)), Sampling(1, stop_ids=(7,)))


def begun(looping: Looping, **changes: Any) -> tuple[Chooser | None, ...]:
    """Step 1 over sequences 0 and 1, which loops."""
    message = step(1, {0: (0, 3), 1: (0, 2)}, **({"sampling": BOTH, "loop": True} | changes))
    choosers = looping.prepare(message)
    looping.begin(message, choosers)
    return choosers


def choose(looping: Looping, *tokens: Chosen) -> Tokens:
    message = step(1, {0: (0, 3), 1: (0, 2)}, sampling=BOTH, loop=True)
    table = PackedTable(message.sequences, message.first_positions, message.counts)
    return looping.chosen(message, table, looping.prepare(message), tokens)


class TestLooping:
    def test_rows_that_go_on_make_the_next_step(self) -> None:
        looping = Looping(VOCABULARY)
        begun(looping)
        tokens = choose(looping, Chosen(9), Chosen(7, finished="stop"))
        assert (tokens.sequences, tokens.positions) == ((0, 1), (3, 2))
        going = tokens.following(step(1, {0: (0, 3), 1: (0, 2)}, loop=True, answered=0))
        assert going is not None
        following, ids = going
        assert (following.step, following.loop, following.sampling) == (2, True, ())
        assert (following.sequences, following.first_positions, following.counts) == (
            (0,),
            (3,),
            (1,),
        )
        assert ids == b"\x09\0\0\0" and following.payload == Payload("ids", "int32", 1, 1)
        assert tokens.following(step(1, {0: (0, 3), 1: (0, 2)})) is None
        ended = Tokens(sequences=(1,), positions=(2,), chosen=(Chosen(7, finished="stop"),))
        assert ended.following(step(1, {1: (0, 2)}, loop=True)) is None

    def test_how_the_next_token_is_chosen_moves_on(self) -> None:
        looping = Looping(VOCABULARY)
        begun(looping)
        choose(looping, Chosen(9), Chosen(7, finished="stop"))
        ((sequence, sampling),) = looping.state()
        assert sequence == 0
        told = BOTH[0]
        moved = {"drawn": 1, "budget": 4, "context": told.context + b"\x09\0\0\0"}
        assert sampling == msgspec.structs.replace(told, **moved)
        other = Looping(VOCABULARY)
        other.restore(looping.state(), tuple(looping.kept.items()))
        assert other.state() == looping.state() and other.kept == looping.kept

    def test_penalties_that_leave_out_the_prompt_keep_what_was_chosen(self) -> None:
        looping = Looping(VOCABULARY)
        begun(looping, sampling=(Sampling(5, repetition_penalty=1.5), BOTH[1]))
        choose(looping, Chosen(9), Chosen(7, finished="stop"))
        ((_, sampling),) = looping.state()
        assert (sampling.drawn, sampling.budget) == (1, 4)
        assert sampling.context == b"\x09\0\0\0"

    @pytest.mark.parametrize(
        "changes",
        [
            {"operations": Operations(truncates=((0, 0),))},
            {"operations": Operations(releases=(0,))},
            {"operations": Operations(forks=((0, 1),))},
            {"sequences": (0,), "first_positions": (3,), "counts": (1,)},
        ],
    )
    def test_any_other_step_over_a_sequence_ends_it(self, changes: dict[str, Any]) -> None:
        looping = Looping(VOCABULARY)
        begun(looping)
        plain = {"sequences": (2,), "first_positions": (0,), "counts": (1,)}
        other = msgspec.structs.replace(step(2, {2: (0, 1)}), **(plain | changes))
        looping.begin(other, looping.prepare(other))
        assert [sequence for sequence, _ in looping.state()] == [1]
        with pytest.raises(ProtocolError, match="sequence 0, for which this stage has no"):
            looping.prepare(step(3, {0: (3, 1)}, loop=True))

    def test_the_oldest_go_when_they_are_many(self) -> None:
        tokens = Tokens(sequences=(0,), positions=(1,), chosen=(Chosen(1),))
        looping = Looping(VOCABULARY, limit_bytes=3 * tokens.kept_bytes)
        for number in range(1, 6):
            looping.keep(number, tokens)
        assert list(looping.kept) == [3, 4, 5]
        looping.answered(4)
        assert list(looping.kept) == [5]

    def test_what_makes_no_sense(self) -> None:
        looping = Looping(VOCABULARY)
        with pytest.raises(RequestError, match="id 100"):
            begun(looping, sampling=(Sampling(1, stop_ids=(100,)), None))
        assert looping.state() == ()
        begun(looping)
        with pytest.raises(StepFailed, match="1 tokens were chosen for 2"):
            choose(looping, Chosen(9))

    def test_tokens_travel_as_outputs(self) -> None:
        chosen = (Chosen(9, -0.5, ((9, -0.5), (3, -1.5))), Chosen(7, finished="stop"))
        tokens = Tokens(sequences=(0, 1), positions=(3, 2), chosen=chosen, logprobs=True)
        output = tokens.output(bytes(16), 2, 5)
        assert tokens_of(output, memoryview(tokens.body)) == tokens
        for broken in (
            {"positions": (3,)},
            {"logprobs": (1.0,)},
            {"payload": Payload("ids", "int32", 3, 1)},
            {"finished": ("", "", "")},
        ):
            wrong: Output = msgspec.structs.replace(output, **broken)
            with pytest.raises(ProtocolError, match="step 5"):
                tokens_of(wrong, memoryview(tokens.body))


class TestMail:
    OUTPUT = Output(bytes(16), 0, 1, Payload("ids", "int32", 0, 1))

    def test_it_keeps_order_and_has_limits(self) -> None:
        async def main() -> None:
            mail = Mail(messages=2)
            await mail.room()
            for number in (1, 2):
                mail.post(msgspec.structs.replace(self.OUTPUT, step=number), b"", 0)
            assert not mail.has_room
            async with asyncio.TaskGroup() as group:
                room = group.create_task(mail.room())
                empty = group.create_task(mail.empty())
                await asyncio.sleep(0)
                assert not room.done()
                for number in (1, 2):
                    assert (await mail.first()).output.step == number
                    mail.sent()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    assert room.done()
                    assert empty.done() == (number == 2)

        asyncio.run(main())

    def test_bytes_count(self) -> None:
        mail = Mail(limit_bytes=1000)
        mail.post(self.OUTPUT, b"", 600)
        assert not mail.has_room and len(mail) == 1
        mail.sent()
        assert mail.has_room
