"""What a server accepts, as tables of rules over values: no torch, no clock, no I/O.

`check_open` and `check_step` judge a message by itself; what depends on the
steps before it is judged by `sequences.SequenceBook`. All checks come before
anything is allocated or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bloombee.core import PackedTable, Span
from bloombee.errors import (
    BloomBeeError,
    ProtocolError,
    RequestError,
    StaleEpoch,
    Unsupported,
)
from bloombee.protocol.messages import PREFIX_TOKENS, Open, Operations, Replay, Step

NO_OPERATIONS = Operations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this server serves: blocks `span` of a model, rows of `hidden_size`.

    `max_length` is the longest sequence that the model itself allows. `vocab_size` is 0
    where ids are not known, and `blocks`, how many the model has, where that isn't.
    """

    fingerprint: str
    span: Span
    hidden_size: int
    max_length: int
    vocab_size: int = 0
    blocks: int = 0

    def ends_with(self, end: int) -> bool:
        """Whether block `end - 1` is the model's last, as far as that is known."""
        return end == (self.blocks or end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Enforced before any allocation; sequences count per session, messages per peer.

    `max_tokens_per_peer` (None: all) is in KV tokens. A request queues for KV at most
    `max_wait_s`. A session whose client is silent ends after `lease_s`; one idle for
    `park_idle_s` may be parked, `park_bytes` of KV in all. Prompts are kept for later sessions
    in `prefix_bytes`, for those of other clients too if these `share_prefixes`. Of the last
    `traced_sessions` it is known where the time of their steps went.
    """

    max_sessions: int = 256
    max_sessions_per_peer: int = 64
    max_tokens_per_peer: int | None = None
    max_wait_s: float = 60.0
    lease_s: float = 30.0
    park_idle_s: float = 5.0
    park_bytes: int = 1 << 30
    prefix_bytes: int = 1 << 28
    share_prefixes: bool = False
    traced_sessions: int = 256
    max_sequences: int = 1024
    max_step_tokens: int = 8192
    max_messages_per_s: int = 2000


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session agreed to when it opened."""

    epoch: int
    span: Span
    sequences: int
    max_length: int


M = TypeVar("M")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Rule(Generic[M, C]):
    """`broken` says whether a message breaks the rule in its context; `says` tells how."""

    broken: Callable[[M, C], bool]
    error: type[BloomBeeError]
    says: Callable[[M, C], str]


def judge(rules: Sequence[Rule[M, C]], message: M, context: C) -> None:
    """Raise what the first broken rule says."""
    for rule in rules:
        if rule.broken(message, context):
            raise rule.error(rule.says(message, context))


# Open --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpenContext:
    offer: Offer
    limits: Limits


_OPEN_RULES: tuple[Rule[Open, _OpenContext], ...] = (
    Rule(
        lambda m, c: m.fingerprint != c.offer.fingerprint,
        RequestError,
        lambda m, c: (
            f"this server serves another model ({c.offer.fingerprint[:12]}, asked for "
            f"{m.fingerprint[:12]}): load the client from the same files"
        ),
    ),
    Rule(
        lambda m, c: not (c.offer.span.start <= m.start < m.end <= c.offer.span.end),
        RequestError,
        lambda m, c: f"blocks {m.start}:{m.end} are not served here, {c.offer.span} are",
    ),
    Rule(
        lambda m, c: not 1 <= m.sequences <= c.limits.max_sequences,
        RequestError,
        lambda m, c: (
            f"{m.sequences} sequences in a session: this server allows "
            f"1 to {c.limits.max_sequences}"
        ),
    ),
    Rule(
        lambda m, c: not 1 <= m.max_length <= c.offer.max_length,
        RequestError,
        lambda m, c: (
            f"max_length {m.max_length}: the model allows 1 to {c.offer.max_length} tokens"
        ),
    ),
    Rule(
        lambda m, c: m.dtype not in ("float32", "bfloat16", "float16"),
        RequestError,
        lambda m, c: f"rows travel as float32, bfloat16 or float16, not {m.dtype}",
    ),
    Rule(
        lambda m, c: bool(m.prefixes) and len(m.prefixes) != m.sequences,
        ProtocolError,
        lambda m, c: f"{len(m.prefixes)} prompts announced for {m.sequences} sequences",
    ),
    Rule(
        lambda m, c: max(map(len, m.prefixes), default=0) * PREFIX_TOKENS > m.max_length,
        RequestError,
        lambda m, c: f"a prompt is announced that is longer than max_length {m.max_length}",
    ),
    Rule(
        lambda m, c: m.ring is not None and (m.next is not None or m.start == 0),
        RequestError,
        lambda m, c: (
            f"a ring from blocks {m.start}:{m.end}: only the last stage of several leads "
            "back to the first"
        ),
    ),
    Rule(
        lambda m, c: m.stages < 1,
        RequestError,
        lambda m, c: "a route of no stages: send how many it has",
    ),
)


def check_open(message: Open, offer: Offer, limits: Limits) -> Terms:
    """The terms of the session that `message` asks for.

    Raises RequestError or Unsupported, with what is served instead.
    """
    judge(_OPEN_RULES, message, _OpenContext(offer, limits))
    return Terms(
        message.epoch, Span(message.start, message.end), message.sequences, message.max_length
    )


# Step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step is held against besides the steps before it."""

    terms: Terms
    hidden_size: int
    max_step_tokens: int
    vocab_size: int = 0
    """0: not known."""
    last_block: bool = True
    """Whether its blocks end with the model's last, as far as that is known."""

    @property
    def takes_ids(self) -> bool:
        """Whether it is where tokens are embedded."""
        return self.terms.span.start == 0

    def width(self, step: Step) -> int:
        """What a row of the step's payload has to have."""
        return 1 if step.payload.content == "ids" else self.hidden_size


_STEP_RULES: tuple[Rule[Step, StepContext], ...] = (
    Rule(
        lambda m, c: m.epoch < c.terms.epoch,
        StaleEpoch,
        lambda m, c: f"step {m.step} is of epoch {m.epoch}, the session is at {c.terms.epoch}",
    ),
    Rule(
        lambda m, c: m.epoch > c.terms.epoch,
        ProtocolError,
        lambda m, c: (
            f"step {m.step} is of epoch {m.epoch}, the session is at {c.terms.epoch}: "
            "open that epoch first"
        ),
    ),
    Rule(
        lambda m, c: m.step < 1,
        ProtocolError,
        lambda m, c: "steps count from 1",
    ),
    Rule(
        lambda m, c: not m.write_kv or bool(m.operations.accepted),
        Unsupported,
        lambda m, c: (
            f"step {m.step} asks for recomputation or acceptance, which this version does not do"
        ),
    ),
    Rule(
        lambda m, c: m.replay and m.until < c.terms.span.end,
        ProtocolError,
        lambda m, c: f"replay up to block {m.until} came to a stage of blocks {c.terms.span}",
    ),
    Rule(
        lambda m, c: m.replay and bool(m.operations.forks or m.operations.truncates or m.parents),
        Unsupported,
        lambda m, c: f"step {m.step} replays with forks, truncates or a draft tree: send rows only",
    ),
    Rule(
        lambda m, c: m.payload.content == "ids" and not c.takes_ids,
        RequestError,
        lambda m, c: (
            f"step {m.step} carries ids to blocks {c.terms.span}: they are for the first stage"
        ),
    ),
    Rule(
        lambda m, c: (
            m.payload.content == "logits"
            or (m.payload.content == "ids") != (m.payload.dtype == "int32")
            or (m.payload.content == "ids" and m.payload.codec != "raw")
        ),
        Unsupported,
        lambda m, c: (
            f"step {m.step} carries {m.payload.content} of {m.payload.dtype}, coded as "
            f"{m.payload.codec}: send rows of floats, or raw ids of int32"
        ),
    ),
    Rule(
        lambda m, c: m.payload.width != c.width(m),
        RequestError,
        lambda m, c: (
            f"step {m.step} carries {m.payload.content} of width {m.payload.width}, "
            f"theirs is {c.width(m)} here"
        ),
    ),
    Rule(
        lambda m, c: m.payload.rows > c.max_step_tokens,
        RequestError,
        lambda m, c: (
            f"step {m.step} carries {m.payload.rows} tokens: send at most "
            f"{c.max_step_tokens} in a step"
        ),
    ),
    Rule(
        lambda m, c: m.payload.rows != sum(m.counts),
        ProtocolError,
        lambda m, c: f"step {m.step} carries {m.payload.rows} rows for {sum(m.counts)} tokens",
    ),
)


def check_step(message: Step, context: StepContext) -> PackedTable:
    """The step's packed table, when the message is sound by itself.

    Raises StaleEpoch, Unsupported, RequestError, or ProtocolError.
    """
    judge(_STEP_RULES, message, context)
    try:
        return PackedTable(
            message.sequences, message.first_positions, message.counts, message.parents
        )
    except ValueError as error:
        raise ProtocolError(f"step {message.step}: {error}") from None


def check_replay(message: Replay, context: StepContext, *, is_last: bool) -> PackedTable:
    """The packed table of the rows to send on from the journal.

    Raises StaleEpoch, RequestError, or ProtocolError.
    """
    terms = context.terms
    if message.epoch != terms.epoch:
        kind = StaleEpoch if message.epoch < terms.epoch else ProtocolError
        raise kind(f"replay of epoch {message.epoch}, the session is at {terms.epoch}")
    if is_last or message.until <= terms.span.end:
        raise ProtocolError(f"nothing to replay from blocks {terms.span} to block {message.until}")
    try:
        table = PackedTable(message.sequences, message.first_positions, message.counts)
    except ValueError as error:
        raise ProtocolError(f"replay {message.step}: {error}") from None
    if max(message.sequences) >= terms.sequences:
        raise RequestError(f"sequence {max(message.sequences)} of {terms.sequences} sequences")
    if table.tokens > context.max_step_tokens:
        raise RequestError(
            f"a replay of {table.tokens} tokens: ask for at most {context.max_step_tokens} at once"
        )
    return table


def touched(message: Step) -> frozenset[int]:
    """The sequences that a step reads or writes, through tokens or operations."""
    operations = message.operations
    if operations == NO_OPERATIONS:
        return frozenset(message.sequences)
    named = [sequence for pair in operations.forks for sequence in pair]
    named += [sequence for sequence, _ in operations.truncates]
    return frozenset((*message.sequences, *named, *operations.releases))
