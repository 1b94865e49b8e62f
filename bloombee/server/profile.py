"""A server's profile: measured before it serves, or taken from the cache; told as a cost table."""

from __future__ import annotations

import logging
import platform
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bloombee import __version__
from bloombee.config.settings import ServerSettings
from bloombee.core import Span
from bloombee.kv.interface import KVPool
from bloombee.protocol.report_messages import CostTable
from bloombee.server import profile_cache
from bloombee.server.background import in_background
from bloombee.server.bandwidths import disk_bytes_per_s, host_device_bytes_per_s
from bloombee.server.executor import Executor
from bloombee.server.opened import Opened
from bloombee.server.power import EnergyMeter, device_watts
from bloombee.server.profile_cache import Measured, ProfileKey
from bloombee.server.profiling import Extent, Profiler
from bloombee.server.readings import Readings, decode_grid, head_grid, prefill_grid
from bloombee.server.work import Model
from bloombee.telemetry import Stopwatch

logger = logging.getLogger(__name__)

CPU_NAMES = Path("/proc/cpuinfo")
MAX_HARDWARE = 120
MUCH_FASTER = 0.7
"""A kept profile is given up when a row takes less than so much of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a table says that needs no measuring: sizes, memory, and the owner's word."""

    hardware: str
    device_bytes: int
    host_bytes: int
    block_bytes: int
    kv_bytes_per_token: int
    price_per_hour: float = 0.0
    purchase: float = 0.0
    watts: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What serving costs on this machine."""

    standing: Standing
    measured: Measured

    def table(self) -> CostTable:
        """For whoever asks, with its age now."""
        standing, measured = self.standing, self.measured
        return CostTable(
            hardware=standing.hardware,
            decode=measured.decode,
            prefill=measured.prefill,
            head=measured.head,
            pass_s=measured.pass_s,
            device_bytes=standing.device_bytes,
            host_bytes=standing.host_bytes,
            block_bytes=standing.block_bytes,
            kv_bytes_per_token=standing.kv_bytes_per_token,
            host_device_bytes_per_s=measured.host_device_bytes_per_s,
            disk_bytes_per_s=measured.disk_bytes_per_s,
            price_per_hour=standing.price_per_hour,
            purchase=standing.purchase,
            watts=standing.watts,
            measured_watts=measured.watts,
            age_s=profile_cache.age_s(measured),
        )

    def tokens_per_s(self, blocks: int) -> float:
        """Tokens of one sequence through so many blocks in a second."""
        return 1 / max(1e-6, self.measured.pass_s + blocks * self.measured.decode.seconds[0][0])


MakeProfile = Callable[[Executor, Model, KVPool], Awaitable[Profile]]
"""Measures a span through its executor, or finds that it has been."""


def profiling(settings: ServerSettings, opened: Opened, threads: int) -> MakeProfile:
    """How a server of these settings comes by its profile."""
    return partial(_profile, settings, opened, threads)


async def _profile(  # noqa: PLR0913 - the first three are bound by `profiling`
    settings: ServerSettings,
    opened: Opened,
    threads: int,
    executor: Executor,
    model: Model,
    pool: KVPool,
) -> Profile:
    standing = _standing(settings, opened, threads)
    key = _key(settings, opened, threads, model.span)
    kept = profile_cache.load(key) if settings.profile == "cached" else None
    if kept is not None and not await _is_slow(kept, Profiler(executor, model, pool, Extent())):
        return Profile(standing, kept)
    extent = Extent(
        seconds=settings.profile_s * settings.pace,
        most_rows=64 if opened.device.type == "cpu" else 256,
        most_chunk=128 if opened.source.whole_prompts else min(512, settings.max_step_tokens),
        max_length=opened.max_length,
        has_head=model.span.end == opened.source.num_blocks,
    )
    watch, meter = Stopwatch(), EnergyMeter()
    readings = await Profiler(executor, model, pool, extent).run()
    watts = meter.watts() + device_watts(opened.device)
    rates = await in_background(partial(_rates, opened))
    measured = _measured(key, readings, rates, watts)
    logger.info(
        "measured blocks %s in %.1f s: %.2f ms a block for one row, a pass %.2f ms besides",
        *(model.span, watch.elapsed_s),
        *(measured.decode.seconds[0][0] * 1e3, measured.pass_s * 1e3),
    )
    profile_cache.save(measured)
    return Profile(standing, measured)


async def _is_slow(kept: Measured, profiler: Profiler) -> bool:
    """Whether this machine is faster than it was: others kept it busy while it measured."""
    said_s = kept.pass_s + profiler.blocks * kept.decode.seconds[0][0]
    now_s = await profiler.one_row()
    if now_s >= said_s * MUCH_FASTER:
        return False
    logger.info("a row takes %.2f ms, no longer %.2f: measuring again", now_s * 1e3, said_s * 1e3)
    return True


def _key(settings: ServerSettings, opened: Opened, threads: int, span: Span) -> ProfileKey:
    head = "head" if span.end == opened.source.num_blocks else "no head"
    return ProfileKey(
        hardware=hardware_of(opened.device),
        threads=threads,
        device=str(opened.device),
        fingerprint=opened.fingerprint,
        dtype=str(opened.dtype).removeprefix("torch."),
        version=__version__,
        pace=settings.pace,
        span=f"{'one block' if len(span) == 1 else 'blocks'}, {head}",
    )


def _rates(opened: Opened) -> tuple[float, float]:
    """Of the way from host to device, and from disk to host."""
    disk = disk_bytes_per_s(opened.source.weights_file)
    return host_device_bytes_per_s(opened.device), disk


def _measured(
    key: ProfileKey, readings: Readings, rates: tuple[float, float], watts: float
) -> Measured:
    return Measured(
        key=key,
        decode=decode_grid(readings),
        prefill=prefill_grid(readings),
        head=head_grid(readings),
        pass_s=readings.pass_s,
        host_device_bytes_per_s=rates[0],
        disk_bytes_per_s=rates[1],
        watts=watts,
        measured_at_s=profile_cache.now_s(),
    )


def _standing(settings: ServerSettings, opened: Opened, threads: int) -> Standing:
    """Memory as it was before anything was loaded: what a plan may share out anew."""
    room = opened.room
    on_cpu = "" if opened.device.type == "cuda" else f", {threads} threads"
    paced = "" if settings.pace == 1 else f", paced {settings.pace:g} x"
    return Standing(
        hardware=f"{hardware_of(opened.device)}{on_cpu}{paced}"[:MAX_HARDWARE],
        device_bytes=room.usable_bytes,
        host_bytes=0 if room.is_shared else room.usable_host_bytes,
        block_bytes=room.largest_block_bytes,
        kv_bytes_per_token=room.kv_bytes_per_token_and_block,
        price_per_hour=settings.price_per_hour,
        purchase=settings.purchase,
        watts=settings.watts,
    )


def hardware_of(device: torch.device) -> str:
    """What the device calls itself, in printable characters."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name() or platform.processor() or platform.machine()
    return "".join(letter for letter in name if letter.isprintable())[:MAX_HARDWARE]


def _cpu_name() -> str:
    try:
        lines = CPU_NAMES.read_text().splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")
