"""Fixtures of the transport suite: each of its tests runs over every transport."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.transports import LIMITS, Direct, Memory, Serving, Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bloombee.transport.interface import (
        Dialer,
        Endpoint,
        StreamHandler,
        TransportLimits,
    )


@pytest.fixture(params=[Memory, Direct])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param()


@pytest.fixture
def serving(transport: Transport) -> Serving:
    @asynccontextmanager
    async def start(
        handler: StreamHandler,
        *,
        server: TransportLimits = LIMITS,
        client: TransportLimits = LIMITS,
    ) -> AsyncIterator[tuple[Dialer, Endpoint]]:
        listener, endpoint = transport.listener(server)
        dialer = transport.dialer(client)
        await listener.start(handler)
        try:
            yield dialer, endpoint()
        finally:
            await dialer.close()
            await listener.stop(0.0)

    return start
