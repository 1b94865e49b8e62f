"""One forward pass over the shares of several sessions; runs on the compute thread.

Operations of a step are applied once, before its first share. When a merged pass
fails, each share runs by itself, so that only the session at fault fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloombee.core import SessionId
from bloombee.errors import BloomBeeError, StepFailed
from bloombee.kv.interface import BatchItem, KVPool
from bloombee.protocol.messages import Operations
from bloombee.server.work import Model, Waiting

logger = logging.getLogger(__name__)


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
        return failures
    if len(ready) > 1:
        alone = [(run, _compute(model, pool, [run])) for run in ready]
    else:
        alone = [(ready[0], error)]
    for run, error in alone:
        if error is not None:
            _roll_back(pool, run.waiting)
            failures.append(Failure(run.waiting, error))
    return failures


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
        rows = inputs[0] if len(inputs) == 1 else _joined(inputs, model.dtype)
        rows = rows.to(device=model.device, dtype=model.dtype)
        span = runs[0].waiting.work.span
        output = model.forward(rows, batch, pool, span=None if span == model.span else span)
        parts = output.split([run.tokens for run in runs]) if len(runs) > 1 else (output,)
        kept = [run.waiting.pick(part) for run, part in zip(runs, parts, strict=True)]
    except Exception as error:
        if not isinstance(error, BloomBeeError):
            logger.exception("a forward pass of %d sessions failed", len(runs))
        return typed(error)
    for run, rows in zip(runs, kept, strict=True):
        run.waiting.advance(run.tokens, rows)
    return None


def _joined(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([rows.to(dtype) for rows in inputs])


def _roll_back(pool: KVPool, waiting: Waiting) -> None:
    """Forget the shares of a step that ran before the one that failed."""
    table = waiting.work.table
    lengths = pool.lengths(waiting.work.session)
    for row in table.rows():
        if lengths[row.sequence] > row.first_position:
            pool.truncate(waiting.work.session, row.sequence, row.first_position)
