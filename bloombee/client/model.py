"""The model class that stands in for a transformers one: its blocks are on other machines.

`DistributedModelForCausalLM` holds embeddings, final norm and head. Its `forward`
packs the new tokens of a batch, embeds them, sends them through a session, and
turns what comes back into logits; `generate` is transformers' own, see
`model_generation`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Coroutine
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from bloombee.client.batch import Backend, BatchTerms, RemoteBatch
from bloombee.client.cache import RemoteCache
from bloombee.client.embedding import Tokens, embed_entries
from bloombee.client.inputs import Inputs, check_ids, check_positions, read_inputs
from bloombee.client.links import deadline
from bloombee.client.loop import LoopThread
from bloombee.client.many import ManyPromptsMixin
from bloombee.client.model_generation import RemoteGenerationMixin
from bloombee.client.packing import Packing
from bloombee.client.payloads import WIRE_DTYPES
from bloombee.client.session import RemoteSession
from bloombee.client.split import Want
from bloombee.client.swarm_access import SwarmAccess
from bloombee.client.terms import SessionTerms
from bloombee.client.traffic import Progress, Traffic, merged
from bloombee.config.client import ClientSettings
from bloombee.core import Route
from bloombee.errors import RequestError, Unsupported
from bloombee.models import ModelEnds, ModelSource


@dataclass(frozen=True, slots=True)
class Computed:
    """What one call computed, for the columns that logits are wanted of."""

    logits: Float[torch.Tensor, "B S V"]
    states: Float[torch.Tensor, "B S N"]


class DistributedModelForCausalLM(ManyPromptsMixin, RemoteGenerationMixin, PreTrainedModel):
    """A causal language model whose blocks are computed by a swarm.

    Made by `AutoDistributedModelForCausalLM.from_pretrained`. Use it as you would a
    transformers model, for inference: `generate` (greedy, sampling with `seed=`,
    beams, processors, criteria, streamers), `forward`, and
    `with model.inference_session(max_length=...)` for several turns; or take tokens from
    `decode`. `route` and `traffic` are those of the session opened last, and of all that
    were opened for one call.
    """

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(
        self, source: ModelSource, ends: ModelEnds, access: SwarmAccess, loop: LoopThread
    ) -> None:
        config = copy.deepcopy(source.config)
        config._attn_implementation = "eager"
        super().__init__(config)
        self.generation_config = source.generation_config()
        self.source = source
        self._shown: list[Progress] = []
        self._ends = ends
        self._access = access
        self._loop = loop
        self._closer = weakref.finalize(self, _release, loop, access)
        super().train(False)

    # What it is ------------------------------------------------------------------

    @property
    def route(self) -> Route | None:
        """The stages of the session opened last, as they are now; None before the first."""
        return self._shown[-1].route if self._shown else None

    @property
    def traffic(self) -> Traffic | None:
        """What the session opened last has moved; None before the first."""
        return merged([each.traffic for each in self._shown]) if self._shown else None

    @property
    def device(self) -> torch.device:
        """Where embeddings and head are."""
        return torch.device(self._ends.device)

    @property
    def dtype(self) -> torch.dtype:
        """Type of rows and logits."""
        return self._ends.dtype

    @property
    def settings(self) -> ClientSettings:
        """Deadlines and limits of its sessions."""
        return self._access.settings

    def get_input_embeddings(self) -> torch.nn.Module:
        """What turns ids into `inputs_embeds`, for prompts of embeddings."""
        return self._ends.embeddings

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return self.source.vocab_size

    @property
    def loop(self) -> LoopThread:
        """Where its sessions run."""
        return self._loop

    @property
    def access(self) -> SwarmAccess:
        """How it finds and reaches servers."""
        return self._access

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises ModelError when it has none."""
        return self.source.tokenizer()

    def close(self) -> None:
        """Leave the swarm. Also happens by garbage collection and at exit."""
        if self._closer.detach() and self._loop.is_open:
            self._loop.run(self._access.close())

    # What it computes --------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: RemoteCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits `[B, S, V]` of a batch `[B, S]` of ids or `[B, S, D]` of embeddings.

        Equal to the local model's at unmasked positions; a masked position repeats the
        last unmasked one before it. With `cache` the batch continues what that holds;
        inside an `inference_session` it continues the session; else nothing stays on
        the servers, unless `use_cache=True` asks for a cache. `hidden_states` holds
        the last hidden states only, those after the final norm.

        Raises RequestError or Unsupported for what can't be done, before anything is
        sent, and the errors of `RemoteSession.step`.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        positions = kwargs.pop("position_ids", None)
        _refuse(kwargs, inputs_embeds)
        held = self._held(cache, use_cache)
        past = None if held is None else held.batch
        inputs = read_inputs(input_ids, inputs_embeds, attention_mask, past)
        everything = bool(output_hidden_states) or labels is not None
        with self.within(None), self._working(held, inputs, use_cache) as working:
            keep = 0 if everything else logits_to_keep
            computed = self._compute(working.batch, inputs, positions, keep)
        logits, states = computed.logits, computed.states
        if everything:
            logits = logits[:, _kept(logits_to_keep)]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=working if held is not None or use_cache else None,
            hidden_states=(states,) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _held(self, cache: object, use_cache: bool | None) -> RemoteCache | None:
        if cache is None:
            session = self.active_session
            return None if session is None or use_cache is False else session.cache
        if not isinstance(cache, RemoteCache):
            raise RequestError(
                f"the cache is a {type(cache).__name__}: leave it out, or pass one of this model's"
            )
        return cache

    @contextmanager
    def _working(self, held: RemoteCache | None, inputs: Inputs, use_cache: bool | None):
        """The cache of a call: the one held, a new one to return, or one for this call only."""
        if held is not None:
            yield held
            return
        longest = max(inputs.packing().counts)
        made = self.new_cache(BatchTerms(inputs.batch, longest, growable=bool(use_cache)))
        try:
            yield made
        finally:
            if not use_cache:
                made.close()

    @torch.no_grad()
    def _compute(
        self,
        batch: RemoteBatch,
        inputs: Inputs,
        positions: torch.Tensor | None,
        keep: int | torch.Tensor,
    ) -> Computed:
        if batch.sharing > 1 and not inputs.repeats(batch.sharing):
            batch.stop_sharing()
        group = batch.sharing
        own = inputs.every(group)
        packing = own.packing()
        if positions is not None:
            check_positions(positions[::group], packing, batch.lengths[::group])
        last_only = inputs.columns == 1 or (isinstance(keep, int) and keep == 1)
        states = self._states(batch, own, packing, last_only)
        batch.extend(packing, inputs.mask, _repeated(states[:, -1], group))
        states = states if last_only else states[:, _kept(keep)]
        logits = self._ends.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        return Computed(_repeated(logits, group), _repeated(states, group))

    def _states(
        self, batch: RemoteBatch, own: Inputs, packing: Packing, last_only: bool
    ) -> torch.Tensor:
        """Last hidden states `[B, S, N]` of the new columns, or `[B, 1, N]` of the last."""
        batch.check_results(packing)
        carried = None if batch.carried is None else batch.carried[:: batch.sharing]
        if not packing.tokens:
            width = self._ends.hidden_size
            known = carried if carried is not None else torch.zeros(own.batch, width)
            return known.to(self.dtype)[:, None].expand(-1, 1 if last_only else own.columns, -1)
        prompt = batch.columns == 0 or own.columns > 1
        want: Want = "last" if last_only else "all"
        tokens = own.tokens(packing)
        check_ids(tokens, self.source.vocab_size)
        rows = batch.advance(packing, tokens, want, "prefill" if prompt else "decode")
        normed = self._ends.norm(rows.to(self.device))
        if last_only:
            return packing.unpack_last(normed, carried)[:, None]
        return packing.unpack(normed, carried)

    # What it works with --------------------------------------------------------------

    def new_cache(self, terms: BatchTerms) -> RemoteCache:
        """An empty cache; see `new_batch`."""
        return RemoteCache(self.new_batch(terms))

    def new_batch(self, terms: BatchTerms) -> RemoteBatch:
        """An empty batch; its session opens with the first tokens.

        Raises RequestError when `terms` ask for longer rows than the model takes, or
        the model is closed.
        """
        if not self._closer.alive:
            raise RequestError("the model is closed: load it again with from_pretrained")
        self.check_length(terms.max_length)
        limit = self.source.max_length
        embed = partial(_embed, self._ends)
        opening = partial(self._opening, background=terms.background, server_head=terms.server_head)
        backend = Backend(opening, embed, self._loop, limit, self.left_s)
        return RemoteBatch(terms, backend)

    def check_length(self, tokens: int) -> None:
        """Raise RequestError when the model can't hold so many tokens in a row."""
        if tokens > self.source.max_length:
            raise RequestError(
                f"{tokens} tokens are more than {self.source.name} takes "
                f"({self.source.max_length}): shorten the prompt or max_new_tokens"
            )

    def _opening(
        self,
        sequences: int,
        max_length: int,
        prompts: tuple[tuple[int, ...], ...] = (),
        *,
        background: bool = False,
        server_head: bool = False,
    ) -> Coroutine[Any, Any, RemoteSession]:
        self.check_length(max_length)
        terms = self.session_terms(
            sequences, max_length, prompts, background=background, server_head=server_head
        )
        return self._open(terms, self.left_s() or self.settings.request_s)

    def session_terms(
        self,
        sequences: int,
        max_length: int,
        prompts: tuple[tuple[int, ...], ...] = (),
        *,
        background: bool = False,
        server_head: bool = False,
    ) -> SessionTerms:
        """What a session of the model reserves."""
        return SessionTerms(
            self.source.fingerprint,
            sequences,
            max_length,
            self.source.hidden_size,
            WIRE_DTYPES[self.dtype],
            self.source.whole_prompts,
            prompts,
            background,
            server_head,
            self.access.settings.lossless,
        )

    async def _open(self, terms: SessionTerms, within_s: float) -> RemoteSession:
        embed = partial(embed_entries, partial(_embed, self._ends))
        async with deadline(within_s, "opening a session"):
            session = await self._access.open(terms, self._loop.tasks, embed)
        self._shown = self.shown_together(session.progress)
        return session

    # What it is not --------------------------------------------------------------------

    def train(self, mode: bool = True) -> DistributedModelForCausalLM:
        """Raises Unsupported: a swarm serves inference only."""
        if mode:
            _unsupported("training", "fine-tune a local copy of the model")
        return super().train(mode)

    def resize_token_embeddings(self, *_: object, **__: object) -> NoReturn:
        """Raises Unsupported: all clients of a swarm share one vocabulary."""
        _unsupported("resizing the embeddings", "use the vocabulary of the model as it is")

    def save_pretrained(self, *_: object, **__: object) -> NoReturn:
        """Raises Unsupported: this process holds no blocks."""
        _unsupported("saving", "copy the model's own files")


@torch.no_grad()
def _embed(ends: ModelEnds, tokens: Tokens, positions: torch.Tensor) -> torch.Tensor:
    positions = positions.to(ends.device)
    if tokens.ids is not None:
        return ends.embed(tokens.ids.to(ends.device), positions)
    if tokens.embeds is None:
        raise RequestError("a step needs token ids or embeddings")
    return ends.place(tokens.embeds.to(ends.device, ends.dtype), positions)


# Read by stopping criteria and assistants; `generate` hands them on to `forward` all the same.
_READ = ("tokenizer", "assistant_tokenizer")


def _refuse(unknown: dict[str, Any], inputs_embeds: torch.Tensor | None) -> None:
    if unknown.pop("output_attentions", None):
        _unsupported("output_attentions", "attention weights never leave the servers; leave it out")
    if inputs_embeds is not None and inputs_embeds.requires_grad and torch.is_grad_enabled():
        _unsupported("gradients", "detach the embeddings, or call it under torch.no_grad()")
    given = [name for name, value in unknown.items() if value is not None and name not in _READ]
    if given:
        raise RequestError(f"forward does not take {', '.join(given)}: leave it out")


def _unsupported(what: str, mend: str) -> NoReturn:
    raise Unsupported(f"{what} is not possible with a distributed model: {mend}")


def _kept(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """The columns that `logits_to_keep` names, as transformers reads it."""
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None) if logits_to_keep else slice(None)
    return logits_to_keep


def _repeated(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=0)


def _release(loop: LoopThread, access: SwarmAccess) -> None:
    loop.post(access.close())
