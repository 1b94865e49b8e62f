"""Servers hold the end of the model that adjoins their blocks, and compute it as clients do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from bloombee.core import Span
from bloombee.errors import Unsupported
from bloombee.models import ModelEnds, SpanModel, ends_bytes, open_source
from bloombee.models.ends import BOTH, FIRST, LAST, ends_of
from bloombee.models.linear import can_prepack
from tests.tiny import BLOCKS, FAMILIES, VOCABULARY, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [torch.float32, torch.bfloat16]
LAST_NAMES = ("norm.", "head", "out", "embed_out")


def served(source_path: Path, start: int, end: int, dtype: torch.dtype) -> SpanModel:
    return SpanModel.load_with_ends(
        open_source(str(source_path)), Span(start, end), dtype=dtype, device="cpu", progress=False
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_ends_are_bit_for_bit_those_of_clients(family: str, tmp_path: Path, *, tied: bool) -> None:
    path = tiny_model(family, tmp_path, tie_word_embeddings=tied)
    for dtype in DTYPES:
        ends = ModelEnds.load(open_source(str(path)), dtype=dtype, device="cpu")
        ids = torch.arange(VOCABULARY)
        rows = ends.embed(ids, ids)
        logits = ends.logits(ends.norm(rows)).float()
        first, last = served(path, 0, 1, dtype), served(path, BLOCKS - 1, BLOCKS, dtype)
        whole = served(path, 0, BLOCKS, dtype)
        for model in (first, whole):
            assert torch.equal(model.embed(ids, ids), rows)
            assert torch.equal(model.embed(ids[7:8], ids[7:8]), rows[7:8])
        for model in (last, whole):
            got = model.logits(rows)
            assert got.dtype is torch.float32
            assert torch.equal(got, logits)
            assert torch.equal(model.logits(rows[7:8]), logits[7:8])


def test_what_is_not_held_is_unsupported(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path)
    rows, ids = torch.zeros(1, 48), torch.zeros(1, dtype=torch.long)
    bare = SpanModel.load(
        open_source(str(path)), Span(0, BLOCKS), dtype=torch.float32, device="cpu", progress=False
    )
    for model in (served(path, 1, BLOCKS, torch.float32), bare):
        with pytest.raises(Unsupported, match="without the embeddings"):
            model.embed(ids, ids)
    for model in (served(path, 0, BLOCKS - 1, torch.float32), bare):
        with pytest.raises(Unsupported, match="without the final norm and head"):
            model.logits(rows)
    assert bare.vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("span", "ends"),
    [((0, 2), FIRST), ((2, 5), LAST), ((0, 5), BOTH), ((1, 4), frozenset())],
)
def test_which_ends_adjoin(span: tuple[int, int], ends: frozenset[str]) -> None:
    assert ends_of(Span(*span), 5) == ends


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_their_bytes_are_those_of_the_tensors(family: str, tmp_path: Path, *, tied: bool) -> None:
    path = tiny_model(family, tmp_path, tie_word_embeddings=tied)
    source = open_source(str(path))
    tensors = load_file(path / "model.safetensors")
    outside = {name: t for name, t in tensors.items() if ".layers." not in name}
    last = sum(t.nbytes for name, t in outside.items() if any(n in name for n in LAST_NAMES))
    first = sum(t.nbytes for t in outside.values()) - last
    tokens = next(t for name, t in outside.items() if "embed_tokens" in name or "embed_in" in name)
    shared = tokens.nbytes if tied else 0
    on_cuda = [ends_bytes(source, e, dtype=torch.float32, device="cuda") for e in (FIRST, LAST)]
    assert on_cuda == [first, last + shared]
    assert ends_bytes(source, BOTH, dtype=torch.float32, device="cuda") == first + last
    # A head in a layout of its own is a copy.
    copied = shared if can_prepack(torch.float32) else 0
    assert ends_bytes(source, BOTH, dtype=torch.float32, device="cpu") == first + last + copied
    assert ends_bytes(source, BOTH, dtype=torch.bfloat16, device="cuda") * 2 == first + last
