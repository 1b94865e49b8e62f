"""The settings of `bloombee-profile`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bloombee.config.fields import Blocks, Device, DtypeName, ModelName, PositiveInt
from bloombee.config.settings import NetworkSettings


class ProfileSettings(NetworkSettings):
    """`bloombee-profile`: of this machine, or with initial peers of a swarm's servers."""

    model: ModelName | None = Field(
        default=None, description="the model to measure, or whose servers to ask"
    )
    blocks: Blocks | None = Field(
        default=None, description="the blocks to measure with; else some at the model's end"
    )
    device: Device = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: DtypeName = Field(
        default="auto", description="type of weights and activations; auto is the model's own"
    )
    threads: PositiveInt | Literal["auto"] = Field(
        default="auto", description="threads that compute on the CPU; auto is one a core"
    )
    seconds: float = Field(
        default=10.0, ge=0, le=600, allow_inf_nan=False, description="time to measure in"
    )
    json_output: bool = Field(default=False, alias="json", description="print one JSON object")

    @model_validator(mode="after")
    def _something(self) -> ProfileSettings:
        if not self.initial_peers and self.model is None:
            raise ValueError(
                "give --model to measure this machine, or --initial-peers MADDR ... to ask a swarm"
            )
        if self.initial_peers and self.blocks is not None:
            raise ValueError("--blocks is for measuring this machine; leave out --initial-peers")
        return self
