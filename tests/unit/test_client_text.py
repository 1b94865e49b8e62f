"""Text as tokens come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.client.prompts import Words
from bloombee.client.text import Detokenizer, StopStrings, piece_bytes
from bloombee.models import open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY = 49_152


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(open_source("smollm2").tokenizer())


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_pieces_of_any_ids_are_their_text(words: Words, ids: list[int]) -> None:
    assert "".join(pieces(words.decode, ids)) == words.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(words: Words, text: str) -> None:
    ids = words.encode(text) if text else ()
    told = pieces(words.decode, ids)
    assert "".join(told) == words.decode(ids)
    if "\ufffd" not in words.decode(ids):  # it has no token for some bytes
        assert not any("\ufffd" in piece for piece in told)


def test_an_emoji_comes_with_its_last_token(words: Words) -> None:
    ids = words.encode("a🐝b")
    told = pieces(words.decode, ids)
    assert len(ids) > 3
    assert "🐝" in told
    assert told[0] == "a"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
def test_the_bytes_of_tokens_are_those_of_their_text(words: Words, ids: list[int]) -> None:
    spelled = b"".join(words.spell(token) for token in ids if words.decode([token]))
    assert spelled.decode("utf-8", "replace") == words.decode(ids)


def test_bytes_of_a_half_character(words: Words) -> None:
    ids = words.encode("🐝")
    assert b"".join(words.spell(token) for token in ids) == "🐝".encode()
    assert piece_bytes("<0xF0>") == b"\xf0"
    assert piece_bytes("\u4e00") is None


def by_bytes(ids: Sequence[int]) -> str:
    """One token a byte, as models fall back to."""
    return bytes(ids).decode("utf-8", "replace")


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_told_all_the_same(data: bytes) -> None:
    assert "".join(pieces(by_bytes, data)) == by_bytes(data)


# Stop strings -------------------------------------------------------------------------------


def cut(text: str, stops: Sequence[str]) -> str:
    """What comes before the first stop string that is complete first."""
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text
    end = min(ends)[0]
    return text[: min(text.find(stop) for stop in stops if stop in text[:end])]


@given(
    st.lists(st.text("ab.", max_size=5), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(parts: list[str], stops: list[str]) -> None:
    letters = "".join(parts)
    reader = StopStrings(stops)
    told = "".join(reader.push(letter) for letter in letters) + reader.flush()
    assert told == cut(letters, stops)
    assert reader.hit == any(stop in letters for stop in stops)


@given(
    st.lists(st.text("ab.", max_size=5), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_what_was_told_was_never_part_of_a_stop_string(parts: list[str], stops: list[str]) -> None:
    reader, told = StopStrings(stops), ""
    for part in parts:
        told += reader.push(part)
    told += reader.flush()
    assert "".join(parts).startswith(told)
    assert not any(stop in told for stop in stops)


def test_what_can_not_be_a_stop_string_is_told_at_once() -> None:
    reader = StopStrings(["###"])
    told: list[Any] = [reader.push(text) for text in ("one ", "#", "two ##", "# three", "more")]
    assert told == ["one ", "", "#two ", "", ""]
    assert reader.hit
