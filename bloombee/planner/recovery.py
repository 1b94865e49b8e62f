"""What to do about stages that fail: pure policy over what was seen; nothing here waits.

A client sees errors; `trouble_of` says what kind of trouble each is. The `Casebook`
turns the troubles of all stages into one care for each: keep what it holds, start it
empty, or let others take its blocks. The mildest care comes first, and a stage that
is in the same trouble again without any step answered in between gets a stronger one.
`PeerHealth` says whom to leave out for now; nobody is left out for ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bloombee.core import doubled
from bloombee.errors import (
    AuthError,
    BloomBeeError,
    HopLost,
    KVFull,
    ModelError,
    PeerStopping,
    ProtocolError,
    RequestError,
    StepFailed,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bloombee.core import PeerId

FAILURES_OF_A_STEP = 3
"""A step that failed so often, wherever it was computed, is the caller's to know of."""


FORGOTTEN_AFTER = 10
"""Longest backoffs after which a peer's failures count no longer."""


class Trouble(StrEnum):
    """What is wrong with a stage, as its client sees it."""

    BROKEN = "its connection broke"
    SILENT = "it gives no sign of life"
    HOP = "it has lost the stage after it"
    CONFUSED = "it and the session disagree"
    STALLED = "it holds a step too long"
    FAILED = "its computation failed"
    GAP = "it lacks a part of what it should hold"
    STOPPING = "it is about to stop"
    UNFIT = "it refused the session"
    REQUEST = "the request itself is wrong"


class Care(StrEnum):
    """What becomes of a stage in the next epoch."""

    KEEP = "keep"
    """It stays with what it holds."""
    EMPTY = "empty"
    """It stays, and its part is computed again."""
    REPLACE = "replace"
    """Other servers take its blocks."""


Cares = tuple[Care, ...]
"""The care to try first, then what to do when that can't be had."""

_FINE: Cares = (Care.KEEP, Care.REPLACE)
_GENTLE: dict[Trouble, Cares] = {
    Trouble.BROKEN: (Care.KEEP, Care.REPLACE),
    Trouble.SILENT: (Care.REPLACE, Care.KEEP),
    Trouble.CONFUSED: (Care.KEEP, Care.REPLACE),
    Trouble.STALLED: (Care.KEEP, Care.REPLACE),
    Trouble.FAILED: (Care.REPLACE, Care.EMPTY),
    Trouble.GAP: (Care.EMPTY, Care.REPLACE),
    Trouble.STOPPING: (Care.REPLACE, Care.KEEP),
    Trouble.UNFIT: (Care.REPLACE, Care.EMPTY),
}
_FIRM: dict[Trouble, Cares] = {
    **_GENTLE,
    Trouble.CONFUSED: (Care.REPLACE, Care.EMPTY),
    Trouble.STALLED: (Care.REPLACE, Care.KEEP),
    Trouble.GAP: (Care.REPLACE, Care.EMPTY),
}
_BROKEN_TOO_OFTEN = 3


@dataclass(frozen=True, slots=True)
class Symptom:
    """Stage number `stage` of the route is in `trouble`."""

    stage: int
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Treatment:
    """The cares of each stage, and after how long to start.

    `hopeless` is the symptom that no other server could mend: its error is the
    caller's.
    """

    cares: tuple[Cares, ...]
    pause_s: float = 0.0
    hopeless: Symptom | None = None


def trouble_of(error: BloomBeeError, *, reported: bool) -> Trouble:
    """The trouble that `error` is: `reported` by the stage itself, or met on its stream."""
    match error:
        case HopLost():
            return Trouble.HOP
        case StepFailed():
            return Trouble.FAILED
        case PeerStopping():
            return Trouble.STOPPING
        case KVFull():
            return Trouble.UNFIT
        case TransportError():
            return Trouble.CONFUSED if reported else Trouble.BROKEN
        case ProtocolError():
            return Trouble.CONFUSED
        case RequestError() | ModelError() | AuthError():
            return Trouble.REQUEST if reported else Trouble.UNFIT
        case _:
            return Trouble.CONFUSED


class Casebook:
    """The troubles since a step was last answered; decides what is done next."""

    def __init__(self, *, first_pause_s: float, longest_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._seen: Counter[tuple[Trouble, PeerId]] = Counter()
        self._failures = 0
        self._attempts = 0

    def progress(self) -> None:
        """A step was answered, or given up: what comes now is a new case."""
        if self._attempts:
            self._seen.clear()
            self._failures = self._attempts = 0

    def treat(self, symptoms: Sequence[Symptom], peers: Sequence[PeerId]) -> Treatment:
        """What to do with the stages held by `peers`, in order. Counts the symptoms."""
        worst = _worst(symptoms, len(peers))
        cares = [_FINE] * len(peers)
        hopeless: Symptom | None = None
        for symptom in worst:
            peer = peers[symptom.stage]
            self._seen[symptom.trouble, peer] += 1
            if self._is_hopeless(symptom):
                hopeless = symptom
            elif symptom.trouble is Trouble.HOP:
                self._relink(cares, symptom.stage, self._seen[Trouble.HOP, peer])
            else:
                cares[symptom.stage] = self._cares(symptom, peer)
        if len(worst) == len(peers) and all(s.trouble is Trouble.SILENT for s in worst):
            # More likely it is our own network: then they still hold everything.
            cares = [_FINE] * len(peers)
        self._attempts += 1
        return Treatment(tuple(cares), self._pause_s(), hopeless)

    def _is_hopeless(self, symptom: Symptom) -> bool:
        if symptom.trouble is Trouble.FAILED:
            self._failures += 1
            return self._failures >= FAILURES_OF_A_STEP
        return symptom.trouble is Trouble.REQUEST

    def _cares(self, symptom: Symptom, peer: PeerId) -> Cares:
        times = self._seen[symptom.trouble, peer]
        if symptom.trouble is Trouble.BROKEN and times >= _BROKEN_TOO_OFTEN:
            return (Care.REPLACE, Care.KEEP)
        return (_GENTLE if times == 1 else _FIRM)[symptom.trouble]

    def _relink(self, cares: list[Cares], stage: int, times: int) -> None:
        """First both ends of the hop try again, then the far end goes, then the near one, ..."""
        culprit = _after(stage, len(cares)) if times % 2 == 0 else stage
        if times > 1:
            cares[culprit] = (Care.REPLACE, Care.KEEP)

    def _pause_s(self) -> float:
        if self._attempts <= 2:
            return 0.0
        return doubled(self._first_pause_s, self._attempts - 3, self._longest_pause_s)


_ORDER = (
    Trouble.REQUEST,
    Trouble.BROKEN,
    Trouble.SILENT,
    Trouble.STOPPING,
    Trouble.FAILED,
    Trouble.UNFIT,
    Trouble.GAP,
    Trouble.CONFUSED,
    Trouble.STALLED,
    Trouble.HOP,
)


def _after(stage: int, stages: int) -> int:
    """The far end of a stage's hop: the last one sends chosen tokens to the first."""
    return (stage + 1) % stages


def _worst(symptoms: Sequence[Symptom], stages: int) -> list[Symptom]:
    """One symptom a stage; a hop that was lost because its far end is counts for nothing."""
    found: dict[int, Trouble] = {}
    for stage, trouble in ((s.stage, s.trouble) for s in symptoms):
        if stage not in found or _ORDER.index(trouble) < _ORDER.index(found[stage]):
            found[stage] = trouble
    return [
        Symptom(stage, trouble)
        for stage, trouble in sorted(found.items())
        if trouble is not Trouble.HOP or found.get(_after(stage, stages)) in (None, Trouble.HOP)
    ]


@dataclass(slots=True)
class _Absence:
    failures: int
    until_s: float


class PeerHealth:
    """Whom to leave out for now: twice as long after each failure in a row, up to a cap."""

    def __init__(self, *, backoff_s: float, cap_s: float) -> None:
        self._backoff_s = backoff_s
        self._cap_s = cap_s
        self._absent: dict[PeerId, _Absence] = {}

    def failed(self, peer: PeerId, now_s: float) -> None:
        """`peer` did not do what was asked."""
        self._forget(now_s)
        failures = self._absent[peer].failures + 1 if peer in self._absent else 1
        away_s = doubled(self._backoff_s, failures - 1, self._cap_s)
        self._absent[peer] = _Absence(failures, now_s + away_s)

    def leaves(self, peer: PeerId, now_s: float) -> None:
        """`peer` said that it is about to stop; that is no failure."""
        self._forget(now_s)
        failures = self._absent[peer].failures if peer in self._absent else 0
        self._absent[peer] = _Absence(failures, now_s + self._cap_s)

    def worked(self, peer: PeerId) -> None:
        """`peer` did what was asked: its failures are forgotten."""
        self._absent.pop(peer, None)

    def _forget(self, now_s: float) -> None:
        """Drop what is so old that a next failure is a first one again."""
        past_s = now_s - FORGOTTEN_AFTER * self._cap_s
        for peer in [p for p, absence in self._absent.items() if absence.until_s < past_s]:
            del self._absent[peer]

    def left_out(self, now_s: float) -> frozenset[PeerId]:
        """The peers not to choose now."""
        return frozenset(p for p, absence in self._absent.items() if absence.until_s > now_s)


class StallWatch:
    """Notices a stage that keeps a step to itself: others before it have passed the step on."""

    def __init__(self, stage_s: float) -> None:
        self._stage_s = stage_s
        self._held: tuple[int, int] | None = None
        self._since_s = 0.0

    def suspect(self, step: int, sent_steps: Sequence[int], now_s: float) -> int | None:
        """The stage that has held `step` (0: none is due) for too long, or None.

        `sent_steps` are the newest steps that the stages, in order, have sent on. When
        all claim to have sent it, the last is suspected: its answer is what is missing.
        """
        behind = (stage for stage, sent in enumerate(sent_steps) if sent < step)
        held = (step, next(behind, len(sent_steps) - 1)) if step else None
        if held != self._held:
            self._held, self._since_s = held, now_s
        if held is None or now_s - self._since_s <= self._stage_s:
            return None
        self._held = None
        return held[1]
