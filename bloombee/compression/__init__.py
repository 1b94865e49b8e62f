"""Tensor to frame codecs and the choice between them."""

from bloombee.compression.codec import LOSSY, Codec, decode, encode
from bloombee.compression.layout import row_bytes, torch_dtype, wire_dtype
from bloombee.compression.raw import Buffer

__all__ = ["LOSSY", "Buffer", "Codec", "decode", "encode", "row_bytes", "torch_dtype", "wire_dtype"]
