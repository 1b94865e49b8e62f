"""Identifiers as their own types, so that a peer is never mistaken for a session."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""A peer's libp2p identity in base58 (the hash of its public key)."""

SessionId = NewType("SessionId", bytes)
"""Sixteen random bytes chosen by the client that opens the session."""

SESSION_ID_BYTES = 16
