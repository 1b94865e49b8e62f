"""What messages are made of: their base, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Parent = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Id16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Blob = Annotated[bytes, msgspec.Meta(max_length=4096)]
WireDtype = Literal["float32", "bfloat16", "float16", "int32", "float8_e4m3fn", "float8_e5m2"]
Content = Literal["ids", "rows", "logits"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""
