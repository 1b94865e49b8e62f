"""The handshake: what a Hello signs, how it is checked, and which version is spoken.

The listener challenges with a fresh nonce. The dialer signs it together with the
hash of the certificate it sees, both peers, the time and the versions offered,
so that a Hello is worth nothing on another connection, to another server, or
after a downgrade. In a private swarm it also proves that it knows the shared
key. Pure: clocks, nonces, signing and verification are passed in.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloombee.core import PeerId
from bloombee.errors import AuthError, ProtocolError, VersionMismatch
from bloombee.protocol.messages import VERSION, Challenge, Hello
from bloombee.protocol.text import one_line

VERSIONS = (VERSION,)
"""The protocol versions this program speaks, best first."""

MAX_SKEW_S = 120.0
"""How far two clocks may differ; the nonce already stops replays, so it is generous."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes, bytes], bool]
"""(peer, public key, signed bytes, signature) -> whether all three belong together."""

_DOMAIN = b"bloombee hello\x00"


@dataclass(frozen=True, slots=True)
class Greeting:
    """What both ends of one connection know about it before the Hello.

    `certificate_hash` is that of the listener's certificate: the one the dialer
    has pinned, and the one the listener shows.
    """

    challenge: Challenge
    certificate_hash: bytes
    swarm_key: bytes | None = None

    def signed_bytes(self, dialer: PeerId, version: int, time_s: float) -> bytes:
        """What the Hello's signature covers; every field carries its length."""
        fields = (
            self.challenge.nonce,
            self.certificate_hash,
            self.challenge.peer.encode(),
            dialer.encode(),
            struct.pack("<Id", version, time_s),
            struct.pack(f"<{len(self.challenge.versions)}I", *self.challenge.versions),
        )
        framed = (struct.pack("<I", len(field)) + field for field in fields)
        return _DOMAIN + b"".join(framed)

    def swarm_proof(self, signed: bytes) -> bytes:
        """The keyed hash that shows knowledge of the swarm's key; empty in a public swarm."""
        if self.swarm_key is None:
            return b""
        return hmac.new(self.swarm_key, signed, hashlib.sha256).digest()


def negotiate(offered: Sequence[int]) -> int:
    """The best version both sides speak; raises VersionMismatch when there is none."""
    common = set(offered) & set(VERSIONS)
    if not common:
        raise VersionMismatch(
            f"no common protocol version: the server speaks {_listing(offered)}, "
            f"we speak {_listing(VERSIONS)}; update the older side"
        )
    return max(common)


def answer(greeting: Greeting, dialer: PeerId, public_key: bytes, sign: Sign, now: float) -> Hello:
    """The Hello that answers a challenge.

    Raises VersionMismatch, or AuthError when the clocks are too far apart.
    """
    version = negotiate(greeting.challenge.versions)
    check_skew(greeting.challenge.time_s, now, "server")
    signed = greeting.signed_bytes(dialer, version, now)
    return Hello(
        version=version,
        peer=dialer,
        public_key=public_key,
        time_s=now,
        signature=sign(signed),
        swarm_proof=greeting.swarm_proof(signed),
    )


def check(greeting: Greeting, hello: Hello, verify: Verify, now: float) -> PeerId:
    """The dialer's proven identity.

    Raises VersionMismatch for a version we did not offer, ProtocolError when the
    time is no time, and AuthError for a wrong signature (also one made for
    another connection, server or certificate), a wrong swarm key or clocks too far apart.
    """
    if hello.version not in greeting.challenge.versions:
        raise VersionMismatch(
            f"the client speaks protocol version {hello.version}, "
            f"we speak {_listing(greeting.challenge.versions)}; update the older side"
        )
    check_skew(hello.time_s, now, "client")
    dialer = PeerId(hello.peer)
    signed = greeting.signed_bytes(dialer, hello.version, hello.time_s)
    if not verify(dialer, hello.public_key, signed, hello.signature):
        raise AuthError(
            f"the signature of {one_line(dialer, 80) or 'a nameless peer'} does not fit "
            "this connection: wrong key, or a hello made for another server or certificate"
        )
    if not hmac.compare_digest(greeting.swarm_proof(signed), hello.swarm_proof):
        raise AuthError(_wrong_key(greeting, hello))
    return dialer


def check_skew(theirs_s: float, ours_s: float, who: str) -> None:
    """Refuse clocks over MAX_SKEW_S apart.

    Raises AuthError with the difference, ProtocolError when `theirs_s` is not finite.
    """
    skew_s = theirs_s - ours_s
    if skew_s != skew_s or abs(skew_s) == float("inf"):
        raise ProtocolError(f"the {who} sent {theirs_s} as its time")
    if abs(skew_s) > MAX_SKEW_S:
        word = "ahead of" if skew_s > 0 else "behind"
        raise AuthError(
            f"the {who}'s clock is {abs(skew_s):.0f} s {word} ours (limit {MAX_SKEW_S:.0f} s): "
            "set both clocks, for example with NTP"
        )


def _wrong_key(greeting: Greeting, hello: Hello) -> str:
    if greeting.swarm_key is None:
        return "this swarm is public, but the client sent a swarm key: leave it out"
    if not hello.swarm_proof:
        return "this swarm is private: give its swarm key"
    return "wrong swarm key: use the one that the swarm's servers were started with"


def _listing(versions: Sequence[int]) -> str:
    return one_line(", ".join(map(str, versions[:20])) or "none", 80)
