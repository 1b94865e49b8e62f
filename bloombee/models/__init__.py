"""Models: family specs, loading only a span's tensors, and running it on packed tokens."""

from bloombee.models.dtype import resolve_dtype
from bloombee.models.ends import ModelEnds, ends_bytes
from bloombee.models.source import ModelSource, open_source
from bloombee.models.span_model import SpanModel
from bloombee.models.spec import FamilySpec

__all__ = [
    "FamilySpec",
    "ModelEnds",
    "ModelSource",
    "SpanModel",
    "ends_bytes",
    "open_source",
    "resolve_dtype",
]
