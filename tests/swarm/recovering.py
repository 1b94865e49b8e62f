"""Sessions that move on by hand: raw Opens of later epochs, replays, steps sent again.

The stages compute digests (`tests.swarm.chaos.digests`): every output depends on
every token before it, so a row that is lost, doubled or misplaced shows.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import msgspec

from bloombee import compression
from bloombee.core import Span
from bloombee.protocol.failures import to_error
from bloombee.protocol.messages import Failed, Hop, Open, Opened, Operations, Output, Replay, Step
from bloombee.server.validation import Limits, Offer
from tests.swarm.chaos.digests import (
    VOCABULARY,
    WIDTH,
    DigestModel,
    DigestPool,
    embed,
    fold,
    to_numbers,
)
from tests.swarm.harness import (
    FINGERPRINT,
    PATIENCE_S,
    RawClient,
    RawSession,
    RouteStage,
    StageSetup,
    Swarm,
    eventually,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from bloombee.swarm.connection import Connection

BLOCKS = 6
SEQUENCES = 3
MAX_LENGTH = 32
KV_TOKENS = 400
PROMPTS = {0: [5, 7, 11], 1: [3, 1], 2: [8, 8, 8, 2]}
LENGTHS = {0: 3, 1: 2, 2: 4}
Tokens = dict[int, list[int]]
"""New tokens of some sequences."""


class GatedModel(DigestModel):
    """Computes only while its `gate` is set; counts the rows of each pass."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[int] = []

    def forward(self, rows: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        assert self.gate.wait(20)
        self.passes.append(len(rows))
        return super().forward(rows, *rest, **named)


def digest_stage(start: int, end: int, **limits: Any) -> StageSetup:
    """A stage of blocks `[start, end)` that computes digests."""
    span = Span(start, end)
    offer = Offer(
        fingerprint=FINGERPRINT,
        span=span,
        hidden_size=WIDTH,
        max_length=64,
        vocab_size=VOCABULARY,
        blocks=BLOCKS,
    )
    return StageSetup(
        model=GatedModel(span),
        pool=DigestPool(span, KV_TOKENS),
        offer=offer,
        limits=replace(Limits(max_step_tokens=64), **limits),
    )


def model_of(setup: StageSetup) -> GatedModel:
    """The model of a stage made by `digest_stage`."""
    assert isinstance(setup.model, GatedModel)
    return setup.model


@dataclass
class Undisturbed:
    """The same session where nothing ever fails: ids, and a digest chain for each block."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    chains: dict[int, list[list[int]]] = field(default_factory=dict)

    def step(self, tokens: Tokens, operations: Operations = Operations()) -> list[int]:  # noqa: B008
        """The numbers that the last stage puts out for each new token."""
        before = {s: (list(ids), [list(c) for c in self.chains[s]]) for s, ids in self.ids.items()}
        for destination, source in operations.forks:
            ids, chains = before[source]
            self.ids[destination], self.chains[destination] = list(ids), [list(c) for c in chains]
        for sequence, length in operations.truncates:
            self._cut(sequence, length)
        for sequence in operations.releases:
            self._cut(sequence, 0)
        return [self._token(s, token) for s, new in tokens.items() for token in new]

    def _cut(self, sequence: int, length: int) -> None:
        del self.ids[sequence][length:]
        for chain in self.chains[sequence]:
            del chain[length:]

    def _token(self, sequence: int, token: int) -> int:
        ids = self.ids.setdefault(sequence, [])
        chains = self.chains.setdefault(sequence, [[] for _ in range(BLOCKS)])
        (row,) = to_numbers(embed([token], [len(ids)]))
        ids.append(token)
        for block, chain in enumerate(chains):
            row = fold(chain[-1] if chain else 0, row, block)
            chain.append(row)
        return row


@dataclass
class Sent:
    """A step as it was sent; the same again in a later epoch."""

    message: Step
    rows: torch.Tensor


class Talk:
    """A client that holds one session and knows what each answer has to be."""

    def __init__(self, client: RawClient, route: Sequence[RouteStage], session: RawSession) -> None:
        self.client = client
        self.route = list(route)
        self.session = session
        self.truth = Undisturbed()
        self.expected: dict[int, list[int]] = {}

    @classmethod
    async def open(cls, client: RawClient, route: Sequence[RouteStage], **changes: Any) -> Self:
        """Open a session on every stage of `route`."""
        changes = {"sequences": SEQUENCES, "max_length": MAX_LENGTH} | changes
        return cls(client, route, await client.open(route, **changes))

    @property
    def links(self) -> list[Connection]:
        """The client's streams, in order."""
        return self.session.links

    async def send(self, tokens: Tokens, **changes: Any) -> Sent:
        """Send one step without waiting for what comes of it."""
        operations = changes.get("operations", Operations())
        numbers = self.truth.step(tokens, operations)
        ends = {s: len(self.truth.ids[s]) for s in tokens}
        table = {s: (ends[s] - len(new), len(new)) for s, new in tokens.items()}
        positions = [first + i for first, count in table.values() for i in range(count)]
        rows = embed([token for new in tokens.values() for token in new], positions)
        message = self.session.message(rows, table, want="all", **changes)
        self.expected[message.step] = numbers
        sent = Sent(message, rows)
        await self.session.send(message, rows)
        return sent

    async def step(self, tokens: Tokens, **changes: Any) -> None:
        """Send one step, and check its answer."""
        await self.check(await self.send(tokens, **changes))

    async def check(self, *sent: Sent) -> None:
        """The next answers are those of `sent`, and right."""
        for each in sent:
            output, rows = await self.session.answer()
            assert (output.step, output.epoch) == (each.message.step, self.session.epoch)
            assert to_numbers(rows) == self.expected[output.step]

    async def again(self, *sent: Sent) -> None:
        """Send steps again, in the epoch of now."""
        for each in sent:
            each.message = msgspec.structs.replace(each.message, epoch=self.session.epoch)
            await self.session.send(each.message, each.rows)

    async def move(
        self,
        route: Sequence[RouteStage],
        *,
        fresh: Sequence[int] = (),
        redial: Sequence[int] = (),
        **changes: Any,
    ) -> list[Opened]:
        """Take the session to its next epoch, on `route`; returns what each stage says.

        Stages that keep their server keep their stream, but for those in `redial`; those
        in `fresh` are to start empty. Raises the error of one that refuses.
        """
        await self.begin_move(route, fresh=fresh, redial=redial, **changes)
        self.session.opened = [await self.opened(link) for link in self.links]
        return self.session.opened

    async def opened(self, link: Connection) -> Opened:
        """What a stage says to the Open of this epoch; failures of older ones cross it."""
        while True:
            received = await link.receive(PATIENCE_S)
            assert received is not None
            message = received[0]
            if isinstance(message, Opened):
                return message
            assert isinstance(message, Failed | Output)
            if isinstance(message, Failed) and message.epoch == self.session.epoch:
                raise to_error(message)

    async def begin_move(
        self,
        route: Sequence[RouteStage],
        *,
        fresh: Sequence[int] = (),
        redial: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """Send the Opens of `move`."""
        before = {
            id(stage.server): link for stage, link in zip(self.route, self.links, strict=True)
        }
        self.route = list(route)
        self.session.epoch += 1
        self.session.secret = secrets.token_bytes(16)
        links = []
        for index, stage in enumerate(route):
            link = before.get(id(stage.server))
            if link is None or index in redial:
                link = await self.client.connect(stage.server)
            links.append(link)
        self.session.links = links
        for index, link in enumerate(links):
            opening = self.opening(index, resume=index not in fresh)
            await link.send(msgspec.structs.replace(opening, **changes))

    def opening(self, index: int, *, resume: bool = True) -> Open:
        """The Open of one stage, in the epoch of now."""
        stage = self.route[index]
        following: Hop | None = None
        if index + 1 < len(self.route):
            following = self.route[index + 1].hop
        return Open(
            session=self.session.id,
            secret=self.session.secret,
            epoch=self.session.epoch,
            fingerprint=FINGERPRINT,
            start=stage.span.start,
            end=stage.span.end,
            sequences=SEQUENCES,
            max_length=MAX_LENGTH,
            dtype="float32",
            next=following,
            resume=resume,
        )

    def replay(self, lengths: Mapping[int, int], until: int, as_of: int, **changes: Any) -> Replay:
        """Ask for the rows of each sequence, from its start."""
        self.session.steps += 1
        message = Replay(
            session=self.session.id,
            epoch=self.session.epoch,
            step=self.session.steps,
            sequences=tuple(lengths),
            first_positions=(0,) * len(lengths),
            counts=tuple(lengths.values()),
            until=until,
            as_of=as_of,
        )
        return msgspec.structs.replace(message, **changes)

    async def rebuild(
        self, source: int, until: int, lengths: Mapping[int, int], as_of: int, **changes: Any
    ) -> None:
        """Have stage `source` replay to those behind it, and wait for the one of `until`."""
        message = self.replay(lengths, until, as_of, **changes)
        await self.links[source].send(message)
        await self._rebuilt(message.step)

    async def feed(self, lengths: Mapping[int, int], until: int, as_of: int) -> None:
        """Replay to the first stages from the ids, and wait for the one of `until`."""
        table = {s: (0, count) for s, count in lengths.items()}
        ids = [token for s, count in lengths.items() for token in self.truth.ids[s][:count]]
        rows = embed(ids, [i for count in lengths.values() for i in range(count)])
        changes: dict[str, Any] = {"replay": True, "until": until, "as_of": as_of, "want": "none"}
        message = self.session.message(rows, table, **changes)
        await self.links[0].send(message, compression.encode(rows)[1])
        await self._rebuilt(message.step)

    async def _rebuilt(self, step: int) -> None:
        output, rows = await self.session.answer()
        assert (output.step, output.epoch, len(rows)) == (step, self.session.epoch, 0)


def steps_computed(s: Swarm) -> list[int]:
    """How many steps each stage has taken to compute."""
    return [int(stage.telemetry.snapshot()["steps"]) for stage in s.stages]


def only(s: Swarm, *stages: int) -> list[RouteStage]:
    """A route over some of the swarm's stages, each with its whole span."""
    return [RouteStage(s.stages[i], s.stages[i].offer.span) for i in stages]


async def computed(s: Swarm, *counts: int) -> None:
    """Wait until each stage has taken so many steps, and has computed them."""

    async def done() -> bool:
        quiet = all(not held.held.computing for stage in s.stages for held in stage.sessions)
        return quiet and steps_computed(s) == list(counts)

    await eventually(done, f"{counts} steps are computed")
