"""Interactive work goes before background work, which keeps a reserve."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import Phase, SessionId
from bloombee.server.scheduler import RESERVE_EVERY, Budget, Scheduler, WorkItem
from tests.scheduling import BUDGET, OTHER, A, B, Bench, C, batch, prompt, tree, work


def later(item: WorkItem) -> WorkItem:
    """The same, as background work."""
    return replace(item, background=True)


PASSES = [
    ("prompts", [later(prompt(0, A, 64)), prompt(1, B, 64)], [[(1, 64)], [(0, 64)]]),
    ("what is left of a pass", [later(prompt(0, A, 64)), prompt(1, B, 40)],
     [[(1, 40), (0, 24)], [(0, 40)]]),
    ("decode rows", [later(work(0, A)), work(1, B), later(work(2, C)), work(3, A, touches={1})],
     [[(1, 1), (3, 1)], [(0, 1), (2, 1)]]),
    ("whatever fits beside", [later(batch(0, A, 2)), work(1, B), later(work(2, C))],
     [[(1, 1), (2, 1)], [(0, 2)]]),
    ("trees", [later(tree(0, A, 40)), tree(1, B, 40)], [[(1, 40)], [(0, 40)]]),
    ("not across spans", [later(replace(work(0, A), span=OTHER)), work(1, B)],
     [[(0, 1)], [(1, 1)]]),
    ("nor across kinds", [prompt(0, A, 64), later(work(1, B))], [[(1, 1)], [(0, 16)]]),
    ("nor in one session", [later(prompt(0, A, 4)), work(1, A)], [[(0, 4)], [(1, 1)]]),
]  # fmt: skip


@pytest.mark.parametrize(("queue", "passes"), [c[1:] for c in PASSES], ids=[c[0] for c in PASSES])
def test_who_goes_first(queue: list[WorkItem], passes: list[list[tuple[int, int]]]) -> None:
    bench = Bench(Scheduler(replace(BUDGET, decode_rows=2)), queue)
    assert [bench.run() for _ in passes] == passes


def test_every_fourth_pass_is_for_the_background() -> None:
    chats = [work(n, A, Phase.PREFILL, 64, touches={n}) for n in range(10, 19)]
    bench = Bench(queue=[later(prompt(0, B, 64)), later(prompt(1, C, 64)), *chats])
    order = [passes[0][0] for passes in bench.drain()]
    assert order == [10, 11, 12, 0, 13, 14, 15, 1, 16, 17, 18]


def test_what_a_batch_job_got_is_not_held_against_its_clients_questions() -> None:
    jobs = [later(work(n, A, Phase.PREFILL, 64, touches={n})) for n in range(4)]
    bench = Bench(queue=jobs)
    for _ in range(3):
        bench.run()
    asked = [work(10 + n, A, Phase.PREFILL, 64, touches={10 + n}) for n in range(2)]
    bench.queue += [*asked, *(work(20 + n, B, Phase.PREFILL, 64, touches={n}) for n in range(2))]
    assert [bench.run()[0][0] for _ in range(3)] == [10, 20, 11]


def test_among_batch_jobs_alone_the_reserve_is_no_way_round_fairness() -> None:
    many = [later(work(n, A, Phase.PREFILL, 64, touches={n})) for n in range(20)]
    bench = Bench(queue=many)
    for _ in range(9):
        bench.run()
    bench.queue += [later(work(n, B, Phase.PREFILL, 64, touches={n})) for n in range(20, 26)]
    owners = [bench.run()[0][0] >= 20 for _ in range(12)]
    assert owners.count(True) == 6


# With whatever comes ------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Items that could all run in one pass, if it were large enough."""

    phase: Phase
    divisible: bool

    def item(self, arrival: int, client: int, size: int, *, background: bool) -> WorkItem:
        session = SessionId(bytes([client]) * 16)
        touches = [1000 * arrival + n for n in range(size if self.phase is Phase.DECODE else 1)]
        made = work(arrival, session, self.phase, size, touches)
        return replace(made, divisible=self.divisible, background=background)


kinds = st.builds(
    lambda phase, cut: Kind(phase, cut or phase is Phase.DECODE),
    st.sampled_from(list(Phase)),
    st.booleans(),
)
comers = st.lists(st.tuples(st.integers(65, 68), st.integers(1, 20), st.booleans()), max_size=4)


@settings(max_examples=100, deadline=None)
@given(kinds, st.lists(comers, max_size=25), st.integers(4, 32), st.none() | st.integers(1, 8))
def test_but_for_the_reserve_interactive_work_never_notices(
    kind: Kind, arriving: list[list[tuple[int, int, bool]]], tokens: int, rows: int | None
) -> None:
    """A pass is what it would be without background work, or begins with the oldest of it.

    Of `RESERVE_EVERY` in a row that could be interactive work's alone one serves the oldest,
    and it is given the first place in no more than one.
    """
    scheduler = Scheduler(replace(Budget.of(tokens, tokens), decode_rows=rows))
    bench, arrival = Bench(scheduler), 0
    waited, since_reserve = 0, RESERVE_EVERY
    for comers in arriving:
        for client, size, background in comers:
            bench.queue.append(kind.item(arrival, client, size, background=background))
            arrival += 1
        urgent = [item for item in bench.queue if not item.background]
        others = [item for item in bench.queue if item.background]
        alone = [(s.item.arrival, s.tokens) for s in deepcopy(scheduler).next_batch(urgent)]
        ran = bench.run()
        if not urgent or not others:
            continue
        oldest = others[0].arrival
        if ran[0][0] == oldest:
            assert since_reserve >= RESERVE_EVERY - 1
            waited = since_reserve = 0
            continue
        assert ran[: len(alone)] == alone
        is_served = any(item.arrival == oldest for item in bench.finished)
        waited = 0 if is_served else waited + 1
        since_reserve += 1
        assert waited < RESERVE_EVERY


@settings(max_examples=50, deadline=None)
@given(
    kind=kinds,
    ahead=st.lists(st.integers(1, 20), max_size=4),
    flood=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    limit=st.integers(4, 32),
    rows=st.none() | st.integers(1, 8),
)
def test_the_background_gets_its_share_of_an_unending_flood(
    kind: Kind, ahead: list[int], flood: list[int], limit: int, rows: int | None
) -> None:
    """Interactive items come before every pass: of four passes one moves the oldest on."""
    sizes = [*ahead, 20]
    queue = [kind.item(n, 65, size, background=True) for n, size in enumerate(sizes)]
    bench = Bench(Scheduler(replace(Budget.of(limit, limit), decode_rows=rows)), queue)
    turns = sum(-(-size // limit) if kind.divisible else 1 for size in sizes)
    arrival = len(sizes)
    for _ in range(RESERVE_EVERY * turns):
        for n, size in enumerate(flood):
            bench.queue.append(kind.item(arrival, 66 + n, size, background=False))
            arrival += 1
        bench.run()
        if any(item.arrival == len(ahead) for item in bench.finished):
            return
    raise AssertionError("it still waits")
