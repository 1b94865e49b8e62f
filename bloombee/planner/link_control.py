"""Which codec the rows take to one peer: whatever brings them there sooner, and stays chosen.

Coding saves `bytes x (1 - ratio) / rate` on the wire and costs what it takes to encode and
decode. It begins when it saves 1.7 times its cost, and ends when it saves less than its
cost: in between lies what measurements of a steady link vary by. A tiny gain is none: less
than a hundredth of what a hop takes anyway is not worth a core's time. Sizes and phases
decide for themselves. Only lossless codecs are ever chosen here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

RAW, SPLIT = "raw", "split"
BEGIN = 1.7
"""Times its cost that coding must save to begin; above (1 + 20 %) / (1 - 20 %)."""
LEAST_GAIN_S = 2e-4
LEAST_SHARE = 0.01
"""Gains below this, or this share of computing and travelling, are none."""
CALL_S = 6e-5
"""What encoding, and decoding, cost whatever the size."""
CONTRARY = 2
"""So many decisions in a row must be for a change."""
DWELL_S = 1.0
"""Between two changes."""
KEPT = 0.8
"""How much of what was known of a codec's speed counts beside the next measurement."""
FORGOTTEN_S = 60.0
"""After so long without coding, a codec is taken to do again what it usually does."""


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """What a lossless codec does to rows of one dtype: size as a share of raw, s a raw byte."""

    ratio: float
    encode_s_per_byte: float = 1 / 8e8
    decode_s_per_byte: float = 1 / 12e8

    def cost_s(self, raw_bytes: int) -> float:
        """Encoding and decoding."""
        return 2 * CALL_S + raw_bytes * (self.encode_s_per_byte + self.decode_s_per_byte)


USUAL = {"bfloat16": CodecFigures(0.68), "float16": CodecFigures(0.86)}
"""Of hidden states, before anything was coded."""
_OTHERS = CodecFigures(0.9)


class CodecRecord:
    """What the split codec did of late, by dtype."""

    def __init__(self) -> None:
        self._figures: dict[str, tuple[float, CodecFigures]] = {}

    def figures(self, dtype: str, now_s: float) -> CodecFigures:
        """What to expect."""
        noted_s, figures = self._figures.get(dtype, (-math.inf, _OTHERS))
        return figures if now_s - noted_s < FORGOTTEN_S else USUAL.get(dtype, _OTHERS)

    def encoded(
        self, dtype: str, raw_bytes: int, coded_bytes: int, took_s: float, now_s: float
    ) -> None:
        """A frame was coded."""
        figures = self.figures(dtype, now_s)
        new = replace(
            figures,
            ratio=_mixed(figures.ratio, coded_bytes / raw_bytes),
            encode_s_per_byte=_mixed(figures.encode_s_per_byte, _speed(took_s, raw_bytes)),
        )
        self._figures[dtype] = (now_s, new)

    def decoded(self, dtype: str, raw_bytes: int, took_s: float, now_s: float) -> None:
        """One was decoded: as fast as others decode ours, we take it."""
        figures = self.figures(dtype, now_s)
        speed = _mixed(figures.decode_s_per_byte, _speed(took_s, raw_bytes))
        self._figures[dtype] = (now_s, replace(figures, decode_s_per_byte=speed))


def _speed(took_s: float, raw_bytes: int) -> float:
    return max(0.0, took_s - CALL_S) / raw_bytes


def _mixed(known: float, new: float) -> float:
    """A mean in which one outlier, say a pause of the processor, counts little."""
    return KEPT * known + (1 - KEPT) * min(new, 2 * known + 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Rows about to be sent, and what is known of their way. 0 is unknown.

    `compute_s` is what the stage took for them.
    """

    raw_bytes: int
    bytes_per_s: float
    rtt_s: float
    compute_s: float
    figures: CodecFigures

    @property
    def saved_s(self) -> float:
        """What coding saves on the wire."""
        if not self.bytes_per_s:
            return 0.0
        return self.raw_bytes * (1 - self.figures.ratio) / self.bytes_per_s

    @property
    def needed_s(self) -> float:
        """What it has to save to be worth it: its cost, and a gain that shows."""
        share_s = LEAST_SHARE * (self.compute_s + self.rtt_s / 2)
        return self.figures.cost_s(self.raw_bytes) + max(LEAST_GAIN_S, share_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """How rows go, and why. `is_new` when it was otherwise before."""

    codec: str
    reason: str
    is_new: bool = False


def wanted(current: str, transfer: Transfer) -> str:
    """The codec for such rows, if those before went as `current`."""
    if not transfer.bytes_per_s:
        return current
    needed_s = transfer.needed_s * (1.0 if current == SPLIT else BEGIN)
    return SPLIT if transfer.saved_s >= needed_s else RAW


@dataclass(slots=True)
class _Standing:
    codec: str = RAW
    reason: str = "not measured yet"
    contrary: int = 0
    changed_s: float = -math.inf


@dataclass(slots=True)
class LinkControl:
    """The choices for one link."""

    _standings: dict[tuple[str, int], _Standing] = field(
        default_factory=dict[tuple[str, int], _Standing]
    )
    _last: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def choose(self, phase: str, transfer: Transfer, now_s: float) -> Choice:
        """The codec for rows of `phase`, of about this size."""
        key = (phase, transfer.raw_bytes.bit_length())
        self._last[phase] = key
        standing = self._standings.setdefault(key, _Standing())
        if wanted(standing.codec, transfer) == standing.codec:
            standing.contrary = 0
            if transfer.bytes_per_s and math.isinf(standing.changed_s):
                standing.reason = reason(transfer)
                standing.changed_s = now_s - DWELL_S
            return Choice(standing.codec, standing.reason)
        standing.contrary += 1
        if standing.contrary < CONTRARY or now_s - standing.changed_s < DWELL_S:
            return Choice(standing.codec, standing.reason)
        standing.codec = SPLIT if standing.codec == RAW else RAW
        standing.contrary, standing.changed_s = 0, now_s
        standing.reason = reason(transfer)
        return Choice(standing.codec, standing.reason, is_new=True)

    def standing(self, phase: str) -> Choice | None:
        """The newest choice for a phase."""
        if phase not in self._last:
            return None
        standing = self._standings[self._last[phase]]
        return Choice(standing.codec, standing.reason)


def reason(transfer: Transfer) -> str:
    """One line: what coding saves there and what it costs."""
    mbps = transfer.bytes_per_s * 8 / 1e6
    return (
        f"{transfer.raw_bytes / 1e3:.1f} kB at {mbps:.3g} Mbit/s: coding saves "
        f"{transfer.saved_s * 1e3:.2f} ms and costs "
        f"{transfer.figures.cost_s(transfer.raw_bytes) * 1e3:.2f}"
    )
