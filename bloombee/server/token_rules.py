"""What a server accepts of steps that choose tokens, and of those that come round a loop."""

from __future__ import annotations

from bloombee.errors import ProtocolError, RequestError, Unsupported
from bloombee.protocol.messages import Step
from bloombee.server.validation import NO_OPERATIONS, Rule, StepContext, judge

MOST_LOGPROBS = 1 << 15
"""In one output: half a megabyte."""

_RULES: tuple[Rule[Step, StepContext], ...] = (
    Rule(
        lambda m, c: bool(m.sampling) and len(m.sampling) != len(m.sequences),
        RequestError,
        lambda m, c: (
            f"step {m.step} has sampling for {len(m.sampling)} of {len(m.sequences)} sequences: "
            "send one or None for each"
        ),
    ),
    Rule(
        lambda m, c: sum(s.logprobs for s in m.sampling if s is not None) > MOST_LOGPROBS,
        RequestError,
        lambda m, c: (
            f"step {m.step} asks for more than {MOST_LOGPROBS} log-probabilities a token of all "
            "its sequences: ask for fewer alternatives"
        ),
    ),
    Rule(
        lambda m, c: (m.loop or bool(m.sampling)) and (m.replay or m.phase == "verify"),
        Unsupported,
        lambda m, c: f"step {m.step} replays or verifies, and asks for tokens: send them apart",
    ),
    Rule(
        lambda m, c: m.loop and None in m.sampling,
        RequestError,
        lambda m, c: f"step {m.step} loops without sampling for some sequence: send it for all",
    ),
    Rule(
        lambda m, c: m.loop and _longest(m) > c.terms.max_length,
        RequestError,
        lambda m, c: (
            f"step {m.step} may loop up to {_longest(m)} tokens, the session was opened with "
            f"max_length {c.terms.max_length}"
        ),
    ),
)

_LOOPED_RULES: tuple[Rule[Step, StepContext], ...] = (
    Rule(
        lambda m, c: not m.loop or bool(m.sampling) or m.replay or m.operations != NO_OPERATIONS,
        ProtocolError,
        lambda m, c: f"step {m.step} came from the last stage, and does not just go on in its loop",
    ),
    Rule(
        lambda m, c: m.payload.content != "ids" or m.payload.rows != len(m.sequences),
        ProtocolError,
        lambda m, c: f"step {m.step} came from the last stage without one id a sequence",
    ),
)


def check_tokens(message: Step, context: StepContext, *, looped: bool) -> None:
    """Whether what a sound step wants of tokens can be done, and fits where it comes from.

    `looped`: it comes from the last stage. Raises RequestError, Unsupported, or ProtocolError.
    """
    if message.sampling or message.loop:
        judge(_RULES, message, context)
    if looped:
        judge(_LOOPED_RULES, message, context)
    elif message.loop and not message.sampling and context.takes_ids:
        raise ProtocolError(f"step {message.step} begins a loop without sampling")


def _longest(step: Step) -> int:
    """The most tokens that a sequence can hold at the end of a loop; its last is not fed back."""
    rows = zip(step.first_positions, step.counts, step.sampling, strict=False)
    return max((f + c + (s.budget if s else 1) - 1 for f, c, s in rows), default=0)
