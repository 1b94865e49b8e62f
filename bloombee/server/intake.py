"""Pages of another server, checked one by one: they fit exactly, or nothing is kept.

The sender is not trusted: every page must be the one that follows the page before,
of the size that its numbers say, and within what the session may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from bloombee import compression
from bloombee.errors import ProtocolError
from bloombee.kv.interface import KVPool, KVShape
from bloombee.protocol.messages import HandedOver, Output, Pages
from bloombee.server.carried import Carried, Terms
from bloombee.server.looping import KEPT_BYTES, Tokens, tokens_of

KINDS = ("kv", "journal", "output")


@dataclass(frozen=True, slots=True)
class Loaded:
    """One page of KV; its tensors lie in the frame that brought it."""

    page: Pages
    key: Float[torch.Tensor, "N K E"]
    value: Float[torch.Tensor, "N K E"]


class Intake:
    """Takes the pages of one hand-over in order. KV waits in `loads` for the compute thread."""

    def __init__(self, terms: Terms, shape: KVShape) -> None:
        self.received_bytes = 0
        self.total_bytes = 0
        self.loads: list[Loaded] = []
        self.terms = terms
        self._shape = shape
        self._last: Pages | None = None
        self._lengths = [0] * terms.sequences
        self._rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._tokens: dict[int, Tokens] = {}
        self._tokens_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """KV that waits to be loaded."""
        return sum(load.key.nbytes + load.value.nbytes for load in self.loads)

    def take(self, page: Pages, body: memoryview) -> None:
        """One page. Raises ProtocolError unless it is whole and the one that comes next."""
        if self._last is None:
            self.total_bytes = page.total_bytes
            if page.total_bytes > self._most_bytes():
                raise ProtocolError(f"{page.total_bytes} bytes are more than the session can hold")
        self._check_place(page)
        self._check_order(page)
        self.received_bytes += body.nbytes
        if page.total_bytes != self.total_bytes or self.received_bytes > self.total_bytes:
            raise ProtocolError("the pages are more than was announced")
        if page.kind == "kv":
            self._take_kv(page, body)
        else:
            self._take_rows(page, body)
        self._last = page

    def take_tokens(self, output: Output, body: memoryview) -> None:
        """What one step chose. Raises ProtocolError unless it is of the session, and not much."""
        tokens = tokens_of(output, body)
        self._tokens_bytes += tokens.kept_bytes
        if output.session != self.terms.session or self._tokens_bytes > 2 * KEPT_BYTES:
            raise ProtocolError(f"tokens of step {output.step} are too many, or of another session")
        self._tokens[output.step] = tokens

    def finish(self, told: HandedOver) -> Carried:
        """What came with the KV. Raises ProtocolError when it is not complete and coherent."""
        terms = self.terms
        counts = {len(told.lengths), len(told.newest_steps), len(told.released)}
        if counts != {terms.sequences}:
            raise ProtocolError(f"a book of {counts} sequences, the session has {terms.sequences}")
        if self._last is not None and not self._ends(self._last):
            raise ProtocolError("the last page is missing")
        if self.received_bytes != self.total_bytes:
            raise ProtocolError(f"{self.received_bytes} bytes of {self.total_bytes} came")
        if told.lengths != tuple(self._lengths):
            raise ProtocolError(f"pages for {self._lengths} tokens, {told.lengths} announced")
        if any(gone and length for gone, length in zip(told.released, told.lengths, strict=True)):
            raise ProtocolError("a released sequence holds tokens")
        if any(sequence >= terms.sequences for sequence, _ in told.sampling):
            raise ProtocolError("sampling of a sequence that the session lacks")
        return Carried(
            lengths=told.lengths,
            newest_steps=told.newest_steps,
            released=told.released,
            included=told.included,
            journal=self._journal(),
            outputs=self._outputs(told.outputs),
            tokens=tuple(sorted(self._tokens.items())),
            sampling=told.sampling,
        )

    def _most_bytes(self) -> int:
        terms, shape = self.terms, self._shape
        token = shape.block_token_bytes * len(terms.span)
        row = compression.row_bytes(terms.hidden_size, terms.wire_dtype)
        return terms.sequences * terms.max_length * (token + 2 * row)

    def _check_place(self, page: Pages) -> None:
        """Whether the session has such a place at all."""
        terms = self.terms
        blocks = terms.span if page.kind == "kv" else range(1)
        known = page.sequence < terms.sequences or page.kind == "output"
        if page.session != terms.session or page.block not in blocks or not known:
            raise ProtocolError(
                f"a page of block {page.block}, sequence {page.sequence}, which the session lacks"
            )
        if page.count < 1 or page.first + page.count > page.whole:
            raise ProtocolError(
                f"a page of tokens {page.first}:{page.first + page.count} of {page.whole}"
            )
        if page.kind != "output" and page.whole > terms.max_length:
            raise ProtocolError(f"a sequence of {page.whole} tokens, at most {terms.max_length}")

    def _check_order(self, page: Pages) -> None:
        if (last := self._last) is None:
            follows = page.first == 0 and self._begins(page)
        elif last.first + last.count < last.whole:  # more of the same
            follows = page.first == last.first + last.count and _item(page) == _item(last)
        elif page.first:
            follows = False
        elif page.kind == "kv" and page.block > self.terms.span.start:
            follows = _item(page) == (last.kind, last.sequence, last.block + 1, last.whole)
        else:
            follows = self._ends(last) and _place(page) > _place(last) and self._begins(page)
        if not follows:
            raise ProtocolError(f"the page of sequence {page.sequence} at {page.first} is not next")

    def _begins(self, page: Pages) -> bool:
        return page.kind != "kv" or page.block == self.terms.span.start

    def _ends(self, page: Pages) -> bool:
        whole = page.first + page.count == page.whole
        return whole and (page.kind != "kv" or page.block == self.terms.span.end - 1)

    def _take_kv(self, page: Pages, body: memoryview) -> None:
        heads, size = self._shape.kv_heads, self._shape.head_size
        dtype = compression.wire_dtype(self._shape.dtype)
        if page.dtype != dtype:
            raise ProtocolError(f"KV in {page.dtype}, this server holds {dtype}")
        rows = compression.decode(body, "raw", dtype, 2 * page.count, heads * size)
        key, value = rows.view(2, page.count, heads, size)
        self.loads.append(Loaded(page, key, value))
        self._lengths[page.sequence] = page.whole

    def _take_rows(self, page: Pages, body: memoryview) -> None:
        if page.dtype != self.terms.wire_dtype:
            raise ProtocolError(f"rows of {page.dtype}, the session's are {self.terms.wire_dtype}")
        rows = compression.decode(body, "raw", page.dtype, page.count, self.terms.hidden_size)
        self._rows.setdefault((page.kind, page.sequence), []).append(rows)

    def _journal(self) -> tuple[torch.Tensor, ...] | None:
        if any(self._lengths) and not any(kind == "journal" for kind, _ in self._rows):
            return None
        rows = tuple(self._joined("journal", sequence) for sequence in range(len(self._lengths)))
        if [len(each) for each in rows] != self._lengths:
            raise ProtocolError("the journal is not as long as the KV")
        return rows

    def _outputs(self, steps: Sequence[int]) -> tuple[tuple[int, torch.Tensor], ...]:
        last = max((index for kind, index in self._rows if kind == "output"), default=-1)
        if last >= len(steps):
            raise ProtocolError(f"rows of output {last}, {len(steps)} announced")
        return tuple((step, self._joined("output", index)) for index, step in enumerate(steps))

    def _joined(self, kind: str, index: int) -> torch.Tensor:
        parts = self._rows.get((kind, index))
        if parts is None:
            dtype = compression.torch_dtype(self.terms.wire_dtype)
            return torch.empty(0, self.terms.hidden_size, dtype=dtype)
        return torch.cat(parts)  # a copy: each part holds its whole frame


def load(pool: KVPool, terms: Terms, loads: Sequence[Loaded]) -> None:
    """Write pages in order into the session's sequences; for the compute thread.

    Raises RequestError when they don't fit.
    """
    for each in loads:
        page, device = each.page, pool.shape.device
        if page.first == 0 and page.block == terms.span.start:
            pool.expect(terms.session, page.sequence, page.whole, terms.span)
        key, value = each.key.to(device), each.value.to(device)
        pool.load(terms.session, page.sequence, page.block, key, value)


def _item(page: Pages) -> tuple[str, int, int, int]:
    return page.kind, page.sequence, page.block, page.whole


def _place(page: Pages) -> tuple[int, int]:
    return KINDS.index(page.kind), page.sequence
