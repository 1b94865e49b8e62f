"""The one persistent key of a peer: its libp2p identity.

Keys are Ed25519. libp2p gives such a peer an id that *is* its public key (an
"identity" multihash of the protobuf-encoded key), so whoever knows the id can
check a signature and no public key has to travel with a record.

    public key     08 01 12 20 <32 bytes>          libp2p PublicKey protobuf, type Ed25519
    private key    08 01 12 40 <seed, public>      libp2p PrivateKey protobuf: the file's content
    peer id        00 24 <public key>              base58 of it starts with 12D3KooW
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from bloombee.core import PeerId
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

_PUBLIC_PREFIX = bytes.fromhex("08011220")
_PRIVATE_PREFIX = bytes.fromhex("08011240")
_PEER_PREFIX = bytes.fromhex("0024")
_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's key pair: `peer_id` in base58 and `public_key` as libp2p protobuf.

    `path` is the file it came from, None when it lives in memory only.
    """

    peer_id: PeerId
    public_key: bytes
    path: Path | None
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def load_or_create(cls, path: Path | None) -> Identity:
        """The identity kept in `path`, made there (mode 0600) when missing.

        None gives a new identity that is not kept. Raises SettingsError when the
        file can't be read or written, or isn't one of our key files.
        """
        if path is None:
            return cls._from_key(Ed25519PrivateKey.generate(), None)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = _create_file(path)
        except OSError as error:
            raise SettingsError(_unusable(path, error.strerror)) from error
        return cls._from_key(_parse_file(path, content), path)

    @classmethod
    def _from_key(cls, key: Ed25519PrivateKey, path: Path | None) -> Identity:
        public_key = _PUBLIC_PREFIX + key.public_key().public_bytes_raw()
        return cls(peer_id_of(public_key), public_key, path, key)

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature of `data`; deterministic."""
        return self._key.sign(data)

    def libp2p_private_key(self) -> bytes:
        """The private key as libp2p protobuf, for the daemon that dials as this peer."""
        return _private_file(self._key)


def peer_id_of(public_key: bytes) -> PeerId:
    """The id of the peer with this libp2p public key."""
    return PeerId(base58.b58encode(_PEER_PREFIX + public_key).decode())


def peer_id_bytes(peer_id: str) -> bytes | None:
    """The binary form of an Ed25519 peer id, or None when it isn't one."""
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    prefix = _PEER_PREFIX + _PUBLIC_PREFIX
    return raw if raw.startswith(prefix) and len(raw) == len(prefix) + _KEY_BYTES else None


def public_key_of(peer_id: str) -> bytes | None:
    """The libp2p public key that an Ed25519 peer id carries, or None when it isn't one."""
    raw = peer_id_bytes(peer_id)
    return None if raw is None else raw[len(_PEER_PREFIX) :]


def verify(peer_id: str, public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` is by `public_key`, and that key is `peer_id`'s.

    Never raises: malformed keys, ids and signatures are just not valid.
    """
    if public_key_of(peer_id) != public_key:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key[len(_PUBLIC_PREFIX) :])
        key.verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _private_file(key: Ed25519PrivateKey) -> bytes:
    return _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()


def _parse_file(path: Path, content: bytes) -> Ed25519PrivateKey:
    if len(content) != len(_PRIVATE_PREFIX) + 2 * _KEY_BYTES or not content.startswith(
        _PRIVATE_PREFIX
    ):
        raise SettingsError(_unusable(path, "it holds no Ed25519 libp2p key"))
    seed = content[len(_PRIVATE_PREFIX) : -_KEY_BYTES]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != content[-_KEY_BYTES:]:
        raise SettingsError(_unusable(path, "its two halves don't match, so it is damaged"))
    if path.stat().st_mode & 0o077:
        _log.warning("identity file %s can be read by others; run: chmod 600 %s", path, path)
    return key


def _create_file(path: Path) -> bytes:
    """Write a new key; returns what the file holds, also when another process was faster."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_private_file(Ed25519PrivateKey.generate()))
            # A link never replaces: of two processes that start at once, both get one key.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(_unusable(path, error.strerror)) from error


def _unusable(path: Path, reason: str | None) -> str:
    return (
        f"identity file {path} can't be used: {reason or 'unknown error'}; "
        "give --identity another path (a new key is made there) or restore the file"
    )
