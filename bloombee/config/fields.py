"""Types of settings that several commands share, with how they are written and checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bloombee.config.base import Flag
from bloombee.core import Span

MULTIADDRESS = re.compile(r"(/[^/\s]+)+/p2p/[1-9A-HJ-NP-Za-km-z]{20,}")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+)(:\d{1,5})?")

SESSION = re.compile(r"[0-9a-fA-F]{32}")


def _span(value: object) -> object:
    return value if isinstance(value, Span) else Span.parse(str(value))


def _peer(value: str) -> str:
    if MULTIADDRESS.fullmatch(value) is None:
        raise ValueError(
            "peers are written as multiaddresses, such as "
            f"/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..., got {value!r}"
        )
    return value


def _device(value: str) -> str:
    if DEVICE.fullmatch(value) is None:
        raise ValueError(f"devices are auto, cpu, cuda, cuda:0 and so on, got {value!r}")
    return value


def _announced(value: str) -> str:
    if ADDRESS.fullmatch(value) is None:
        raise ValueError(f"an announced address is HOST or HOST:PORT, got {value!r}")
    return value


def _session(value: str) -> str:
    if SESSION.fullmatch(value) is None:
        raise ValueError(
            "a session is named by its 32 hexadecimal digits, as bloombee-generate --json and "
            f"model.traffic.sessions tell them, got {value!r}"
        )
    return value.lower()


def _text(value: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("a prompt is text in UTF-8")  # argv keeps other bytes as surrogates
    return value


DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
CodecName = Literal["auto", "raw", "split", "lossy-int8", "lossy-bf16", "lossy-fp16"]
LOSSY_HELP = (
    "; lossy-int8 (a scale for each row), lossy-bf16 and lossy-fp16 (cut from float32) change "
    "values and so the output, and are never chosen by auto"
)
LogLevel = Literal["debug", "info", "warning", "error"]

Prompt = Annotated[str, AfterValidator(_text), Flag(positional=True)]
Blocks = Annotated[Span, BeforeValidator(_span), Flag(metavar="START:END")]
Peer = Annotated[str, AfterValidator(_peer)]
SessionName = Annotated[str, AfterValidator(_session)]
SessionNames = Annotated[tuple[SessionName, ...], Flag(metavar="SESSION")]
Peers = Annotated[tuple[Peer, ...], Flag(metavar="MADDR", item="/.+")]
Device = Annotated[str, AfterValidator(_device)]
Announced = Annotated[str, AfterValidator(_announced), Flag(metavar="HOST[:PORT]")]
Port = Annotated[int, Field(ge=0, le=65535)]
File = Annotated[Path, Flag(metavar="FILE")]
Folder = Annotated[Path, Flag(metavar="FOLDER")]
ModelName = Annotated[str, Field(min_length=1), Flag(metavar="PATH|HUB_ID|ALIAS")]
PositiveInt = Annotated[int, Field(gt=0)]
