"""All the links that one server, or one client, sends on: measured, and what goes on them how."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from bloombee.planner.link_control import (
    RAW,
    Choice,
    CodecRecord,
    LinkControl,
    Transfer,
)
from bloombee.protocol.link_estimate import LEAST_BYTES, LinkEstimator
from bloombee.protocol.messages import LinkReport
from bloombee.protocol.report_messages import MOST_LINKS

AUTO = "auto"
PHASES = ("decode", "verify", "prefill")
EXPIRES_S = 600.0
"""A link of which nothing was heard for so long is not reported any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows about to be sent: for what, how many bytes of which dtype, and what they took."""

    phase: str
    raw_bytes: int
    dtype: str
    compute_s: float = 0.0


@dataclass(slots=True)
class _Neighbour:
    estimator: LinkEstimator = field(default_factory=LinkEstimator)
    control: LinkControl = field(default_factory=LinkControl)


class Neighbours:
    """Keeps the newest MOST_LINKS links. `codec` is a pin, unless it is auto."""

    def __init__(self, codec: str = RAW) -> None:
        self.record = CodecRecord()
        self._codec = codec
        self._links: OrderedDict[str, _Neighbour] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def estimator(self, peer: str) -> LinkEstimator:
        """What is measured of the link to `peer`, by all streams to it."""
        return self._of(peer).estimator

    def choose(self, peer: str, rows: Rows, now_us: int) -> Choice:
        """How such rows go to `peer` now."""
        if self._codec != AUTO:
            return Choice(self._codec, "pinned")
        if rows.raw_bytes < LEAST_BYTES:
            return Choice(RAW, "small")
        link, now_s = self._of(peer), now_us / 1e6
        transfer = Transfer(
            raw_bytes=rows.raw_bytes,
            bytes_per_s=link.estimator.bytes_per_s(now_us),
            rtt_s=link.estimator.rtt_s,
            compute_s=rows.compute_s,
            figures=self.record.figures(rows.dtype, now_s),
        )
        return link.control.choose(rows.phase, transfer, now_s)

    def reports(self, now_us: int) -> tuple[LinkReport, ...]:
        """What is known of each link, for whoever asks."""
        return tuple(
            self._report(peer, link, now_us)
            for peer, link in self._links.items()
            if link.estimator.age_s(now_us) < EXPIRES_S
        )

    def _report(self, peer: str, link: _Neighbour, now_us: int) -> LinkReport:
        estimator = link.estimator
        standing = [link.control.standing(phase) for phase in PHASES]
        choice = next((each for each in standing if each is not None), None)
        if self._codec != AUTO:
            choice = Choice(self._codec, "pinned")
        elif choice is None:
            choice = Choice(RAW, "nothing that coding could save")
        return LinkReport(
            peer=peer,
            rtt_s=estimator.rtt_s,
            bytes_per_s=estimator.bytes_per_s(now_us),
            offset_s=estimator.offset_s,
            samples=estimator.samples,
            age_s=estimator.age_s(now_us),
            codec=choice.codec,
            reason=choice.reason,
        )

    def _of(self, peer: str) -> _Neighbour:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Neighbour()
            if len(self._links) > MOST_LINKS:
                self._links.popitem(last=False)
        else:
            self._links.move_to_end(peer)
        return link
