"""What `bloombee-plan` shows: the plan, its alternatives; as tables or JSON; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bloombee.planner.alternatives import Alternative, value
from bloombee.planner.plan import Infeasible, Plan
from bloombee.planner.workload import Head, Objective

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bloombee.planner.plan import HopPlan, MemoryUse, RoutePlan, StagePlan
    from bloombee.planner.planning import Problem

BAR = 20
SHOWN_LETTERS = 24
COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("peer", "left"),
    ("device", "left"),
    ("blocks", "left"),
    ("KV away", "right"),
    ("streamed", "right"),
    ("device memory", "left"),
    ("host GB", "right"),
    ("decode ms", "right"),
    ("prefill", "right"),
    ("then to", "left"),
    ("codec", "left"),
    ("ms", "right"),
    ("busy", "right"),
)
UNITS = {
    Objective.THROUGHPUT: "tokens/s",
    Objective.LATENCY: "tokens/s a sequence",
    Objective.FIRST_TOKEN: "first tokens/s",
    Objective.COST: "tokens/$",
    Objective.ENERGY: "tokens/J",
}


@dataclass(frozen=True, slots=True)
class Today:
    """A running swarm as it is: what its placement gives by the same costs, and each span.

    `moves`: the peers that the plan has serve otherwise. `guessed` of `links` are not measured.
    """

    tokens_per_s: float
    gain: float | None
    moves: tuple[str, ...]
    guessed: int
    links: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """The chosen plan; `served_tokens_per_s` is the simulator's figure.

    `today` is for a running swarm.
    """

    about: str
    problem: Problem
    plan: Plan
    served_tokens_per_s: float
    alternatives: tuple[Alternative, ...]
    today: Today | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything, with the derived figures by name."""
        return {
            "model": self.problem.model.name,
            "objective": self.problem.objective.value,
            "served_tokens_per_s": self.served_tokens_per_s,
            **_figures(self.plan),
            "routes": [{**asdict(r), **_route_figures(r)} for r in self.plan.routes],
            "alternatives": [_alternative_json(a) for a in self.alternatives],
            **({"today": asdict(self.today)} if self.today else {}),
        }


def _figures(plan: Plan) -> dict[str, float | None]:
    return {
        "tokens_per_s": plan.tokens_per_s,
        "first_token_s": plan.first_token_s,
        "tokens_per_dollar": plan.tokens_per_dollar,
        "tokens_per_joule": plan.tokens_per_joule,
    }


def _route_figures(route: RoutePlan) -> dict[str, float | str]:
    return {
        "tokens_per_s": route.tokens_per_s,
        "token_s": route.token_s,
        "first_token_s": route.first_token_s,
        "bottleneck": route.bottleneck,
    }


def _alternative_json(alternative: Alternative) -> dict[str, Any]:
    made = alternative.outcome
    if isinstance(made, Infeasible):
        return {"change": alternative.change, "infeasible": made.reason}
    why = made.routes[0].bottleneck
    return {"change": alternative.change, **_figures(made), "bottleneck": why}


def render(report: PlanReport) -> RenderableType:
    """The report for a terminal."""
    parts: list[RenderableType] = [_heading(report)]
    if report.today is not None:
        parts.append(_today(report.today))
    for number, route in enumerate(report.plan.routes, 1):
        title = f"route {number} of {len(report.plan.routes)}: " if report.plan.routes[1:] else ""
        parts += [Text(title + _shape(route), style="bold"), _table(route), Text()]
    parts += [Text("what else was tried (one route)", style="bold"), _alternatives(report)]
    parts.append(Text(_footnote(report), style="dim"))
    return Group(*parts)


def _heading(report: PlanReport) -> Text:
    plan, problem = report.plan, report.problem
    facts = problem.model
    text = Text.assemble(
        (facts.name, "bold"),
        f"  {facts.blocks} blocks of {facts.block_bytes / 1e9:.2f} GB on {report.about}\n",
        f"best {problem.objective.value}: ",
        (f"{plan.tokens_per_s:,.1f} tokens/s", "bold green"),
        f" ({report.served_tokens_per_s:,.1f} simulated), ",
        f"first token {_seconds(plan.first_token_s)}, ",
        f"next ones every {_seconds(max(route.token_s for route in plan.routes))}",
    )
    if plan.tokens_per_dollar is not None:
        text.append(f"\n{plan.tokens_per_dollar:,.0f} tokens/$")
    if plan.tokens_per_joule is not None:
        text.append(f"  {plan.tokens_per_joule:.3f} tokens/J")
    return text.append("\n")


def _today(today: Today) -> Text:
    if today.gain is None:
        text = Text("today: the servers as they are leave blocks that nobody can serve so\n")
    else:
        text = Text(
            f"today: {today.tokens_per_s:,.1f} tokens/s; the plan gives {today.gain:.2f} x\n"
        )
    for move in today.moves:
        text.append(f"  {move}\n")
    if today.guessed:
        text.append(f"{today.guessed} of {today.links} links are guessed, not measured\n", "yellow")
    for line in today.left_out:
        text.append(f"left out: {line}\n", "red")
    return text


def _shape(route: RoutePlan) -> str:
    shape = route.shape
    where = "server" if shape.head is Head.SERVER else "client"
    return (
        f"batch {shape.batch} as {shape.micro_batches} x {shape.micro_batch} in decode, "
        f"{shape.chunk_tokens} prompt tokens a pass, head at the {where}; "
        f"{route.tokens_per_s:,.1f} tokens/s, limited by {route.bottleneck}"
    )


def _table(route: RoutePlan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    if route.shape.head is Head.CLIENT:
        table.add_row("client", *[""] * 8, *_hop(route, route.hops[0]))
    for stage, hop in zip(route.stages, route.hops[1:], strict=True):
        table.add_row(*_stage(route, stage), *_hop(route, hop))
    return table


def _stage(route: RoutePlan, stage: StagePlan) -> tuple[str | Text, ...]:
    busiest = stage.decode_s >= route.decode_bottleneck_s
    return (
        _short(stage.peer),
        stage.kind[:SHOWN_LETTERS],
        str(stage.span),
        f"{stage.kv_offload:.0%}" if stage.kv_offload else "-",
        str(stage.streamed_blocks or "-"),
        memory_bar(stage.memory),
        f"{(stage.memory.host_kv_bytes + stage.memory.host_weights_bytes) / 1e9:.1f}",
        _marked(stage.decode_s, busiest=busiest),
        f"{stage.prefill_s * 1e3:.1f}",
    )


def _short(name: str) -> str:
    """A machine's name; of a peer id what tells it from others."""
    return name if len(name) <= SHOWN_LETTERS else f"..{name[-8:]}"


def _hop(route: RoutePlan, hop: HopPlan) -> tuple[str | Text, ...]:
    busiest = hop.decode_busy_s >= route.decode_bottleneck_s
    ids = route.shape.head is Head.SERVER and hop is route.hops[-1]
    return (
        _short(hop.target or "client"),
        "ids" if ids else hop.codec,
        f"{hop.decode_s * 1e3:.1f}",
        _marked(hop.decode_busy_s, busiest=busiest),
    )


def _marked(seconds: float, *, busiest: bool) -> Text:
    """Milliseconds, marked where nothing is busier."""
    text = f"{seconds * 1e3:.1f}"
    return Text(f"{text} <", style="bold red") if busiest else Text(f"{text}  ")


def memory_bar(memory: MemoryUse) -> str:
    """Device memory in letters by what fills it, dots for what is free, and GB."""
    parts = [
        ("#", memory.weights_bytes),
        ("e", memory.ends_bytes),
        ("k", memory.kv_bytes),
        ("b", memory.buffer_bytes),
        ("w", memory.workspace_bytes),
    ]
    bar, filled = "", 0
    for letter, size in parts:
        filled += size
        bar += letter * (round(BAR * filled / memory.device_bytes) - len(bar))
    used, there = memory.used_bytes / 1e9, memory.device_bytes / 1e9
    return f"{bar:.<{BAR}} {used:.1f}/{there:.1f} GB"


def _alternatives(report: PlanReport) -> Table:
    objective = report.problem.objective
    best = value(objective, report.plan)
    table = Table(box=None, pad_edge=False)
    table.add_column("change")
    table.add_column(UNITS[objective], justify="right")
    table.add_column("against the plan", justify="right")
    table.add_column("peers", justify="right")
    table.add_column("why")
    for alternative in report.alternatives:
        made = alternative.outcome
        if isinstance(made, Infeasible):
            table.add_row(alternative.change, "-", "-", "-", made.reason)
            continue
        gives = value(objective, made)
        table.add_row(
            alternative.change,
            f"{gives:,.3g}" if gives < 100 else f"{gives:,.0f}",
            f"{gives / best - 1:+.1%}" if best else "-",
            str(len(made.peers)),
            _why(objective, made),
        )
    return table


def _why(objective: Objective, made: Plan) -> str:
    route = made.routes[0]
    shape = route.shape
    batch = f"batch {shape.batch} as {shape.micro_batches} x {shape.micro_batch}"
    if objective is Objective.FIRST_TOKEN:
        passes = f"{route.prefill_chunks} x {shape.chunk_tokens} prompt tokens"
        return f"batch {shape.batch}, {passes}: {_seconds(route.first_token_s)}"
    return f"{batch}; {route.bottleneck}: {_seconds(route.token_s)} a token"


def _footnote(report: PlanReport) -> str:
    counted = "prompts counted" if report.problem.workload.count_prefill else "decoding only"
    times = "roofline model of published figures, not measured"
    if report.today is not None:
        times = "as the servers measured them"
    return (
        f"tokens/s: {counted}. Block times: {times}. "
        "tokens/J: declared watts of the used devices; no hosts, no network.\n"
        "Memory: # weights, e embedding and head, k KV, b buffers, w workspace. "
        "KV away: on the host. < busiest."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
