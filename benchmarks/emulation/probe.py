"""Measures a path over real TCP sockets: one process at each end.

`python -m benchmarks.emulation.probe serve HOST` prints its port and serves until its
input closes; `... measure HOST PORT SECONDS` prints a `Measured` as JSON.
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

ECHO, SINK = b"E", b"S"
PINGS = 60
PING_GAP_S = 0.005
PING_BYTES = 64
CHUNK = bytes(1 << 16)
WARM_UP_SHARE = 0.4
"""Of the time of a transfer: TCP finds the rate before what counts begins."""
ANSWER = struct.Struct("=dQ")
SILENCE_S = 30.0


class Measured(msgspec.Struct, frozen=True):
    """Round trips of small messages in ms, and the rate of one long transfer in Mbit/s."""

    rtt_ms: float
    rtt_low_ms: float
    """5 % of the round trips were shorter."""
    rtt_high_ms: float
    """5 % were longer."""
    mbps: float


def serve(host: str) -> None:
    """Answer probes until standard input closes."""
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if peer.recv(1) == ECHO:
            while ping := peer.recv(PING_BYTES):
                peer.sendall(ping)
        else:
            _count(peer)


def _count(peer: socket.socket) -> None:
    """Take what comes; tell how many bytes had come by when, every 10 ms or so."""
    room = bytearray(1 << 18)
    total, told_s = 0, 0.0
    while size := peer.recv_into(room):
        total += size
        now_s = time.monotonic()
        if now_s - told_s > 0.01:
            told_s = now_s
            peer.sendall(ANSWER.pack(now_s, total))


def measure(host: str, port: int, seconds: float) -> Measured:
    """Round trips while nothing else is on the line, then one transfer."""
    trips = sorted(_round_trips(host, port))
    last = len(trips) - 1
    return Measured(
        rtt_ms=statistics.median(trips),
        rtt_low_ms=trips[round(last * 0.05)],
        rtt_high_ms=trips[round(last * 0.95)],
        mbps=_rate(host, port, seconds),
    )


def _round_trips(host: str, port: int) -> list[float]:
    found: list[float] = []
    pause = threading.Event()
    with socket.create_connection((host, port), SILENCE_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(ECHO)
        for _ in range(PINGS):
            started_s = time.monotonic()
            peer.sendall(bytes(PING_BYTES))
            got = 0
            while got < PING_BYTES:
                got += len(peer.recv(PING_BYTES))
            found.append((time.monotonic() - started_s) * 1e3)
            pause.wait(PING_GAP_S)
    return found


def _rate(host: str, port: int, seconds: float) -> float:
    """Payload a second at the receiver, by its own clock, after the warm-up."""
    with socket.create_connection((host, port), SILENCE_S) as peer:
        peer.sendall(SINK)
        marks: list[tuple[float, int]] = []
        reader = threading.Thread(target=_read_marks, args=(peer, marks))
        reader.start()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            peer.sendall(CHUNK)
        peer.shutdown(socket.SHUT_WR)
        reader.join(SILENCE_S)
    until_s = marks[0][0] + seconds
    begin_s = marks[0][0] + seconds * WARM_UP_SHARE
    counted = [mark for mark in marks if begin_s <= mark[0] <= until_s]
    # Of all marks, so that a receiver that slept at the first or last one doesn't count.
    fit = statistics.linear_regression(
        [mark[0] - begin_s for mark in counted], [mark[1] for mark in counted]
    )
    return fit.slope * 8 / 1e6


def _read_marks(peer: socket.socket, marks: list[tuple[float, int]]) -> None:
    with peer.makefile("rb") as stream:
        while len(mark := stream.read(ANSWER.size)) == ANSWER.size:
            marks.append(ANSWER.unpack(mark))


def main(arguments: Sequence[str]) -> int:
    """Serve or measure."""
    match arguments:
        case ["serve", host]:
            serve(host)
        case ["measure", host, port, seconds]:
            found = measure(host, int(port), float(seconds))
            print(msgspec.json.encode(found).decode())
        case _:
            print("usage: probe serve HOST | measure HOST PORT SECONDS", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
