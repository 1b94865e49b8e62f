"""Every message that crosses the wire (version 1), and the story they tell.

Who says what to whom:

    client -> stage    Challenge < Hello > Open > Opened < (Step >)* (Output <)* Close > Closed <
    stage -> next      Challenge < Hello > Attach > Attached < (Step >)*
    new -> old holder  Challenge < Hello > Fetch > (Pages <)* (Output <)* HandedOver <
    anyone -> server   Challenge < Hello > Describe > Description <
    at any time, either way   Failed (one step, or the session when `step` is 0)
    while a session or hop stands, either way   Beat
    client -> stage    Standby, whenever another server could soon be the next stage

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

from typing import Literal

from bloombee.protocol.fields import (
    U32,
    U63,
    Blob,
    Content,
    Id16,
    Index,
    Message,
    Parent,
    Text,
    WireDtype,
)
from bloombee.protocol.report_messages import (
    CostTable,
    Describe,
    Description,
    LinkReport,
    TimeGrid,
    TraceReport,
)
from bloombee.protocol.session_messages import (
    ADOPTED_STEP,
    MOST_CHUNKS,
    PREFIX_TOKENS,
    Attach,
    Attached,
    Beat,
    Chain,
    Challenge,
    Close,
    Closed,
    Hello,
    Hop,
    Leaving,
    Open,
    Opened,
    Source,
)
from bloombee.protocol.step_messages import (
    MOST_BIASES,
    MOST_STOP_IDS,
    Acknowledged,
    End,
    Failed,
    Operations,
    Output,
    Payload,
    Replay,
    Sampling,
    Step,
    Timing,
)

__all__ = [
    "ADOPTED_STEP",
    "End",
    "MOST_BIASES",
    "MOST_CHUNKS",
    "MOST_STOP_IDS",
    "Acknowledged",
    "AnyMessage",
    "Attach",
    "Attached",
    "Beat",
    "Blob",
    "Chain",
    "Challenge",
    "Close",
    "Closed",
    "Content",
    "CostTable",
    "Describe",
    "Description",
    "Failed",
    "Fetch",
    "HandedOver",
    "Hello",
    "Hop",
    "Id16",
    "Index",
    "Leaving",
    "LinkReport",
    "Message",
    "Open",
    "Opened",
    "Operations",
    "Output",
    "PREFIX_TOKENS",
    "Pages",
    "Parent",
    "Payload",
    "Replay",
    "Sampling",
    "Source",
    "Standby",
    "Step",
    "Text",
    "TimeGrid",
    "Timing",
    "TraceReport",
    "U32",
    "U63",
    "VERSION",
    "WireDtype",
]

VERSION = 1


# A session's spares -----------------------------------------------------------


class Standby(Message, frozen=True, array_like=True, tag=True):
    """The server at `hop` would take the next stage's place: keep the way there short."""

    session: Id16
    hop: Hop


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
    `outputs` the steps whose outputs were among the pages, in that order. Those of steps
    that chose tokens came as Output messages; `sampling` says by sequence how the next
    tokens of their loop are chosen.
    """

    session: Id16
    lengths: tuple[Index, ...]
    newest_steps: tuple[U63, ...]
    released: tuple[bool, ...]
    included: tuple[U63, ...] = ()
    outputs: tuple[U63, ...] = ()
    sampling: tuple[tuple[Index, Sampling], ...] = ()


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
    | Standby
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
