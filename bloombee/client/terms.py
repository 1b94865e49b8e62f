"""What a session is opened for, and how large its steps may be."""

from __future__ import annotations

from dataclasses import dataclass

from bloombee.compression import row_bytes
from bloombee.protocol.messages import WireDtype


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a session reserves, and the rows that travel in it: `[T, hidden_size]` of `dtype`.

    With `whole_prompts` no step is split: the model rotates by the length of the call.
    `prompts`, if given, are those that the first step is going to bring, of each sequence.
    What it does in the `background` gives way to others at the servers. With `server_head`
    they choose its tokens. Unless it is `lossless` its rows may lose something on their way,
    where servers are set to that.
    """

    fingerprint: str
    sequences: int
    max_length: int
    hidden_size: int
    dtype: WireDtype
    whole_prompts: bool = False
    prompts: tuple[tuple[int, ...], ...] = ()
    background: bool = False
    server_head: bool = False
    lossless: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire, uncompressed."""
        return row_bytes(self.hidden_size, self.dtype)

    def step_tokens(self, allowed: int, payload_bytes: int) -> int:
        """How many tokens one step may carry where servers take `allowed`."""
        if self.whole_prompts:
            return allowed
        return max(1, min(payload_bytes // self.row_bytes, allowed))
