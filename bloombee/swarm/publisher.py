"""Keeps one server's record alive in the DHT: store, refresh, withdraw."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from bloombee.swarm.identity import Identity, peer_id_bytes
from bloombee.swarm.keys import model_keys, span_keys
from bloombee.swarm.records import ServerRecord, encode_model, encode_server, encode_tombstone

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXPIRY_STEP_S = 0.001


class Store(Protocol):
    """Puts one sealed value of `owner` under each key; see `Dht.store`."""

    async def __call__(
        self, keys: Sequence[str], values: Sequence[bytes], owner: bytes, expires_at_s: float, /
    ) -> None:
        """Raises SwarmError when no node takes any of them."""
        ...


class Publisher:
    """Runs in the DHT's event loop. Of two values a DHT node keeps the later-expiring one,
    so every store expires a little later than the one before, tombstones included.
    """

    def __init__(self, store: Store, identity: Identity, lifetime_s: float) -> None:
        owner = peer_id_bytes(identity.peer_id)
        if owner is None:
            raise ValueError(f"{identity.peer_id} is no Ed25519 peer id")
        self._put, self._identity = store, identity
        self._owner, self._lifetime_s = owner, lifetime_s
        self._record: ServerRecord | None = None
        self._used_keys: set[str] = set()
        self._last_expiry_s = 0.0
        self._turn = asyncio.Lock()

    async def publish(self, record: ServerRecord) -> None:
        """Replace what is published by `record` (its time of publishing is set here).

        Raises SwarmError when no node takes it, ValueError when readers would refuse it.
        """
        async with self._turn:
            await self._store(record)
            self._record = record

    async def withdraw(self) -> None:
        """Replace all that was published by tombstones; nothing is refreshed any more."""
        async with self._turn:
            self._record = None
            keys = sorted(self._used_keys)
            if keys:
                expires_at_s = self._next_expiry()
                tombstone = encode_tombstone(expires_at_s, self._identity)
                await self._put(keys, [tombstone] * len(keys), self._owner, expires_at_s)
                self._used_keys.clear()

    async def refresh(self) -> None:
        """Publish the record again, if there is one. Raises SwarmError as `publish` does."""
        async with self._turn:
            if self._record is not None:
                await self._store(self._record)

    async def _store(self, record: ServerRecord) -> None:
        expires_at_s = self._next_expiry()
        dated = replace(record, published_at_s=time.time())
        keys = span_keys(record.fingerprint, record.span)
        sealed = encode_server(dated, expires_at_s, self._identity)
        announcement = encode_model(record, expires_at_s, self._identity)
        values = dict.fromkeys(keys, sealed) | dict.fromkeys(model_keys(), announcement)
        # Where it held other blocks before, readers would find it there still.
        left = sorted(self._used_keys.difference(values))
        values |= dict.fromkeys(left, encode_tombstone(expires_at_s, self._identity))
        self._used_keys.update(values)
        await self._put(list(values), list(values.values()), self._owner, expires_at_s)
        self._used_keys.difference_update(left)

    def _next_expiry(self) -> float:
        wanted = time.time() + self._lifetime_s
        self._last_expiry_s = max(wanted, self._last_expiry_s + _EXPIRY_STEP_S)
        return self._last_expiry_s
