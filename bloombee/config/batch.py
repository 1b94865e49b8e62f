"""The settings of `bloombee-batch`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from bloombee.config.base import Flag
from bloombee.config.fields import DtypeName, File, ModelName, PositiveInt
from bloombee.config.settings import CLIENT_IDENTITY, NetworkSettings

Texts = Annotated[tuple[str, ...], Flag(metavar="TEXT")]


class BatchSettings(NetworkSettings):
    """`bloombee-batch`. What a line says of how it is answered wins over these."""

    model: ModelName = Field(description="the model that the swarm serves")
    input: File = Field(description="file of prompts, one JSON object a line")
    output: File = Field(
        description="file that answers are appended to; lines that it answers are not asked again"
    )
    errors: File | None = Field(
        default=None,
        description="file for the lines that this run could not answer; else OUTPUT.errors",
    )
    identity: File | None = Field(default=None, description=CLIENT_IDENTITY)
    dtype: DtypeName = Field(
        default="auto", description="type of the client's own weights and activations"
    )
    concurrency: PositiveInt | None = Field(
        default=None, description="prompts in flight at most; else as many as the swarm works best"
    )
    max_new_tokens: PositiveInt = Field(default=128, description="tokens to generate at most")
    temperature: float = Field(
        default=0.0, description="0 takes the most likely token; higher is more varied"
    )
    top_k: int = Field(default=0, description="sample only from that many tokens; 0: from all")
    top_p: float = Field(
        default=1.0, description="sample only from the most likely tokens that add up to this"
    )
    min_p: float = Field(
        default=0.0, description="sample only from tokens that are this likely beside the likeliest"
    )
    repetition_penalty: float = Field(
        default=1.0, description="above 1 makes tokens of prompt and answer less likely"
    )
    presence_penalty: float = Field(
        default=0.0, description="subtracted from the score of tokens that the answer holds"
    )
    frequency_penalty: float = Field(
        default=0.0, description="the same, as often as the answer holds them"
    )
    stop: Texts = Field(default=(), description="texts that end an answer, which stops before them")
    seed: int | None = Field(
        default=None, description="makes sampling repeatable; the same for all lines without one"
    )

    @model_validator(mode="after")
    def _some_peer(self) -> BatchSettings:
        if not self.initial_peers:
            raise ValueError("give --initial-peers MADDR ... as the servers print them")
        return self
