"""What `bloombee-status --trace` shows: where the time of steps went, stage by stage; pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bloombee.protocol.messages import Description

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from bloombee.core import PeerId
    from bloombee.protocol.messages import TraceReport
    from bloombee.swarm.describe import Answer

PHASES = ("prefill", "decode", "verify")
PARTS = ("wire", "decode", "queue", "copy", "compute", "encode", "send")
"""What a step's time on one stage is made of, in order: the codec decodes and encodes."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one stage, at `peer`, said of one session and phase."""

    peer: str
    report: TraceReport


@dataclass(frozen=True, slots=True)
class StageTrace:
    """The mean step of one phase on one stage, in milliseconds; bytes are those of a step.

    `wire_ms` from the stage or client before it (`upstream`) until all was here; handing a
    result to the transport counts there, too; both are of `timed_steps`, for which clocks were
    known. `exposed_ms` of it the device here had nothing else to do. `share` of the step.
    """

    blocks: str
    peer: str
    upstream: str
    steps: int
    timed_steps: int
    rows: float
    wire_ms: float
    exposed_ms: float
    decode_ms: float
    queue_ms: float
    copy_ms: float
    compute_ms: float
    encode_ms: float
    send_ms: float
    share: float
    bytes_in: float
    bytes_out: float
    raw_bytes_out: float

    @property
    def parts_ms(self) -> tuple[float, ...]:
        """As PARTS names them."""
        return tuple(float(getattr(self, f"{part}_ms")) for part in PARTS)

    @property
    def total_ms(self) -> float:
        """From the sender's hand until the transport was handed the result."""
        return sum(self.parts_ms)


@dataclass(frozen=True, slots=True)
class PhaseTrace:
    """The mean step of one phase through all stages.

    `step_ms` is the way of one step, without the way back to a client; steps of several
    micro-batches run beside each other. `exposed_share` of it was wire time that no
    computing hid.
    """

    phase: str
    steps: int
    step_ms: float
    exposed_ms: float
    exposed_share: float
    stages: tuple[StageTrace, ...]


def told_by(answers: Iterable[Mapping[PeerId, Answer]]) -> list[Told]:
    """What servers said; of those that can't be asked, or know nothing, nothing."""
    return [
        Told(said.peer, report)
        for each in answers
        for said in each.values()
        if isinstance(said, Description)
        for report in said.traces
    ]


def traces_of(told: Iterable[Told]) -> tuple[PhaseTrace, ...]:
    """All that was told, put together by phase; sessions of one call are taken as one."""
    found: dict[str, dict[tuple[int, int, str], list[TraceReport]]] = {p: {} for p in PHASES}
    for each in told:
        report = each.report
        stage = (report.start, report.end, each.peer)
        found[report.phase].setdefault(stage, []).append(report)
    return tuple(_phase(phase, stages) for phase, stages in found.items() if stages)


def _phase(phase: str, stages: dict[tuple[int, int, str], list[TraceReport]]) -> PhaseTrace:
    ordered = sorted(stages)
    last = ordered[-1][2]
    is_loop = any(report.upstream == last for report in stages[ordered[0]])
    rows = [_stage(key, stages[key], is_taken_on=is_loop or key != ordered[-1]) for key in ordered]
    step_ms = sum(row.total_ms for row in rows)
    exposed_ms = sum(row.exposed_ms for row in rows)
    return PhaseTrace(
        phase=phase,
        steps=max(row.steps for row in rows),
        step_ms=step_ms,
        exposed_ms=exposed_ms,
        exposed_share=exposed_ms / step_ms if step_ms else 0.0,
        stages=tuple(_shared(row, step_ms) for row in rows),
    )


def _stage(
    key: tuple[int, int, str], reports: Sequence[TraceReport], *, is_taken_on: bool
) -> StageTrace:
    """`is_taken_on`: the next stage's wire time begins when the transport is handed the result."""
    sums: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for name in report.__struct_fields__:
            if isinstance(value := getattr(report, name), int | float):
                sums[name] += value
    steps, timed = max(1.0, sums["steps"]), max(1.0, sums["timed_steps"])
    send_us = sums["send_us"] - (sums["taking_us"] if is_taken_on else 0.0)
    start, end, peer = key
    return StageTrace(
        blocks=f"{start}:{end}",
        peer=peer,
        upstream=reports[-1].upstream,
        steps=int(sums["steps"]),
        timed_steps=int(sums["timed_steps"]),
        rows=sums["rows"] / steps,
        wire_ms=sums["wire_us"] / timed / 1e3,
        exposed_ms=sums["exposed_us"] / timed / 1e3,
        decode_ms=sums["decode_us"] / steps / 1e3,
        queue_ms=sums["queue_us"] / steps / 1e3,
        copy_ms=sums["copy_us"] / steps / 1e3,
        compute_ms=sums["compute_us"] / steps / 1e3,
        encode_ms=sums["encode_us"] / steps / 1e3,
        send_ms=max(0.0, send_us) / steps / 1e3,
        share=0.0,
        bytes_in=sums["bytes_in"] / steps,
        bytes_out=sums["bytes_out"] / steps,
        raw_bytes_out=sums["raw_bytes_out"] / steps,
    )


def _shared(row: StageTrace, step_ms: float) -> StageTrace:
    return replace(row, share=row.total_ms / step_ms if step_ms else 0.0)


def traces_shown(traces: Sequence[PhaseTrace]) -> RenderableType:
    """All phases for a terminal."""
    if not traces:
        return Text(
            "no server knows such a session: ten minutes after its last step they forget it; "
            "a wrong digit looks the same"
        )
    parts = [(headline(trace), trace_table(trace), Text()) for trace in traces]
    return Group(*[each for part in parts for each in part])


def headline(trace: PhaseTrace) -> Text:
    """One phase in a line."""
    return Text(
        f"{trace.phase}: {trace.steps} steps a stage, ms of the mean step; wire time that no "
        f"computing hid: {trace.exposed_ms:.2f} ms, {100 * trace.exposed_share:.0f} % of the step"
    )


def trace_table(trace: PhaseTrace) -> Table:
    """One phase for a terminal: a row a stage, and the whole step."""
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column("blocks", "step")
    table.add_column("at", "")
    columns = [("wire", trace_sum(trace, "wire")), ("exposed", f"{trace.exposed_ms:.2f}")]
    columns += [(part, trace_sum(trace, part)) for part in PARTS[1:]]
    for name, whole in (*columns, ("total", f"{trace.step_ms:.2f}"), ("share", "100 %")):
        table.add_column(name, whole, justify="right")
    table.add_column("KB out (raw)", justify="right")
    for row in trace.stages:
        wire, *others = (f"{part:.2f}" for part in row.parts_ms)
        table.add_row(
            row.blocks,
            row.peer[-8:],
            wire if row.timed_steps else "?",
            f"{row.exposed_ms:.2f}" if row.timed_steps else "?",
            *others,
            f"{row.total_ms:.2f}",
            f"{100 * row.share:.0f} %",
            f"{row.bytes_out / 1e3:.1f} ({row.raw_bytes_out / 1e3:.1f})",
        )
    return table


def trace_sum(trace: PhaseTrace, part: str) -> str:
    """A part over all stages."""
    at = PARTS.index(part)
    return f"{sum(row.parts_ms[at] for row in trace.stages):.2f}"
