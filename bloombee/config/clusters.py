"""Cluster files, and the tables of devices, models and codecs that they refer to.

A cluster file lists machines, how they and the client are linked, and the codecs that links
may use. Rates are in Mbit/s, times in ms, memory in units of 1e9 bytes, money in dollars.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field, model_validator

from bloombee.config.base import Settings
from bloombee.config.files import config_path, read_yaml
from bloombee.config.nested import validate_nested
from bloombee.config.validation import nearest
from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

Entry = TypeVar("Entry", bound=Settings)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]

ANYWHERE = "*"
CLIENT = "client"


class DeviceFacts(Settings):
    """What is published of a device; see configs/planner/devices.yaml for the units."""

    memory_gb: Positive
    bandwidth_gb_s: Positive
    tflops: Positive
    host_gb_s: NotNegative = 0.0
    watts: NotNegative = 0.0
    dollars: NotNegative = 0.0
    bandwidth_efficiency: Share = 0.75
    compute_efficiency: Share = 0.5
    source: str


class ModelSizes(Settings):
    """What the config of a model says of its size."""

    hidden: Count
    blocks: Count
    heads: Count
    kv_heads: Count | None = None
    head_size: Count | None = None
    intermediate: Count
    vocabulary: Count
    gated: bool = True
    tied: bool = False


class CodecFacts(Settings):
    """Size as a share of raw, and speeds on raw bytes."""

    ratio: Positive
    encode_mb_s: Positive
    decode_mb_s: Positive
    source: str


class Access(Settings):
    """How a machine hangs on the internet; a link's rate is at most up here and down there.

    `rtt_ms` is the round trip to the middle of the network: two machines are the mean of
    theirs apart, one way.
    """

    up_mbps: Positive | None = None
    down_mbps: Positive | None = None
    rtt_ms: NotNegative = 0.0


class Machine(Access):
    """One kind of machine, `count` times. `gpus` of it share each block's work evenly.

    `speed` is its measured speed as a share of the roofline's; `price_per_hour` is rent.
    """

    name: str = Field(min_length=1)
    device: str
    count: Count = 1
    gpus: Count = 1
    region: str = ""
    host_gb: NotNegative = 0.0
    disk_gb_s: NotNegative = 0.0
    memory_gb: Positive | None = None
    speed: Positive = 1.0
    pass_ms: NotNegative = 1.0
    workspace_gb: NotNegative = 0.5
    overlaps: bool = True
    streams_weights: bool = True
    price_per_hour: NotNegative = 0.0
    dollars: NotNegative | None = None
    watts: NotNegative | None = None


class ClientPlace(Access):
    """Where the client sits, and what computes its head."""

    region: str = ""
    device: str = "desktop-cpu"


class Link(Settings):
    """The link between two regions or machines (`*`: any), both ways unless `one_way`."""

    source: str = Field(alias="from", min_length=1)
    target: str = Field(alias="to", min_length=1)
    mbps: NotNegative
    rtt_ms: NotNegative = 0.0
    one_way: bool = False


class ClusterFile(Settings):
    """One cluster. Of several links that match a pair, the last one counts."""

    about: str = ""
    machines: tuple[Machine, ...] = Field(min_length=1)
    client: ClientPlace = ClientPlace()
    links: tuple[Link, ...] = ()
    codecs: tuple[str, ...] = ("raw", "split-bf16")
    dollars_per_kwh: NotNegative = 0.15
    lifetime_years: Positive = 3.0

    @model_validator(mode="after")
    def _coherent(self) -> ClusterFile:
        names = [machine.name for machine in self.machines]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two machines are called {twice[0]!r}; use count, or other names")
        regions = {machine.region for machine in self.machines} | {self.client.region}
        known = {*names, *regions, CLIENT, ANYWHERE} - {""}
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known:
                    hint = nearest(end, known)
                    raise ValueError(f"links name {end!r}, no machine or region{hint}")
        return self


def read_cluster(path: Path) -> ClusterFile:
    """The cluster in a file. Raises SettingsError: the file, the key, what is wrong with it."""
    found = validate_nested(ClusterFile, read_yaml(path), str(path))
    for machine in found.machines:
        _known(machine.device, devices(), f"{path}: machines: {machine.name}: device")
    _known(found.client.device, devices(), f"{path}: client: device")
    for codec in found.codecs:
        _known(codec, codecs(), f"{path}: codecs")
    return found


@cache
def devices() -> dict[str, DeviceFacts]:
    """The devices of configs/planner/devices.yaml. Raises SettingsError for a broken file."""
    return _table(DeviceFacts, "devices.yaml")


@cache
def model_sizes() -> dict[str, ModelSizes]:
    """The models of configs/planner/models.yaml. Raises SettingsError for a broken file."""
    return _table(ModelSizes, "models.yaml")


@cache
def codecs() -> dict[str, CodecFacts]:
    """The codecs of configs/planner/codecs.yaml. Raises SettingsError for a broken file."""
    return _table(CodecFacts, "codecs.yaml")


def _table(model: type[Entry], name: str) -> dict[str, Entry]:
    path = config_path("planner", name)
    return {
        key: validate_nested(model, value, f"{path}: {key}")
        for key, value in read_yaml(path).items()
    }


def _known(name: str, table: dict[str, Entry], where: str) -> None:
    if name not in table:
        raise SettingsError(f"{where}: {name!r} is not known{nearest(name, table)}")
