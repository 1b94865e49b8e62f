"""When this server moves: it looks at the swarm, announces a move, and carries it out.

What is due is the planner's to say (`planner.moves`), of the same records everywhere.
One look: 1. is a move of ours due? 2. after a random delay, is it still? 3. announce it
in our record. 4. when all can know, does it go ahead, or yield to another's? 5. move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from bloombee.errors import BloomBeeError, DeadlineExceeded, SwarmError
from bloombee.planner.moves import Move, MovePolicy, Verdict, judge, next_move
from bloombee.server.placement import Noticeboard
from bloombee.swarm.records import ServerRecord
from bloombee.swarm.view import SwarmSnapshot

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Looks at an announced move before it is given up, when others that have to yield don't."""


class Movable(Protocol):
    """What is moved; see `hosting.Host`."""

    @property
    def record(self) -> ServerRecord: ...
    async def move(self, move: Move) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """A look every `every_s` or so; `settle_s` is more than records take to be seen."""

    every_s: float = 30.0
    settle_s: float = 5.0


class Rebalancer:
    """Moves `host` when that helps the swarm. `draw` gives numbers in [0, 1)."""

    def __init__(
        self,
        board: Noticeboard,
        host: Movable,
        draw: Callable[[], float],
        *,
        policy: MovePolicy | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        self._board = board
        self._host = host
        self._draw = draw
        self._policy = policy or MovePolicy()
        self._rhythm = rhythm or Rhythm()
        self._is_announced = False

    async def run(self) -> BloomBeeError:
        """Look for ever; returns why, when the server can't serve any more."""
        while True:
            await asyncio.sleep(self._rhythm.every_s * (0.75 + 0.5 * self._draw()))
            try:
                await self.look()
            except (SwarmError, DeadlineExceeded) as error:
                logger.warning("can't see now whether another place would be better: %s", error)
            except BloomBeeError as error:
                return error

    async def look(self) -> bool:
        """Move if that is due; whether it did. Raises SwarmError, and as `Host.move`."""
        await self._take_back()
        move = await self._due()
        if move is None:
            return False
        await asyncio.sleep(self._rhythm.settle_s * self._draw())
        if await self._due() != move:
            return False
        logger.info("blocks %s would serve the swarm better: %s", move.to, _reason(move))
        self._is_announced = True
        await self._board.publish(replace(self._host.record, next_span=move.to))
        if await self._verdict(move) is not Verdict.GO:
            logger.info("another server moves first; staying with blocks %s", move.span)
            await self._take_back()
            return False
        moved = await self._host.move(move)
        self._is_announced = False
        return moved

    async def _due(self) -> Move | None:
        """The move of ours that is due, if one is."""
        snapshot = await self._look()
        mine = self._host.record
        move = next_move(snapshot.records, mine.num_blocks, snapshot.taken_at_s, self._policy)
        is_ours = move is not None and (move.peer, move.span) == (mine.peer, mine.span)
        return move if is_ours else None

    async def _verdict(self, move: Move) -> Verdict:
        """What becomes of our move, once everybody can have seen it announced."""
        verdict = Verdict.WAIT
        for _ in range(PATIENCE):
            await asyncio.sleep(self._rhythm.settle_s)
            snapshot = await self._look()
            verdict = judge(
                snapshot.records,
                self._host.record.num_blocks,
                snapshot.taken_at_s,
                move,
                self._policy,
            )
            if verdict is not Verdict.WAIT:
                break
        return verdict

    async def _look(self) -> SwarmSnapshot:
        """Servers of our model whose sessions could be ours."""
        mine = self._host.record
        snapshot = await self._board.snapshot(mine.fingerprint, mine.num_blocks)
        return snapshot.select(fingerprint=mine.fingerprint, dtype=mine.dtype)

    async def _take_back(self) -> None:
        """Publish that we stay, if it may still be read that we go."""
        if self._is_announced:
            await self._board.publish(self._host.record)
            self._is_announced = False


def _reason(move: Move) -> str:
    if move.closes:
        return f"nobody holds {move.closes} of them"
    return f"the weakest block would serve {move.gain:.2f} times as much"
