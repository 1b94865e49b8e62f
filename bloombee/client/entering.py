"""Writing steps into the books of a session: cut to parts, encoded, numbered."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float

from bloombee.client.circuit import Circuit
from bloombee.client.history import History, ids_of
from bloombee.client.ledger import NO_OPERATIONS, Ledger, PendingStep
from bloombee.client.looping import Loop
from bloombee.client.payloads import decode_rows, encode_ids, encode_rows
from bloombee.client.prefixes import Beginning
from bloombee.client.split import Part, part_tokens, split
from bloombee.client.terms import SessionTerms
from bloombee.client.work import Work
from bloombee.compression import Buffer
from bloombee.config.client import ClientSettings
from bloombee.protocol.messages import Payload


class Entering:
    """Enters the steps of one session."""

    def __init__(
        self, circuit: Circuit, terms: SessionTerms, history: History, settings: ClientSettings
    ) -> None:
        self.max_step_tokens = 0
        self.entered = 0
        """How many steps are in the history, whatever became of them since."""
        self.beginning: Beginning | None = None
        """Until the first step: what stages may hold of it already."""
        self._circuit = circuit
        self._ledger: Ledger = circuit.ledger
        self._terms = terms
        self._history = history
        self._settings = settings

    def measure(self) -> None:
        """Let steps be as large as the stages that are open take them."""
        allowed = min(seat.standing.max_step_tokens for seat in self._circuit.seats)
        self.max_step_tokens = self._terms.step_tokens(allowed, self._settings.payload_bytes)

    def enter(self, work: Work, loop: Loop | None = None) -> list[PendingStep]:
        """Count the parts of `work` as pending; nothing is sent yet. `loop` begins with them."""
        if self.beginning is not None:
            self.beginning.check(work.table, work.entries)
        operations = self._history.apply(work.operations)
        self._history.append(work.table, work.entries)
        self.entered += 1
        if self.beginning is not None:
            work = self.beginning.first(replace(work, operations=operations))
            self.beginning, operations = None, work.operations
        steps: list[PendingStep] = []
        parts = list(split(work.table, work.want, self._part_tokens(work)))
        for part in parts:
            payload, content = self._encoded(work, part)
            step = PendingStep(
                self._ledger.number(),
                part,
                operations,
                work.phase,
                payload,
                content,
                self._settings.trace,
            )
            operations = NO_OPERATIONS
            if loop is not None:
                loop.attach(step, is_whole=len(parts) == 1)
            self._ledger.enter(step)
            steps.append(step)
        return steps

    def _encoded(self, work: Work, part: Part) -> tuple[Payload, Buffer]:
        if work.rows is None:
            return encode_ids(ids_of(work.entries[part.start : part.stop]))
        rows = work.rows[part.start : part.stop]
        return encode_rows(rows, self._terms.dtype, self._circuit.rows_in(work.phase))

    def _part_tokens(self, work: Work) -> int:
        tokens, stages = work.table.tokens, len(self._circuit.seats)
        if self._settings.barrier and work.phase == "decode":
            parts = self._settings.micro_batches or stages
            return min(self.max_step_tokens, -(-tokens // parts))
        one_stage = work.phase != "prefill" or stages == 1
        if self._terms.whole_prompts or (one_stage and tokens <= self.max_step_tokens):
            return tokens
        return part_tokens(tokens, stages, self._settings.prefill_tokens, self.max_step_tokens)

    def rows_of(self, step: PendingStep) -> Float[torch.Tensor, "R D"]:
        """The rows of a part's answer, which is here."""
        output, content = step.answer.result()
        part = step.part
        rows = {"all": part.table.tokens, "last": len(part.table.counts), "none": 0}[part.wants]
        shape = (rows, self._terms.hidden_size)
        return decode_rows(output.payload, content, shape, self._terms.dtype)[: part.kept]
