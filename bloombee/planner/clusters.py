"""From the files of `config` to what the planner works with: facts, profiles, networks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bloombee.config.clusters import ANYWHERE, CLIENT
from bloombee.core import PeerId
from bloombee.planner.profiles import RAW, Cluster, Codec, ModelFacts, Network, PeerProfile
from bloombee.planner.roofline import Silicon, decode_table, head_table, prefill_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bloombee.config.clusters import (
        Access,
        ClusterFile,
        CodecFacts,
        DeviceFacts,
        Machine,
        ModelSizes,
    )

GB = 1e9
BYTES_PER_MBIT = 1e6 / 8
YEAR_S = 365 * 24 * 3600.0
WORKSPACE_ROWS_OF_HIDDEN = 16
"""Values of scratch space a row, in hidden sizes: queries, MLP, residual, both codec ends."""


def model_facts(name: str, sizes: ModelSizes, value_bytes: int = 2) -> ModelFacts:
    """What a model of these sizes weighs with `value_bytes` a weight, KV value and wire value."""
    head_size = sizes.head_size or sizes.hidden // sizes.heads
    queries, keys = sizes.heads * head_size, (sizes.kv_heads or sizes.heads) * head_size
    matrices = 3 if sizes.gated else 2
    parameters = 2 * sizes.hidden * (queries + keys) + 2 * sizes.hidden
    parameters += matrices * sizes.hidden * sizes.intermediate
    ends_bytes = sizes.vocabulary * sizes.hidden * value_bytes
    return ModelFacts(
        name,
        sizes.blocks,
        sizes.hidden,
        parameters * value_bytes,
        parameters,
        2 * keys * value_bytes,
        queries,
        ends_bytes,
        ends_bytes,
        sizes.tied,
        value_bytes,
    )


@dataclass(frozen=True, slots=True)
class Tables:
    """The device and codec tables that cluster files refer to."""

    devices: Mapping[str, DeviceFacts]
    codecs: Mapping[str, CodecFacts]


def build(file: ClusterFile, model: ModelFacts, tables: Tables) -> Cluster:
    """The cluster of a file, with block times of `model` derived by the roofline model."""
    places = [place for machine in file.machines for place in _places(machine)]
    here = _Place(CLIENT, CLIENT, file.client.region, file.client)
    return Cluster(
        tuple(_profile(place, machine, model, tables) for place, machine in _each(file)),
        _network([*places, here], file),
        tuple(_codec(name, tables.codecs[name]) for name in file.codecs) or (RAW,),
        head_table(model, _silicon(tables.devices[file.client.device])),
        file.dollars_per_kwh,
        file.lifetime_years * YEAR_S,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A node of the network: its own name, its kind's name, its region, its access."""

    name: str
    kind: str
    region: str
    access: Access

    def answers(self, end: str) -> bool:
        return end == ANYWHERE or end in (self.kind, self.region, self.name)


def _places(machine: Machine) -> list[_Place]:
    numbered = machine.count > 1
    return [
        _Place(
            f"{machine.name}-{i + 1}" if numbered else machine.name,
            machine.name,
            machine.region,
            machine,
        )
        for i in range(machine.count)
    ]


def _each(file: ClusterFile) -> list[tuple[_Place, Machine]]:
    return [(place, machine) for machine in file.machines for place in _places(machine)]


def _silicon(device: DeviceFacts, gpus: int = 1, speed: float = 1.0) -> Silicon:
    return Silicon(
        device.bandwidth_gb_s * GB * gpus * speed,
        device.tflops * 1e12 * gpus * speed,
        device.bandwidth_efficiency,
        device.compute_efficiency,
    )


def _profile(place: _Place, machine: Machine, model: ModelFacts, tables: Tables) -> PeerProfile:
    device = tables.devices[machine.device]
    silicon = _silicon(device, machine.gpus, machine.speed)
    memory = machine.memory_gb if machine.memory_gb is not None else device.memory_gb
    dollars = machine.dollars if machine.dollars is not None else device.dollars * machine.gpus
    watts = machine.watts if machine.watts is not None else device.watts * machine.gpus
    return PeerProfile(
        peer=PeerId(place.name),
        device_bytes=int(memory * GB) * machine.gpus,
        decode=decode_table(model, silicon),
        prefill=prefill_table(model, silicon),
        head=head_table(model, silicon),
        pass_s=machine.pass_ms / 1e3,
        workspace_bytes=int(machine.workspace_gb * GB) * machine.gpus,
        workspace_bytes_per_row=WORKSPACE_ROWS_OF_HIDDEN * model.row_bytes,
        host_bytes=int(machine.host_gb * GB),
        host_device_bytes_per_s=device.host_gb_s * GB * machine.gpus,
        disk_bytes_per_s=machine.disk_gb_s * GB,
        overlaps=machine.overlaps,
        streams_weights=machine.streams_weights,
        price_per_hour=machine.price_per_hour,
        purchase=dollars,
        watts=watts,
        kind=machine.device if machine.gpus == 1 else f"{machine.gpus} x {machine.device}",
    )


def _network(places: list[_Place], file: ClusterFile) -> Network:
    count = len(places)
    latency, rate = np.zeros((count, count)), np.zeros((count, count))
    for i, source in enumerate(places):
        for j, target in enumerate(places):
            if i != j:
                latency[i, j], rate[i, j] = _link(source, target, file)
    return Network(latency, rate)


def _link(source: _Place, target: _Place, file: ClusterFile) -> tuple[float, float]:
    """Seconds one way and bytes a second; a rate of 0 where nothing says there is a link."""
    up, down = source.access.up_mbps, target.access.down_mbps
    for link in reversed(file.links):
        forth = source.answers(link.source) and target.answers(link.target)
        back = source.answers(link.target) and target.answers(link.source)
        if forth or (back and not link.one_way):
            mbps = min(link.mbps, up or link.mbps, down or link.mbps)
            return link.rtt_ms / 2e3, mbps * BYTES_PER_MBIT
    if up is None or down is None:
        return 0.0, 0.0
    one_way_ms = (source.access.rtt_ms + target.access.rtt_ms) / 2
    return one_way_ms / 1e3, min(up, down) * BYTES_PER_MBIT


def _codec(name: str, facts: CodecFacts) -> Codec:
    if name == RAW.name:
        return replace(RAW)
    return Codec(name, facts.ratio, facts.encode_mb_s * 1e6, facts.decode_mb_s * 1e6)
