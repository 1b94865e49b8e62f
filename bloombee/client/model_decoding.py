"""Tokens chosen on the servers, for `generate` and for whoever takes them one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from bloombee.client.batch import BatchTerms, RemoteBatch
from bloombee.client.counting import count_for
from bloombee.client.decoding import Mailbox, check_prompts
from bloombee.client.loop import LoopThread
from bloombee.client.micro_batches import MicroBatches, Strand
from bloombee.client.server_head import Request
from bloombee.client.swarm_access import SwarmAccess
from bloombee.client.terms import SessionTerms
from bloombee.client.tokens import Emit, Token, with_context
from bloombee.client.traffic import Progress
from bloombee.config.client import ClientSettings
from bloombee.planner.micro_batching import LEAST_ROWS
from bloombee.protocol.messages import Sampling

_together: ContextVar[list[Progress] | None] = ContextVar("bloombee_together", default=None)
"""The sessions of one call."""


class RemoteDecodingMixin:
    """What a distributed model does with the server head."""

    if TYPE_CHECKING:

        def new_batch(self, terms: BatchTerms) -> RemoteBatch:
            """See `DistributedModelForCausalLM`."""
            ...

        def check_length(self, tokens: int) -> None:
            """See `DistributedModelForCausalLM`."""
            ...

        def session_terms(
            self, sequences: int, max_length: int, *, server_head: bool
        ) -> SessionTerms:
            """See `DistributedModelForCausalLM`."""
            ...

        def within(self, deadline_s: float | None) -> AbstractContextManager[None]:
            """See `RemoteGenerationMixin`."""
            ...

        @property
        def settings(self) -> ClientSettings:
            """See `DistributedModelForCausalLM`."""
            ...

        @property
        def vocabulary(self) -> int:
            """See `DistributedModelForCausalLM`."""
            ...

        @property
        def loop(self) -> LoopThread:
            """See `DistributedModelForCausalLM`."""
            ...

        @property
        def access(self) -> SwarmAccess:
            """See `DistributedModelForCausalLM`."""
            ...

    @staticmethod
    def shown_together(progress: Progress) -> list[Progress]:
        """The sessions of this call so far, with one more."""
        together = _together.get()
        if together is None:
            return [progress]
        together.append(progress)
        return together

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> AsyncGenerator[Token, None]:
        """Tokens of all `prompts` (one `sampling` each), as the servers choose them.

        One session, opened with the first `anext` and closed when all rows are finished
        or the generator is (`aclose`, cancellation). For any event loop, the client's own
        too. Of one row tokens come in order; rows don't wait for the caller. `context` of a
        sampling with penalties may be left empty: it is the prompt then. It takes at most
        `deadline_s` and the settings' `request_s`. In the `background` it gives way to others at
        the servers.

        Raises RequestError before anything is sent, and later what `RemoteSession.decode`
        does.
        """
        check_prompts(prompts, sampling, self.vocabulary)
        chosen = [with_context(each, ids) for each, ids in zip(sampling, prompts, strict=True)]
        strand = Strand(0, tuple(prompts), tuple(chosen), background=background)
        self.check_length(strand.terms.max_length)
        mailbox = Mailbox()

        async def work() -> None:
            with self.within(deadline_s):
                await MicroBatches(self.new_batch, mailbox.put).run([strand])

        begun = self.loop.begin(work(), mailbox.close)
        try:
            async for token in mailbox:
                yield token
            begun.check()
        finally:
            begun.cancel()
            await mailbox.closed()

    def stream_tokens(
        self, request: Request, held: RemoteBatch | None
    ) -> Iterator[Sequence[Token]]:
        """Tokens of a call of `generate`, in its thread; of new sessions or of `held`."""
        if held is not None:
            yield from self._continue(request, held)
            return

        async def work(emit: Emit) -> None:
            _together.set([])
            strand, batches = request.strand, MicroBatches(self.new_batch, emit)
            rows, known = len(strand.prompts), self.access.descriptions
            if self.settings.micro_batches is not None or rows < 2 * LEAST_ROWS:
                await batches.run(strand.split(min(self.settings.micro_batches or 1, rows)))
                return
            terms = self.session_terms(LEAST_ROWS, strand.terms.max_length, server_head=True)
            route = await self.access.likely_route(terms)
            count = count_for(rows, route, known, terms)
            await batches.run(strand.split(count), known.keep(route))

        yield from self.loop.stream(work)

    def _continue(self, request: Request, held: RemoteBatch) -> Iterator[Sequence[Token]]:
        strand, before = request.strand, held.lengths
        if held.sharing > 1:
            held.stop_sharing()

        async def work(emit: Emit) -> None:
            await held.decode(strand.prompts, strand.samplings, emit, 0)

        try:
            yield from self.loop.stream(work)
        finally:
            held.settle(request.packing, request.mask, before)
