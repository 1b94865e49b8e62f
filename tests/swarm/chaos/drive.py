"""One run of one seed: a swarm, its clients' scripts, a schedule, and what must hold at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bloombee.errors import BloomBeeError, SwarmError
from bloombee.telemetry import clock
from tests.swarm.chaos.conversation import Conversation, Interrupted
from tests.swarm.chaos.fates import Fates
from tests.swarm.chaos.faults import Calm, Deed, Fault, make_schedule
from tests.swarm.chaos.oracle import right_outputs
from tests.swarm.chaos.scripts import (
    Script,
    make_script,
    uninterrupted,
    with_kept_prompts,
    with_server_head,
)
from tests.swarm.chaos.world import Plan, World, tiled
from tests.virtual_time import VirtualTimeLoop, process, run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.swarm.chaos.world import Client

logger = logging.getLogger("bloombee.chaos")

LONGEST_S = 900.0
"""Virtual seconds that a run may take."""
SETTLE_S = 45.0
"""Virtual seconds until everything is freed: the longest lease, and a little."""
ATTEMPTS = 5
KEEPING = 12
"""Of so many seeds one has sessions that begin with prompts which servers kept."""


@dataclass(frozen=True)
class Case:
    """Everything that a seed decides."""

    seed: int
    plan: Plan
    scripts: tuple[Script, ...]
    schedule: tuple[Fault, ...]

    @property
    def may_fail(self) -> bool:
        """Whether a step may end in an error (and must go on after the swarm healed)."""
        deeds = [fault.deed for fault in self.schedule]
        return Deed.BLACKOUT in deeds or deeds.count(Deed.FAIL) > 1

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: servers {', '.join(map(str, self.plan.spans))}"]
        lines += [f"  client {i}: {s.rows} rows, {s.acts}" for i, s in enumerate(self.scripts)]
        lines += [f"  fault: {fault}" for fault in self.schedule]
        return "\n".join(lines)


@dataclass
class Report:
    """What came of a run; `problems` must be empty."""

    case: Case
    problems: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    seconds: float = 0.0
    frames: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    events: int = 0
    trace: str = ""
    adopted: int = 0
    """Tokens that sessions began with."""

    def __str__(self) -> str:
        told = "\n".join(f"  problem: {problem}" for problem in self.problems)
        return f"{self.case}\n  errors: {self.errors}\n{told}\n  {self.seconds:.1f} s"


def make_case(seed: int, *, disturbed: bool = True) -> Case:
    """What `seed` stands for."""
    luck = random.Random(f"chaos {seed}")
    num_blocks = luck.choice((4, 6, 8))
    spans = []
    for copy in range(luck.choice((1, 2, 2, 2))):
        stages = luck.choice((1, 2, 2, 3, 3)) if copy == 0 else luck.choice((1, 2, 3))
        spans += tiled(num_blocks, sorted(luck.sample(range(1, num_blocks), stages - 1)))
    scripts = tuple(make_script(luck) for _ in range(luck.choice((1, 1, 1, 2, 3))))
    heads = random.Random(f"heads {seed}")  # apart, so that the rest stays as it was
    scripts = tuple(with_server_head(script, heads) for script in scripts)
    if seed % KEEPING == KEEPING - 1:
        keeps = random.Random(f"kept prompts {seed}")
        scripts = tuple(with_kept_prompts(script, keeps) for script in scripts[:2])
    if not disturbed:
        scripts = tuple(map(uninterrupted, scripts))
    needs = [s.rows * (s.max_length + 3) for s in scripts]
    room = max(needs) + 8 if luck.random() < 0.25 else sum(needs) + 64
    plan = Plan(num_blocks, tuple(spans), room, park_idle_s=luck.choice((0.2, 1.0, 5.0)))
    calm = Case(seed, plan, scripts, ())
    if not disturbed:
        return calm
    report = run_case(calm)
    schedule = make_schedule(luck, len(spans), Calm(report.frames, report.seconds))
    return replace(calm, schedule=schedule)


def run_case(case: Case) -> Report:
    """Run it in virtual time; deterministic."""
    report = Report(case)
    with _errors_logged(report), contextlib.ExitStack() as stack:
        loop_time: list[VirtualTimeLoop] = []

        def now() -> float:
            return loop_time[0].time() if loop_time else 0.0

        stack.enter_context(patch.object(clock, "perf_counter", now))
        stack.enter_context(patch.object(clock, "perf_counter_ns", lambda: int(now() * 1e9)))

        async def main() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop_time.append(loop)
            loop.set_exception_handler(lambda _, context: _unhandled(report, context))
            async with asyncio.timeout(LONGEST_S):
                await _drive(case, report)

        try:
            run(main())
        except Exception as error:  # noqa: BLE001 - whatever it is, the report tells of it
            report.problems.append(f"{type(error).__name__}: {error}")
            logger.debug("the run failed", exc_info=True)
    return report


async def _drive(case: Case, report: Report) -> None:
    world = World(case.seed, case.plan)
    right = [await right_outputs(case.plan.num_blocks, script) for script in case.scripts]
    await world.start()
    clients = [world.client() for _ in case.scripts]
    async with asyncio.TaskGroup() as faults:
        fates = Fates(world, case.schedule, faults)
        world.network.observer = fates.observe
        async with asyncio.TaskGroup() as group:
            for client, script, wanted in zip(clients, case.scripts, right, strict=True):
                with process(client.name):
                    talk = _converse(world, client, script, wanted, report)
                    client.talk = group.create_task(talk)
        report.seconds = world.loop.time()
        report.frames = dict(fates.seen)
        report.struck, report.events, report.trace = fates.struck, fates.events, fates.trace
        fates.end()
    await world.heal()
    await _check_freed(world, report)
    for client in clients:
        await client.access.close()
    await world.stop()
    await asyncio.sleep(1.0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    report.problems += [f"a task is left: {task.get_coro()}" for task in left]


async def _converse(
    world: World, client: Client, script: Script, right: list[list[int]], report: Report
) -> None:
    """Play one script; every error, and every difference from what is right, is noted."""
    attempts = 0

    async def retry(error: BloomBeeError) -> None:
        nonlocal attempts
        if isinstance(error, Interrupted):
            return
        attempts += 1
        text = f"{client.name}: {type(error).__name__}: {error}"
        report.errors.append(text)
        logger.debug("ERROR for the caller: %s", text, exc_info=error)
        if not report.case.may_fail:
            report.problems.append(f"an error though the blocks were held: {text}")
        if attempts >= ATTEMPTS:
            raise error
        await world.heal()

    talks: list[Conversation] = []
    try:
        for _ in range(script.sessions):
            await _play(client, script, talks, retry, report)
    except* BloomBeeError as group:
        report.problems.append(f"{client.name} gave up: {group.exceptions[0]}")
    finally:
        told = [output for talk in talks for output in talk.outputs]
        right = right * script.sessions
        wanted = right if client.vanished_at is None else right[: len(told)]
        if told != wanted:
            pairs = enumerate(zip(told, wanted, strict=False))
            first = next((i for i, (got, want) in pairs if got != want), len(told))
            report.problems.append(f"{client.name}: wrong output {first} of {len(right)}")


async def _play(
    client: Client,
    script: Script,
    talks: list[Conversation],
    retry: Callable[[BloomBeeError], Awaitable[None]],
    report: Report,
) -> None:
    """One session, which is entered into `talks`."""
    async with asyncio.TaskGroup() as tasks:
        session = None
        while session is None:
            try:
                session = await client.open(script, tasks)
            except SwarmError as missing:
                # Whoever starts while blocks have no holder is told at once.
                logger.debug("nobody to open a session with: %s", missing)
                await asyncio.sleep(1.0)
            except BloomBeeError as error:
                await retry(error)
        talks.append(Conversation(session, script, retry))
        try:
            await talks[-1].play()
        finally:
            report.adopted += sum(session.traffic.adopted)
            await session.close()


async def _check_freed(world: World, report: Report) -> None:
    """Every page and session of every server is free within the longest lease."""
    end = world.loop.time() + SETTLE_S
    while world.loop.time() < end and any(_held(world)):  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.5)
    report.problems += list(_held(world))
    for server in world.servers:
        if server.pool is not None:
            server.pool.check_integrity()
        if server.stage is not None:
            store = server.stage.prefixes.store
            store.check()
            used = sum(chunk.uses for chunk in store._chunks.values())
            report.problems += [f"{server.name}: {used} kept chunks are in use"] if used else []


def _held(world: World) -> Iterator[str]:
    for server in world.servers:
        if server.stage is None or server.pool is None:
            continue
        if server.pool.free_tokens != server.pool.total_tokens:
            leaked = server.pool.total_tokens - server.pool.free_tokens
            yield f"{server.name} leaks {leaked} tokens"
        if len(server.stage.sessions):
            yield f"{server.name} keeps {len(server.stage.sessions)} sessions"


def _unhandled(report: Report, context: dict[str, Any]) -> None:
    told = f"unhandled: {context.get('message')}: {context.get('exception')!r}"
    report.problems.append(told)
    logger.debug("%s", told, exc_info=context.get("exception"))


class _Errors(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if "injected" not in str(record.exc_info):
            self._report.problems.append(f"logged: {record.getMessage()} {record.exc_info}")


@contextlib.contextmanager
def _errors_logged(report: Report) -> Iterator[None]:
    """Whatever is logged as an error is a problem."""
    root, handler = logging.getLogger("bloombee"), _Errors(report)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
