"""Network files: hosts, the rates of their lines, and the delay, rate and loss between pairs.

Rates are in Mbit/s of IP packets, times in ms, loss is a share of packets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from bloombee.config.base import Settings
from bloombee.config.files import config_path, read_yaml
from bloombee.config.nested import validate_nested
from bloombee.config.validation import nearest
from bloombee.errors import SettingsError

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=0, lt=1)]

ANYWHERE = "*"
CLIENT = "client"
HERE = "here"
"""The process that runs the emulation, when it is no host of the file."""
MOST_HOSTS = 64
JUMBO_MTU, USUAL_MTU = 9000, 1500
JUMBO_FROM_MBPS = 200.0


class HostKind(Settings):
    """One host, or `count` of them called `NAME-0`, `NAME-1`; no rate: no limit."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    count: Annotated[int, Field(gt=0)] | None = None
    up_mbps: Rate | None = None
    down_mbps: Rate | None = None

    @property
    def names(self) -> list[str]:
        """What its hosts are called."""
        if self.count is None:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.count)]


class PathKind(Settings):
    """What lies between two hosts or kinds of them (`*`: any), both ways unless `one_way`.

    `delay_ms` is one way; `rtt_ms` is twice that.
    """

    source: str = Field(alias="from", min_length=1)
    target: str = Field(alias="to", min_length=1)
    delay_ms: Time | None = None
    rtt_ms: Time | None = None
    mbps: Rate | None = None
    loss: Loss = 0.0
    one_way: bool = False

    @model_validator(mode="after")
    def _one_delay(self) -> PathKind:
        if self.delay_ms is not None and self.rtt_ms is not None:
            raise ValueError("give delay_ms (one way) or rtt_ms (both ways), not both")
        return self

    @property
    def one_way_ms(self) -> float:
        """The delay of one direction."""
        return self.delay_ms if self.delay_ms is not None else (self.rtt_ms or 0.0) / 2

    def joins(self, source: tuple[str, str], target: tuple[str, str]) -> bool:
        """Whether it is the path from one host to another; each is (name, kind)."""

        def one(ends: tuple[str, str]) -> bool:
            return all(
                end == ANYWHERE or end in host
                for end, host in zip(ends, (source, target), strict=True)
            )

        return one((self.source, self.target)) or (
            not self.one_way and one((self.target, self.source))
        )


class NetworkFile(Settings):
    """One network. Of several paths that match a pair, the last one counts.

    A full queue drops what comes (drop-tail). It holds `queue_ms` of its rate or
    `queue_kb`; without either 100 ms, or 50 ms more than the longest round trip.
    """

    about: str = ""
    hosts: tuple[HostKind, ...] = Field(min_length=1)
    paths: tuple[PathKind, ...] = ()
    queue_ms: Rate | None = None
    queue_kb: Rate | None = None
    mtu: Annotated[int, Field(ge=576, le=JUMBO_MTU)] | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _coherent(self) -> NetworkFile:
        if self.queue_ms is not None and self.queue_kb is not None:
            raise ValueError("give queue_ms or queue_kb, not both")
        names = self.host_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two hosts are called {twice[0]!r}; use count, or other names")
        if len(names) > MOST_HOSTS:
            raise ValueError(f"{len(names)} hosts are too many; at most {MOST_HOSTS}")
        if HERE in names:
            raise ValueError(f"no host can be called {HERE!r}: it is whoever runs the network")
        known = {*names, *(kind.name for kind in self.hosts), ANYWHERE}
        for path in self.paths:
            for end in (path.source, path.target):
                if end not in known:
                    raise ValueError(f"paths name {end!r}, no host{nearest(end, known)}")
        return self

    @property
    def host_names(self) -> list[str]:
        """All hosts, in the order of the file."""
        return [name for kind in self.hosts for name in kind.names]

    def kind_of(self, host: str) -> HostKind:
        """The kind that a host is of. Raises SettingsError for a host that isn't there."""
        for kind in self.hosts:
            if host in kind.names:
                return kind
        known = nearest(host, self.host_names)
        raise SettingsError(f"the network has no host called {host!r}{known}")

    def path(self, source: str, target: str) -> PathKind:
        """What lies between two hosts, in this direction. Raises SettingsError as `kind_of`."""
        ends = [(name, self.kind_of(name).name) for name in (source, target)]
        found = [path for path in self.paths if path.joins(ends[0], ends[1])]
        return found[-1] if found else PathKind.model_validate({"from": source, "to": target})

    @property
    def packet_bytes(self) -> int:
        """The MTU: jumbo frames where rates are high, so that packets stay few."""
        if self.mtu is not None:
            return self.mtu
        limits = [rate for kind in self.hosts for rate in (kind.up_mbps, kind.down_mbps)]
        fastest = max(rate or float("inf") for rate in limits)
        return JUMBO_MTU if fastest >= JUMBO_FROM_MBPS else USUAL_MTU


def read_network(file: str | Path) -> NetworkFile:
    """The network in a file, or of that name in `configs/networks`.

    Raises SettingsError: the file, the key, what is wrong with it.
    """
    path = Path(file)
    if not path.exists():
        folder = config_path("networks")
        named = folder / f"{file}.yaml"
        if not named.is_file():
            known = [each.stem for each in folder.glob("*.yaml")]
            raise SettingsError(f"--network: there is no file {file}{nearest(str(file), known)}")
        path = named
    return validate_nested(NetworkFile, read_yaml(path), str(path))
