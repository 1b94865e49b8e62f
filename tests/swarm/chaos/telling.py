"""Rows whose tokens the servers choose, through whatever interrupts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from bloombee.client.history import History, ids_of
from bloombee.client.payloads import ids_bytes
from bloombee.client.tokens import Line
from bloombee.protocol.messages import Sampling
from tests.swarm.chaos.digests import VOCABULARY

if TYPE_CHECKING:
    from bloombee.client.rows import Row
    from tests.swarm.chaos.scripts import Tell


@dataclass
class Telling:
    """A row that servers continue: `known` is its newest token and those told after it."""

    row: Row
    known: list[int]
    sampling: Sampling
    held: int = 0
    finished: str = ""

    @property
    def told(self) -> list[int]:
        return self.known[1:]

    @property
    def rest(self) -> list[int]:
        """What is known and not held."""
        return self.known[self.held :]

    def line(self, history: History) -> Line:
        """How it goes on."""
        drawn, text = len(self.told), history.entries(self.row.sequence)[: self.row.length]
        sampling = msgspec.structs.replace(
            self.sampling,
            budget=self.sampling.budget - drawn,
            drawn=drawn,
            context=ids_bytes([*ids_of(text), *self.rest]),
        )
        return Line(0, self.row.sequence, sampling)

    def heard(self, line: Line, history: History) -> None:
        """Enter what came."""
        self.known += line.chosen
        self.finished = line.finished
        length = history.length(line.sequence)
        if length >= self.row.length:
            self.held += length - self.row.length
            self.row = replace(self.row, length=length)


def sampling_of(act: Tell, row: int) -> Sampling:
    """A few tokens are likely, and some of them end the row."""
    likely = [(act.seed * 31 + index * 97) % VOCABULARY for index in range(24)]
    return Sampling(
        budget=act.steps,
        seed=act.seed,
        stream=row,
        temperature=float(act.seed % 2),
        repetition_penalty=1.5 if act.seed % 3 == 0 else 1.0,
        logit_bias=tuple((token, 20.0) for token in sorted(set(likely))),
        stop_ids=tuple(likely[:2]),
    )
