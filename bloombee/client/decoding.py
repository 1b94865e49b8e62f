"""Tokens chosen on the servers, as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bloombee.protocol.messages import Sampling

Finished = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of row `row` of the prompts; `finished` says whether and why it is the last.

    `logprob` is None unless `Sampling.logprobs` asked for it; `alternatives` are the
    likeliest ids with theirs.
    """

    row: int
    id: int
    finished: Finished = ""
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Decodes(Protocol):
    """What `DistributedModelForCausalLM` offers to whoever wants tokens one by one."""

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Tokens of all `prompts` (one `sampling` each), as the servers choose them.

        One session, opened with the first `anext` and closed when all rows are finished
        or the generator is (`aclose`, cancellation). For any event loop, the client's own
        too. Of one row tokens come in order; rows don't wait for the caller. `context` of a
        sampling with penalties may be left empty: it is the prompt then.

        Raises RequestError before anything is sent, and later what `RemoteSession.step` does.
        """
        ...
