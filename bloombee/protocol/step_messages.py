"""Messages of steps: one forward pass of new tokens, and what comes of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bloombee.protocol.fields import (
    U32,
    U63,
    Content,
    Id16,
    Index,
    Message,
    Parent,
    Text,
    WireDtype,
)

MOST_STOP_IDS = 64
MOST_BIASES = 1024
"""What one Sampling may hold."""

End = Literal["", "stop", "length"]
"""Whether and why a sequence ends with a token."""


class Sampling(Message, frozen=True, array_like=True, tag=True):
    """How the last stage chooses the tokens of one sequence (server head).

    `temperature` 0 takes the likeliest. The generator is keyed by `seed` and `stream`
    (the sequence's number among those that share the seed); its position is `drawn`, the
    tokens chosen so far, of which `budget` more may follow. `stop_ids` end the
    sequence, and are impossible before `least` tokens. With a penalty, `context` holds the ids so
    far (int32, little endian). `logprobs`: how many alternatives to tell, plus one; 0 none.
    """

    budget: U32
    seed: U63 = 0
    stream: Index = 0
    drawn: U32 = 0
    least: U32 = 0
    temperature: float = 0.0
    top_k: U32 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[
        tuple[tuple[Index, float], ...], msgspec.Meta(max_length=MOST_BIASES)
    ] = ()
    stop_ids: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MOST_STOP_IDS)] = ()
    logprobs: U32 = 0
    context: Annotated[bytes, msgspec.Meta(max_length=1 << 22)] = b""


class Payload(Message, frozen=True, array_like=True, tag=True):
    """Describes the frame's payload: `[rows, width]` of `dtype`, encoded by `codec`."""

    content: Content
    dtype: WireDtype
    rows: Index
    width: Index
    codec: Text = "raw"


class Operations(Message, frozen=True, array_like=True, tag=True):
    """Changes to sequences, applied before the step's tokens, in this order.

    `accepted` (later): per sequence, the draft nodes of the previous verify step
    to keep. `forks`: `(destination, source)` copies, all read before any is
    written (a reorder is a set of forks). `truncates`: `(sequence, length)`.
    `releases`: sequences whose KV is freed for good.
    """

    accepted: tuple[tuple[Index, tuple[Index, ...]], ...] = ()
    forks: tuple[tuple[Index, Index], ...] = ()
    truncates: tuple[tuple[Index, Index], ...] = ()
    releases: tuple[Index, ...] = ()


class Timing(Message, frozen=True, array_like=True, tag=True):
    """Where one stage's share of a step went, in microseconds: as in TraceReport.

    `total_us` from the step's arrival until its result was handed to the transport; the parts
    but for `wire_us` (before the arrival) add up to it. `send_us`: waiting for the way to be free.
    """

    peer: Text
    queue_us: float
    compute_us: float
    decode_us: float
    encode_us: float
    total_us: float
    copy_us: float = 0.0
    wire_us: float = 0.0
    send_us: float = 0.0


class Step(Message, frozen=True, array_like=True, tag=True):
    """One forward pass of new tokens; travels from the client through all stages.

    `step` counts up from 1 in a session. `sequences`, `first_positions`,
    `counts` and `parents` are the packed table. `want` says which rows the last
    stage answers with: all, the last of each sequence, or none (an empty output
    still comes). The client has the outputs of all steps up to `answered`.
    `deadline_ms` is the time that was left when the message was sent (0: unknown); a
    stage drops a step whose time is up. `sent_us` is when it was handed to the transport, by
    the clock of the receiver (0: unknown): whoever dials a stream knows both clocks.

    With `replay` the step rebuilds the KV of stages that hold none: the stage whose
    blocks end at `until` answers (with no rows) and nothing goes beyond it. Its
    sequences then count as touched by step `as_of`, and the operations of the steps
    `included` as done. `write_kv` false (later) only recomputes rows.

    `sampling` (server head) says for each row of the table how its next token is chosen;
    None: it isn't, a later part of the prompt follows. The last stage answers with the
    ids. With `loop` it also sends those of rows that go on to stage 0, as a step of the
    next number with one token a row, `loop`, and no `sampling` of its own: the last
    stage knows it. The client leaves out as many numbers as tokens may follow, and
    sends such a step itself, with `sampling`, to begin, and to go on after a recovery.

    Stages that run ahead of the client answer a step that it sends again with what they
    kept. A last stage that has lost what it chose may choose otherwise (rounding): the
    client then gives the step a new number, and has it truncate its sequences to where
    they start, so that no stage goes on with tokens which nobody else knows.
    """

    session: Id16
    epoch: U32
    step: U63
    phase: Literal["prefill", "decode", "verify"]
    sequences: tuple[Index, ...]
    first_positions: tuple[Index, ...]
    counts: tuple[Index, ...]
    payload: Payload
    want: Literal["all", "last", "none"] = "last"
    parents: tuple[Parent, ...] | None = None
    operations: Operations = Operations()
    replay: bool = False
    write_kv: bool = True
    trace: bool = False
    timings: tuple[Timing, ...] = ()
    answered: U63 = 0
    deadline_ms: U32 = 0
    until: Index = 0
    as_of: U63 = 0
    included: tuple[U63, ...] = ()
    loop: bool = False
    sampling: tuple[Sampling | None, ...] = ()
    sent_us: U63 = 0


class Replay(Message, frozen=True, array_like=True, tag=True):
    """Send these rows of your journal to the next stage, as a `Step` with `replay`.

    The fields are those of the step to make. Failed answers when the journal lacks
    some of them.
    """

    session: Id16
    epoch: U32
    step: U63
    sequences: tuple[Index, ...]
    first_positions: tuple[Index, ...]
    counts: tuple[Index, ...]
    until: Index
    as_of: U63
    included: tuple[U63, ...] = ()
    releases: tuple[Index, ...] = ()
    deadline_ms: U32 = 0


class Output(Message, frozen=True, array_like=True, tag=True):
    """The last stage's answer to a step.

    With ids as payload (`[R, 1]`): of which sequences, the position that each token takes,
    whether the sequence ends with it and why, and if asked for its log-probability and
    the likeliest tokens with theirs. `sent_us`: when a traced step's output left, by the
    sender's clock (0: unknown).
    """

    session: Id16
    epoch: U32
    step: U63
    payload: Payload
    timings: tuple[Timing, ...] = ()
    sequences: tuple[Index, ...] = ()
    positions: tuple[Index, ...] = ()
    finished: tuple[End, ...] = ()
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[tuple[tuple[Index, float], ...], ...] = ()
    sent_us: U63 = 0


class Acknowledged(Message, frozen=True, array_like=True, tag=True):
    """The step was an exact repeat of one already taken in this epoch, and was dropped."""

    session: Id16
    epoch: U32
    step: U63


class Failed(Message, frozen=True, array_like=True, tag=True):
    """An error of the tree, by code; `step` 0 means the session or the stream."""

    session: Id16
    epoch: U32
    step: U63
    code: Text
    message: Text
