"""What the emulation has measured, as tables."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.emulation import accuracy

if TYPE_CHECKING:
    from benchmarks.emulation.accuracy import Result
    from benchmarks.emulation.network import Traffic
    from bloombee.config.networks import NetworkFile

WIDTH = 130


class AccuracyTable(AbstractContextManager["AccuracyTable", None]):
    """Asked for and measured, a row a case, printed as they come."""

    def __init__(self) -> None:
        self._table = Table(title="TCP between two hosts, nothing else in the network")
        for column in ("from", "to", "Mbit/s", "measured", "off", "RTT ms", "median", "off"):
            self._table.add_column(
                column, justify="left" if column in ("from", "to") else "right", no_wrap=True
            )
        for column in ("5 - 95 %", "switch CPU", "late us", "load"):
            self._table.add_column(column, justify="right", no_wrap=True)
        self._live = Live(self._table, console=Console(width=WIDTH), refresh_per_second=1)

    def __enter__(self) -> AccuracyTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def check(self, network: NetworkFile | None) -> None:
        """All pairs of a network, or the usual rates and round trips. Raises SwarmError."""
        if network is None:
            accuracy.check_usual(self._add)
        else:
            accuracy.check_network(network, self._add)

    def _add(self, result: Result) -> None:
        case, found = result.case, result.measured
        asked = "no limit" if case.mbps is None else f"{case.mbps:.4g}"
        off = "" if case.mbps is None else f"{(result.mbps / case.mbps - 1) * 100:+.1f} %"
        self._table.add_row(
            *(case.source, case.target, asked, f"{result.mbps:.1f}", off),
            *(f"{case.rtt_ms:g}", f"{found.rtt_ms:.2f}", f"{found.rtt_ms - case.rtt_ms:+.2f}"),
            f"{found.rtt_low_ms:.2f} - {found.rtt_high_ms:.2f}",
            *(f"{result.cpu:.0%}", f"{result.late_us:.0f}", f"{result.load:.1f}"),
        )


def print_traffic(traffic: Traffic) -> None:
    """Bytes of every directed pair that had any, on standard error."""
    table = Table(title="What the network carried")
    for column in ("from", "to", "KB", "packets", "dropped", "lost"):
        table.add_column(column, justify="left" if column in ("from", "to") else "right")
    for (source, target), count in traffic.pairs.items():
        if count.packets or count.lost or count.dropped:
            numbers = (count.packets, count.dropped, count.lost)
            table.add_row(source, target, f"{count.bytes / 1e3:.1f}", *map(str, numbers))
    console = Console(stderr=True, width=WIDTH)
    console.print(table)
    console.print(
        f"switch: {traffic.cpu_s:.2f} s of CPU, packets {traffic.late_s * 1e6:.0f} us late"
    )
