"""One forward pass over the shares of several sessions; runs on the compute thread.

Ids are embedded here, and where the last block's rows become tokens, all rows of the pass
that want one go through the head together. Operations of a step are applied once, before
its first share. When a merged pass fails, each share runs by itself, and so does the
choice of tokens, so that only the session at fault fails.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, StepFailed
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.models.sampling import Chooser, Chosen, advance, pick
from bloombee.protocol.messages import Operations
from bloombee.server.copying import copy_clock
from bloombee.server.work import Model, Waiting

logger = logging.getLogger(__name__)

HEAD_ROWS = 256
"""At most so many go through the head at once: logits of 128,000 tokens take 131 MB."""


@dataclass(frozen=True, slots=True)
class Run:
    """The next `tokens` of a waiting step."""

    waiting: Waiting
    tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that can't go on."""

    waiting: Waiting
    error: BloomBeeError


def run_pass(model: Model, pool: KVPool, runs: Sequence[Run]) -> list[Failure]:
    """Compute `runs` together and keep their outputs; returns those that failed.

    Modifies the pool. The sequences of a failed step are as long as before it.
    """
    failures = [Failure(run.waiting, error) for run in runs if (error := _operate(pool, run))]
    failed = {id(failure.waiting) for failure in failures}
    ready = [run for run in runs if id(run.waiting) not in failed]
    if not ready:
        return failures
    error = _compute(model, pool, ready)
    if error is None:
        broken = _choose(model, [run.waiting for run in ready])
    elif len(ready) == 1:
        broken = [Failure(ready[0].waiting, error)]
    else:
        broken = [failure for run in ready for failure in _compute_alone(model, pool, run)]
    for failure in broken:
        _roll_back(pool, failure.waiting)
    return failures + broken


def _compute_alone(model: Model, pool: KVPool, run: Run) -> list[Failure]:
    error = _compute(model, pool, [run])
    return _choose(model, [run.waiting]) if error is None else [Failure(run.waiting, error)]


def typed(error: Exception) -> BloomBeeError:
    """`error` as one of our tree, in one line."""
    if isinstance(error, BloomBeeError):
        return error
    said = str(error).strip().splitlines()
    return StepFailed(f"{type(error).__name__}: {said[0]}" if said else type(error).__name__)


def _operate(pool: KVPool, run: Run) -> BloomBeeError | None:
    work = run.waiting.work
    if run.waiting.operated or work.operations is None:
        return None
    run.waiting.operated = True
    try:
        _apply(pool, work.session, work.operations)
    except BloomBeeError as error:
        return error
    return None


def _apply(pool: KVPool, session: SessionId, operations: Operations) -> None:
    if operations.forks:
        pool.fork(session, operations.forks)
    for sequence, length in operations.truncates:
        pool.truncate(session, sequence, length)
    for sequence in operations.releases:
        pool.release(session, sequence)


def _compute(model: Model, pool: KVPool, runs: Sequence[Run]) -> BloomBeeError | None:
    """Forward the runs as one batch and keep what they want of it; or the error."""
    try:
        batch = [
            BatchItem(run.waiting.work.session, run.waiting.share_table(run.tokens)) for run in runs
        ]
        inputs = [run.waiting.share_rows(run.tokens) for run in runs]
        clock = copy_clock(model.device)
        rows = _joined(model, inputs, batch)
        clock.copied()
        span = runs[0].waiting.work.span
        output = model.forward(rows, batch, pool, span=None if span == model.span else span)
        parts = output.split([run.tokens for run in runs]) if len(runs) > 1 else (output,)
        clock.computed()
        kept = [run.waiting.pick(part) for run, part in zip(runs, parts, strict=True)]
        came_back = any(one is not None and not one.is_cuda for one in kept)
        copy_us = clock.ended(came_back=came_back)
    except Exception as error:
        if not isinstance(error, BloomBeeError):
            logger.exception("a forward pass of %d sessions failed", len(runs))
        return typed(error)
    for run, rows in zip(runs, kept, strict=True):
        run.waiting.advance(run.tokens, rows)
        run.waiting.copy_us += copy_us
    return None


def _joined(
    model: Model, inputs: Sequence[torch.Tensor], batch: Sequence[BatchItem]
) -> Float[torch.Tensor, "T D"]:
    """The inputs as rows on the device, in order; ids become rows all at once."""
    ids = [number for number, each in enumerate(inputs) if not each.is_floating_point()]
    if not ids:
        return _cat(inputs, model.dtype).to(device=model.device, dtype=model.dtype)
    positions = [torch.from_numpy(batch[number].table.positions) for number in ids]
    embedded = model.embed(
        _cat([inputs[number] for number in ids], torch.long).to(model.device),
        _cat(positions, torch.long).to(model.device),
    ).to(model.dtype)
    if len(ids) == len(inputs):
        return embedded
    rows = [each.to(device=model.device, dtype=model.dtype) for each in inputs]
    for number, part in zip(ids, embedded.split([len(inputs[n]) for n in ids]), strict=True):
        rows[number] = part
    return torch.cat(rows)


def _cat(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return parts[0].to(dtype) if len(parts) == 1 else torch.cat([part.to(dtype) for part in parts])


def _choose(model: Model, waiting: Sequence[Waiting]) -> list[Failure]:
    """Choose the tokens of those steps that are computed; returns the ones that can't be.

    When it fails for some, no chooser has moved on, and each step tries by itself.
    """
    asking = [one for one in waiting if one.work.chooses and one.is_computed]
    if not asking:
        return []
    choosers = [one.choosers for one in asking]
    try:
        rows = _cat([one.joined() for one in asking], model.dtype)
        chosen = _choose_all(model, rows, [chooser for each in choosers for chooser in each])
    except Exception as error:
        if len(asking) > 1:
            return [failure for one in asking for failure in _choose(model, [one])]
        if not isinstance(error, BloomBeeError):
            logger.exception("the choice of %d tokens failed", len(choosers[0]))
        return [Failure(asking[0], typed(error))]
    tokens = iter(chosen)
    for one, each in zip(asking, choosers, strict=True):
        one.chosen = tuple(itertools.islice(tokens, len(each)))
    return []


def _choose_all(
    model: Model, rows: Float[torch.Tensor, "R D"], choosers: Sequence[Chooser]
) -> list[Chosen]:
    """A token for each row; the choosers move on, all of them or none."""
    chosen: list[Chosen] = []
    for part in rows.split(HEAD_ROWS):
        chosen += pick(model.logits(part), choosers[len(chosen) : len(chosen) + len(part)])
    advance(choosers, chosen)
    return chosen


def _roll_back(pool: KVPool, waiting: Waiting) -> None:
    """Forget the shares of a step that ran before the one that failed."""
    table = waiting.work.table
    lengths = pool.lengths(waiting.work.session)
    for row in table.rows():
        if lengths[row.sequence] > row.first_position:
            pool.truncate(waiting.work.session, row.sequence, row.first_position)
