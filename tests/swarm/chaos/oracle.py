"""What a swarm has to answer: a session on all blocks, which can't fail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bloombee.client.history import History, ids_of
from bloombee.client.tokens import Line, Token
from bloombee.client.work import Work
from bloombee.core import PackedTable, SessionId, Span
from bloombee.kv.interface import BatchItem
from bloombee.models.sampling import Chooser, choose
from tests.swarm.chaos.conversation import Conversation
from tests.swarm.chaos.digests import VOCABULARY, DigestModel, DigestPool, embed, logits, to_numbers
from tests.swarm.chaos.scripts import unhurried, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bloombee.client.tokens import Emit
    from bloombee.errors import BloomBeeError
    from tests.swarm.chaos.scripts import Script


class Oracle:
    """A session on all blocks, in this process, without wire or faults."""

    _session = SessionId(bytes(16))

    def __init__(self, num_blocks: int, script: Script) -> None:
        span = Span(0, num_blocks)
        self.history = History(script.rows)
        self._model = DigestModel(span)
        self._pool = DigestPool(span, script.rows * (script.max_length + 4))
        self._pool.reserve(self._session, script.rows, script.max_length)

    async def step(self, work: Work) -> torch.Tensor:
        table, operations, want = work.table, work.operations, work.want
        self.history.apply(operations)
        self.history.append(table, work.entries)
        rows = embed(ids_of(work.entries), table.positions.tolist())
        self._pool.fork(self._session, operations.forks)
        for sequence, length in operations.truncates:
            self._pool.truncate(self._session, sequence, length)
        for sequence in operations.releases:
            self._pool.release(self._session, sequence)
        made = self._model.forward(rows, [BatchItem(self._session, table)], self._pool)
        if want == "all":
            return made
        return made[table.last_rows.tolist()] if want == "last" else made[:0]

    async def decode(self, work: Work, lines: Sequence[Line], emit: Emit) -> None:
        choosers = [Chooser.of(line.sampling, VOCABULARY) for line in lines]
        going = list(zip(lines, choosers, strict=True))
        while going:
            numbers = to_numbers(await self.step(work))
            chosen = choose(logits(numbers), [chooser for _, chooser in going])
            for (line, _), each in zip(going, chosen, strict=True):
                line.take(Token(line.row, each.token, each.finished))
            going = [pair for pair in going if not pair[0].finished]
            sequences = tuple(line.sequence for line, _ in going)
            if sequences:
                lengths = tuple(self.history.length(sequence) for sequence in sequences)
                table = PackedTable(sequences, lengths, (1,) * len(sequences))
                work = Work(table=table, entries=[line.chosen[-1] for line, _ in going])


async def right_outputs(num_blocks: int, script: Script) -> list[list[int]]:
    """What a swarm has to answer, whatever befalls it."""

    async def never(error: BloomBeeError) -> None:
        raise error

    script = uninterrupted(replace(script, acts=tuple(map(unhurried, script.acts))))
    told = Conversation(Oracle(num_blocks, script), script, never)
    await told.play()
    return told.outputs
