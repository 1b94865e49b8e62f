"""What a client does in one session, as a seeded script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.swarm.chaos.digests import VOCABULARY

if TYPE_CHECKING:
    import random

    from bloombee.client.split import Want


@dataclass(frozen=True)
class Say:
    """New tokens for each row, of these lengths (0: none)."""

    lengths: tuple[int, ...]
    want: Want = "last"


@dataclass(frozen=True)
class Decode:
    """So many greedy tokens for each row."""

    steps: int


@dataclass(frozen=True)
class Tell:
    """Tokens that the servers choose, at most so many for each row; some rows end early."""

    steps: int
    seed: int


@dataclass(frozen=True)
class Reorder:
    """Rows become what other rows are, chosen by the newest outputs, as beams do; then a token."""

    steps: int


@dataclass(frozen=True)
class Crop:
    """Forget the last tokens of each row."""

    tokens: int


@dataclass(frozen=True)
class Leave:
    """The last row has finished; with `release` its KV is given back."""

    release: bool


@dataclass(frozen=True)
class Pause:
    """Nothing, for a while."""

    seconds: float


@dataclass(frozen=True)
class Interrupt:
    """The next step is cancelled after a while, and then asked for again."""

    after_s: float


Act = Say | Decode | Tell | Reorder | Crop | Leave | Pause | Interrupt


@dataclass(frozen=True)
class Script:
    """One session."""

    rows: int
    max_length: int
    acts: tuple[Act, ...]
    sends_rows: bool = True
    """Or ids, which the first stage turns into rows."""
    sessions: int = 1
    """How often it is played, each time anew; with announced prompts from the second on."""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """What servers may keep for the next session: what is said first, if it comes again."""
        first = self.acts[0]
        if self.sessions == 1 or not isinstance(first, Say):
            return ()
        return tuple(tuple(said(row + 1, row, n)) for row, n in enumerate(first.lengths))


def said(number: int, row: int, length: int) -> list[int]:
    """The tokens of what is said as `number`."""
    return [(number * 101 + row * 17 + i) % VOCABULARY for i in range(length)]


def with_kept_prompts(script: Script, luck: random.Random) -> Script:
    """The same twice or more, with prompts so long that servers keep them for the next time."""
    rows = min(script.rows, 2)
    first = Say(tuple(luck.choice((66, 90, 131)) for _ in range(rows)))
    acts = tuple(_of_rows(act, rows) for act in script.acts[1:] if not isinstance(act, Leave))
    acts = (first, *acts)
    longest = sum(_growth(act) for act in acts) + 8
    return replace(script, rows=rows, max_length=longest, acts=acts, sessions=luck.choice((2, 3)))


def _of_rows(act: Act, rows: int) -> Act:
    return Say((act.lengths * 2)[-rows:], act.want) if isinstance(act, Say) else act


def with_server_head(script: Script, luck: random.Random) -> Script:
    """Let servers choose some of the tokens, and perhaps turn ids into rows."""
    acts = [
        Tell(act.steps, luck.randrange(1000))
        if isinstance(act, Decode) and luck.random() < 0.6
        else act
        for act in script.acts
    ]
    return replace(script, acts=tuple(acts), sends_rows=luck.random() < 0.3)


def make_script(luck: random.Random) -> Script:
    """A session of one to four rows: a prompt, some tokens, perhaps more turns."""
    rows = luck.choice((1, 1, 2, 3, 4))
    acts: list[Act] = [Say(tuple(luck.randint(1, 40) for _ in range(rows)))]
    left = rows
    for _ in range(luck.randint(1, 4)):
        act = _next_act(luck, left)
        if isinstance(act, Reorder) and any(isinstance(a, Leave) and a.release for a in acts):
            act = Decode(act.steps)  # forks need a free sequence, and a released one is gone
        acts.append(act)
        left -= isinstance(act, Leave)
    acts.append(Decode(luck.randint(1, 8)))
    longest = sum(_growth(act) for act in acts)
    return Script(rows, longest + luck.randint(0, 8), tuple(acts))


def _next_act(luck: random.Random, rows: int) -> Act:
    kinds = ("decode", "say", "say", "reorder", "reorder", "crop", "leave", "pause", "stop")
    kind = luck.choice(kinds)
    if kind == "leave" and rows > 1:
        return Leave(luck.random() < 0.5)
    if kind == "say":
        lengths = [luck.choice((0, 1, 3, 20)) for _ in range(rows)]
        return Say((*lengths[1:], 5), luck.choice(("last", "last", "all", "none")))
    if kind == "reorder":
        return Reorder(luck.randint(2, 10))
    if kind == "crop":
        return Crop(luck.randint(1, 6))
    if kind == "pause":
        return Pause(luck.choice((0.3, 2.0, 8.0)))
    if kind == "stop":
        return Interrupt(luck.choice((0.0, 0.01, 0.05)))
    return Decode(luck.randint(1, 10))


def _growth(act: Act) -> int:
    match act:
        case Say(lengths):
            return max(lengths)
        case Decode(steps) | Reorder(steps) | Tell(steps):
            return steps
        case _:
            return 0


def uninterrupted(script: Script) -> Script:
    """The same, but the caller never gives up on a step."""
    acts = (Pause(0.0) if isinstance(act, Interrupt) else act for act in script.acts)
    return replace(script, acts=tuple(acts))


def unhurried(act: Act) -> Act:
    return Pause(0.0) if isinstance(act, Pause) else act
