"""`bloombee-plan`: tables, JSON, the picture, and one line for every mistake."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from bloombee.cli.model_facts import facts_of
from bloombee.cli.plan import main
from bloombee.cli.plan_report import BAR, memory_bar
from bloombee.planner.alternatives import alternatives, value
from bloombee.planner.plan import MemoryUse, Plan
from bloombee.planner.planning import Problem, plan, widened
from bloombee.planner.workload import Objective, Workload
from tests.planning import LLAMA_30B, random_cluster

if TYPE_CHECKING:
    from pathlib import Path

E5 = ("--model", "llama-30b", "--cluster", "e5", "--batch", "32")


def _complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(E5) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "60 blocks of 1.07 GB" in lines[0]
    spans = [line for line in lines if "rtx-5090" in line]
    assert len(spans) == 3
    assert "paper-fp16" in spans[0]
    assert "ids" in spans[-1]
    assert sum(line.count(" <") for line in spans) >= 1
    assert "no compression" in shown
    assert "head at the client" in shown
    assert "Petals' greedy rule" in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*E5, "--json", "--max-peers", "2", "--objective", "cost")) == 0
    made = json.loads(capsys.readouterr().out)
    route = made["routes"][0]
    assert [stage["peer"] for stage in route["stages"]] == ["gpu-1", "gpu-2"]
    assert made["objective"] == "cost"
    rent = 2 * 0.56 / 3600
    assert made["tokens_per_dollar"] == pytest.approx(made["tokens_per_s"] / rent)
    assert made["served_tokens_per_s"] == pytest.approx(made["tokens_per_s"], rel=0.02)
    changes = {alternative["change"] for alternative in made["alternatives"]}
    assert {"batch 16", "batch 64", "at most 1 peer", "head at the client"} <= changes
    assert "Petals' greedy rule" not in changes, "it takes three peers"


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert main((*E5, "--plot", str(path))) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out


def test_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib: pip install" in _complaint(capsys, *E5, "--plot", "p.png")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = _complaint(capsys, "--model", "llama-30b", "--cluster", "home-6")
    assert "no file 'home-6'; did you mean home-5?" in unknown
    large = _complaint(capsys, "--model", "llama-3.1-405b", "--cluster", "e1", "--batch", "1")
    assert "no plan for llama-3.1-405b on e1: " in large
    nobody = _complaint(capsys, "--model", "./nowhere", "--cluster", "e1")
    assert "nowhere" in nobody
    path = tmp_path / "c.yaml"
    path.write_text("machines: [{name: a, device: t4, count: 9, up_mbps: 9, down_mbps: 9}]\n")
    priceless = _complaint(
        capsys, "--model", "llama-7b", "--cluster", str(path), "--objective", "cost"
    )
    assert "a-1 has no price: give it price_per_hour or dollars" in priceless


def test_facts_of_a_model_from_its_own_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    own, known = facts_of(str(tmp_path), 2), facts_of("smollm2", 2)
    assert (own.blocks, own.hidden_size, own.tied) == (30, 576, True)
    assert own.block_parameters == known.block_parameters
    assert own.kv_bytes_per_token == known.kv_bytes_per_token
    assert own.both_ends_bytes == known.both_ends_bytes


def test_memory_bar() -> None:
    use = MemoryUse(
        weights_bytes=50 * 10**9,
        ends_bytes=0,
        kv_bytes=25 * 10**9,
        buffer_bytes=0,
        workspace_bytes=5 * 10**9,
        device_bytes=100 * 10**9,
        host_kv_bytes=0,
        host_weights_bytes=0,
        host_bytes=0,
        disk_weights_bytes=0,
    )
    letters = {"#": BAR // 2, "k": BAR // 4, "w": BAR // 20, ".": BAR // 5}
    assert memory_bar(use) == "".join(k * n for k, n in letters.items()) + " 80.0/100.0 GB"


def test_no_alternative_within_the_same_choices_is_better() -> None:
    problem = Problem(LLAMA_30B, random_cluster(2, 5), Workload(batches=(16,)))
    chosen = plan(problem)
    assert isinstance(chosen, Plan)
    for alternative in alternatives(problem, chosen):
        if isinstance(alternative.outcome, Plan) and not alternative.change.startswith("batch"):
            gives = value(Objective.THROUGHPUT, alternative.outcome)
            assert gives <= chosen.tokens_per_s * (1 + 1e-9), alternative.change


def test_batches_grow_while_that_pays() -> None:
    cluster = random_cluster(2, 4)
    narrow = Problem(LLAMA_30B, cluster, Workload(batches=(1, 2)))
    wide = widened(narrow)[0]
    assert wide.shape.batch > 2
    twice = Problem(LLAMA_30B, cluster, Workload(batches=(wide.shape.batch * 2,)))
    more = plan(twice)
    assert not isinstance(more, Plan) or more.tokens_per_s <= 1 / wide.score
