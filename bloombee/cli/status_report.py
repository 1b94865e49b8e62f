"""What `bloombee-status` shows: facts about a swarm, then as a table or JSON; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bloombee.cli.status_links import LinkStatus, links_table
from bloombee.cli.status_traces import PhaseTrace, traces_shown
from bloombee.protocol.messages import Description
from bloombee.swarm.records import ServerRecord, ServerState
from bloombee.swarm.view import SERVING, ModelEntry, SwarmSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from bloombee.core import PeerId
    from bloombee.swarm.describe import Answer

AHEAD_S = 2.0
STALE_S = 15.0
"""Records are refreshed every ten seconds."""
_WIDE_BAR = 80
_STATE_STYLES = {
    ServerState.ONLINE: "green",
    ServerState.CHOOSING: "yellow",
    ServerState.JOINING: "yellow",
    ServerState.LEAVING: "red",
}


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One line of the table. What only the server tells is None when it wasn't reached.

    Of its `sessions` some are `parked`, their KV set aside; others wait for KV (`waiting`).
    Kept prompts take `prefix_bytes`, and saved `prefix_hits` sequences that many tokens.
    """

    peer: str
    span: str
    state: str
    dtype: str
    kv_tokens: int
    free_tokens: int | None
    sessions: int | None
    waiting: int | None
    parked: int | None
    prefix_bytes: int | None
    prefix_hits: int | None
    prefix_tokens_saved: int | None
    max_length: int
    throughput_tokens_per_s: float
    version: str
    address: str
    age_s: float
    problem: str | None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model: `coverage` counts the serving peers of each block.

    `silent` are the blocks that only servers hold which did not answer just now.
    """

    model: str
    fingerprint: str
    num_blocks: int
    coverage: tuple[int, ...]
    missing: tuple[str, ...]
    silent: tuple[str, ...]
    servers: tuple[ServerStatus, ...]


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """Everything that is shown."""

    models: tuple[ModelStatus, ...]
    warnings: tuple[str, ...]
    links: tuple[LinkStatus, ...] | None = None
    """None: they were not asked for."""
    traces: tuple[PhaseTrace, ...] | None = None
    """As `links`; when there are any, they are all that a terminal shows."""


def report(
    snapshot: SwarmSnapshot, answers: Mapping[PeerId, Answer], clock_skew_s: float
) -> SwarmStatus:
    """Put together what the DHT and the servers themselves said."""
    models = tuple(_model(entry, snapshot, answers) for entry in snapshot.models)
    # Times in records are the swarm's; ours may be off by the measured skew.
    warnings = (
        *_clock_warnings(snapshot, clock_skew_s),
        *_version_warnings(snapshot),
        *_silence_warnings(snapshot, answers),
    )
    return SwarmStatus(models, warnings)


def _model(
    entry: ModelEntry, snapshot: SwarmSnapshot, answers: Mapping[PeerId, Answer]
) -> ModelStatus:
    here = snapshot.select(fingerprint=entry.fingerprint)
    serving = here.select(states=SERVING)
    heard = serving.select(where=lambda r: not isinstance(answers.get(r.peer), Exception))
    missing = tuple(str(span) for span in serving.missing(entry.num_blocks))
    unheard = tuple(str(span) for span in heard.missing(entry.num_blocks))
    return ModelStatus(
        entry.model,
        entry.fingerprint,
        entry.num_blocks,
        serving.servers_per_block(entry.num_blocks),
        missing,
        () if missing else unheard,
        tuple(_server(r, answers.get(r.peer), snapshot.taken_at_s) for r in here.records),
    )


def _server(record: ServerRecord, answer: Answer | None, now_s: float) -> ServerStatus:
    said = answer if isinstance(answer, Description) else None
    return ServerStatus(
        peer=record.peer,
        span=str(record.span),
        state=record.state.value,
        dtype=record.dtype,
        kv_tokens=record.kv_tokens,
        free_tokens=None if said is None else said.free_tokens,
        sessions=None if said is None else said.sessions,
        waiting=None if said is None else said.waiting,
        parked=None if said is None else said.parked,
        prefix_bytes=None if said is None else said.prefix_bytes,
        prefix_hits=None if said is None else said.prefix_hits,
        prefix_tokens_saved=None if said is None else said.prefix_tokens_saved,
        max_length=record.max_length,
        throughput_tokens_per_s=record.throughput_tokens_per_s,
        version=record.version,
        address=record.addresses[0] if record.addresses else "",
        age_s=round(now_s - record.published_at_s, 1),
        problem=str(answer) if isinstance(answer, Exception) else None,
    )


def _clock_warnings(snapshot: SwarmSnapshot, clock_skew_s: float) -> tuple[str, ...]:
    told: list[str] = []
    for record in snapshot.records:
        age_s = snapshot.taken_at_s + clock_skew_s - record.published_at_s
        if age_s < -AHEAD_S:
            told.append(
                f"the clock of {record.peer[-8:]} ({_address(record)}) is at least {-age_s:.1f} s "
                "ahead; its operator should set it by NTP"
            )
        elif age_s > STALE_S:
            told.append(
                f"{record.peer[-8:]} ({_address(record)}) was last heard {age_s:.0f} s ago: "
                "it died, or its clock is behind"
            )
    return tuple(told)


def _version_warnings(snapshot: SwarmSnapshot) -> tuple[str, ...]:
    versions = sorted({record.version for record in snapshot.records})
    if len(versions) < 2:
        return ()
    return (f"servers run different versions: {', '.join(versions)}",)


def _silence_warnings(snapshot: SwarmSnapshot, answers: Mapping[PeerId, Answer]) -> tuple[str, ...]:
    return tuple(
        f"{record.peer[-8:]} ({_address(record)}) can't be asked: {answer}"
        for record in snapshot.records
        if isinstance(answer := answers.get(record.peer), Exception)
    )


def _address(record: ServerRecord) -> str:
    return record.addresses[0] if record.addresses else "no address"


def render(status: SwarmStatus) -> RenderableType:
    """The status for a terminal."""
    parts: list[RenderableType] = []
    if status.traces is not None:
        return traces_shown(status.traces)
    for model in status.models:
        parts += [_heading(model), _table(model), *_kept_prompts(model), Text()]
    if not status.models:
        parts.append(Text("no model is served in this swarm yet"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in status.warnings]
    if status.links is not None:
        parts += [Text(), links_table(status.links)]
    return Group(*parts)


def _heading(model: ModelStatus) -> Text:
    text = Text.assemble(
        (model.model, "bold"), f"  {model.num_blocks} blocks  {model.fingerprint[:12]}\n"
    )
    text.append(coverage_bar(model.coverage), "cyan")
    if model.missing:
        text.append(f"  missing {', '.join(model.missing)}", "bold red")
    elif model.silent:
        text.append(f"  no answer for {', '.join(model.silent)}", "bold yellow")
    else:
        text.append("  complete", "green")
    return text


def coverage_bar(coverage: tuple[int, ...]) -> str:
    """How many servers hold each block: a digit, `+` for ten or more, `.` for none.

    Models of more than 80 blocks share a character among neighbours, the least counts.
    """
    per_mark = -(-len(coverage) // _WIDE_BAR) or 1
    groups = [coverage[i : i + per_mark] for i in range(0, len(coverage), per_mark)]
    return "".join(_mark(min(group)) for group in groups)


def _mark(count: int) -> str:
    if not count:
        return "."
    return str(count) if count < 10 else "+"


def _sessions(server: ServerStatus) -> str:
    """`7`, or `7 (2 parked, 1 waiting)`."""
    if server.sessions is None:
        return "?"
    apart = [
        f"{count} {name}"
        for count, name in ((server.parked, "parked"), (server.waiting, "waiting"))
        if count
    ]
    return f"{server.sessions} ({', '.join(apart)})" if apart else str(server.sessions)


def _kept_prompts(model: ModelStatus) -> list[Text]:
    """A line for each server that keeps prompts."""
    return [
        Text(
            f"{server.peer[-8:]} keeps {server.prefix_bytes / 1e6:,.1f} MB of prompts: "
            f"{server.prefix_tokens_saved or 0:,} tokens saved in {server.prefix_hits or 0:,} "
            "sequences",
            style="dim",
        )
        for server in model.servers
        if server.prefix_bytes
    ]


def _table(model: ModelStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("peer", "blocks", "state", "dtype"):
        table.add_column(name)
    for name in ("KV tokens free/all", "sessions", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("version")
    table.add_column("address", overflow="fold")
    for server in model.servers:
        free = "?" if server.free_tokens is None else f"{server.free_tokens:,}"
        table.add_row(
            server.peer[-8:],
            server.span,
            Text(server.state, style=_STATE_STYLES[ServerState(server.state)]),
            server.dtype,
            f"{free}/{server.kv_tokens:,}",
            _sessions(server),
            f"{server.throughput_tokens_per_s:.1f}",
            server.version,
            server.address,
        )
    return table
