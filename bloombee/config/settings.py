"""The settings of every command: name, type, default and help, once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bloombee.config.base import Settings
from bloombee.config.fields import (
    LOSSY_HELP,
    Announced,
    Blocks,
    CodecName,
    Device,
    DtypeName,
    File,
    Folder,
    LogLevel,
    ModelName,
    Peers,
    Port,
    PositiveInt,
    Prompt,
    SessionNames,
)
from bloombee.config.lines import EMULATE_LINK, EmulatedLine

DRAIN_HELP = (
    "tell the servers that you run on this machine to hand their sessions over and end, and "
    "wait until they are gone; needs no other flag"
)
CLIENT_IDENTITY = (
    "file with this client's private key, made if missing: servers then find the prompts that "
    "they kept for an earlier run; else a new key each start"
)
PID_HELP = "with --drain: only the server with this process id"


class NetworkSettings(Settings):
    """How to reach a swarm."""

    initial_peers: Peers = Field(
        default=(), description="peers of the swarm to join; one that answers is enough"
    )
    swarm_key: File | None = Field(
        default=None, description="file with the key that all members of a private swarm share"
    )
    log_level: LogLevel = Field(default="info", description="least severity of what is logged")


class ListenSettings(NetworkSettings):
    """How others reach this process."""

    new_swarm: bool = Field(default=False, description="start a swarm instead of joining one")
    host: str = Field(default="0.0.0.0", description="address to listen on")
    dht_port: Port = Field(default=0, description="port of the DHT node; 0 takes a free one")
    announce: Announced | None = Field(
        default=None,
        description="address under which others reach this process, if not the one it listens on",
    )
    identity: File | None = Field(
        default=None,
        description="file with this peer's private key, made if missing; else a new key each start",
    )
    ready_file: File | None = Field(
        default=None, description="write peer, addresses and pid to this file, as JSON, once ready"
    )

    @model_validator(mode="after")
    def _one_swarm(self) -> ListenSettings:
        if self.new_swarm and self.initial_peers:
            raise ValueError("--new-swarm and --initial-peers exclude each other; leave one out")
        return self


class DhtSettings(ListenSettings):
    """`bloombee-dht`. Without initial peers it is the first node of a swarm."""

    dht_port: Port = Field(default=31337, description="port of the DHT node; 0 takes a free one")

    @model_validator(mode="after")
    def _no_key(self) -> DhtSettings:
        if self.swarm_key is not None:
            raise ValueError("--swarm-key is for servers and clients; a DHT node needs none")
        return self


class ServerSettings(ListenSettings):
    """`bloombee-server`."""

    model: ModelName = Field(description="the model to serve a part of")
    blocks: Blocks | None = Field(default=None, description="the blocks to serve, e.g. 0:10")
    num_blocks: PositiveInt | None = Field(
        default=None,
        description="how many blocks to serve, where the swarm covers least; else all that fit",
    )
    pin: bool = Field(
        default=False,
        description="stay with the blocks chosen at the start, whatever the swarm lacks later; "
        "--blocks does so too",
    )
    rebalance_s: float = Field(
        default=30.0,
        ge=1,
        allow_inf_nan=False,
        description="how often to look whether other blocks would serve the swarm better",
    )
    move_gain: float = Field(
        default=0.2,
        gt=0,
        allow_inf_nan=False,
        description="move only if the swarm's throughput grows by more than this share, or to "
        "blocks that nobody holds",
    )
    port: Port = Field(
        default=0, description="port of the data connections (gRPC); 0 takes a free one"
    )
    device: Device = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: DtypeName = Field(
        default="auto", description="type of weights and activations; auto is the model's own"
    )
    threads: PositiveInt | Literal["auto"] = Field(
        default="auto", description="threads that compute on the CPU; auto is one a core"
    )
    kv_tokens: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="KV capacity in tokens, over all sessions; auto is what memory allows",
    )
    max_length: PositiveInt | None = Field(
        default=None,
        description="longest sequence a session may ask for, in tokens; else the model's own limit",
    )
    max_step_tokens: PositiveInt = Field(
        default=2048, description="tokens computed in one pass; longer prompts are split"
    )
    chunk_tokens: PositiveInt = Field(
        default=128,
        description="prompt tokens computed in one pass while others decode, who wait for it",
    )
    max_sessions: PositiveInt = Field(default=256, description="sessions served at a time")
    max_sessions_per_peer: PositiveInt = Field(
        default=64, description="sessions that one peer may hold at a time"
    )
    max_tokens_per_peer: PositiveInt | Literal["auto"] = Field(
        default="auto", description="KV tokens that one peer may reserve; auto is all there are"
    )
    max_wait_s: float = Field(
        default=60.0,
        ge=0,
        allow_inf_nan=False,
        description="longest that a request may queue for KV, in seconds",
    )
    park_idle_s: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="idle time after which a session may lose its place to one that waits; "
        "what it holds is kept aside and comes back with its next step",
    )
    park_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="host memory for the KV of sessions that lost their place",
    )
    prefix_bytes: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="host memory for prompts kept, so that sessions that begin alike need not "
        "compute them again; auto is up to a quarter of the KV's size; 0 keeps none",
    )
    share_prefixes: bool = Field(
        default=False,
        description="let clients begin with prompts of other clients: only where all of them "
        "are trusted, since one that lies about its tokens changes the answers of others",
    )
    lease_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="how long the session of a silent client is kept, in seconds",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="time for sessions to move to other servers when this one is told to stop",
    )
    drain: bool = Field(default=False, description=DRAIN_HELP)
    pid: PositiveInt | None = Field(default=None, description=PID_HELP)
    codec: CodecName = Field(
        default="auto",
        description="how activations are sent on: raw, split (lossless compression), or auto, "
        "whichever brings them there sooner as measured of each link" + LOSSY_HELP,
    )
    profile: Literal["cached", "fresh"] = Field(
        default="cached",
        description="what the planner is told of this machine: as measured when it first served "
        "the model, or measured afresh",
    )
    profile_s: float = Field(
        default=2.5,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="time to measure in before serving, in seconds; more covers larger batches",
    )
    price_per_hour: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="rent of this machine, in dollars"
    )
    purchase: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="price of this machine, in dollars"
    )
    watts: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="power that this machine draws while serving, as you declare it",
    )
    pace: float = Field(
        default=1.0,
        ge=1,
        allow_inf_nan=False,
        description="for benchmarks: take so many times longer for a token than this machine needs",
    )
    diary: Folder | None = Field(
        default=None,
        description="for benchmarks: folder for a file, named by the blocks, of when passes ran; "
        "START-END.needs.json there, if any, says what passes need",
    )
    emulate_link: EmulatedLine | None = Field(default=None, description=EMULATE_LINK)
    max_frame_bytes: PositiveInt = Field(
        default=64 << 20, description="largest message accepted from a peer"
    )
    max_requests_per_s: PositiveInt = Field(
        default=2000, description="messages accepted from one peer in a second"
    )

    @model_validator(mode="after")
    def _coherent(self) -> ServerSettings:
        if self.drain:
            raise ValueError("--drain stands on the command line, alone or with --pid")
        if self.pid is not None:
            raise ValueError("--pid names the server that --drain is for; add --drain")
        if not self.new_swarm and not self.initial_peers:
            raise ValueError(
                "give --initial-peers MADDR ... to join a swarm or --new-swarm to start one"
            )
        if self.blocks is not None and self.num_blocks is not None:
            raise ValueError("--blocks and --num-blocks exclude each other; leave one out")
        return self


class DrainSettings(Settings):
    """`bloombee-server --drain`."""

    drain: bool = Field(default=False, description=DRAIN_HELP)
    pid: PositiveInt | None = Field(default=None, description=PID_HELP)
    log_level: LogLevel = Field(default="warning", description="least severity of what is logged")


class StatusSettings(NetworkSettings):
    """`bloombee-status`."""

    model: ModelName | None = Field(default=None, description="show only the swarm of this model")
    links: bool = Field(
        default=False,
        description="show the links that servers have measured, and how rows go there",
    )
    trace: SessionNames = Field(
        default=(),
        description="show instead where the time of these sessions' steps went, stage by stage; "
        "until ten minutes after their last step",
    )
    plot: File | None = Field(
        default=None, description="draw what --trace shows into this PNG; needs matplotlib"
    )
    json_output: bool = Field(default=False, alias="json", description="print one JSON object")

    @model_validator(mode="after")
    def _something_to_draw(self) -> StatusSettings:
        if self.plot is not None and not self.trace:
            raise ValueError("--plot draws what --trace shows; add --trace SESSION ...")
        return self


class SamplingSettings(Settings):
    """How the next token is chosen, shared by every command that generates."""

    max_new_tokens: PositiveInt = Field(default=128, description="tokens to generate at most")
    temperature: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="0 takes the most likely token; higher is more varied",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="sample only from the most likely tokens that add up to this",
    )
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = Field(
        default=None, description="makes sampling repeatable"
    )
    chat: bool = Field(
        default=True, description="wrap the prompt in the model's chat template, if it has one"
    )
    json_output: bool = Field(default=False, alias="json", description="print one JSON object")


class GenerateSettings(NetworkSettings, SamplingSettings):
    """`bloombee-generate`."""

    prompt: Prompt = Field(description="the text to answer or continue")
    model: ModelName = Field(description="the model that the swarm serves")
    identity: File | None = Field(default=None, description=CLIENT_IDENTITY)
    emulate_link: EmulatedLine | None = Field(default=None, description=EMULATE_LINK)
    dtype: DtypeName = Field(
        default="auto", description="type of the client's own weights and activations"
    )
    log_level: LogLevel = Field(default="warning", description="least severity of what is logged")

    @model_validator(mode="after")
    def _some_peer(self) -> GenerateSettings:
        if not self.initial_peers:
            raise ValueError("give --initial-peers MADDR ... as the servers print them")
        return self


class DemoSettings(SamplingSettings):
    """`scripts/demo`."""

    prompt: Prompt = Field(
        default="In three sentences: why do bees dance?", description="the text to answer"
    )
    servers: PositiveInt = Field(
        default=3, description="servers to start, each with its share of the blocks"
    )
    model: ModelName = Field(default="smollm2", description="the model to serve")
    dtype: DtypeName = Field(default="auto", description="type of weights and activations")
    log_level: LogLevel = Field(default="warning", description="least severity of what is logged")
