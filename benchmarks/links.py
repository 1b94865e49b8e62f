"""How well links are measured: rate and round trip of emulated links, beside what they are.

Two processes, the one sending steps as a stage does, over an emulated network (root), or
over lines that the processes play themselves (`--shaped`). The last column is how long
it takes to notice that the rate has dropped to a 25th and come back, within 30 %.

    python -m benchmarks.links [--rates 20 125 500] [--rtts 0 20 80] [--shaped]
"""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.network import Emulation
from benchmarks.link_ends import Burst, Job, Measured
from benchmarks.process import LineProcess
from bloombee.config.networks import NetworkFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DECODE, PREFILL = 36_864, 294_912
"""Bytes of a decode step and of a prompt's, of SmolLM2 in bfloat16 (32 and 256 rows)."""
DROP, NEAR = 25, 0.3


@contextmanager
def emulated(mbps: float, rtt_ms: float) -> Iterator[tuple[LineProcess, Callable[[float], None]]]:
    """The dialer over a network of namespaces, and what changes the rate."""
    network = NetworkFile.model_validate(
        {
            "hosts": [{"name": "a"}, {"name": "b"}],
            "paths": [{"from": "*", "to": "*", "rtt_ms": rtt_ms}],
            "queue_ms": 2000.0,
            "mtu": 9000 if mbps > 200 else 1500,  # noqa: PLR2004 - fast ones need jumbo frames
        }
    )
    with ExitStack() as stack:
        emulation = stack.enter_context(Emulation(network))
        emulation.set_rate("a", mbps, None)
        here, there = emulation.place("a"), emulation.place("b")
        listener = stack.enter_context(
            LineProcess("benchmarks.link_ends", Job(there.host), there.prefix)
        )
        dialer = stack.enter_context(
            LineProcess("benchmarks.link_ends", listener.read(Job), here.prefix)
        )
        yield dialer, lambda rate: emulation.set_rate("a", rate, None)


@contextmanager
def shaped(mbps: float, rtt_ms: float) -> Iterator[tuple[LineProcess, None]]:
    """The dialer over lines that both processes play; their rates can't change."""
    line = f"{mbps:g}/{10 * mbps:g}:{rtt_ms:g}"
    with ExitStack() as stack:
        listener = stack.enter_context(
            LineProcess("benchmarks.link_ends", Job("127.0.0.1", line=f"10000/10000:{rtt_ms:g}"))
        )
        at = listener.read(Job)
        job = Job("", at.peer, at.address, at.certificate_hash, line)
        yield stack.enter_context(LineProcess("benchmarks.link_ends", job)), None


def _measure(dialer: LineProcess, burst: Burst) -> Measured:
    dialer.write(burst)
    return dialer.read(Measured)


def _noticed_s(measured: Measured, mbps: float) -> float:
    """From when on the rate was taken to be about that, to the end."""
    right_from = 0.0
    for at_s, then in zip(measured.when_s, measured.mbps_then, strict=True):
        if abs(then / mbps - 1) > NEAR:
            right_from = at_s
    return right_from


def _row(options: argparse.Namespace, mbps: float, rtt_ms: float) -> list[str]:
    way = shaped if options.shaped else emulated
    with way(mbps, rtt_ms) as (dialer, set_rate):
        threading.Event().wait(1.0)
        seconds = options.seconds
        prompt = _measure(dialer, Burst([PREFILL], 0.1, seconds))
        decode = _measure(dialer, Burst([DECODE], 0.06, seconds))
        cells = [
            f"{mbps:g}", f"{rtt_ms:g}",
            f"{prompt.mbps:.1f} ({100 * (prompt.mbps / mbps - 1):+.0f} %)",
            f"{decode.mbps:.1f} ({100 * (decode.mbps / mbps - 1):+.0f} %)",
            f"{decode.rtt_ms:.2f}", str(decode.samples),
        ]  # fmt: skip
        if set_rate is None:
            return [*cells, ""]
        set_rate(mbps / DROP)
        every_s = max(0.06, 1.2 * DECODE * 8 / (mbps / DROP * 1e6))
        dropped = _measure(dialer, Burst([DECODE], every_s, 6.0))
        set_rate(mbps)
        threading.Event().wait(1.0)
        back = _measure(dialer, Burst([DECODE], 0.06, 3.0))
        noticed = f"{_noticed_s(dropped, mbps / DROP):.1f} / {_noticed_s(back, mbps):.1f}"
        return [*cells, noticed]


def main() -> int:
    """Measure all links and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 125, 500])
    parser.add_argument("--rtts", type=float, nargs="+", default=[0, 20, 80])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--shaped", action="store_true")
    options = parser.parse_args()
    table = Table(
        "Mbit/s", "RTT ms", "by prompts", "by decode steps", "RTT measured", "samples",
        "drop / back noticed, s",
    )  # fmt: skip
    for rtt_ms in options.rtts:
        for mbps in options.rates:
            table.add_row(*_row(options, mbps, rtt_ms))
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
