"""What a session is besides its KV, in the form in which it moves to another server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float

from bloombee.core import SessionId, Span
from bloombee.protocol.messages import Sampling, WireDtype
from bloombee.server.looping import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Per sequence: length, newest step, whether it is released, and the journal's rows.

    `journal` is None where none is kept. `outputs` are those that the client may ask
    for again, by step, and so are `tokens` that were chosen. `sampling` says by sequence
    how the next ones are. `included` are steps whose operations are done.
    """

    lengths: tuple[int, ...]
    newest_steps: tuple[int, ...]
    released: tuple[bool, ...]
    included: tuple[int, ...] = ()
    journal: tuple[Float[torch.Tensor, "_ D"], ...] | None = None
    outputs: tuple[tuple[int, Float[torch.Tensor, "_ D"]], ...] = ()
    tokens: tuple[tuple[int, Tokens], ...] = ()
    sampling: tuple[tuple[int, Sampling], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What both servers know of a session that moves: ids, sizes, and the rows' dtype."""

    session: SessionId
    span: Span
    sequences: int
    max_length: int
    hidden_size: int
    wire_dtype: WireDtype
