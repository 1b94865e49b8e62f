"""What the stages of a new session may hold of its prompts already, and what is left to send.

A prompt is announced by its chain, one hash for each whole chunk of it; stages answer how
much of it they kept of earlier sessions. The first step brings what one of them lacks, has
the others cut to that, and always at least the last token, whose result is wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from bloombee.client.circuit import Circuit
from bloombee.client.history import Entry
from bloombee.client.terms import SessionTerms
from bloombee.client.work import Work
from bloombee.core import PackedTable
from bloombee.errors import RequestError
from bloombee.protocol.messages import MOST_CHUNKS, PREFIX_TOKENS, Chain

HASH_BYTES = 16
MOST_IN_ALL = 1 << 14
"""Announced of all prompts of one session: a quarter of the largest message."""


def chain(root: str, ids: Sequence[int], most: int = MOST_CHUNKS) -> Chain:
    """For each whole chunk of `ids` a hash of it and of all before it; of `most` chunks.

    `root` is what else the same ids must have in common: the model.
    """
    link = hashlib.blake2b(root.encode(), digest_size=HASH_BYTES).digest()
    links: list[bytes] = []
    for first in range(0, min(len(ids) // PREFIX_TOKENS, most) * PREFIX_TOKENS, PREFIX_TOKENS):
        part = b"".join(token.to_bytes(8, "little") for token in ids[first : first + PREFIX_TOKENS])
        link = hashlib.blake2b(link + part, digest_size=HASH_BYTES).digest()
        links.append(link)
    return tuple(links)


def chains(terms: SessionTerms) -> tuple[Chain, ...]:
    """Those of all prompts of a session; empty when it has none that is worth it."""
    most = min(MOST_CHUNKS, MOST_IN_ALL // terms.sequences)
    found = tuple(chain(terms.fingerprint, prompt, most) for prompt in terms.prompts)
    # Where a model rotates by the length of the call, the same ids are not the same KV.
    return found if any(found) and not terms.whole_prompts else ()


class Beginning:
    """A session before its first step, whose prompts were announced."""

    def __init__(self, circuit: Circuit, terms: SessionTerms) -> None:
        self._circuit = circuit
        self._prompts = terms.prompts
        circuit.ledger.expect_adoption()

    def check(self, table: PackedTable, entries: Sequence[Entry]) -> None:
        """Raise RequestError unless a step brings the prompts: stages count on it."""
        brought = {row.sequence: row for row in table.rows()}
        for sequence, prompt in enumerate(self._prompts):
            if not prompt:
                continue
            row = brought.get(sequence)
            given = [] if row is None else entries[row.offset : row.offset + row.count]
            if row is None or row.first_position or list(given) != list(prompt):
                raise RequestError(
                    f"sequence {sequence} was opened for another prompt: open another session"
                )

    def first(self, work: Work) -> Work:
        """What is left of the first step; from here on all stages count as holding the rest."""
        held = [seat.standing.held_tokens for seat in self._circuit.seats]
        adopted, cut = shared(work.table, held)
        self._circuit.ledger.adopt(adopted)
        self._circuit.progress.traffic.adopted.extend(adopted)
        if cut:
            truncates = (*work.operations.truncates, *cut)
            operations = msgspec.structs.replace(work.operations, truncates=truncates)
            work = replace(work, operations=operations)
        return _rest(work, adopted) if any(adopted) else work


def _rest(work: Work, adopted: Sequence[int]) -> Work:
    """The step without the first `adopted` tokens of each sequence."""
    table = work.table
    left = [slice(r.offset + adopted[r.sequence], r.offset + r.count) for r in table.rows()]
    return replace(
        work,
        entries=[entry for part in left for entry in work.entries[part]],
        rows=None if work.rows is None else torch.cat([work.rows[part] for part in left]),
        table=PackedTable(
            table.sequences,
            tuple(adopted[sequence] for sequence in table.sequences),
            tuple(part.stop - part.start for part in left),
        ),
    )


def shared(
    table: PackedTable, held: Sequence[Sequence[int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """How much of each sequence no stage needs, where each has `held` so much, and what to cut.

    At least the last token of each row of `table`, the first step, is computed. Cut are
    the sequences of which some stage holds more, to what all of them go on from.
    """
    adopted = [0] * len(held[0])
    for row in table.rows():
        whole = (row.count - 1) // PREFIX_TOKENS * PREFIX_TOKENS
        adopted[row.sequence] = min(whole, *(each[row.sequence] for each in held))
    most = [max(each) for each in zip(*held, strict=True)]
    return adopted, [(s, kept) for s, kept in enumerate(adopted) if kept < most[s]]
