"""Loops by hand: a client that starts them, hears their tokens, and goes on after a failure.

What the tokens have to be follows from the digests of `Undisturbed` and from a chooser of
its own for each sequence.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import torch

from bloombee import compression
from bloombee.core import SessionId
from bloombee.models.sampling import Chooser, choose
from bloombee.protocol.messages import (
    Failed,
    Open,
    Operations,
    Output,
    Payload,
    Sampling,
    Step,
)
from tests.swarm.chaos.digests import VOCABULARY, logits
from tests.swarm.harness import PATIENCE_S, RawClient, RawSession, RouteStage
from tests.swarm.recovering import PROMPTS, Talk, Undisturbed, digest_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

Prompts = dict[int, list[int]]
Samplings = dict[int, Sampling]


@dataclass
class Expected:
    """The tokens that a sequence has to get, and how it ends."""

    ids: list[int] = field(default_factory=list)
    finished: str = ""


def expected(prompts: Prompts, samplings: Samplings) -> dict[int, Expected]:
    """What comes of `prompts` where nothing ever fails, each sequence alone."""
    told: dict[int, Expected] = {}
    for sequence, prompt in prompts.items():
        truth, chooser = Undisturbed(), Chooser.of(samplings[sequence], VOCABULARY)
        came = told[sequence] = Expected()
        new = prompt
        while not came.finished:
            number = truth.step({sequence: new})[-1]
            (chosen,) = choose(logits([number]), [chooser])
            came.ids.append(chosen.token)
            came.finished = chosen.finished
            new = [chosen.token]
    return told


class LoopTalk(Talk):
    """A session whose tokens the last stage chooses; `came` are those that the client has."""

    def __init__(self, client: RawClient, route: Sequence[RouteStage], session: RawSession) -> None:
        super().__init__(client, route, session)
        self.prompts: Prompts = {}
        self.samplings: Samplings = {}
        self.came: dict[int, Expected] = {}
        self.newest = 0
        """The newest step whose output the client has."""

    @classmethod
    async def begin(cls, client: RawClient, route: Sequence[RouteStage]) -> Self:
        """Open a session on every stage of `route`, in epoch 0."""
        session = SessionId(secrets.token_bytes(16))
        talk = cls(client, [], RawSession(session, b"", [], [], -1))
        await talk.move(route)
        return talk

    def opening(self, index: int, *, resume: bool = True) -> Open:
        opening = super().opening(index, resume=resume)
        last = len(self.route) - 1
        ring = self.route[0].hop if index == last and last else None
        return msgspec.structs.replace(opening, ring=ring, stages=last + 1)

    # What it says ----------------------------------------------------------------

    async def start(self, prompts: Prompts, samplings: Samplings, **changes: Any) -> Step:
        """Begin a loop with whole prompts."""
        self.prompts, self.samplings = dict(prompts), dict(samplings)
        self.came = {sequence: Expected() for sequence in prompts}
        table = {s: (0, len(ids)) for s, ids in prompts.items()}
        step = self.ask([i for ids in prompts.values() for i in ids], table, samplings, **changes)
        await self.say(step)
        return step.message

    def ask(
        self,
        ids: Sequence[int],
        table: dict[int, tuple[int, int]],
        samplings: Samplings,
        **changes: Any,
    ) -> SentIds:
        """A step with ids, whose numbers are reserved as far as it may loop."""
        tensor = torch.tensor(ids, dtype=torch.int32)[:, None]
        plain: dict[str, Any] = {
            "payload": Payload("ids", "int32", len(ids), 1),
            "loop": True,
            "sampling": tuple(samplings[s] for s in table),
        }
        message = self.session.message(tensor, table, **(plain | changes))
        self.newest = message.step - 1
        if message.loop:
            self.session.steps += max(s.budget for s in samplings.values())
        return SentIds(message, tensor)

    async def say(self, step: SentIds) -> None:
        """Send it to the first stage, in the epoch of now."""
        message = msgspec.structs.replace(step.message, epoch=self.session.epoch)
        await self.links[0].send(message, compression.encode(step.ids)[1])

    async def go_on(self, *, anew: bool = False, **changes: Any) -> Step:
        """Send the step that follows the newest output; `anew` with a number of its own."""
        going = {s: came for s, came in self.came.items() if not came.finished}
        table = {s: (len(self.prompts[s]) + len(came.ids) - 1, 1) for s, came in going.items()}
        samplings = {s: self._sampling_now(s) for s in going}
        steps = self.session.steps
        if anew:
            truncates = tuple((s, first) for s, (first, _) in table.items())
            changes["operations"] = Operations(truncates=truncates)
        else:
            changes["step"] = self.newest + 1
        ids = [came.ids[-1] for came in going.values()]
        step = self.ask(ids, table, samplings, phase="decode", **changes)
        if not anew:
            self.session.steps = steps
        await self.say(step)
        return step.message

    def _sampling_now(self, sequence: int) -> Sampling:
        told, ids = self.samplings[sequence], self.came[sequence].ids
        return msgspec.structs.replace(
            told,
            drawn=len(ids),
            budget=told.budget - len(ids),
            context=told.context + packed(ids) if told.context else b"",
        )

    # What it hears -----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether all sequences have ended."""
        return all(came.finished for came in self.came.values())

    async def hear(self, outputs: int = 1000) -> list[Output]:
        """Take so many outputs, or all until the loop ends; they follow each other exactly."""
        heard: list[Output] = []
        while len(heard) < outputs and not self.is_over:
            output, ids = await self.session.answer()
            self.take(output, ids.flatten().tolist())
            heard.append(output)
        return heard

    def take(self, output: Output, ids: Sequence[int]) -> None:
        """Enter an output, which must be the next one."""
        assert (output.epoch, output.step) == (self.session.epoch, self.newest + 1)
        going = tuple(s for s, came in self.came.items() if not came.finished)
        assert output.sequences == going
        assert output.payload == Payload("ids", "int32", len(going), 1)
        rows = zip(going, ids, output.positions, output.finished, strict=True)
        for sequence, token, position, finished in rows:
            came = self.came[sequence]
            assert position == len(self.prompts[sequence]) + len(came.ids)
            came.ids.append(token)
            came.finished = finished
        self.newest = output.step

    def check_tokens(self) -> None:
        """All that came is right so far."""
        for sequence, right in expected(self.prompts, self.samplings).items():
            came = self.came[sequence]
            assert came.ids == right.ids[: len(came.ids)], sequence
            if came.finished:
                assert came == right

    async def finish(self) -> None:
        """Hear the loop to its end, and check all of it."""
        await self.hear()
        self.check_tokens()

    # What a recovery takes ------------------------------------------------------------

    @property
    def held(self) -> dict[int, int]:
        """Tokens of every sequence that the stages hold when the pending step is to be sent."""
        lengths = {s: len(ids) + len(self.came[s].ids) - 1 for s, ids in self.prompts.items()}
        return {s: length for s, length in lengths.items() if length > 0}

    async def refill(self, source: int, until: int) -> None:
        """Have the stages after `source` (-1: all) filled up to the pending step."""
        if source >= 0:
            await self.rebuild(source, until, self.held, as_of=self.newest)
            return
        table = {s: (0, length) for s, length in self.held.items()}
        ids = [
            token
            for s, length in self.held.items()
            for token in (self.prompts[s] + self.came[s].ids)[:length]
        ]
        tensor = torch.tensor(ids, dtype=torch.int32)[:, None]
        message = self.session.message(
            tensor,
            table,
            payload=Payload("ids", "int32", len(ids), 1),
            replay=True,
            until=until,
            as_of=self.newest,
            want="none",
        )
        await self.say(SentIds(message, tensor))
        await self._rebuilt(message.step)


@dataclass
class SentIds:
    """A step and its ids, `[T, 1]`."""

    message: Step
    ids: torch.Tensor


def packed(ids: Sequence[int]) -> bytes:
    """Ids as a `Sampling.context` has them."""
    return np.array(ids, "<i4").tobytes()


async def failed(link: Any) -> Failed:
    """The next Failed on a link, whatever comes before it."""
    while True:
        received = await link.receive(PATIENCE_S)
        assert received is not None
        if isinstance(received[0], Failed):
            return received[0]


ROUTES = {1: [(0, 6)], 2: [(0, 3), (3, 6)], 3: [(0, 2), (2, 4), (4, 6)]}
GREEDY = {0: Sampling(12), 1: Sampling(5), 2: Sampling(9)}
SAMPLED = {
    0: Sampling(12, seed=7, temperature=0.8, top_p=0.9),
    1: Sampling(7, seed=7, stream=1, temperature=1.3, top_k=40),
    2: Sampling(9, seed=3, repetition_penalty=1.5, context=packed(PROMPTS[2]), temperature=2.0),
}


def stages(count: int) -> list[Any]:
    """Those of the route of so many."""
    return [digest_stage(*span) for span in ROUTES[count]]
