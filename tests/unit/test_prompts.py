"""What a stage may keep of a prompt: only what surely is what its chain says."""

from __future__ import annotations

from typing import Any

from bloombee.protocol.messages import PREFIX_TOKENS, Operations, Payload, Step
from bloombee.server.prompts import Prompts

C = PREFIX_TOKENS


def step(*rows: tuple[int, int, int], **operations: Any) -> Step:
    """Of rows (sequence, first position, count)."""
    return Step(
        session=b"s" * 16,
        epoch=0,
        step=2,
        phase="prefill",
        sequences=tuple(row[0] for row in rows),
        first_positions=tuple(row[1] for row in rows),
        counts=tuple(row[2] for row in rows),
        payload=Payload("rows", "float32", sum(row[2] for row in rows), 1),
        operations=Operations(**operations),
    )


def prompts(*chunks: int) -> Prompts:
    return Prompts([[bytes([n, i]) for i in range(count)] for n, count in enumerate(chunks)])


def kept(held: Prompts) -> list[tuple[int, int]]:
    """All that is ready, as (sequence, chunk)."""
    found: list[tuple[int, int]] = []
    while (ready := held.ready()) is not None:
        sequence, prompt = ready
        found.append((sequence, prompt.looked))
        prompt.looked += 1
    return found


def test_chunks_are_ready_when_they_are_computed() -> None:
    held = prompts(3)
    first, second = step((0, 0, C + 10)), step((0, C + 10, 2 * C))
    assert held.taken(first) == [0]
    assert kept(held) == []
    held.computed(first)
    assert kept(held) == [(0, 0)]
    assert held.taken(second) == []
    held.computed(second)
    assert kept(held) == [(0, 1), (0, 2)]
    assert held.is_over


def test_what_was_adopted_and_what_follows() -> None:
    held = prompts(2, 3)
    first = step((0, C, 2 * C), (1, 2 * C, C), truncates=((0, C), (1, 2 * C)))
    assert held.taken(first) == [C, 2 * C]
    held.computed(first)
    assert kept(held) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_rows_of_one_prompt_in_several_steps() -> None:
    """The first of them has the operations, also for sequences that follow later."""
    held = prompts(2, 2)
    first, second = step((0, C, C), truncates=((0, C), (1, C))), step((1, C, C))
    assert held.taken(first) == [C]
    assert held.taken(second) == [C]
    held.computed(first)
    held.computed(second)
    assert kept(held) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_nothing_beyond_a_cut() -> None:
    held = prompts(3)
    first = step((0, 0, 3 * C))
    held.taken(first)
    held.computed(first)
    held.taken(step((0, C + 5, 4), truncates=((0, C + 5),)))
    assert kept(held) == [(0, 0)]
    assert held.is_over


def test_a_cut_counts_from_when_it_is_taken() -> None:
    held = prompts(1)
    first = step((0, 0, C))
    held.taken(first)
    held.taken(step((0, 0, 4), truncates=((0, 0),)))
    held.computed(first)
    assert kept(held) == []


def test_what_is_copied_over_or_released_is_not_kept() -> None:
    held = prompts(1, 1, 1)
    first = step((0, 0, C), (1, 0, C), (2, 0, C))
    held.taken(first)
    held.computed(first)
    held.taken(step((0, C, 1), forks=((1, 0),), releases=(2,)))
    assert kept(held) == [(0, 0)]


def test_tokens_behind_the_prompt_are_not_kept() -> None:
    held = prompts(1)
    first = step((0, 0, C + 3))
    held.taken(first)
    held.computed(first)
    assert kept(held) == [(0, 0)]
    assert held.is_over
    more = step((0, C + 3, 2 * C))
    held.taken(more)
    held.computed(more)
    assert kept(held) == []


def test_a_step_that_does_not_follow_brings_nothing() -> None:
    held = prompts(2)
    held.taken(step((0, 0, C)))
    held.computed(step((0, C + 1, C)))
    assert kept(held) == []
