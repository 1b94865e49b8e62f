"""An emulated network as a context manager: what benchmarks and tests use.

    with Emulation(read_network("e5")) as network:
        places = [network.place(host) for host in ("server-0", "server-1", "server-2")]
        network.set_rate("server-1", up_mbps=20, down_mbps=100)

The switch and all devices go when the block is left, and when this process ends in
any other way.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from benchmarks.emulation import namespace
from benchmarks.emulation.plan import (
    Answer,
    Counts,
    Failed,
    Line,
    Order,
    PairCount,
    Read,
    SetCut,
    SetLine,
    SetPath,
    Up,
    bytes_per_s,
    plan_of,
)
from benchmarks.emulation.switch import MESSAGE_BYTES, address_of
from bloombee.cli.child import Place
from bloombee.config.validation import nearest
from bloombee.errors import BloomBeeError, SettingsError, SwarmError

if TYPE_CHECKING:
    from bloombee.config.networks import NetworkFile

ROOT = Path(__file__).parents[2]
TOOLS = ("ip", "nsenter")
_ANSWER_S = 30.0
_END_S = 5.0
_ANSWERS = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of a network: directed pairs of hosts, and seconds their lines were busy.

    `cpu_s` is the switch's processor time, `late_s` the mean time by which packets
    left it late: the emulation's own error.
    """

    pairs: dict[tuple[str, str], PairCount]
    up_busy_s: dict[str, float]
    down_busy_s: dict[str, float]
    cpu_s: float
    delivered: int
    late_total_s: float

    @property
    def late_s(self) -> float:
        """By how much a packet was late in the mean."""
        return self.late_total_s / max(1, self.delivered)

    def since(self, before: Traffic) -> Traffic:
        """What came after `before`."""
        return Traffic(
            {pair: count - before.pairs[pair] for pair, count in self.pairs.items()},
            {host: busy - before.up_busy_s[host] for host, busy in self.up_busy_s.items()},
            {host: busy - before.down_busy_s[host] for host, busy in self.down_busy_s.items()},
            self.cpu_s - before.cpu_s,
            self.delivered - before.delivered,
            self.late_total_s - before.late_total_s,
        )


def missing() -> str:
    """Why this machine can't emulate a network; empty when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"emulation needs {' and '.join(tools)} (iproute2, util-linux)"
    if not os.path.exists("/dev/net/tun"):
        return "emulation needs /dev/net/tun (modprobe tun; in a container: --device /dev/net/tun)"
    try:
        os.close(namespace.new_namespace())
    except BloomBeeError as error:
        return str(error)
    return ""


class Emulation:
    """Hosts with addresses of their own, joined as a network file says.

    This process is the host `here_as`, or one more called `here`, without limits.
    Thread-safe. Entering raises SettingsError where the machine can't do it.
    """

    def __init__(self, network: NetworkFile, *, here_as: str = "") -> None:
        self._plan = plan_of(network, here_as)
        self._paths = [list(row) for row in self._plan.paths]
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._control: socket.socket | None = None
        self._up = Up(0, (), 0)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
            command = [sys.executable, "-m", "benchmarks.emulation.switch", str(theirs.fileno())]
            with theirs:
                # In a session of its own: Ctrl-C is for us, who end it.
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], cwd=ROOT, start_new_session=True
                )
            stack.callback(_end, process)
            stack.enter_context(ours)
            ours.settimeout(_ANSWER_S)
            self._control = ours
            answer = self._ask(self._plan)
            if not isinstance(answer, Up):
                raise SwarmError(f"the switch answered {answer}")
            self._up = answer
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._control = None

    # Where things run --------------------------------------------------------------------

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, this process's as well."""
        return self._plan.names

    @property
    def here(self) -> str:
        """The address of this process."""
        return address_of(self._up.subnet, self._plan.here)

    def address(self, host: str) -> str:
        """Where a host is reached. Raises SettingsError for an unknown host."""
        return address_of(self._up.subnet, self._host(host))

    def place(self, host: str) -> Place:
        """Where a child runs that is to be in a host. Raises SettingsError for an unknown one."""
        number = self._host(host)
        if number == self._plan.here:
            return Place(self.here)
        nsenter = shutil.which("nsenter") or "nsenter"
        entry = f"--net=/proc/{self._up.pid}/fd/{self._up.namespaces[number]}"
        return Place(self.address(host), (nsenter, entry, "--"))

    # Changes while it runs ---------------------------------------------------------------

    def set_rate(
        self, host: str, up_mbps: float | None = None, down_mbps: float | None = None
    ) -> None:
        """A host's rates from now on (None: no limit); what is queued keeps its time.

        Raises SettingsError for an unknown host or a rate that is not positive.
        """
        number = self._host(host)
        for rate in (up_mbps, down_mbps):
            if rate is not None and not rate > 0:
                raise SettingsError(f"{host}: a rate should be greater than 0, got {rate}")
        self._ask(SetLine(number, Line(bytes_per_s(up_mbps), bytes_per_s(down_mbps))))

    def set_path_rate(
        self, source: str, target: str, mbps: float | None, *, both: bool = True
    ) -> None:
        """The rate of what lies between two hosts from now on, beside those of their lines."""
        if mbps is not None and not mbps > 0:
            raise SettingsError(f"{source} to {target}: a rate should be above 0, got {mbps}")
        self._set_path(source, target, both=both, rate=bytes_per_s(mbps))

    def set_delay(self, source: str, target: str, delay_ms: float, *, both: bool = True) -> None:
        """The one-way delay between two hosts from now on, in both directions or in one."""
        if not delay_ms >= 0:
            raise SettingsError(f"{source} to {target}: a delay can't be {delay_ms} ms")
        self._set_path(source, target, both=both, delay_s=delay_ms / 1e3)

    def set_loss(self, source: str, target: str, loss: float, *, both: bool = True) -> None:
        """The share of packets lost at random between two hosts from now on."""
        if not 0 <= loss < 1:
            raise SettingsError(f"{source} to {target}: loss is a share below 1, got {loss}")
        self._set_path(source, target, both=both, loss=loss)

    def cut(self, host: str) -> None:
        """No packet goes to or from the host any more; its own device stays up."""
        self._cut_host(host, cut=True)

    def mend(self, host: str) -> None:
        """Undo `cut`."""
        self._cut_host(host, cut=False)

    def mute(self, speaker: str, listener: str) -> None:
        """What one host sends to the other is lost; the other direction works."""
        self._ask(SetCut(self._host(speaker), self._host(listener), cut=True))

    def unmute(self, speaker: str, listener: str) -> None:
        """Undo `mute`."""
        self._ask(SetCut(self._host(speaker), self._host(listener), cut=False))

    # What it carried ---------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """The counters by now."""
        counts = self._ask(Read())
        if not isinstance(counts, Counts):
            raise SwarmError(f"the switch answered {counts}")
        names = self.hosts
        return Traffic(
            {
                (source, target): counts.pairs[one][other]
                for one, source in enumerate(names)
                for other, target in enumerate(names)
                if one != other
            },
            dict(zip(names, counts.up_busy_s, strict=True)),
            dict(zip(names, counts.down_busy_s, strict=True)),
            counts.cpu_s,
            counts.delivered,
            counts.late_s,
        )

    # The switch --------------------------------------------------------------------------

    def _host(self, name: str) -> int:
        if name not in self.hosts:
            raise SettingsError(f"no host is called {name!r}{nearest(name, self.hosts)}")
        return self.hosts.index(name)

    def _set_path(self, source: str, target: str, *, both: bool, **changed: float) -> None:
        one, other = self._host(source), self._host(target)
        for start, end in [(one, other), (other, one)][: 2 if both else 1]:
            path = msgspec.structs.replace(self._paths[start][end], **changed)
            self._paths[start][end] = path
            self._ask(SetPath(start, end, path))

    def _cut_host(self, host: str, *, cut: bool) -> None:
        number = self._host(host)
        for other in range(len(self.hosts)):
            self._ask(SetCut(number, other, cut=cut))
            self._ask(SetCut(other, number, cut=cut))

    def _ask(self, order: Order) -> Answer:
        if self._control is None:
            raise SwarmError("the network does not run; use it inside its `with` block")
        with self._lock:
            try:
                self._control.send(msgspec.msgpack.encode(order))
                answer = _ANSWERS.decode(self._control.recv(MESSAGE_BYTES) or b"\xc0")
            except (OSError, msgspec.MsgspecError) as error:
                raise SwarmError(f"the emulation's switch is gone: {error}") from error
        if isinstance(answer, Failed):
            raise SettingsError(answer.reason)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends when our end of its socket is closed, which has just happened."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
