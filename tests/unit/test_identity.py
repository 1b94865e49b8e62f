"""One key per peer: made once, kept private, checked against the peer id."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from bloombee.errors import SettingsError
from bloombee.swarm.identity import Identity, peer_id_of, public_key_of, verify

if TYPE_CHECKING:
    from pathlib import Path


def test_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]
    assert Identity.load_or_create(path) == made
    assert made.peer_id.startswith("12D3KooW")


def test_two_starts_at_once_share_one_key(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: Identity.load_or_create(path).peer_id, range(8)))
    assert len(set(made)) == 1


def test_unkept_identities_differ() -> None:
    assert Identity.load_or_create(None).peer_id != Identity.load_or_create(None).peer_id


def test_file_holds_the_libp2p_form(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    made = Identity.load_or_create(path)
    content = path.read_bytes()
    assert content == made.libp2p_private_key()
    assert content[:4] == bytes([8, 1, 18, 64]) and len(content) == 68
    assert content[36:] == made.public_key[4:]


def test_peer_id_is_that_of_the_libp2p_specification() -> None:
    # Test vector of the libp2p peer-id specification (Ed25519).
    public = bytes.fromhex(
        "08011220" + "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    peer_id = peer_id_of(public)
    assert public_key_of(peer_id) == public
    assert peer_id == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@pytest.mark.parametrize(
    "content",
    [b"", b"not a key", bytes([8, 1, 18, 64]) + bytes(63), bytes([8, 1, 18, 64]) + b"x" * 64],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="identity file .*identity can't be used") as caught:
        Identity.load_or_create(path)
    assert "\n" not in str(caught.value) and "--identity" in str(caught.value)
    assert path.read_bytes() == content


def test_rsa_identities_of_hivemind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"\x08\x00\x12\xa7\x09" + RSAPrivateKey().to_bytes())
    with pytest.raises(SettingsError, match="no Ed25519"):
        Identity.load_or_create(path)


def test_a_folder_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Is a directory"):
        Identity.load_or_create(tmp_path)


def test_signatures_hold_for_one_peer_key_and_text() -> None:
    one, other = Identity.load_or_create(None), Identity.load_or_create(None)
    signature = one.sign(b"text")
    assert verify(one.peer_id, one.public_key, b"text", signature)
    assert not verify(one.peer_id, one.public_key, b"other text", signature)
    assert not verify(one.peer_id, other.public_key, b"text", signature)
    assert not verify(other.peer_id, other.public_key, b"text", signature)
    assert not verify(other.peer_id, one.public_key, b"text", signature)
    assert not verify(one.peer_id, one.public_key, b"text", signature[:-1])
    assert not verify("", b"", b"text", signature)
    assert not verify("not base58 0OIl", one.public_key, b"text", signature)
    assert not verify("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", b"x", b"text", signature)
