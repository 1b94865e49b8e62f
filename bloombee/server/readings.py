"""From times of single passes to tables of one block: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, field

from bloombee.protocol.report_messages import TimeGrid

PREFILL_CONTEXTS = (0, 256, 1024, 4096)


@dataclass(slots=True)
class Readings:
    """Seconds of passes through all `blocks` of a span.

    `decode` by (rows, context), `chunks` by (rows, tokens that each attends to on average),
    `head` what choosing tokens adds, by rows; `single_s` a row through one block.
    """

    blocks: int
    decode: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    chunks: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])
    head: dict[int, float] = field(default_factory=dict[int, float])
    single_s: float = 0.0

    @property
    def pass_s(self) -> float:
        """What a pass costs besides its blocks; 0 where there is one block to tell by.

        Half of a pass at most: what disturbed one of the two measurements makes no block free.
        """
        if self.blocks == 1:
            return 0.0
        first_s = self.decode[min(rows for rows, context in self.decode if not context), 0]
        block_s = (first_s - self.single_s) / (self.blocks - 1)
        return min(max(0.0, self.single_s - block_s), first_s / 2)

    def per_block(self, seconds: float) -> float:
        """A block's share of a pass."""
        return max(0.0, (seconds - self.pass_s) / self.blocks)


def decode_grid(readings: Readings) -> TimeGrid:
    """Of all rows and contexts measured.

    Where a context was not measured with so many rows, what it adds is taken to grow with
    the rows, as reading their KV does.
    """
    rows = sorted({count for count, context in readings.decode if not context})
    contexts = sorted({context for _, context in readings.decode})
    added = {context: _added_per_row(readings, context) for context in contexts}

    def seconds(count: int, context: int) -> float:
        known = readings.decode.get((count, context))
        return readings.decode[count, 0] + count * added[context] if known is None else known

    passes = [[seconds(count, context) for context in contexts] for count in rows]
    lines = tuple(tuple(map(readings.per_block, line)) for line in _sorted_out(passes))
    return TimeGrid(tuple(rows), tuple(contexts), lines)


def _sorted_out(table: list[list[float]]) -> list[list[float]]:
    """The table without what can't be: more rows, or more context, that cost less."""
    return [
        [min(min(line[column:]) for line in table[row:]) for column in range(len(table[0]))]
        for row in range(len(table))
    ]


def _added_per_row(readings: Readings, context: int) -> float:
    """What a context adds to a pass, for each row, by the pass of most rows."""
    rows = max(count for count, kept in readings.decode if kept == context)
    return max(0.0, readings.decode[rows, context] - readings.decode[rows, 0]) / rows


def prefill_grid(readings: Readings) -> TimeGrid:
    """By rows, and tokens that each attends to on average.

    One chunk was measured twice, at two contexts; so much a row and token of context adds.
    """
    rows = sorted({count for count, _ in readings.chunks})
    per_token = _added_per_token(readings)

    def seconds(count: int, context: int) -> float:
        attended = min(kept for chunk, kept in readings.chunks if chunk == count)
        passed = readings.chunks[count, attended] + count * (context - attended) * per_token
        return readings.per_block(passed)

    contexts = PREFILL_CONTEXTS if per_token else PREFILL_CONTEXTS[:1]
    lines = tuple(tuple(seconds(count, context) for context in contexts) for count in rows)
    return TimeGrid(tuple(rows), contexts, lines)


def _added_per_token(readings: Readings) -> float:
    for count in {count for count, _ in readings.chunks}:
        near, *far = sorted(kept for chunk, kept in readings.chunks if chunk == count)
        if far:
            added_s = readings.chunks[count, far[-1]] - readings.chunks[count, near]
            return max(0.0, added_s) / (count * (far[-1] - near))
    return 0.0


def head_grid(readings: Readings) -> TimeGrid | None:
    """By rows; None where the span has no head."""
    if not readings.head:
        return None
    rows = sorted(readings.head)
    lines = _sorted_out([[readings.head[count]] for count in rows])
    return TimeGrid(tuple(rows), (0,), tuple((seconds,) for (seconds,) in lines))
