"""Chains of prompts, and what a first step leaves out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee.client.prefixes import MOST_CHUNKS, MOST_IN_ALL, chain, chains, shared
from bloombee.client.terms import SessionTerms
from bloombee.core import PackedTable
from bloombee.protocol.messages import PREFIX_TOKENS

C = PREFIX_TOKENS
lengths = st.integers(0, 4 * C)


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=count)


def terms(*prompts: tuple[int, ...], whole_prompts: bool = False) -> SessionTerms:
    return SessionTerms("model", len(prompts), 10_000, 8, "float32", whole_prompts, prompts)


@given(lengths, lengths, lengths)
def test_chains_are_as_long_in_common_as_the_prompts(alike: int, first: int, second: int) -> None:
    common = ids(alike, 0)
    one = chain("model", [*common, 1, *ids(first, 1)])
    other = chain("model", [*common, 2, *ids(second, 2)])
    assert (len(one), len(other)) == ((alike + 1 + first) // C, (alike + 1 + second) // C)
    same = [a == b for a, b in zip(one, other, strict=False)]
    assert same == [index < alike // C for index in range(len(same))]


@given(lengths, st.data())
def test_one_other_token_changes_its_chunk_and_all_after_it(
    length: int, data: st.DataObject
) -> None:
    prompt = ids(C + length, 0)
    at = data.draw(st.integers(0, len(prompt) - 1))
    changed = [*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]]
    one, other = chain("model", prompt), chain("model", changed)
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert same == [index < at // C for index in range(len(one))]


def test_the_same_chunk_elsewhere_has_another_hash() -> None:
    assert len(set(chain("model", [5] * (3 * C)))) == 3


def test_another_model_has_other_chains() -> None:
    assert chain("model", [5] * C) != chain("another", [5] * C)


def test_ids_of_any_size_differ() -> None:
    big = [1 << 40, *[0] * (C - 1)]
    assert chain("model", big) != chain("model", [0] * C)


def test_prompts_worth_announcing() -> None:
    long, short = tuple(range(C)), tuple(range(C - 1))
    assert chains(terms(short, short)) == ()
    assert [len(each) for each in chains(terms(long, short, ()))] == [1, 0, 0]
    assert chains(terms(long, whole_prompts=True)) == ()
    assert chains(SessionTerms("model", 2, 100, 8, "float32")) == ()


def test_what_is_announced_is_bounded() -> None:
    endless = tuple(range((MOST_CHUNKS + 2) * C))
    assert len(chains(terms(endless))[0]) == MOST_CHUNKS
    eight = chains(terms(*[endless] * 8))
    assert sum(map(len, eight)) == MOST_IN_ALL


@pytest.mark.parametrize(
    ("held", "count", "adopted"),
    [
        ([128, 128], 200, 128),
        ([128, 64], 200, 64),
        ([0, 192], 200, 0),
        ([128, 128], 128, 64),  # the last token is computed
        ([128, 128], 129, 128),
        ([64, 64], 64, 0),
    ],
)
def test_the_least_of_what_stages_hold(held: list[int], count: int, adopted: int) -> None:
    table = PackedTable((0,), (0,), (count,))
    cut = [(0, adopted)] if max(held) > adopted else []
    assert shared(table, [(each,) for each in held]) == ([adopted], cut)


def test_sequences_are_shared_each_by_itself() -> None:
    table = PackedTable((0, 2), (0, 0), (70, 200))
    held = [(64, 0, 192), (64, 0, 128)]
    assert shared(table, held) == ([64, 0, 128], [(2, 128)])
