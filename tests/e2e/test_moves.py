"""A server process moves by itself to blocks that nobody holds any more, and serves them."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from bloombee import AutoDistributedModelForCausalLM
from bloombee.core import Span
from bloombee.swarm.records import ServerState
from tests.e2e.dht_processes import running, wait_until
from tests.e2e.test_server import LOCAL, SERVER, records
from tests.generation import prompt
from tests.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.swarm.records import ServerRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ANSWER: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MOVE_S = 120.0


def test_a_gap_is_closed_by_a_server_that_is_not_pinned(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    flags = (*SERVER, *LOCAL, "--model", str(folder), "--ready-file", "READY_FILE")
    with running(*flags, "--new-swarm", "--blocks", "0:3") as left:
        joins = (*flags, "--initial-peers", *left.maddrs)
        with (
            running(*joins, "--blocks", "2:5") as right,
            running(*joins, "--num-blocks", "3", "--rebalance-s", "1") as mover,
        ):
            peers = (*left.maddrs, *right.maddrs, *mover.maddrs)

            def mine() -> ServerRecord:
                return next(record for record in records(peers, folder) if not record.pinned)

            before = mine()
            # It is beside the slower of the two, so that the other leaves a gap.
            to, gone = {0: (Span(2, 5), right), 2: (Span(0, 3), left)}[before.span.start]
            model = AutoDistributedModelForCausalLM.from_pretrained(
                str(folder), initial_peers=list(peers)
            )
            with model.inference_session(max_length=64):
                expected = model.generate(prompt(1, 9), **ANSWER).tolist()
                gone.process.send_signal(signal.SIGTERM)
                assert model.generate(prompt(1, 9), **ANSWER).tolist() == expected
            wait_until(lambda: mine().state is ServerState.ONLINE and mine().span == to, MOVE_S)
            assert model.generate(prompt(1, 9), **ANSWER).tolist() == expected
            after = mine()
            assert model.route is not None
            assert after.peer in {stage.peer for stage in model.route.stages}
            assert after.addresses == before.addresses, "it serves at the same port"
            assert after.moved_at_s > before.published_at_s
            model.close()
            mover.process.send_signal(signal.SIGTERM)
            assert mover.process.wait(10) == 0
            assert mover.process.stderr is not None
            assert "Traceback" not in mover.process.stderr.read()
