"""Profiles: what passes cost, how that becomes a table, and what is kept of it on disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.kv import make_pool
from bloombee.models import SpanModel
from bloombee.protocol.report_messages import TimeGrid
from bloombee.server import profile_cache
from bloombee.server.bandwidths import disk_bytes_per_s
from bloombee.server.executor import Executor, ExecutorSettings
from bloombee.server.opened import open_model
from bloombee.server.power import EnergyMeter
from bloombee.server.profile import Profile, profiling
from bloombee.server.profile_cache import Measured, ProfileKey
from bloombee.server.profiling import Extent, Profiler
from bloombee.server.readings import Readings, decode_grid, head_grid, prefill_grid
from bloombee.server.recent_load import RecentLoad
from tests.counting_pool import SPAN, AddingModel, CountingPool
from tests.tiny import BLOCKS, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    import torch

PASS_S, BLOCK_S, ROW_S, CHOICE_S = 0.002, 0.001, 0.0001, 0.004


class _LoadablePool(CountingPool):
    """Takes context in, as the real ones do."""

    def load(self, session: Any, sequence: int, block: int, key: Any, value: Any) -> None:
        if block == SPAN.end - 1:
            self.held[session][sequence] = len(key)


@dataclass
class _Clock:
    """Time that passes only where a test says so."""

    now_s: float = 0.0

    def now_us(self) -> int:
        return round(self.now_s * 1e6)

    @property
    def elapsed_s(self) -> float:
        return self.now_s


class _TimedModel(AddingModel):
    """Takes as long as the constants say."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def forward(
        self, rows: torch.Tensor, batch: Any, pool: Any, span: Span | None = None
    ) -> torch.Tensor:
        self._clock.now_s += PASS_S + len(span or SPAN) * (BLOCK_S + ROW_S * len(rows))
        return super().forward(rows, batch, pool, span)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        self._clock.now_s += CHOICE_S
        return super().logits(rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr("bloombee.server.scratch.now_us", made.now_us)
    monkeypatch.setattr("bloombee.server.profiling.Stopwatch", lambda: made)
    return made


async def _measured(pool: CountingPool, extent: Extent, clock: _Clock) -> Readings:
    model = _TimedModel(clock)
    executor = Executor(model, pool, ExecutorSettings(pass_tokens=64))
    executor.start()
    try:
        return await Profiler(executor, model, pool, extent).run()
    finally:
        await executor.stop(1.0)


def test_blocks_rows_head_and_the_rest_of_a_pass_are_told_apart(clock: _Clock) -> None:
    pool = _LoadablePool(4000)
    extent = Extent(seconds=4.0, most_rows=8, most_chunk=64, has_head=True)
    found = asyncio.run(_measured(pool, extent, clock))
    assert pool.free_tokens == 4000
    grid = decode_grid(found)
    assert grid.rows == (1, 2, 4, 8) and grid.contexts == (0, 256, 1024)
    assert found.pass_s == pytest.approx(PASS_S, rel=0.01)
    assert grid.seconds[0][0] == pytest.approx(BLOCK_S + ROW_S, rel=0.01)
    assert grid.seconds[3][0] == pytest.approx(BLOCK_S + 8 * ROW_S, rel=0.01)
    head = head_grid(found)
    assert head is not None and min(head.seconds)[0] == pytest.approx(CHOICE_S, rel=0.01)
    prefill = prefill_grid(found)
    assert prefill.rows == (16, 64)
    assert prefill.seconds[1][0] == pytest.approx(BLOCK_S + 64 * ROW_S, rel=0.01)


def test_without_time_one_row_and_one_chunk_are_measured(clock: _Clock) -> None:
    pool = _LoadablePool(64)
    found = asyncio.run(_measured(pool, Extent(seconds=0.0, max_length=32), clock))
    assert set(found.decode) == {(1, 0)} and not found.head
    assert [count for count, _ in found.chunks] == [16]
    assert pool.free_tokens == 64


def test_a_context_measured_with_few_rows_grows_with_the_rows() -> None:
    readings = Readings(2, {(1, 0): 0.3, (4, 0): 0.6, (8, 0): 1.0, (4, 256): 1.0}, single_s=0.2)
    grid = decode_grid(readings)
    assert readings.pass_s == pytest.approx(0.1)
    assert grid.seconds[0] == pytest.approx((0.1, 0.15))  # 0.1 s more a row, by the four
    assert grid.seconds[2] == pytest.approx((0.45, 0.85))
    assert head_grid(readings) is None


def test_more_rows_never_cost_less() -> None:
    readings = Readings(1, {(1, 0): 0.5, (2, 0): 0.3, (4, 0): 0.4})
    assert decode_grid(readings).seconds == ((0.3,), (0.3,), (0.4,))


def test_the_load_is_of_the_last_seconds() -> None:
    load = RecentLoad(0)
    load.note(0, 1_000_000)
    assert load.share(2_000_000) == pytest.approx(0.5)
    load.note(5_500_000, 500_000)
    assert load.share(6_000_000) == pytest.approx(0.1)
    assert load.share(60_000_000) == 0.0


class TestCache:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    KEY = ProfileKey("a cpu", 1, "cpu", "f" * 40, "float32", "1.0", 1.0, "blocks, head")
    GRID = TimeGrid((1, 8), (0, 256), ((0.1, 0.2), (0.3, 0.4)))

    def _kept(self) -> Measured:
        made = Measured(self.KEY, self.GRID, self.GRID, None, 0.01, 0.0, 1e9, 12.0, 100.0)
        profile_cache.save(made)
        return made

    def test_it_comes_back_for_the_same_machine_only(self) -> None:
        assert profile_cache.load(self.KEY) is None
        assert profile_cache.load(self.KEY) is None
        made = self._kept()
        assert profile_cache.load(self.KEY) == made
        other = msgspec.structs.replace(self.KEY, threads=2)
        assert profile_cache.load(other) is None

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("0.01", "-1.0"),
            ("0.4", "1e9"),
            ("0.3,0.4", "0.3"),
            ('"a cpu"', '"another"'),
            ('"watts":12.0', '"watts":"many"'),
            ("{", "\x00"),
        ],
    )
    def test_a_broken_file_is_ignored_with_a_warning(
        self, old: str, new: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        self._kept()
        file = self.KEY.file
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        assert profile_cache.load(self.KEY) is None
        assert "measuring again" in caplog.text


def test_the_disk_is_read_and_a_missing_file_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    assert disk_bytes_per_s(file) > 1e5
    assert disk_bytes_per_s(None) == 0.0
    assert disk_bytes_per_s(tmp_path / "none") == 0.0
    assert "is not known" in caplog.text


def test_energy_counters_are_read_over_their_end(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of it: not counted twice
    (zone / "max_energy_range_uj").write_text("1000000000\n")
    (zone / "energy_uj").write_text("999999000\n")
    meter = EnergyMeter(tmp_path)
    assert meter.is_readable
    (zone / "energy_uj").write_text("500000\n")
    assert meter.watts() > 0
    assert not EnergyMeter(tmp_path / "none").is_readable
    assert EnergyMeter(tmp_path / "none").watts() == 0.0


def test_a_server_keeps_its_profile_until_the_machine_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ServerSettings(
        model=str(tiny_model("llama", tmp_path / "tiny")),
        profile_s=0.1,
        new_swarm=True,
        kv_tokens=4096,
        device="cpu",
        watts=30.0,
    )
    span = Span(2, BLOCKS)
    opened = open_model(settings).settled(settings, span)
    model = SpanModel.load_with_ends(
        opened.source, span, dtype=opened.dtype, device=opened.device, progress=False
    )
    shape = opened.source.kv_shape(span, opened.dtype, opened.device)
    pool = make_pool(shape, 4096, max_length=opened.max_length)

    async def profiles() -> tuple[Profile, Profile, Profile]:
        executor = Executor(model, pool, ExecutorSettings())
        executor.start()
        make = profiling(settings, opened, 1)
        try:
            first = await make(executor, model, pool)
            second = await make(executor, model, pool)
            slow = TimeGrid((1,), (0,), ((1.0,),))
            profile_cache.save(msgspec.structs.replace(first.measured, decode=slow))
            return first, second, await make(executor, model, pool)
        finally:
            await executor.stop(1.0)

    first, second, third = asyncio.run(profiles())
    table = first.table()
    assert table.head is not None and table.decode.seconds[0][0] > 0
    assert table.watts == 30.0 and table.price_per_hour == 0.0
    assert table.block_bytes == opened.source.block_bytes(opened.dtype)
    assert 0 < first.tokens_per_s(len(span)) < 1e6
    assert second.measured.key == first.measured.key
    assert third.measured.decode.seconds[0][0] < 0.5  # not the second that was kept
    assert pool.free_tokens == pool.total_tokens
