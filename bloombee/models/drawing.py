"""The one generator that seeded sampling uses, on servers and on clients alike.

A token is drawn by the Gumbel-max trick: the token of largest log-probability plus
noise. The noise of token v of the `drawn`-th token (from 0) of a sequence is
`-log(-log((w + 0.5) / 2**32))`, where w is word v, 32 bits each, little end first, of
numpy's `Philox(key=[seed, stream], counter=[0, drawn, 0, 0])`. So what is drawn depends
on the seed, the stream, the position and the probabilities, and on nothing else: not
on batches, chunks or recovery, and a tree of drafts can be verified with it.

A row over a vocabulary of 49,152 takes 330 us on one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float64, Int

from bloombee.errors import StepFailed

WORDS = 2.0**32


def gumbel(seed: int, stream: int, drawn: int, vocabulary: int) -> Float64[torch.Tensor, "V"]:
    """The noise of every token of the vocabulary (V)."""
    return torch.from_numpy(_noise(seed, stream, drawn, vocabulary))


def draw(
    probabilities: Float[torch.Tensor, "B V"],
    seed: int,
    streams: Sequence[int],
    drawn: Sequence[int],
) -> Int[torch.Tensor, "B"]:
    """One token for each row, of the sequence `stream` and at its position `drawn`.

    The rows need not add up to 1. Raises StepFailed for one that has no positive
    probability, or one that is not a number.
    """
    rows = probabilities.float().cpu().numpy()
    tokens = [
        _draw(row, _noise(seed, stream, position, len(row)))
        for row, stream, position in zip(rows, streams, drawn, strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.long, device=probabilities.device)


def _noise(seed: int, stream: int, drawn: int, vocabulary: int) -> npt.NDArray[np.float64]:
    generator = np.random.Philox(
        key=np.array([seed, stream], np.uint64), counter=np.array([0, drawn, 0, 0], np.uint64)
    )
    words = generator.random_raw((vocabulary + 1) // 2).astype("<u8", copy=False).view("<u4")
    noise = words[:vocabulary].astype(np.float64)
    noise += 0.5
    noise /= WORDS
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _draw(row: npt.NDArray[np.float32], noise: npt.NDArray[np.float64]) -> int:
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.log(row, dtype=np.float64)
    scores += noise
    token = int(scores.argmax())  # NaN comes out first
    if not np.isfinite(scores[token]):
        raise StepFailed("no token can be drawn: the probabilities are zero or not numbers")
    return token
