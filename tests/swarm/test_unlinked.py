"""Two stages of which each answers, and the one can't reach the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from bloombee.errors import SwarmError, TransportError
from tests.client_swarm import QUICK
from tests.swarm.disturbed import IDS, all_free, peer_of, same

if TYPE_CHECKING:
    from bloombee.transport.interface import Endpoint
    from bloombee.transport.memory import MemoryDialer, MemoryStream
    from tests.client_swarm import ClientSwarm

RECOVERY_S = 0.8


class _Wall:
    """Lets the one reach the other no more, for as long as it stands; counts who tried."""

    def __init__(self, swarm: ClientSwarm, source: int, target: int) -> None:
        self.stands = True
        self.tries = 0
        source_peer, target_peer = (peer_of(swarm.stages[i]) for i in (source, target))
        network = swarm.network
        reach = network.open

        async def opened(dialer: MemoryDialer, endpoint: Endpoint) -> MemoryStream:
            if self.stands and (dialer.peer, endpoint.peer) == (source_peer, target_peer):
                self.tries += 1
                raise TransportError("a wall stands there")
            return await reach(dialer, endpoint)

        network.open = opened


@pytest.mark.parametrize(
    ("near", "far", "head"), [(0, 1, "client"), (0, 1, "server"), (2, 0, "server")]
)
def test_links_that_can_t_be_made_are_tried_for_recovery_s(
    three: ClientSwarm, local: Any, near: int, far: int, head: str
) -> None:
    """Then one error says which; the next call tries again."""
    wall = _Wall(three, near, far)
    model = three.model(QUICK.model_copy(update={"recovery_s": RECOVERY_S}))
    with model.inference_session(max_length=80):
        for _ in range(2):
            before, began_s = wall.tries, time.monotonic()
            with pytest.raises(SwarmError, match="could not be linked.*a wall stands there"):
                model.generate(IDS, max_new_tokens=4, do_sample=False, head=head)
            assert RECOVERY_S / 2 < time.monotonic() - began_s < 3 * RECOVERY_S + 1
            assert wall.tries > before
        wall.stands = False
    same(local, model, head=head)
    all_free(three)
