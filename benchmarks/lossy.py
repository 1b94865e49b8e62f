"""What lossy codecs do to a model's output: perplexity, and whether greedy tokens stay.

The model is cut into three spans; the rows that cross the two cuts go through encoding and
decoding, as between servers that were told `--codec lossy-...`. Layers are transformers', one
thread. The text is English: Python's language reference (`pydoc_data.topics`, in every
Python), cut into windows of tokens. Perplexity is over all tokens of a window but the first.
Agreement is the share of positions where the likeliest next token, after the same true text,
is the one without the codec. Runs of their own choice are greedy, from the starts of the
windows: how many stay the same to their end, and after how many tokens the others part.
`split` is the check: it is lossless, so nothing may change.

    python -m benchmarks.lossy [--windows 16] [--tokens 384] [--runs 16] [--new-tokens 64] [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.codec import tokenizer
from benchmarks.worker import DEMO_MODEL, Job, load
from bloombee.compression import decode, encode, wire_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CUTS = (10, 20)
START = 64
"""Tokens of text before a run of its own choice."""
PLAIN = "raw"
CODECS = {
    "float32": (PLAIN, "split", "lossy-bf16", "lossy-fp16", "lossy-int8"),
    "bfloat16": (PLAIN, "split", "lossy-int8"),
}
console = Console(width=130)


@dataclass(slots=True)
class Crossing:
    """The rows that cross the cuts, changed as a codec changes them, and its bytes."""

    codec: str
    raw_bytes: int = 0
    coded_bytes: int = 0

    def __call__(self, _module: Any, _inputs: Any, out: Any) -> Any:
        """As a hook of the block before a cut."""
        hidden = out[0] if isinstance(out, tuple) else out
        rows = hidden.reshape(-1, hidden.shape[-1])
        used, body = encode(rows, self.codec)
        self.raw_bytes += rows.nbytes
        self.coded_bytes += len(body)
        again = decode(body, used, wire_dtype(rows.dtype), *rows.shape).clone().view_as(hidden)
        return (again, *out[1:]) if isinstance(out, tuple) else again


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a model says with one codec at its cuts; `size` is coded bytes a raw one."""

    perplexity: float
    likeliest: torch.Tensor = field(repr=False)  # [windows, tokens - 1]
    runs: torch.Tensor = field(repr=False)  # [runs, new tokens]
    size: float


def windows(count: int, length: int) -> torch.Tensor:
    """`[count, length]` tokens of the language reference, nothing twice."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer()(text[: 12 * count * length])["input_ids"]
    if len(ids) < count * length:
        raise RuntimeError(f"the text has {len(ids)} tokens, {count * length} were asked for")
    return torch.tensor(ids[: count * length]).view(count, length)


@contextmanager
def crossing(model: Any, codec: str) -> Iterator[Crossing]:
    """A codec at the cuts of the model."""
    taken = Crossing(codec)
    hooks = [model.model.layers[cut - 1].register_forward_hook(taken) for cut in CUTS]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def outcome(model: Any, codec: str, text: torch.Tensor, runs: int, new_tokens: int) -> Outcome:
    """Perplexity, likeliest tokens and free runs."""
    losses, likeliest = list[torch.Tensor](), list[torch.Tensor]()
    with crossing(model, codec) as crossed:
        for window in text:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
            likeliest.append(logits.argmax(dim=-1))
        size = crossed.coded_bytes / crossed.raw_bytes
        starts = text[:runs, :START]
        found = model.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    perplexity = math.exp(float(torch.stack(losses).mean()))
    return Outcome(perplexity, torch.stack(likeliest), found[:, starts.shape[1] :], size)


def row(codec: str, found: Outcome, plain: Outcome) -> Sequence[str]:
    """One line of the table, beside the same model without the codec."""
    equal = found.runs == plain.runs
    parted = [int(each.int().argmin()) for each in equal if not each.all()]
    agreement = (found.likeliest == plain.likeliest).float().mean()
    return (
        codec,
        f"{found.size:.1%}",
        f"{found.perplexity:.3f}",
        f"{found.perplexity / plain.perplexity - 1:+.2%}",
        f"{float(agreement):.2%}",
        f"{len(equal) - len(parted)} of {len(equal)}",
        f"{median(parted):.0f}, first {min(parted)}" if parted else "-",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384, help="of a window")
    parser.add_argument("--runs", type=int, default=16, help="free ones; at most one a window")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(CODECS), default=list(CODECS))
    parser.add_argument("--quick", action="store_true", help="two windows and short runs")
    options = parser.parse_args()
    if options.quick:
        options.windows, options.tokens, options.runs, options.new_tokens = 2, 128, 2, 16
    torch.set_num_threads(1)
    text = windows(options.windows, max(options.tokens, START + 1))
    for dtype in options.dtypes:
        model = load(Job(model=DEMO_MODEL, dtype=dtype, threads=1))
        table = Table(
            "codec", "bytes", "perplexity", "change", "same next token", "same runs", "others part",
            title=f"{dtype}: {text.numel()} tokens, runs of {options.new_tokens}",
        )  # fmt: skip
        plain: Outcome | None = None
        for codec in CODECS[dtype]:
            found = outcome(model, codec, text, options.runs, options.new_tokens)
            plain = plain or found
            table.add_row(*row(codec, found, plain))
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
