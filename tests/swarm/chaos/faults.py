"""Seeded schedules of faults: what happens, to whom, and at which moment of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from bloombee.transport.links import Fate

if TYPE_CHECKING:
    import random


class Deed(StrEnum):
    """What happens. `FATE` is of the frame that triggers it, and of its successors."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    PARTITION = "partition"
    ISOLATE = "isolate"
    FATE = "fate"
    ROUGH = "rough"
    RESET = "reset"
    END = "end"
    DRAIN = "drain"
    STOP = "stop"
    VANISH = "vanish"
    FAIL = "fail"
    SLOW = "slow"
    LATE = "late"
    BLACKOUT = "blackout"


@dataclass(frozen=True)
class At:
    """At a virtual time."""

    seconds: float

    def __str__(self) -> str:
        return f"at {self.seconds:g} s"


@dataclass(frozen=True)
class On:
    """When the `nth` frame is sent that matches.

    `way` is made of the ends' kinds: `cs` from a client to a server, `ss`, `sc`.
    `word` is a message's class, or `replay`, `prefill`, `decode` (steps), `reopen`
    (an Open of a later epoch).
    """

    way: str
    word: str
    nth: int

    def __str__(self) -> str:
        return f"on {self.way} {self.word} #{self.nth}"


class Victim(StrEnum):
    """Which end of the frame that triggers; or a server by its number."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True)
class Fault:
    """`deed` befalls `victim` (an end of the triggering frame, or a server's number).

    It comes `delay_s` after its trigger and lasts `lasts_s` (None: to the end).
    """

    when: At | On
    deed: Deed
    victim: Victim | int
    delay_s: float = 0.0
    lasts_s: float | None = None
    drain_s: float = 0.0
    fate: Fate = Fate.DROP
    frames: int = 1

    def __str__(self) -> str:
        parts = [str(self.when), str(self.deed)]
        if self.deed is Deed.FATE:
            parts.append(f"{self.fate} x {self.frames}")
        parts.append(str(self.victim) if isinstance(self.victim, Victim) else f"s{self.victim}")
        if self.deed is Deed.DRAIN:
            parts.append(f"in {self.drain_s:g} s")
        if self.delay_s:
            parts.append(f"after {self.delay_s:g} s")
        if self.deed in _LASTING:
            parts.append("for good" if self.lasts_s is None else f"for {self.lasts_s:g} s")
        return " ".join(parts)


_LASTING = {
    *(Deed.KILL, Deed.FREEZE, Deed.CUT, Deed.PARTITION, Deed.ISOLATE),
    *(Deed.ROUGH, Deed.SLOW, Deed.LATE, Deed.DRAIN, Deed.STOP, Deed.BLACKOUT),
}

Moments = Mapping[tuple[str, str], int]
"""How often each (way, word) is sent."""

RECOVERY: Moments = {
    ("cs", "Hello"): 8,
    ("cs", "Open"): 6,
    ("cs", "reopen"): 4,
    ("sc", "Opened"): 6,
    ("ss", "Attach"): 4,
    ("ss", "Attached"): 4,
    ("cs", "Replay"): 3,
    ("cs", "replay"): 3,
    ("ss", "replay"): 3,
    ("sc", "Failed"): 3,
    ("sc", "Leaving"): 2,
    ("ss", "Fetch"): 2,
    ("ss", "Pages"): 3,
    ("ss", "HandedOver"): 2,
}
"""What is worth meeting once something has gone wrong, up to which occurrence."""

# How often each deed is chosen. Kills, freezes and cuts are what volunteers do.
WEIGHTS: Mapping[Deed, int] = {
    Deed.KILL: 8,
    Deed.FREEZE: 4,
    Deed.CUT: 3,
    Deed.PARTITION: 3,
    Deed.ISOLATE: 2,
    Deed.FATE: 5,
    Deed.ROUGH: 2,
    Deed.RESET: 3,
    Deed.END: 3,
    Deed.DRAIN: 3,
    Deed.STOP: 1,
    Deed.VANISH: 2,
    Deed.BLACKOUT: 1,
    Deed.FAIL: 2,
    Deed.SLOW: 1,
    Deed.LATE: 1,
}


@dataclass(frozen=True)
class Calm:
    """What happens without faults: all frames by kind, and how long it takes."""

    frames: Moments
    seconds: float


def make_schedule(
    luck: random.Random, servers: int, calm: Calm, deeds: Mapping[Deed, int] = WEIGHTS
) -> tuple[Fault, ...]:
    """One fault, often a second that meets the recovery from it, at times more."""
    count = luck.choice((1, 1, 1, 2, 2, 3, 5))
    faults: list[Fault] = []
    for _ in range(count):
        sooner = calm.frames and (not faults or luck.random() < 0.5)
        moments = calm.frames if sooner else RECOVERY
        fault = _make_fault(luck, moments, deeds)
        if fault.deed is Deed.BLACKOUT:
            fault = replace(fault, lasts_s=luck.choice((5.0, 60.0)))
        if fault.deed is not Deed.FATE and luck.random() < 0.15:
            when = At(round(luck.uniform(0.0, calm.seconds + 1.0), 3))
            fault = replace(fault, when=when, victim=luck.randrange(servers))
        elif fault.deed is not Deed.FATE and luck.random() < 0.1:
            fault = replace(fault, victim=luck.randrange(servers))
        faults.append(fault)
    return tuple(faults)


def _make_fault(luck: random.Random, moments: Moments, deeds: Mapping[Deed, int]) -> Fault:
    way, word = luck.choice(list(moments))
    return Fault(
        On(way, word, luck.randint(1, moments[way, word])),
        luck.choices(list(deeds), list(deeds.values()))[0],
        luck.choice((Victim.SOURCE, Victim.TARGET, Victim.TARGET)),
        delay_s=luck.choice((0.0, 0.0, 0.001, 0.006, 0.02, 1.0)),
        lasts_s=luck.choice((0.02, 0.5, 2.0, 5.0, 12.0)),
        drain_s=luck.choice((0.3, 4.0, 10.0)),
        fate=luck.choice((Fate.DROP, Fate.DROP, Fate.REPEAT, Fate.SWAP, Fate.RESET, Fate.CLOSE)),
        frames=luck.choice((1, 1, 2, 5)),
    )
