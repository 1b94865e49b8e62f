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
from bloombee.protocol.messages import Payload, WireDtype

T = TypeVar("T")

RAW = "raw"
INLINE_BYTES = 128 << 10
POOL_THREADS = 1


class Payloads:
    """Encodes and decodes with `codec` for what we send, and any codec for what we get."""

    def __init__(self, codec: str = RAW) -> None:
        self._codec = codec
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="codec")

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, rows: Float[torch.Tensor, "R D"], dtype: WireDtype
    ) -> tuple[Payload, compression.Buffer]:
        """The description and bytes of host rows, which already have `dtype`."""
        codec, body = await self._run(
            self._codec, rows.nbytes, lambda: compression.encode(rows, self._codec)
        )
        return Payload("rows", dtype, rows.shape[0], rows.shape[1], codec), body

    def is_quick(self, payload: Payload, body: memoryview) -> bool:
        """Whether decoding it costs next to nothing."""
        return _is_quick(payload.codec, body.nbytes)

    def decode_now(self, payload: Payload, body: memoryview) -> Shaped[torch.Tensor, "T W"]:
        """As `decode`, for what is quick."""
        return compression.decode(body, payload.codec, payload.dtype, payload.rows, payload.width)

    async def decode(self, payload: Payload, body: memoryview) -> Shaped[torch.Tensor, "T W"]:
        """The rows or ids that `payload` describes; they may share memory with `body`.

        Raises ProtocolError when they don't fit, Unsupported for an unknown codec.
        """
        return await self._run(
            payload.codec,
            body.nbytes,
            lambda: compression.decode(
                body, payload.codec, payload.dtype, payload.rows, payload.width
            ),
        )

    async def _run(self, codec: str, count_bytes: int, work: Callable[[], T]) -> T:
        if _is_quick(codec, count_bytes):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _is_quick(codec: str, count_bytes: int) -> bool:
    return codec == RAW or count_bytes <= INLINE_BYTES
