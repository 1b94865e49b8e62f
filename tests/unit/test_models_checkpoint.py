"""Loading only a span's tensors, and refusing what can't be loaded in one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloombee.core import Span
from bloombee.errors import ModelError, SettingsError
from bloombee.models import ModelEnds, ModelSource, SpanModel, open_source, resolve_dtype
from tests.tiny import BLOCKS, FAMILIES, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

FLOAT32 = {"dtype": torch.float32, "device": "cpu"}


def refused(act: object, *words: str) -> None:
    """`act` raises ModelError with all `words`, in one line."""
    assert callable(act)
    with pytest.raises(ModelError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path, sharded=True)


def shards_of(folder: Path, block: int) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for name, file in index.items() if f"layers.{block}." in name}


def test_a_span_reads_only_its_own_shards(sharded: Path) -> None:
    kept = shards_of(sharded, 2)
    assert len(kept) < len(list(sharded.glob("*.safetensors")))
    for file in sharded.glob("*.safetensors"):
        if file.name not in kept:
            file.unlink()
    source = open_source(str(sharded))
    SpanModel.load(source, Span(2, 3), **FLOAT32)
    lost = (shards_of(sharded, 0) - kept).pop()
    refused(lambda: SpanModel.load(source, Span(0, 1), **FLOAT32), lost, "hub id")


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_real_tensors(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path)
    source = open_source(str(folder))
    tensors = load_file(folder / "model.safetensors")
    inside = [t for name, t in tensors.items() if ".layers." in name]
    assert source.num_blocks == BLOCKS
    assert source.block_bytes(torch.float32) * BLOCKS == sum(t.nbytes for t in inside)
    assert source.block_bytes(torch.bfloat16) * 2 == source.block_bytes(torch.float32)
    shape = source.kv_shape(Span(1, 3), torch.bfloat16, "cpu")
    key = next(
        t for name, t in tensors.items() if "k_proj.weight" in name or "_key_value.w" in name
    )
    per_block = key.shape[0] // 3 if family == "gpt_neox" else key.shape[0]
    assert shape.kv_heads * shape.head_size == per_block


def test_a_tied_head_needs_no_tensor(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    source = open_source(str(folder))
    ends = ModelEnds.load(source, **FLOAT32)
    rows = ends.embed(torch.tensor([5, 7]), torch.tensor([0, 1]))
    assert ends.logits(rows).argmax(-1).tolist() == [5, 7]


def test_tensors_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file)
    SpanModel.load(open_source(str(folder)), Span(0, BLOCKS), **FLOAT32)


def test_weights_come_in_the_asked_dtype(tmp_path: Path) -> None:
    source = open_source(str(tiny_model("llama", tmp_path, dtype=torch.bfloat16)))
    assert source.native_dtype is torch.bfloat16
    span = SpanModel.load(source, Span(0, 1), dtype=torch.float32, device="cpu")
    assert span.dtype is torch.float32


def test_auto_is_the_checkpoints_dtype_where_the_device_has_it(tmp_path: Path) -> None:
    source = open_source(str(tiny_model("llama", tmp_path, dtype=torch.float16)))
    assert resolve_dtype("auto", source, "cpu") is torch.float32
    assert resolve_dtype("auto", source, "cuda") is torch.float16
    assert resolve_dtype("bfloat16", source, "cpu") is torch.bfloat16
    with pytest.raises(SettingsError, match="bfloat16"):
        resolve_dtype("bf16", source, "cpu")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)

    def load() -> SpanModel:
        return SpanModel.load(open_source(str(folder)), Span(0, BLOCKS), **FLOAT32)

    refused(load, name, "incomplete")
    save_file(tensors | {name: torch.zeros(3, 3)}, file)
    refused(load, "mlp.up_proj.weight", "(3, 3)", "(80, 48)")


def test_blocks_beyond_the_model_are_refused(tmp_path: Path) -> None:
    source = open_source(str(tiny_model("llama", tmp_path)))
    refused(lambda: SpanModel.load(source, Span(3, 6), **FLOAT32), "5 blocks", "0:5")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(
        lambda: SpanModel.load(open_source(str(folder)), Span(0, 1), **FLOAT32),
        "pickled",
        "save_pretrained",
    )


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused(
        lambda: SpanModel.load(open_source(str(folder)), Span(0, 1), **FLOAT32), "download it again"
    )


def test_unknown_families_and_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantized))
    refused(lambda: open_source(str(folder)), "quantized", "GGUF")
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    refused(lambda: open_source(str(folder)), "config.json can't be used", "attention heads")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(lambda: open_source(str(folder)), "'gpt2'", "configs/models/gpt2.yaml")
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such"}))
    refused(lambda: open_source(str(folder)), "config.json can't be used")


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    source: ModelSource = open_source(str(tiny_model("llama", tmp_path)))
    refused(source.tokenizer, "tokenizer files")
    assert source.generation_config().eos_token_id == 2
