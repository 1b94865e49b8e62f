"""The order in which requests get KV: against a naive twin, and that nothing starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee.core import PeerId, SessionId
from bloombee.server.fair_queue import MOST_PASSES, FairQueue, Request, Round

TOTAL = 20


def request(peer: str, pages: int, *, returning: bool = False) -> Request:
    return Request(PeerId(peer), SessionId(b"s" * 16), pages, returning)


def asked(queue: FairQueue, *requests: Request) -> FairQueue:
    for one in requests:
        queue.enter(one)
    return queue


def serve(queue: FairQueue, free: int, held: Counter[PeerId] | None = None) -> list[Request]:
    """One round, carried out."""
    done = queue.line(held or Counter()).serve(free)
    for one in done.served:
        queue.serve(one)
    queue.count_passes(done.passed)
    return list(done.served)


class TestOrder:
    def test_peers_take_turns_and_keep_their_own_order(self) -> None:
        a = [request("a", 1) for _ in range(3)]
        b = [request("b", 1) for _ in range(2)]
        c = [request("c", 1)]
        queue = asked(FairQueue(), *a, *b, *c)
        assert serve(queue, 4) == [a[0], b[0], c[0], a[1]]
        late = request("c", 1)
        queue.enter(late)
        assert serve(queue, 9) == [b[1], a[2], late]
        assert len(queue) == 0

    def test_those_who_come_back_go_first(self) -> None:
        new, back = request("a", 2), request("b", 2, returning=True)
        assert serve(asked(FairQueue(), new, back), 2) == [back]

    def test_one_who_withdraws_leaves_the_round_as_it_was(self) -> None:
        a, b = [request("a", 1) for _ in range(2)], request("b", 1)
        queue = asked(FairQueue(), *a, b)
        queue.withdraw(a[0])
        assert a[0] not in queue
        assert serve(queue, 9) == [a[1], b]

    def test_a_peer_gets_its_share_and_others_pass(self) -> None:
        a = [request("a", 2) for _ in range(3)]
        b = request("b", 1)
        queue = asked(FairQueue(5), *a, b)
        assert serve(queue, TOTAL) == [a[0], b, a[1]]
        assert serve(queue, TOTAL, Counter({PeerId("a"): 4})) == []
        assert serve(queue, TOTAL, Counter({PeerId("a"): 2})) == [a[2]]

    def test_what_returns_counts_as_held_already(self) -> None:
        back = request("a", 4, returning=True)
        assert serve(asked(FairQueue(5), back), 4, Counter({PeerId("a"): 5})) == [back]

    def test_the_place_in_the_queue_is_known(self) -> None:
        a, b = [request("a", 1) for _ in range(3)], request("b", 1)
        queue = asked(FairQueue(), *a, b)
        assert [queue.line({}).order.index(one) for one in (*a, b)] == [0, 2, 3, 1]


class TestLargeRequests:
    def test_small_ones_pass_so_often_and_then_wait(self) -> None:
        large = request("large", 10)
        queue = asked(FairQueue(), large)
        for number in range(MOST_PASSES):
            small = request(f"small {number}", 1)
            queue.enter(small)
            assert serve(queue, 9) == [small]
        queue.enter(small := request("late", 1))
        queue.enter(back := request("back", 1, returning=True))
        assert serve(queue, 9) == []
        assert serve(queue, 12) == [large, back, small]

    def test_not_more_than_that_pass_within_one_round(self) -> None:
        queue = asked(FairQueue(), request("large", 10))
        smalls = [request(f"{number}", 1) for number in range(MOST_PASSES + 3)]
        assert serve(asked(queue, *smalls), 9) == smalls[:MOST_PASSES]

    def test_a_new_one_waits_for_so_many_that_return(self) -> None:
        new = request("new", 5)
        queue = asked(FairQueue(), new)
        for _ in range(MOST_PASSES):
            queue.enter(back := request("back", 5, returning=True))
            assert serve(queue, 5) == [back]
        queue.enter(back := request("back", 5, returning=True))
        assert serve(queue, 5) == [new]
        assert serve(queue, 5) == [back]


@dataclass
class NaiveQueue:
    """The same rules, one request at a time, over plain lists."""

    peer_pages: int | None
    waiting: list[Request] = field(default_factory=list[Request])
    turns: dict[bool, list[PeerId]] = field(default_factory=lambda: {True: [], False: []})
    due: list[Request] = field(default_factory=list[Request])
    passed: Counter[Request] = field(default_factory=Counter[Request])

    def enter(self, request: Request) -> None:
        self.waiting.append(request)
        if request.peer not in self.turns[request.returning]:
            self.turns[request.returning].append(request.peer)

    def remove(self, request: Request, *, served: bool) -> None:
        self.waiting.remove(request)
        self.due = [one for one in self.due if one is not request]
        turns = self.turns[request.returning]
        more = any((r.peer, r.returning) == (request.peer, request.returning) for r in self.waiting)
        if served or not more:
            turns.remove(request.peer)
            turns += [request.peer] if more else []

    def heads(self, served: list[Request]) -> list[Request]:
        """The first request of each peer and kind, in the order in which they are asked."""
        heads = [one for one in self.due if one not in served]
        for returning in (True, False):
            for peer in self.turns[returning]:
                own = [r for r in self.waiting if (r.peer, r.returning) == (peer, returning)]
                heads += [r for r in own if r not in heads][:1]
        return heads

    def serve(self, free: int, held: Counter[PeerId]) -> list[Request]:
        served: list[Request] = []
        before = self.passed.copy(), held.copy()
        held = held.copy()
        while (chosen := self.choose(free, held, served)) is not None:
            if chosen.returning:
                new = [one for one in self.heads(served) if not one.returning]
                kept = [one for one in new if self.in_share(one, before[1])]
                self.passed.update([one for one in kept if before[0][one] < MOST_PASSES][:1])
            free -= chosen.pages
            held[chosen.peer] += 0 if chosen.returning else chosen.pages
            served.append(chosen)
            self.remove(chosen, served=True)
        self.due += [
            one for one in self.heads([]) if self.passed[one] >= MOST_PASSES and one not in self.due
        ]
        return served

    def in_share(self, one: Request, held: Counter[PeerId]) -> bool:
        if one.returning or self.peer_pages is None:
            return True
        return held[one.peer] + one.pages <= self.peer_pages

    def choose(self, free: int, held: Counter[PeerId], served: list[Request]) -> Request | None:
        unfit: list[Request] = []
        stuck: set[PeerId] = set()
        for one in self.heads(served):
            if one.peer in stuck:
                continue
            if not self.in_share(one, held):
                stuck.add(one.peer)
            elif one.pages > free:
                stuck.add(one.peer)
                unfit.append(one)
            else:
                if any(self.passed[other] >= MOST_PASSES for other in unfit):
                    return None
                self.passed.update(unfit)
                return one
        return None


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(0, 3), st.integers(1, TOTAL)),
        st.tuples(st.just("back"), st.integers(0, 3), st.integers(1, TOTAL)),
        st.tuples(st.just("withdraw"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("serve"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@given(ACTIONS, st.one_of(st.none(), st.integers(TOTAL // 2, TOTAL)))
@settings(max_examples=300, deadline=None)
def test_a_round_is_what_one_at_a_time_gives(actions: list[Action], share: int | None) -> None:
    queue, twin = FairQueue(share), NaiveQueue(share)
    standing: list[Request] = []
    for kind, number, pages in actions:
        if kind in ("new", "back") and pages <= (share or TOTAL):
            queue.enter(one := request(f"{number}", pages, returning=kind == "back"))
            twin.enter(one)
        elif kind == "withdraw" and twin.waiting:
            one = twin.waiting[number % len(twin.waiting)]
            queue.withdraw(one)
            twin.remove(one, served=False)
        elif kind == "end" and standing:
            standing.pop(number % len(standing))
        elif kind == "serve":
            held = Counter[PeerId]()
            for one in standing:
                held[one.peer] += one.pages
            free = TOTAL - held.total()
            served = serve(queue, free, held)
            assert served == twin.serve(free, held)
            assert sum(one.pages for one in served) <= free
            standing += served
        assert set(queue.line({}).order) == set(twin.waiting)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, TOTAL), st.booleans()), min_size=1, max_size=60
    ),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_nothing_starves(asked_for: list[tuple[int, int, bool]], life: int) -> None:
    """A request of all pages is served after so many others, whatever else keeps coming."""
    queue, large = FairQueue(), request("large", TOTAL)
    queue.enter(large)
    standing: list[tuple[int, Request]] = []
    served_before = 0
    for moment in range(10_000):
        peer, pages, returning = asked_for[moment % len(asked_for)]
        queue.enter(request(f"{peer}", pages, returning=returning))
        standing = [(end, one) for end, one in standing if end > moment]
        served = serve(queue, TOTAL - sum(one.pages for _, one in standing))
        if large in served:
            break
        served_before += len(served)
        standing += [(moment + life, one) for one in served]
    else:
        raise AssertionError("never served")
    assert served_before <= 2 * MOST_PASSES + 4


def test_a_round_changes_nothing_by_itself() -> None:
    queue = asked(FairQueue(), request("a", 5), request("b", 1))
    line = queue.line({})
    first = line.serve(3)
    assert line.serve(3) == first == Round(first.served, first.passed)
    assert len(queue) == 2
