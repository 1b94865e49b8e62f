"""A client that is given a file for its key is the same peer whenever it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from bloombee.client import auto
from bloombee.client.auto import LocalShare
from bloombee.errors import SwarmError

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.swarm.identity import Identity


def test_the_key_in_the_file_is_the_client_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    class NoNode:
        @staticmethod
        async def start(_: object, identity: Identity) -> NoReturn:
            joined.append(identity.peer_id)
            raise SwarmError("nobody is there")

    monkeypatch.setattr(auto, "SwarmNode", NoNode)
    nothing: Any = object()
    share = LocalShare(nothing, nothing)
    for identity in (tmp_path / "me.key", str(tmp_path / "me.key"), None, None):
        with pytest.raises(SwarmError, match="nobody is there"):
            share.join(("/ip4/127.0.0.1/tcp/1",), identity=identity)
    assert joined[0] == joined[1]
    assert len(set(joined)) == 3
