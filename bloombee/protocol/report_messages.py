"""What a server reports on request: itself, its links, its costs, and where steps went."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from bloombee.protocol.fields import U32, U63, Index, Message, Text

MOST_LINKS = 1024
MOST_TRACES = 1024
MOST_POINTS = 64
"""Of one axis of a time grid."""

Topic = Literal["links", "costs", "traces"]
"""What a server reports only when asked: it may be long, or take a moment."""

_Axis = Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MOST_POINTS)]
_Line = Annotated[tuple[float, ...], msgspec.Meta(min_length=1, max_length=MOST_POINTS)]
_Lines = Annotated[tuple[_Line, ...], msgspec.Meta(min_length=1, max_length=MOST_POINTS)]


class Describe(Message, frozen=True, array_like=True, tag=True):
    """Ask a server about itself, and about these topics.

    `session`: traces of sessions whose id begins so; all of the asker's own when empty.
    """

    topics: Annotated[tuple[Topic, ...], msgspec.Meta(max_length=3)] = ()
    session: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class LinkReport(Message, frozen=True, array_like=True, tag=True):
    """What a server knows of the way from itself to one neighbour.

    `rtt_s` there and back without a queue, `bytes_per_s` from here to there, `offset_s` the
    neighbour's clock minus ours; each 0 as long as it is unknown. `age_s` since the last
    measurement. `codec` and `reason`: how decode rows go there now, and why.
    """

    peer: Text
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0
    offset_s: float = 0.0
    samples: U32 = 0
    age_s: float = 0.0
    codec: Text = "raw"
    reason: Text = ""


class TimeGrid(Message, frozen=True, array_like=True, tag=True):
    """Seconds of one pass through one block, by new rows and context; both axes ascend."""

    rows: _Axis
    contexts: _Axis
    seconds: _Lines


class CostTable(Message, frozen=True, array_like=True, tag=True):
    """What serving costs this machine, as measured: see `planner.profiles.PeerProfile`.

    `decode` takes one row a sequence, `prefill` a chunk of prompt tokens; `head` is norm,
    head and choosing tokens (None: not measured), `pass_s` what a pass costs besides its blocks.
    `block_bytes` of weights and `kv_bytes_per_token` are of one block. Rates are 0 where
    there is no such way. `price_per_hour` in dollars and `watts` are the owner's word, 0
    without it; `measured_watts` is what was read while computing.
    """

    hardware: Text
    decode: TimeGrid
    prefill: TimeGrid
    head: TimeGrid | None
    pass_s: float
    device_bytes: U63
    host_bytes: U63
    block_bytes: U63
    kv_bytes_per_token: U63
    host_device_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    price_per_hour: float = 0.0
    purchase: float = 0.0
    watts: float = 0.0
    measured_watts: float = 0.0
    age_s: float = 0.0


class TraceReport(Message, frozen=True, array_like=True, tag=True):
    """Where the time of one session's steps of one phase went on one stage, in microseconds.

    Sums over `steps`, of which `timed_steps` told when they were sent: `wire_us` from then
    until they were here (clock offset taken off), `decode_us` and `encode_us` of the codec,
    `queue_us` waiting for their turn and the device, `compute_us` there, `copy_us` between
    device and host, `send_us` waiting for the way to be free, and until the transport had
    taken the result, `span_us` from a step's arrival to that: the sum of all of these but
    `wire_us`. `taking_us` of `send_us` is also part of the next stage's `wire_us`.
    `exposed_us`: what of `wire_us` the device here was idle for, counted once however many
    steps were on their way. Outputs to a client count as sent; nobody here knows their way.
    `bytes_in` and `bytes_out` travelled, `raw_bytes_out` would have without a codec.
    """

    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    phase: Literal["prefill", "decode", "verify"]
    upstream: Text
    start: Index
    end: Index
    steps: U63
    rows: U63
    wire_us: float
    decode_us: float
    queue_us: float
    compute_us: float
    copy_us: float
    encode_us: float
    send_us: float
    span_us: float
    bytes_in: U63
    bytes_out: U63
    raw_bytes_out: U63
    taking_us: float = 0.0
    exposed_us: float = 0.0
    timed_steps: U63 = 0


class Description(Message, frozen=True, array_like=True, tag=True):
    """What a server is doing now (for status pages, planners and routing).

    `waiting` requests queue for KV; `parked` sessions wait in host memory to come back.
    Prompts kept for later sessions take `prefix_bytes`; `prefix_hits` sequences began with some
    of them, which saved them `prefix_tokens_saved` on this stage. `busy` is the share of the last
    seconds in which the device computed, `decode_rows` how many sequences decode at present.
    Stages with the same `machine` share its `cores`; "" shares none, or it is unknown. A `pace`
    above 1 plays a device that takes so many times longer, and leaves the cores meanwhile.
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
    prefix_bytes: U63 = 0
    prefix_hits: U63 = 0
    prefix_tokens_saved: U63 = 0
    busy: float = 0.0
    decode_rows: U32 = 0
    pinned: bool = False
    links: Annotated[tuple[LinkReport, ...], msgspec.Meta(max_length=MOST_LINKS)] = ()
    costs: CostTable | None = None
    traces: Annotated[tuple[TraceReport, ...], msgspec.Meta(max_length=MOST_TRACES)] = ()
    machine: Text = ""
    cores: U32 = 0
    pace: float = 1.0
