"""Decode attention, microseconds a block: our pool, SDPA, and a loop over sequences.

Keys and values of several blocks are used in turn, so that the numbers include
reading them from memory as a model does. The write of the new token is included
for all. Every figure is the best of `--repeats` rounds, interleaved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as functional

from bloombee.core import PackedTable, SessionId, Span
from bloombee.kv import BatchItem, KVShape, make_pool

Step = Callable[[int], torch.Tensor]


def pool_step(args: argparse.Namespace, dtype: torch.dtype, batch: int, context: int) -> Step:
    """Our pool's attention on one block."""
    shape = KVShape(Span(0, args.blocks), args.kv_heads, args.head_size, dtype, torch.device("cpu"))
    pool = make_pool(shape, batch * (context + 64), max_length=context + 1)
    session = SessionId(bytes(16))
    pool.reserve(session, batch, context + 1)
    key = torch.randn(context - 1, args.kv_heads, args.head_size).to(dtype)
    for sequence in range(batch):
        for block in range(args.blocks):
            pool.load(session, sequence, block, key, key)
    table = PackedTable(tuple(range(batch)), (context - 1,) * batch, (1,) * batch)
    items = [BatchItem(session, table)]
    query = torch.randn(batch, args.heads, args.head_size).to(dtype)
    new = torch.randn(batch, args.kv_heads, args.head_size).to(dtype)
    plan = pool.begin(items)
    return lambda block: pool.attend(plan, block, query, new, new, scaling=args.head_size**-0.5)


def padded_steps(
    args: argparse.Namespace, dtype: torch.dtype, batch: int, context: int
) -> tuple[Step, Step]:
    """SDPA with grouped heads over one padded tensor, whole batch and row by row."""
    size = (args.blocks, 2, batch, args.kv_heads, context + 64, args.head_size)
    cache = torch.randn(size).to(dtype)
    query = torch.randn(batch, args.heads, 1, args.head_size).to(dtype)
    new = torch.randn(batch, args.kv_heads, args.head_size).to(dtype)

    def sdpa(block: int) -> torch.Tensor:
        keys, values = cache[block, :, :, :, :context]
        keys[:, :, -1] = new
        values[:, :, -1] = new
        return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def loop(block: int) -> torch.Tensor:
        keys, values = cache[block, :, :, :, :context]
        keys[:, :, -1] = new
        values[:, :, -1] = new
        rows = [
            functional.scaled_dot_product_attention(
                query[row].view(1, args.kv_heads, -1, args.head_size),
                keys[row : row + 1],
                values[row : row + 1],
            )
            for row in range(batch)
        ]
        return torch.cat(rows)

    return sdpa, loop


def best_us(steps: dict[str, Step], args: argparse.Namespace) -> dict[str, float]:
    """Best time per block of each, measured in turn."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(args.repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            for block in range(args.blocks):
                step(block)
            best[name] = min(best[name], (time.perf_counter() - start) / args.blocks * 1e6)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'dtype':>9} {'batch':>5} {'context':>7} {'ours':>7} {'sdpa':>7} {'loop':>7}  us/block")
    for dtype in (torch.float32, torch.bfloat16):
        for context in args.contexts:
            for batch in args.batches:
                ours = pool_step(args, dtype, batch, context)
                sdpa, loop = padded_steps(args, dtype, batch, context)
                best = best_us({"ours": ours, "sdpa": sdpa, "loop": loop}, args)
                figures = " ".join(f"{figure:7.0f}" for figure in best.values())
                print(f"{str(dtype)[6:]:>9} {batch:5} {context:7} {figures}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
