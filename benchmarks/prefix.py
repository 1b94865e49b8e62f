"""First token of a prompt whose system prompt the servers have seen, beside one they haven't.

Three servers on this machine, one thread each. In every round a new system prompt is asked
three times, with other questions: by a client whose prompts nobody keeps, by one whose
prompts are kept for the first time, and by the same one again. Prints medians and ratios
of paired runs; all tokens of the last are compared with those of the first client.

    python benchmarks/prefix.py [--tokens 1000] [--rounds 7] [--dtype float32]
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bloombee import AutoDistributedModelForCausalLM
from bloombee.cli.local_swarm import LocalSwarm, equal_spans
from bloombee.config.client import ClientSettings

BLOCKS = 30
SERVERS = 3
QUESTION = 20
NEW = 8
KINDS = ("not kept", "kept for the first time", "begins with what was kept")
console = Console(width=140)


def ids_of(count: int, seed: int, vocabulary: int) -> torch.Tensor:
    """Random tokens: what they say makes no difference to the time."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(100, vocabulary, (1, count), generator=numbers)


def ask(model: Any, ids: torch.Tensor, new: int) -> tuple[float, list[int]]:
    """Seconds that it takes, and the new tokens."""
    started_s = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    return time.perf_counter() - started_s, out[0, ids.shape[1] :].tolist()


def rounds(options: argparse.Namespace, plain: Any, keeping: Any) -> list[tuple[float, ...]]:
    """Seconds to the first token of each kind, round by round."""
    taken: list[tuple[float, ...]] = []
    for number in range(-1, options.rounds):  # the first one only warms up
        system, first, second = (
            ids_of(count, 3 * number + part + 3, plain.config.vocab_size)
            for part, count in enumerate((options.tokens, QUESTION, QUESTION))
        )
        one, two = torch.cat((system, first), 1), torch.cat((system, second), 1)
        times = [ask(model, ids, 1)[0] for model, ids in ((plain, one), (keeping, one))]
        threading.Event().wait(0.5)  # servers copy what they keep meanwhile
        times.append(ask(keeping, two, 1)[0])
        saved = keeping.traffic.adopted[0]
        if saved != options.tokens // 64 * 64:
            raise RuntimeError(f"the session began with {saved} tokens of {options.tokens}")
        if ask(plain, two, NEW)[1] != ask(keeping, two, NEW)[1]:
            raise RuntimeError("the tokens differ")
        if number >= 0:
            taken.append(tuple(times))
    return taken


def report(taken: list[tuple[float, ...]]) -> None:
    """Medians, and ratios to the first kind, paired by round."""
    table = Table("prompt", "first token, ms", "of the first", "least", "most")
    for index, kind in enumerate(KINDS):
        shares = sorted(times[index] / times[0] for times in taken)
        table.add_row(
            kind,
            f"{median(times[index] for times in taken) * 1e3:.1f}",
            f"{median(shares):.3f}",
            f"{shares[0]:.3f}",
            f"{shares[-1]:.3f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flags = ("--dtype", options.dtype, "--threads", "1")
    with LocalSwarm(options.model, equal_spans(BLOCKS, SERVERS), server_flags=flags) as swarm:
        plain, keeping = (
            AutoDistributedModelForCausalLM.from_pretrained(
                options.model,
                initial_peers=swarm.initial_peers,
                dtype=options.dtype,
                settings=ClientSettings(reuse_prompts=reuse),
            )
            for reuse in (False, True)
        )
        report(rounds(options, plain, keeping))
        for said in swarm.describe():
            console.print(
                f"blocks {said.start}:{said.end} keep {said.prefix_bytes / 1e6:.1f} MB of prompts; "
                f"{said.prefix_tokens_saved:,} tokens saved in {said.prefix_hits} sequences"
            )
        plain.close()
        keeping.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
