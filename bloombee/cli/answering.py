"""One prompt, one answer: what `bloombee-generate` and the demo share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, TextStreamer

from bloombee.telemetry import Stopwatch

if TYPE_CHECKING:
    import torch

    from bloombee.client import DistributedModelForCausalLM
    from bloombee.config.settings import SamplingSettings

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One stage of the route that answered."""

    blocks: str
    peer: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The generated text and how fast it came.

    `tokens_per_s` counts the tokens after the first over their time; 0 for a single one.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    time_to_first_token_s: float
    tokens_per_s: float
    route: tuple[RouteStage, ...]
    sessions: tuple[str, ...] = ()
    """Those that it took, as `bloombee-status --trace` takes them."""

    def summary(self) -> str:
        """Speed and route, for people."""
        hops = " -> ".join(f"{stage.blocks} at {stage.peer[-8:]}" for stage in self.route)
        return (
            f"{self.new_tokens} tokens, the first after {self.time_to_first_token_s:.2f} s, "
            f"then {self.tokens_per_s:.1f} tokens/s\nroute: {hops}"
        )


def answer(
    model: DistributedModelForCausalLM,
    prompt: str,
    settings: SamplingSettings,
    write: Write = lambda _: None,
) -> Answer:
    """Generate from `prompt`, passing the text to `write` as it comes.

    Raises ModelError without a tokenizer, and what `generate` raises.
    """
    tokenizer = model.tokenizer()
    encoded = _encode(tokenizer, prompt, chat=settings.chat)
    streamer = _TimedStreamer(tokenizer, write)
    sequences = model.generate(
        **encoded,
        **_choice(settings),
        max_new_tokens=settings.max_new_tokens,
        streamer=streamer,
    )
    prompt_tokens = int(encoded["input_ids"].shape[1])
    new: list[int] = sequences[0, prompt_tokens:].tolist()
    first, last = streamer.times_s[0], streamer.times_s[-1]
    route = () if model.route is None else model.route.stages
    return Answer(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        token_ids=tuple(new),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        time_to_first_token_s=first,
        tokens_per_s=(len(new) - 1) / (last - first) if len(new) > 1 else 0.0,
        route=tuple(RouteStage(str(stage.span), stage.peer) for stage in route),
        sessions=() if model.traffic is None else tuple(model.traffic.sessions),
    )


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool
) -> dict[str, torch.Tensor]:
    if chat and tokenizer.chat_template:
        encoded: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _choice(settings: SamplingSettings) -> dict[str, Any]:
    """How the next token is chosen, in `generate`'s words; overrides the model's own."""
    if settings.temperature == 0:
        return {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
    return {
        "do_sample": True,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": 0,
        "seed": settings.seed,
    }


@dataclass
class _Clock:
    """When each token came, since the start."""

    watch: Stopwatch = field(default_factory=Stopwatch)
    times_s: list[float] = field(default_factory=list)


class _TimedStreamer(TextStreamer):
    """Passes text on and notes when tokens come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self._clock = _Clock()

    @property
    def times_s(self) -> list[float]:
        """Seconds from the start to each token."""
        return self._clock.times_s

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each token."""
        if not self.next_tokens_are_prompt:
            self._clock.times_s.append(self._clock.watch.elapsed_s)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002 - theirs
        """Text that no later token can change."""
        self._write(text)
