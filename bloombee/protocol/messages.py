"""Every message that crosses the wire, with its type, on one screen (version 1).

Who says what to whom:

    client -> stage    Challenge < Hello > Open > Opened < (Step >)* (Output <)* Close > Closed <
    stage -> next      Challenge < Hello > Attach > Attached < (Step >)*
    new -> old holder  Challenge < Hello > Fetch > (Pages <)* HandedOver <
    anyone -> server   Challenge < Hello > Describe > Description <
    at any time, either way   Failed (one step, or the session when `step` is 0)
    while a session or hop stands, either way   Beat

The client has one stream to every stage of its route: it sends steps on the one
to the first stage, reads outputs from the one to the last, and hears failures
from each directly. Activations move from stage to stage on the hop streams.

When a stage is lost the client raises the epoch: it sends Open with `resume` to the
stages that stay and Open to those that take the lost blocks. Each answers with what
it holds; Replay has the stage before a gap send the rows of its journal again, and
the steps without an answer are sent once more under the new epoch.

Fields marked *later* are encoded and validated in version 1 and refused with
Unsupported by servers that don't act on them yet. Messages are msgspec structs:
positional msgpack, tagged by class, frozen. Tensor bytes are never in a message:
they follow it as the payload of the frame, described by `Payload`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

VERSION = 1

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Parent = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Id16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Blob = Annotated[bytes, msgspec.Meta(max_length=4096)]
WireDtype = Literal["float32", "bfloat16", "float16", "int32"]
Content = Literal["ids", "rows", "logits"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# Handshake ------------------------------------------------------------------


class Challenge(Message, frozen=True, array_like=True, tag=True):
    """Listener's first word: what it speaks, who it is, and a nonce to sign."""

    versions: tuple[U32, ...]
    peer: Text
    nonce: Id16
    time_s: float


class Hello(Message, frozen=True, array_like=True, tag=True):
    """Dialer's answer, signed over nonce, certificate hash, both peers and time.

    `swarm_proof` is a keyed hash of the signed bytes in a private swarm, else empty.
    """

    version: U32
    peer: Text
    public_key: Blob
    time_s: float
    signature: Blob
    swarm_proof: Blob = b""


# Sessions -------------------------------------------------------------------


class Hop(Message, frozen=True, array_like=True, tag=True):
    """The stage to push to: its id, `host:port`, and certificate hash."""

    peer: Text
    address: Text
    certificate_hash: Blob


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
    logit_bias: Annotated[tuple[tuple[Index, float], ...], msgspec.Meta(max_length=1024)] = ()
    stop_ids: Annotated[tuple[Index, ...], msgspec.Meta(max_length=64)] = ()
    logprobs: U32 = 0
    context: Annotated[bytes, msgspec.Meta(max_length=1 << 22)] = b""


class Source(Message, frozen=True, array_like=True, tag=True):
    """Where a new stage may fetch a session's KV instead of having it replayed.

    `secret` and `epoch` are those of the session there. A fetch that would take
    longer than `limit_s` in all is given up: replaying is cheaper.
    """

    hop: Hop
    secret: Id16
    epoch: U32
    limit_s: float


class Open(Message, frozen=True, array_like=True, tag=True):
    """Reserve KV for `sequences` x `max_length` tokens on blocks `[start, end)`.

    `secret` lets the upstream stage attach. `next` is None at the last stage.

    With the server head `input` is ids at stage 0, `output` is ids at the last stage, and
    `ring` tells the last stage where stage 0 is: it attaches there and sends chosen
    tokens back, in micro-batches of up to `group_rows` rows. `stages` is how many the
    route has: so many micro-batches keep all of them busy.

    An epoch above the session's own moves the session on: this stream becomes the
    client's, `secret` and `next` replace the old ones, steps of older epochs are
    refused. With `resume` the stage keeps what it holds, without it starts empty.
    `wait_s` is how long the request may queue for KV (0: not at all).
    """

    session: Id16
    secret: Id16
    epoch: U32
    fingerprint: Text
    start: Index
    end: Index
    sequences: Index
    max_length: Index
    dtype: WireDtype
    next: Hop | None = None
    input: Content = "rows"
    output: Content = "rows"
    ring: Hop | None = None
    group_rows: Index = 0
    stages: Index = 1
    resume: bool = False
    wait_s: float = 0.0
    source: Source | None = None


class Opened(Message, frozen=True, array_like=True, tag=True):
    """KV is reserved; the link to the next stage is being made, steps may come.

    Per sequence: `held_tokens`, and in `newest_steps` the newest step that touched it
    (by tokens or operations); both 0 in a new session. `max_step_tokens` bounds T of
    one step.
    """

    session: Id16
    epoch: U32
    held_tokens: tuple[Index, ...]
    free_tokens: U63
    max_step_tokens: U32
    newest_steps: tuple[U63, ...] = ()


class Attach(Message, frozen=True, array_like=True, tag=True):
    """The upstream stage joins the session it will push into."""

    session: Id16
    secret: Id16
    epoch: U32


class Attached(Message, frozen=True, array_like=True, tag=True):
    """Steps may come."""

    session: Id16
    epoch: U32


class Close(Message, frozen=True, array_like=True, tag=True):
    """Free the session's KV."""

    session: Id16


class Closed(Message, frozen=True, array_like=True, tag=True):
    """It is freed."""

    session: Id16


class Beat(Message, frozen=True, array_like=True, tag=True):
    """I am here. The dialer counts `number` up, the listener repeats it at once.

    `sent_step` is the listener's newest step that it has computed and sent on.
    """

    session: Id16
    number: U63
    sent_step: U63 = 0


class Leaving(Message, frozen=True, array_like=True, tag=True):
    """This stage ends in `deadline_s`: move the session.

    `replay_s` is how long it took to compute what it holds of the session, as a
    measure of what replaying it elsewhere costs.
    """

    session: Id16
    epoch: U32
    deadline_s: float
    replay_s: float


# Steps ----------------------------------------------------------------------


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
    """Where one stage's share of a step went, in microseconds."""

    peer: Text
    queue_us: float
    compute_us: float
    codec_us: float
    total_us: float


class Step(Message, frozen=True, array_like=True, tag=True):
    """One forward pass of new tokens; travels from the client through all stages.

    `step` counts up from 1 in a session. `sequences`, `first_positions`,
    `counts` and `parents` are the packed table. `want` says which rows the last
    stage answers with: all, the last of each sequence, or none (an empty output
    still comes). The client has the outputs of all steps up to `answered`.
    `deadline_ms` is the time that was left when the message was sent (0: unknown); a
    stage drops a step whose time is up.

    With `replay` the step rebuilds the KV of stages that hold none: the stage whose
    blocks end at `until` answers (with no rows) and nothing goes beyond it. Its
    sequences then count as touched by step `as_of`, and the operations of the steps
    `included` as done. `write_kv` false (later) only recomputes rows.

    With the server head, `sampling` says for each row of the table how its next token
    is chosen (None: it isn't, a later part of the prompt follows). The last stage tells the
    client and sends the tokens of rows that go on to stage 0 as a step with `loop`: one
    token a row, the number of the step it came from. Such steps are ordered by
    position alone. The client sends one, with `sampling`, to go on after a recovery.
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
    the likeliest tokens with theirs.
    """

    session: Id16
    epoch: U32
    step: U63
    payload: Payload
    timings: tuple[Timing, ...] = ()
    sequences: tuple[Index, ...] = ()
    positions: tuple[Index, ...] = ()
    finished: tuple[Literal["", "stop", "length"], ...] = ()
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[tuple[tuple[Index, float], ...], ...] = ()


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


# Hand-over ------------------------------------------------------------------


class Fetch(Message, frozen=True, array_like=True, tag=True):
    """Hand over what you hold of a session for blocks `[start, end)`.

    The session takes no further step here.
    """

    session: Id16
    secret: Id16
    epoch: U32
    start: Index
    end: Index


class Pages(Message, frozen=True, array_like=True, tag=True):
    """A piece of one sequence, as the frame's payload: `count` of `whole` tokens from `first` on.

    `kv`: keys `[count, K, E]`, then values, of `block`, in the pool's dtype.
    `journal`: rows `[count, D]` that were sent on, in the session's dtype.
    `output`: rows that the client may ask for again; `sequence` counts the outputs.
    They come in that order, each kind by sequence, block and position.
    `total_bytes` is the payload of the whole hand-over.
    """

    session: Id16
    kind: Literal["kv", "journal", "output"]
    sequence: Index
    block: Index
    first: Index
    count: Index
    dtype: WireDtype
    total_bytes: U63
    whole: Index = 0


class HandedOver(Message, frozen=True, array_like=True, tag=True):
    """All pages were sent. Per sequence: its length, newest step, and whether it is released.

    `included` are steps whose operations are done though their tokens are not in;
    `outputs` the steps whose outputs were among the pages, in that order.
    """

    session: Id16
    lengths: tuple[Index, ...]
    newest_steps: tuple[U63, ...]
    released: tuple[bool, ...]
    included: tuple[U63, ...] = ()
    outputs: tuple[U63, ...] = ()


# Questions ------------------------------------------------------------------


class Describe(Message, frozen=True, array_like=True, tag=True):
    """Ask a server about itself."""


class Description(Message, frozen=True, array_like=True, tag=True):
    """What a server is doing now (for status pages and planners).

    `waiting` requests queue for KV; `parked` sessions wait in host memory to come back.
    """

    peer: Text
    version: Text
    model: Text
    fingerprint: Text
    start: Index
    end: Index
    dtype: Text
    device: Text
    kv_tokens: U63
    free_tokens: U63
    sessions: U32
    steps: U63
    uptime_s: float
    waiting: U32 = 0
    parked: U32 = 0


AnyMessage = (
    Challenge
    | Hello
    | Open
    | Opened
    | Attach
    | Attached
    | Close
    | Closed
    | Beat
    | Leaving
    | Step
    | Replay
    | Output
    | Acknowledged
    | Failed
    | Fetch
    | Pages
    | HandedOver
    | Describe
    | Description
)
