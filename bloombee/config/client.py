"""How long a client waits for its peers, and how much it sends ahead."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from bloombee.config.base import Settings
from bloombee.config.fields import LOSSY_HELP, CodecName
from bloombee.config.lines import EMULATE_LINK, EmulatedLine
from bloombee.config.validation import explain
from bloombee.errors import SettingsError

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ClientSettings(Settings):
    """Deadlines and limits of every client session; none of them is infinite.

    Raises SettingsError, in one line, for values that can't be.
    """

    connect_s: Seconds = Field(
        default=10.0, description="to reach a server and agree on who is who"
    )
    open_s: Seconds = Field(
        default=20.0, description="for all stages to open a session, failed attempts included"
    )
    step_s: Seconds = Field(
        default=180.0, description="for the answer to one step, recovery included"
    )
    request_s: Seconds = Field(
        default=3600.0, description="for one call of generate or forward in total"
    )
    stage_s: Seconds = Field(
        default=60.0, description="for one stage to compute a step before another takes its place"
    )
    heartbeat_s: Seconds = Field(
        default=0.5, description="between the signs of life that every stage is asked for"
    )
    silence_s: Seconds = Field(
        default=4.0, description="of silence after which a stage counts as lost"
    )
    recovery_s: Seconds = Field(
        default=60.0,
        description="to replace lost stages, and for servers of missing blocks to join",
    )
    queue_s: Wait = Field(default=30.0, description="to wait for KV on servers that are full")
    backoff_s: Seconds = Field(
        default=0.5, description="for which a server that failed is left out, doubled each time"
    )
    backoff_cap_s: Seconds = Field(
        default=30.0, description="for which a server that failed is left out at most"
    )
    close_s: Seconds = Field(
        default=2.0, description="for servers to confirm that a session is closed"
    )
    snapshot_s: Wait = Field(
        default=3.0, description="how long one look at the swarm serves new sessions"
    )
    objective: Literal["auto", "latency", "throughput"] = Field(
        default="auto",
        description="what a route is chosen for: the time of a token, or tokens of many sessions; "
        "auto: throughput for batches and in the background, else latency",
    )
    survey_s: Wait = Field(
        default=0.3,
        description="for servers to say what they cost and how busy they are before a session "
        "opens without; 0: don't ask them",
    )
    steps_in_flight: int = Field(
        default=8, ge=1, description="steps of a long prompt sent before the first is answered"
    )
    prefill_tokens: int = Field(
        default=256,
        ge=1,
        description="least tokens a step of a prompt carries when it is split for overlap",
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        description="parts of a batch that decode without waiting for each other; "
        "without a number as many as keep all stages busy",
    )
    barrier: bool = Field(
        default=False,
        description="wait for all micro-batches at every token, as the paper does; client head",
    )
    payload_bytes: int = Field(default=16 << 20, ge=1, description="largest payload of one step")
    codec: CodecName = Field(
        default="auto",
        description="how rows are sent to the first stage: raw, split (lossless compression), or "
        "auto, whichever brings them there sooner" + LOSSY_HELP,
    )
    lossless: bool = Field(
        default=True,
        description="have servers send our rows without loss, also those that are set to a lossy "
        "codec; false lets them lose something",
    )
    reuse_prompts: bool = Field(
        default=True,
        description="let servers keep the beginnings of prompts, and begin with those they kept",
    )
    emulate_link: EmulatedLine | None = Field(default=None, description=EMULATE_LINK)
    trace: bool = Field(
        default=False, description="ask every stage where each step's time went (model.traffic)"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(f"client settings: {explain(error, str)}") from None

    @model_validator(mode="after")
    def _beats_before_it_misses(self) -> ClientSettings:
        if 2 * self.heartbeat_s > self.silence_s:
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s:g} is more than half of "
                f"silence_s={self.silence_s:g}: a stage would be missed before it was asked"
            )
        return self
