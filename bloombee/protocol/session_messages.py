"""Messages that begin, keep and end connections and sessions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from bloombee.protocol.fields import (
    U32,
    U63,
    Blob,
    Id16,
    Index,
    Message,
    Text,
    WireDtype,
)

PREFIX_TOKENS = 64
"""Tokens of one chunk of a prompt, as stages keep them (`Open.prefixes`)."""
ADOPTED_STEP = 1
"""What a stage adopts counts as brought by this step; the client's own come after it."""

MOST_CHUNKS = 1 << 12
"""Announced of one prompt."""

MOST_PADDING = 1 << 15

Chain = Annotated[tuple[Id16, ...], msgspec.Meta(max_length=MOST_CHUNKS)]
"""One hash for each whole chunk of a prompt, of its tokens and all before them."""


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


class Hop(Message, frozen=True, array_like=True, tag=True):
    """The stage to push to: its id, `host:port`, and certificate hash."""

    peer: Text
    address: Text
    certificate_hash: Blob


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

    `ring` tells the last stage of several where stage 0 is: it attaches there, and sends
    back the tokens that it chose (server head). `stages` is how many the route has: so
    many micro-batches keep all of them busy.

    An epoch above the session's own moves the session on: this stream becomes the
    client's, `secret` and `next` replace the old ones, steps of older epochs are
    refused. With `resume` the stage keeps what it holds, without it starts empty.
    `wait_s` is how long the request may queue for KV (0: not at all).

    `prefixes`, in the Open of a new session only: for each sequence the chain of the prompt that
    its first step is going to bring. A stage may begin with the chunks of it that it kept of
    earlier sessions, and may keep those that this one computes. The first step then
    truncates each sequence to what all stages hold, and brings the rest.

    `background`: nobody waits for single tokens of this session (a batch job), its steps may
    give way to those of sessions where somebody does.

    `lossless`: its rows lose nothing on their way, whatever codec a stage is set to.
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
    ring: Hop | None = None
    stages: Index = 1
    resume: bool = False
    wait_s: float = 0.0
    source: Source | None = None
    prefixes: tuple[Chain, ...] = ()
    background: bool = False
    lossless: bool = True


class Opened(Message, frozen=True, array_like=True, tag=True):
    """KV is reserved; the link to the next stage is being made, steps may come.

    Per sequence: `held_tokens`, and in `newest_steps` the newest step that touched it
    (by tokens or operations); both 0 in a new session, but for what it adopted of the
    `prefixes` (as of ADOPTED_STEP). `max_step_tokens` bounds T of
    one step.
    """

    session: Id16
    epoch: U32
    held_tokens: tuple[Index, ...]
    free_tokens: U63
    max_step_tokens: U32
    newest_steps: tuple[U63, ...] = ()


class Attach(Message, frozen=True, array_like=True, tag=True):
    """The upstream stage joins the session it will push into.

    With `ring` it is the last stage, which sends chosen tokens to the first.
    """

    session: Id16
    secret: Id16
    epoch: U32
    ring: bool = False


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
    Times are each side's own, in microseconds: `sent_us` when the asker wrote the beat, which
    the answer repeats, `heard_us` when the other side read it; 0 is unknown. A listener that
    measures its link asks with number 0 and `sent_us`: the dialer answers in the same way.
    `padding` gives a beat on an idle link the size of something worth timing.
    """

    session: Id16
    number: U63
    sent_step: U63 = 0
    sent_us: U63 = 0
    heard_us: U63 = 0
    padding: Annotated[bytes, msgspec.Meta(max_length=MOST_PADDING)] = b""


class Leaving(Message, frozen=True, array_like=True, tag=True):
    """This stage ends in `deadline_s`: move the session.

    `replay_s` is how long it took to compute what it holds of the session, as a
    measure of what replaying it elsewhere costs.
    """

    session: Id16
    epoch: U32
    deadline_s: float
    replay_s: float
