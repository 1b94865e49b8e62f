"""Memory is planned before loading, and what does not fit is refused in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bloombee.core import Span
from bloombee.errors import SettingsError
from bloombee.server.memory import (
    MOST_TOKENS,
    RESERVE_BYTES,
    ROOM_TOKENS,
    Ends,
    Memory,
    MemoryPlan,
    plan_memory,
    size,
)

GB = 10**9


def memory(
    free_bytes: int = 10 * GB, device: str = "cpu", journal: int = 0, host: int = 10 * GB
) -> Memory:
    """Blocks of 100 MB, 10 KB of KV a token and block, and a `journal` of bytes a token."""
    return Memory(
        device=device,
        free_bytes=free_bytes,
        host_free_bytes=host,
        largest_block_bytes=100_000_000,
        kv_bytes_per_token_and_block=10_000,
        journal_bytes_per_token=journal,
    )


def test_all_blocks_when_they_fit() -> None:
    plan = plan_memory(memory(), num_blocks=8, wanted_blocks=None, kv_tokens=1000)
    assert (plan.blocks, plan.kv_tokens) == (8, 1000)
    assert (plan.weight_bytes, plan.kv_bytes) == (800_000_000, 80_000_000)


def test_as_many_blocks_as_fit_beside_room_for_kv() -> None:
    plan = plan_memory(memory(), num_blocks=80, wanted_blocks=None, kv_tokens=None)
    usable = 10 * GB - RESERVE_BYTES - GB
    assert plan.blocks == usable // (100_000_000 + ROOM_TOKENS * 10_000) == 33
    assert plan.kv_tokens >= ROOM_TOKENS
    assert plan.weight_bytes + plan.kv_bytes <= usable


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_auto_kv_leaves_half_to_others_on_a_cpu(device: str) -> None:
    plan = plan_memory(memory(device=device), num_blocks=80, wanted_blocks=10, kv_tokens=None)
    left = 9 * GB - RESERVE_BYTES - GB
    assert plan.kv_tokens == (left // 100_000) // (2 if device == "cpu" else 1)


def test_auto_kv_is_capped() -> None:
    plan = plan_memory(memory(10**15, "cuda:0"), num_blocks=2, wanted_blocks=1, kv_tokens=None)
    assert plan.kv_tokens == MOST_TOKENS


def test_tight_memory_still_gives_what_is_left() -> None:
    tight = memory(10 * 100_000_000 + RESERVE_BYTES + 500_000_000)
    plan = plan_memory(tight, num_blocks=10, wanted_blocks=10, kv_tokens=None)
    assert plan.kv_tokens == (tight.usable_bytes - GB) // 100_000
    assert 0 < plan.kv_tokens < ROOM_TOKENS


@pytest.mark.parametrize(
    ("free_bytes", "wanted", "kv_tokens", "says"),
    [
        (300_000_000, None, None, "not one block fits on cpu: it takes 100.0 MB and KV of 16,384"),
        (10 * GB, 100, None, "100 blocks take 10.0 GB on cpu, 8.7 GB are usable: --num-blocks 33"),
        (10 * GB, 10, 1_000_000, "10 blocks and KV of 1,000,000 tokens take 101.0 GB"),
    ],
)
def test_what_does_not_fit_is_refused(
    free_bytes: int, wanted: int | None, kv_tokens: int | None, says: str
) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        plan_memory(memory(free_bytes), num_blocks=100, wanted_blocks=wanted, kv_tokens=kv_tokens)
    assert "\n" not in str(caught.value)


def test_it_prints_in_one_line() -> None:
    plan = plan_memory(
        memory(journal=2000),
        num_blocks=8,
        wanted_blocks=8,
        kv_tokens=1000,
        park_bytes=GB,
        prefix_bytes=None,
    )
    assert str(plan) == (
        "memory on cpu: 8 blocks 800.0 MB, KV of 1,000 tokens 80.0 MB, journal up to 2.0 MB, "
        "parked sessions up to 1.0 GB and kept prompts up to 20.0 MB, 10.0 GB free before"
    )
    other = memory(device="cuda:0", journal=2000)
    plan = plan_memory(other, num_blocks=8, wanted_blocks=8, kv_tokens=1000)
    assert "80.0 MB, on the host journal up to 2.0 MB, parked" in str(plan)


USABLE = 10 * GB - RESERVE_BYTES - GB


class TestJournal:
    def test_on_a_cpu_it_takes_from_the_same_memory(self) -> None:
        plan = plan_memory(memory(journal=50_000), num_blocks=80, wanted_blocks=10, kv_tokens=None)
        assert plan.kv_tokens == ((USABLE - GB) // 150_000) // 2
        assert plan.journal_bytes == plan.kv_tokens * 50_000
        blocks = plan_memory(
            memory(journal=50_000), num_blocks=80, wanted_blocks=None, kv_tokens=20_000
        ).blocks
        assert blocks == (USABLE - GB) // (100_000_000 + 20_000 * 10_000) == 25
        with pytest.raises(SettingsError, match=r"take 9\.0 GB on cpu"):
            plan_memory(memory(journal=50_000), num_blocks=80, wanted_blocks=10, kv_tokens=53_334)

    def test_beside_an_accelerator_it_takes_from_the_host(self) -> None:
        beside = memory(device="cuda:0", journal=50_000)
        plan = plan_memory(beside, num_blocks=80, wanted_blocks=10, kv_tokens=None)
        assert plan.kv_tokens == (USABLE - GB) // 100_000
        small_host = memory(device="cuda:0", journal=50_000, host=GB)
        usable = GB - RESERVE_BYTES - GB // 10
        plan = plan_memory(small_host, num_blocks=80, wanted_blocks=10, kv_tokens=None)
        assert plan.kv_tokens == usable // 50_000
        with pytest.raises(SettingsError, match=f"host memory, .*--kv-tokens {usable // 50_000}"):
            plan_memory(small_host, num_blocks=80, wanted_blocks=10, kv_tokens=50_000)

    def test_parked_sessions_get_what_is_left_of_the_host(self) -> None:
        """A third of it for the rows that their journals keep."""

        def parked(where: Memory, kv_tokens: int) -> int:
            return plan_memory(
                where, num_blocks=80, wanted_blocks=10, kv_tokens=kv_tokens, park_bytes=4 * GB
            ).park_bytes

        assert parked(memory(journal=50_000), 1000) == 4 * GB
        assert parked(memory(journal=50_000), 40_000) == (USABLE - GB - 40_000 * 150_000) * 2 // 3
        cuda = memory(device="cuda:0", journal=50_000, host=3 * GB)
        left = 3 * GB - RESERVE_BYTES - 3 * GB // 10 - 1000 * 50_000
        assert parked(cuda, 1000) == left * 2 // 3


class TestKeptPrompts:
    @staticmethod
    def room(where: Memory, *, asked: int | None, parked: int = 0, kv_tokens: int = 1000) -> int:
        return plan_memory(
            where,
            num_blocks=80,
            wanted_blocks=10,
            kv_tokens=kv_tokens,
            park_bytes=parked,
            prefix_bytes=asked,
        ).prefix_bytes

    def test_auto_is_a_quarter_of_the_kv(self) -> None:
        assert self.room(memory(), asked=None) == 1000 * 100_000 // 4
        assert self.room(memory(), asked=0) == 0

    def test_or_of_what_is_left_beside_parked_sessions_and_their_rows(self) -> None:
        where = memory(journal=50_000)
        left = USABLE - GB - 40_000 * 150_000
        assert self.room(where, asked=None, kv_tokens=40_000) == left // 4
        assert self.room(where, asked=10 * GB, kv_tokens=40_000) == left
        parked = GB // 2
        found = self.room(where, asked=10 * GB, parked=parked, kv_tokens=40_000)
        assert found == left - parked * 3 // 2
        assert self.room(where, asked=GB, parked=8 * GB, kv_tokens=40_000) <= 1

    def test_beside_an_accelerator_they_lie_on_the_host(self) -> None:
        cuda = memory(device="cuda:0", host=3 * GB)
        assert self.room(cuda, asked=9 * GB) == 3 * GB - RESERVE_BYTES - 3 * GB // 10


class TestEnds:
    """Of a model of 10 blocks: embeddings of 300 MB, norm and head of 500, together 700."""

    ENDS = Ends(10, 300_000_000, 500_000_000, 700_000_000)

    def plan(self, fits: int, ends: Ends = ENDS, wanted: int | None = None) -> MemoryPlan:
        """The plan when blocks, ends and KV of 1,000 tokens may take `fits` MB."""
        free = (fits * 1_000_000 + RESERVE_BYTES) * 10 // 9 + 1
        where = replace(memory(free), ends=ends)
        return plan_memory(where, num_blocks=10, wanted_blocks=wanted, kv_tokens=1000)

    def test_a_server_keeps_room_for_the_larger_one(self) -> None:
        plan = self.plan(4 * 110 + 500)
        assert (plan.blocks, plan.ends_bytes) == (4, 500_000_000)
        assert self.plan(4 * 110 + 499).blocks == 3
        assert self.plan(4 * 110, ends=self.ENDS.at(Span(3, 7))).blocks == 4

    def test_all_blocks_come_with_both(self) -> None:
        plan = self.plan(1100 + 700)
        assert (plan.blocks, plan.ends_bytes) == (10, 700_000_000)
        assert self.plan(1100 + 699).blocks == 9
        assert self.plan(5000).blocks == 10

    @pytest.mark.parametrize(
        ("start", "end", "needed"), [(0, 4, 300), (6, 10, 500), (0, 10, 700), (3, 7, 0)]
    )
    def test_a_span_that_is_known_needs_what_adjoins_it(
        self, start: int, end: int, needed: int
    ) -> None:
        span, ends = Span(start, end), self.ENDS.at(Span(start, end))
        plan = self.plan(len(span) * 110 + needed, ends, len(span))
        assert plan.ends_bytes == needed * 1_000_000
        with pytest.raises(SettingsError, match=f"{len(span)} blocks and KV of 1,000 tokens take"):
            self.plan(len(span) * 110 + needed - 1, ends, len(span))

    def test_kv_gets_what_they_leave(self) -> None:
        where = replace(memory(), ends=self.ENDS.at(Span(6, 10)))
        plan = plan_memory(where, num_blocks=10, wanted_blocks=4, kv_tokens=None)
        assert plan.kv_tokens == ((USABLE - 900_000_000) // 40_000) // 2
        assert "4 blocks 400.0 MB, ends of the model 500.0 MB, KV of" in str(plan)

    def test_it_is_said_when_they_leave_no_room(self) -> None:
        with pytest.raises(SettingsError, match=r"the end of the model beside it 500\.0 MB"):
            self.plan(600)


def test_sizes() -> None:
    assert [size(n) for n in (999, 1500, 2_000_000, 3 * 10**12)] == [
        "999 B",
        "1.5 KB",
        "2.0 MB",
        "3.0 TB",
    ]


def test_more_blocks_than_the_model_has_are_refused() -> None:
    with pytest.raises(SettingsError, match="--num-blocks 9: the model has 8"):
        plan_memory(memory(), num_blocks=8, wanted_blocks=9, kv_tokens=None)
