"""Text as its tokens come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"
"""What a tokenizer shows for bytes that are no character, or not yet."""


class Detokenizer:
    """Turns ids into pieces of text that later ids can't change.

    A token may end within a character, and its text may depend on the one before it. So
    a piece is the difference of two texts: that of the ids around the last piece, without
    and with the new ones; and a text that ends within a character waits.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        """Those of the last piece, and what came after it."""
        self._before = ""
        self._told = 0

    def push(self, token: int) -> str:
        """The text that is settled now that `token` has come; may be empty."""
        self._ids.append(token)
        return self._piece(is_last=False)

    def flush(self) -> str:
        """What was held back, as it stands; no more ids follow."""
        return self._piece(is_last=True)

    def _piece(self, *, is_last: bool) -> str:
        after, told = self._decode(self._ids), len(self._before)
        if len(after) <= told or (after.endswith(_HALF) and not is_last):
            return ""
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        self._before = self._decode(self._ids)
        return after[told:]


def piece_bytes(piece: str) -> bytes | None:
    """The bytes that a vocabulary's entry stands for, if it is written as bytes.

    Vocabularies write a byte as `<0x0A>`, or every byte as one visible character: itself,
    where it is one in Latin-1, else one of the characters from U+0100 on, in order.
    """
    if len(piece) == len("<0x0A>") and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    try:
        return bytes(_BYTES[letter] for letter in piece)
    except KeyError:
        return None


def _visible_bytes() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _visible_bytes()


class StopStrings:
    """Passes text on up to the first of some strings; `hit` once it came."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """What can be told of the text so far; nothing more after a hit."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.hit = True
            self._held = ""
            return text[: min(places)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, as no more text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
