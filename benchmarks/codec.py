"""The lossless codec on real hidden states, beside other compressors and the entropy bound.

Runs the model on distinct passages (docstrings of Python's own library), takes the rows
between two blocks at several cuts, and sends them through each scheme as servers would:
whole prompts, a chunk of a prompt, and decode steps of some batch. Sizes are shares of the
raw bytes. The bound takes the bytes of a plane as independent and each distinct row once
(planes of the numbers as they are: rotated ones have a lower bound in bfloat16);
"repeated" is the share of rows that equal an earlier one. Speeds are those of one thread,
medians over rounds in which all schemes take turns; ratios are paired within a round.
A payload's memory is free again before the next one is coded.

    python -m benchmarks.codec [--rounds 7] [--cuts 8 15 23] [--dtypes float16 bfloat16]

`pip install blosc2 zipnn` (the second compiles) adds two schemes; without them they are left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import zlib
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.worker import DEMO_MODEL, Job, demo_gguf, load
from bloombee.compression import decode, encode, wire_dtype
from bloombee.compression.entropy import entropy
from bloombee.compression.raw import Buffer, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULES = (
    "abc argparse ast asyncio base64 bisect calendar cmd codecs collections configparser "
    "contextlib copy csv ctypes datetime decimal difflib dis doctest email enum fractions "
    "functools gettext glob heapq hmac html imaplib inspect ipaddress json logging mailbox "
    "optparse os pathlib pdb pickle pickletools platform pprint random re sched shelve shlex "
    "smtplib socket ssl statistics string subprocess tarfile tempfile textwrap threading "
    "tokenize trace turtle typing unittest urllib.request uuid weakref xml zipfile"
)
LEAST_TOKENS = 64
LONGEST = 160
STEPS = 8
CHUNK_ROWS = 256
BATCHES = (1, 8, 32)
OURS, BASE = "split", "zstd-1"
console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Payloads:
    """Rows as they travel at one cut in one phase; each payload is `[rows, width]`."""

    phase: str
    tensors: Sequence[torch.Tensor]

    @property
    def raw_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to make a payload smaller, and back; both take and give whole payloads."""

    name: str
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any, torch.Tensor], Buffer]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one round over all payloads, and those of all threads while encoding."""

    encode_s: float
    decode_s: float
    encode_cpu_s: float


# Hidden states ------------------------------------------------------------------------------


def passages(tokenizer: Any) -> list[list[int]]:
    """Token ids of distinct passages, as many as the largest batch."""
    found: list[list[int]] = []
    for name in MODULES.split():
        text = importlib.import_module(name).__doc__ or ""
        ids = tokenizer(text)["input_ids"][:LONGEST]
        if len(ids) >= LEAST_TOKENS:
            found.append(ids)
    if len(found) < BATCHES[-1]:
        raise RuntimeError(f"only {len(found)} passages of {LEAST_TOKENS} tokens were found")
    return found[: BATCHES[-1]]


def tokenizer() -> Any:
    """The demonstration model's."""
    from transformers import AutoTokenizer

    path = demo_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@torch.inference_mode()
def capture(model: Any, prompts: list[list[int]], cuts: Sequence[int]) -> list[Payloads]:
    """What crosses each cut: rows of the prompts and of the steps after them."""
    taken: dict[int, list[torch.Tensor]] = {cut: [] for cut in cuts}
    hooks = [
        model.model.layers[cut - 1].register_forward_hook(
            lambda _module, _inputs, out, cut=cut: taken[cut].append(
                (out[0] if isinstance(out, tuple) else out)[0].clone()
            )
        )
        for cut in cuts
    ]
    before = {cut: list[torch.Tensor]() for cut in cuts}
    after = {cut: list[torch.Tensor]() for cut in cuts}
    for ids in prompts:
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=STEPS + 1,
            min_new_tokens=STEPS + 1,
            pad_token_id=0,
        )
        for cut in cuts:
            before[cut].append(taken[cut][0])
            after[cut].append(torch.cat(taken[cut][1 : STEPS + 1]))
            taken[cut].clear()
    for hook in hooks:
        hook.remove()
    return [each for cut in cuts for each in payloads(before[cut], after[cut])]


def payloads(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[Payloads]:
    """Rows of single prompts as payloads of every size and phase."""
    packed = torch.cat(before)
    steps = torch.stack(after)  # [prompts, steps, width]
    found = [Payloads(f"chunk of {CHUNK_ROWS}", packed.split(CHUNK_ROWS)[:-1])]
    for batch in BATCHES:
        groups = range(0, len(before) - batch + 1, batch)
        whole = [torch.cat(before[first : first + batch]) for first in groups]
        found.append(Payloads(f"prefill {batch}", whole))
    for batch in BATCHES:
        groups = range(0, len(before) - batch + 1, batch)
        rows = [steps[first : first + batch, step] for first in groups for step in range(STEPS)]
        found.append(Payloads(f"decode {batch}", [each.contiguous() for each in rows]))
    return found


def bound(tensor: torch.Tensor) -> tuple[float, int]:
    """Bytes that the planes of the distinct rows take at least, and how many rows repeat."""
    rows = torch.unique(tensor.view(torch.int16), dim=0)
    raw = np.frombuffer(bytes_of(rows), dtype=np.uint8)
    planes = [raw[byte :: rows.element_size()] for byte in range(rows.element_size())]
    return sum(entropy(plane) * len(plane) / 8 for plane in planes), len(tensor) - len(rows)


# Schemes --------------------------------------------------------------------------------------


def schemes() -> list[Scheme]:
    """Ours, and whatever else is installed."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    found = [
        Scheme(
            OURS,
            lambda tensor: encode(tensor, OURS),
            lambda coded, like: bytes_of(
                decode(coded[1], coded[0], wire_dtype(like.dtype), *like.shape)
            ),
        ),
        Scheme(
            BASE,
            lambda tensor: compressor.compress(bytes_of(tensor)),
            lambda coded, _like: decompressor.decompress(coded),
        ),
        Scheme(
            "zlib-1",
            lambda tensor: zlib.compress(bytes_of(tensor), 1),
            lambda coded, _like: zlib.decompress(coded),
        ),
    ]
    return found + [each for make in (zipnn, blosc) if (each := make()) is not None]


def zipnn() -> Scheme | None:
    """ZipNN with one thread; it changes what it is given, so that a copy is part of it."""
    try:
        made = importlib.import_module("zipnn").ZipNN
    except ImportError:
        return None
    by_dtype = {
        dtype: made(bytearray_dtype=wire_dtype(dtype), threads=1)
        for dtype in (torch.float16, torch.bfloat16)
    }
    return Scheme(
        "ZipNN",
        lambda tensor: by_dtype[tensor.dtype].compress(bytearray(bytes_of(tensor))),
        lambda coded, like: bytes(by_dtype[like.dtype].decompress(coded)),
    )


def blosc() -> Scheme | None:
    """Bytes shuffled by blosc2, then its zstd."""
    try:
        library = importlib.import_module("blosc2")
    except ImportError:
        return None
    library.set_nthreads(1)
    return Scheme(
        "blosc2 shuffle",
        lambda tensor: library.compress(
            bytes_of(tensor),
            typesize=tensor.element_size(),
            clevel=1,
            filter=library.Filter.SHUFFLE,
            codec=library.Codec.ZSTD,
        ),
        lambda coded, _like: library.decompress(coded),
    )


def coded_bytes(coded: Any) -> int:
    """What goes onto the wire."""
    return len(coded[1] if isinstance(coded, tuple) else coded)


def timed(scheme: Scheme, given: Payloads) -> Times:
    """One pass over all payloads, each freed before the next, as once it is sent and read."""
    encode_s = decode_s = encode_cpu_s = 0.0
    for tensor in given.tensors:
        cpu_s, started_s = time.process_time(), time.perf_counter()
        coded = scheme.pack(tensor)
        encode_s += time.perf_counter() - started_s
        encode_cpu_s += time.process_time() - cpu_s
        started_s = time.perf_counter()
        scheme.unpack(coded, tensor)
        decode_s += time.perf_counter() - started_s
    return Times(encode_s, decode_s, encode_cpu_s)


def measure(
    given: Payloads, known: list[Scheme], rounds: int
) -> dict[str, tuple[int, list[Times]]]:
    """Bytes and times of every scheme. Raises RuntimeError when one loses a bit."""
    sizes = dict[str, int]()
    for scheme in known:
        coded = [scheme.pack(tensor) for tensor in given.tensors]
        for each, tensor in zip(coded, given.tensors, strict=True):
            if bytes(scheme.unpack(each, tensor)) != bytes(bytes_of(tensor)):
                raise RuntimeError(f"{scheme.name} does not give back {given.phase} rows")
        sizes[scheme.name] = sum(coded_bytes(each) for each in coded)
    times: dict[str, list[Times]] = {scheme.name: [] for scheme in known}
    for _ in range(rounds):
        for scheme in known:
            times[scheme.name].append(timed(scheme, given))
    return {name: (sizes[name], times[name]) for name in sizes}


# Report ---------------------------------------------------------------------------------------


def report(dtype: str, measured: list[tuple[Payloads, dict[str, tuple[int, list[Times]]]]]) -> None:
    """A table for each phase, over all cuts."""
    for phase in dict.fromkeys(given.phase for given, _ in measured):
        chosen = [(given, result) for given, result in measured if given.phase == phase]
        bounds = [[bound(tensor) for tensor in given.tensors] for given, _ in chosen]
        raw = sum(given.raw_bytes for given, _ in chosen)
        least = sum(size for each in bounds for size, _ in each)
        repeated = sum(rows for each in bounds for _, rows in each)
        rows = sum(len(tensor) for given, _ in chosen for tensor in given.tensors)
        count = sum(len(given.tensors) for given, _ in chosen)
        table = Table(
            "scheme", "size", "over bound", "encode MB/s", "decode MB/s", f"x {BASE}", "cores",
            title=f"{dtype}, {phase}: {raw / count / 1e3:.0f} KB a payload, "
            f"bound {least / raw:.2%}, repeated {repeated / rows:.1%}",
        )  # fmt: skip
        for name in chosen[0][1]:
            table.add_row(name, *figures([result for _, result in chosen], name, raw, least))
        console.print(table)


def figures(
    results: list[dict[str, tuple[int, list[Times]]]], name: str, raw: int, least: float
) -> list[str]:
    """Sums over cuts: size, speeds, speeds over the plain compressor's, cores while encoding."""
    size = sum(result[name][0] for result in results)
    mine, base = summed(results, name), summed(results, BASE)
    pairs = list(zip(mine, base, strict=True))
    encode_s = median(each.encode_s for each in mine)
    return [
        f"{size / raw:.2%}",
        f"{size / least - 1:+.2%}",
        f"{raw / encode_s / 1e6:.0f}",
        f"{raw / median(each.decode_s for each in mine) / 1e6:.0f}",
        f"{median(b.encode_s / a.encode_s for a, b in pairs):.2f} / "
        f"{median(b.decode_s / a.decode_s for a, b in pairs):.2f}",
        f"{median(each.encode_cpu_s for each in mine) / encode_s:.2f}",
    ]


def summed(results: list[dict[str, tuple[int, list[Times]]]], name: str) -> list[Times]:
    """Round by round, over all cuts."""
    by_round = zip(*(result[name][1] for result in results), strict=True)
    return [
        Times(
            sum(each.encode_s for each in together),
            sum(each.decode_s for each in together),
            sum(each.encode_cpu_s for each in together),
        )
        for together in by_round
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cuts", type=int, nargs="+", default=[8, 15, 23])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float16", "bfloat16"), default=["float16", "bfloat16"]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, prompts = schemes(), passages(tokenizer())
    for dtype in options.dtypes:
        captured = capture(
            load(Job(model=DEMO_MODEL, dtype=dtype, threads=1)), prompts, options.cuts
        )
        report(dtype, [(given, measure(given, known, options.rounds)) for given in captured])
    return 0


if __name__ == "__main__":
    sys.exit(main())
