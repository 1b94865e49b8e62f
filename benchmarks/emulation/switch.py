"""The switch: a process that holds the hosts' namespaces and carries their packets.

`python -m benchmarks.emulation.switch SOCKET`: orders come and answers go over that
socket, whose first message is the plan. It ends when the other end closes, which happens
however its parent ends; devices go with it, and namespaces that nothing runs in.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from benchmarks.emulation import leftovers, namespace
from benchmarks.emulation.fabric import Fabric
from benchmarks.emulation.plan import (
    Answer,
    Counts,
    Done,
    Failed,
    Plan,
    Read,
    SetCut,
    SetLine,
    SetPath,
    Up,
)
from bloombee.errors import BloomBeeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGE_BYTES = 1 << 20
SUBNETS = 250
PREFIX = "10.213"
SUBNET = re.compile(r"\b10\.213\.(\d+)\.")
FIRST_HOST = 1
JOINED_BYTES = 32_000
"""Most that the kernel joins of a run of segments: what a queue drops, it drops at once."""
READ_BYTES = 1 << 16
AT_ONCE = 32
LONGEST_WAIT_S = 1.0
LAST_WAIT_S = 0.0004
PRIORITY = -10
REAL_TIME_PRIORITY = 1
IPV4 = 4
IP_AT = namespace.HEADER.size
TARGET_AT = IP_AT + 19
FIRST_PAYLOAD = IP_AT + 20
DECODER = msgspec.msgpack.Decoder(SetLine | SetPath | SetCut | Read)


class Switch:
    """Namespaces, devices and the loop over them."""

    def __init__(self, plan: Plan) -> None:
        self.fabric = Fabric(plan)
        self.namespaces: list[int] = []
        self.subnet = 0
        self._plan = plan
        self._loss = [[path.loss for path in row] for row in plan.paths]
        self._devices: list[int] = []
        try:
            self._make_hosts()
            self._join_segments()
        except OSError as error:
            raise SettingsError(
                f"can't make a network device: {error.strerror}; emulation needs root on Linux, "
                "and /dev/net/tun"
            ) from error
        self._hosts = {device: host for host, device in enumerate(self._devices)}

    # Making it ---------------------------------------------------------------------------

    def _make_hosts(self) -> None:
        mark = f"{namespace.MARK} {os.getpid()} {leftovers.started_ticks(os.getpid())}"
        away = self._open_here()
        for host in range(len(self._plan.names)):
            if host == self._plan.here:
                self.namespaces.append(-1)
                self._devices.append(away)
                continue
            made = namespace.new_namespace()
            self.namespaces.append(made)
            with namespace.inside(made):
                self._devices.append(namespace.new_tun(mark))
                self._set_up(host, namespace.DEVICE)

    def _open_here(self) -> int:
        """The device in our parent's namespace; its name keeps subnets of several apart."""
        taken = {int(number) for number in SUBNET.findall(namespace.ip("route show table all"))}
        first = os.getpid() % SUBNETS
        for number in (*range(first, SUBNETS), *range(first)):
            name = f"bee{number}"
            if number in taken:
                continue
            try:
                device = namespace.open_tun(name)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    continue
                raise
            self.subnet = number
            self._set_up(self._plan.here, name)
            return device
        raise SettingsError(f"all {SUBNETS} networks {PREFIX}.N.0/24 are in use here")

    def _set_up(self, host: int, device: str) -> None:
        address = address_of(self.subnet, host)
        namespace.set_up(device, address, mtu=self._plan.mtu, join_bytes=JOINED_BYTES)

    def _join_segments(self) -> None:
        """Only while nothing is lost at random: loss is to hit single packets."""
        joined = not any(any(row) for row in self._loss)
        for device in self._devices:
            namespace.join_segments(device, joined=joined)

    # Running it --------------------------------------------------------------------------

    def run(self, control: socket.socket) -> None:
        """Carry packets and follow orders until the other end of `control` closes."""
        fabric, hosts, clock = self.fabric, self._hosts, time.monotonic
        files = [control.fileno(), *hosts]
        while True:
            for file in select.select(files, (), (), wait_for(fabric.next_s - clock()))[0]:
                if file in hosts:
                    self._take(file, hosts[file])
                elif not self._answer(control):
                    return
            for target, packet in fabric.due(clock()):
                # A full queue, or a host that is down: gone, as on any network.
                with contextlib.suppress(OSError):
                    os.write(self._devices[target], packet)

    def _take(self, device: int, source: int) -> None:
        """Read what a host has sent; a busy one lets the others have their turn."""
        hosts, send, clock = len(self._plan.names), self.fabric.send, time.monotonic
        for _ in range(AT_ONCE):
            try:
                packet = os.read(device, READ_BYTES)
            except BlockingIOError:
                return
            if len(packet) < FIRST_PAYLOAD or packet[IP_AT] >> 4 != IPV4:
                continue
            target = packet[TARGET_AT] - FIRST_HOST
            if 0 <= target < hosts and target != source:
                size, count = on_the_line(packet)
                send(clock(), (source, target), packet, size, count)

    def _answer(self, control: socket.socket) -> bool:
        """Follow one order; False when the other end is closed."""
        message = control.recv(MESSAGE_BYTES)
        if not message:
            return False
        try:
            answer = self._follow(DECODER.decode(message))
        except (IndexError, msgspec.MsgspecError) as error:
            answer = Failed(f"the switch can't follow: {error}")
        control.send(msgspec.msgpack.encode(answer))
        return True

    def _follow(self, order: SetLine | SetPath | SetCut | Read) -> Answer:
        match order:
            case SetLine(host, line):
                self.fabric.set_line(host, line)
            case SetPath(source, target, path):
                self.fabric.set_path(source, target, path)
                self._loss[source][target] = path.loss
                self._join_segments()
            case SetCut(source, target, cut):
                self.fabric.set_cut(source, target, cut=cut)
            case Read():
                return self._counts()
        return Done()

    def _counts(self) -> Counts:
        fabric = self.fabric
        return Counts(
            pairs=fabric.counts(),
            up_busy_s=tuple(line.busy_s for line in fabric.ups),
            down_busy_s=tuple(line.busy_s for line in fabric.downs),
            cpu_s=time.process_time(),
            delivered=fabric.delivered,
            late_s=fabric.late_s,
        )


def wait_for(left_s: float) -> float:
    """How long to wait now: long waits end late, so the last bit is a wait of its own."""
    if left_s > 2 * LAST_WAIT_S:
        return min(LONGEST_WAIT_S, left_s - LAST_WAIT_S)
    return max(0.0, left_s)


def address_of(subnet: int, host: int) -> str:
    """Where a host is."""
    return f"{PREFIX}.{subnet}.{host + FIRST_HOST}"


def on_the_line(packet: bytes) -> tuple[int, int]:
    """Bytes and number of the packets on a real line that the kernel gave us as one."""
    kind, segment = packet[1], int.from_bytes(packet[4:6], sys.byteorder)
    size = len(packet) - IP_AT
    if not kind or not segment:
        return size, 1
    tcp_at = IP_AT + (packet[IP_AT] & 15) * 4
    headers = tcp_at - IP_AT + (packet[tcp_at + 12] >> 4) * 4
    count = -((headers - size) // segment)
    return size + (count - 1) * headers, count


def main(arguments: Sequence[str]) -> int:
    """Serve one parent; returns the exit code."""
    control = socket.socket(fileno=int(arguments[0]))
    for each in (signal.SIGINT, signal.SIGTERM):  # of the whole terminal; the parent decides
        signal.signal(each, signal.SIG_IGN)
    namespace.wake_on_time()
    _hurry()
    plan = msgspec.msgpack.decode(control.recv(MESSAGE_BYTES), type=Plan)
    try:
        switch = Switch(plan)
    except BloomBeeError as error:
        control.send(msgspec.msgpack.encode(Failed(str(error))))
        return 1
    gc.disable()  # nothing here makes cycles
    up = Up(os.getpid(), tuple(switch.namespaces), switch.subnet)
    control.send(msgspec.msgpack.encode(up))
    switch.run(control)
    return 0


def _hurry() -> None:
    """Run before whatever computes here: a packet can't wait for its time slice to end."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME_PRIORITY))
    except OSError:  # not allowed in some containers
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
