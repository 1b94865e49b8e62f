"""Rows as payloads of frames, coded where it costs least.

Raw rows are views and cost nothing; a codec that computes runs on the event loop
for small payloads (a handoff takes 20 us) and in a pool of its own for large ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from jaxtyping import Float, Shaped

from bloombee import compression
from bloombee.planner.link_control import RAW, SPLIT, CodecRecord
from bloombee.protocol.messages import Payload, WireDtype
from bloombee.telemetry import now_us

T = TypeVar("T")

INLINE_BYTES = 128 << 10
POOL_THREADS = 1


class Payloads:
    """Encodes and decodes; what that does and takes is noted in `record`."""

    def __init__(self, record: CodecRecord) -> None:
        self._record = record
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="codec")

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, rows: Float[torch.Tensor, "R D"], dtype: WireDtype, codec: str = RAW
    ) -> tuple[Payload, compression.Buffer]:
        """The description and bytes of host rows, which already have `dtype`."""
        if codec == RAW:
            used, body = compression.encode(rows, codec)
        else:
            used, body = await self._run(
                codec, rows.nbytes, lambda: self._coded(rows, dtype, codec)
            )
        return Payload("rows", dtype, rows.shape[0], rows.shape[1], used), body

    def _coded(
        self, rows: Float[torch.Tensor, "R D"], dtype: WireDtype, codec: str
    ) -> tuple[str, compression.Buffer]:
        began_us = now_us()
        used, body = compression.encode(rows, codec)
        if used == SPLIT:
            ended_us, size = now_us(), memoryview(body).nbytes
            took_s = (ended_us - began_us) / 1e6
            self._record.encoded(dtype, rows.nbytes, size, took_s, ended_us / 1e6)
        return used, body

    def is_quick(self, payload: Payload, body: memoryview) -> bool:
        """Whether decoding it costs next to nothing."""
        return _is_quick(payload.codec, body.nbytes)

    def decode_now(self, payload: Payload, body: memoryview) -> Shaped[torch.Tensor, "T W"]:
        """As `decode`, for what is quick."""
        began_us = now_us()
        rows = compression.decode(body, payload.codec, payload.dtype, payload.rows, payload.width)
        if payload.codec == SPLIT and rows.nbytes:
            ended_us = now_us()
            took_s = (ended_us - began_us) / 1e6
            self._record.decoded(payload.dtype, rows.nbytes, took_s, ended_us / 1e6)
        return rows

    async def decode(self, payload: Payload, body: memoryview) -> Shaped[torch.Tensor, "T W"]:
        """The rows or ids that `payload` describes; they may share memory with `body`.

        Raises ProtocolError when they don't fit, Unsupported for an unknown codec.
        """
        return await self._run(payload.codec, body.nbytes, lambda: self.decode_now(payload, body))

    async def _run(self, codec: str, count_bytes: int, work: Callable[[], T]) -> T:
        if _is_quick(codec, count_bytes):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _is_quick(codec: str, count_bytes: int) -> bool:
    return codec == RAW or count_bytes <= INLINE_BYTES
