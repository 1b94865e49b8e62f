"""The settings of `bloombee-plan`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloombee.config.base import Flag
from bloombee.config.fields import File, ModelName, PositiveInt
from bloombee.config.settings import NetworkSettings

Batches = Annotated[tuple[PositiveInt, ...], Flag(metavar="N")]
ClusterName = Annotated[str, Field(min_length=1), Flag(metavar="FILE|NAME")]


class PlanSettings(NetworkSettings):
    """`bloombee-plan`: for machines in a file, or with initial peers for those of a swarm."""

    model: ModelName = Field(description="the model to plan for")
    cluster: ClusterName | None = Field(
        default=None,
        description="machines and links: a YAML file, or the name of one that comes along",
    )
    objective: Literal["throughput", "latency", "first-token", "cost", "energy"] = Field(
        default="throughput", description="what makes one plan better than another"
    )
    max_peers: PositiveInt | None = Field(
        default=None, description="longest route, in peers; else as long as pays"
    )
    replicas: PositiveInt | None = Field(
        default=None, description="most routes side by side; else as many as pay"
    )
    batch: Batches = Field(
        default=(), description="sequences served together, to choose from; else powers of two"
    )
    prompt_tokens: PositiveInt = Field(default=128, description="tokens of a prompt")
    new_tokens: PositiveInt = Field(default=128, description="tokens generated for each prompt")
    count_prefill: bool = Field(
        default=False, description="count prompts in tokens/s, not only decoding"
    )
    value_bytes: Literal[1, 2, 4] = Field(
        default=2, description="bytes of a weight, a KV value and a value on the wire"
    )
    json_output: bool = Field(default=False, alias="json", description="print one JSON object")
    plot: File | None = Field(
        default=None, description="draw the pipeline's timeline into this PNG; needs matplotlib"
    )

    @model_validator(mode="after")
    def _one_source(self) -> PlanSettings:
        if (self.cluster is None) == (not self.initial_peers):
            raise ValueError(
                "give --cluster FILE|NAME to plan for machines that are described there, or "
                "--initial-peers MADDR ... for those of a running swarm; one of them"
            )
        return self
