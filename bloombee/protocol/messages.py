"""Every message that crosses the wire, with its type, on one screen (version 1).

Who says what to whom:

    client -> stage    Challenge < Hello > Open > Opened < (Step >)* (Output <)* Close > Closed <
    stage -> next      Challenge < Hello > Attach > Attached < (Step >)*
    anyone -> server   Challenge < Hello > Describe > Description <
    at any time, either way   Failed (one step, or the session when `step` is 0)

The client has one stream to every stage of its route: it sends steps on the one
to the first stage, reads outputs from the one to the last, and hears failures
from each directly. Activations move from stage to stage on the hop streams.

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
    """Server-head sampling of one session (later)."""

    seed: U63
    temperature: float = 0.0
    top_k: U32 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_ids: tuple[Index, ...] = ()


class Open(Message, frozen=True, array_like=True, tag=True):
    """Reserve KV for `sequences` x `max_length` tokens on blocks `[start, end)`.

    `secret` lets the upstream stage attach. `next` is None at the last stage.
    `ring` (stage 0, for ids to come back to) and `sampling` are later, as are
    `input`/`output` other than rows.
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
    sampling: Sampling | None = None


class Opened(Message, frozen=True, array_like=True, tag=True):
    """The session stands, linked to its next stage.

    `held_tokens` per sequence is 0 for a new session; a client that resumes takes
    the minimum over stages. `max_step_tokens` bounds T of one step.
    """

    session: Id16
    epoch: U32
    held_tokens: tuple[Index, ...]
    free_tokens: U63
    max_step_tokens: U32


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
    still comes). `replay` (later) rebuilds KV; `write_kv` false (later) only
    recomputes rows.
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


class Output(Message, frozen=True, array_like=True, tag=True):
    """The last stage's answer to a step."""

    session: Id16
    epoch: U32
    step: U63
    payload: Payload
    timings: tuple[Timing, ...] = ()


class Acknowledged(Message, frozen=True, array_like=True, tag=True):
    """The step was an exact repeat of one already taken, and was dropped."""

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


# Questions ------------------------------------------------------------------


class Describe(Message, frozen=True, array_like=True, tag=True):
    """Ask a server about itself."""


class Description(Message, frozen=True, array_like=True, tag=True):
    """What a server is doing now (for status pages and planners)."""

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


AnyMessage = (
    Challenge
    | Hello
    | Open
    | Opened
    | Attach
    | Attached
    | Close
    | Closed
    | Step
    | Output
    | Acknowledged
    | Failed
    | Describe
    | Description
)
