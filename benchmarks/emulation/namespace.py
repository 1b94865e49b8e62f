"""Network namespaces and TUN devices, made by the calling process and gone with it. Linux, root.

A namespace lives while this process has it open or something runs in it. Each carries
a mark, by which `leftovers` knows whose it was.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bloombee.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONGESTION = "cubic"
MARK = "bloombee-emulation"
DEVICE = "wire"
HEADER = struct.Struct("=BBHHHH")
"""In front of every packet: flags, kind, header bytes, segment bytes, checksum's two places."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS = 0x01, 0x02
_PR_SET_TIMERSLACK = 29
_PACKETS_QUEUED = 2000
_libc = ctypes.CDLL(None, use_errno=True)


def new_namespace() -> int:
    """An open file of a new network namespace; this process stays in its own."""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _called(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
        made = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _called(_libc.setns(ours, _CLONE_NEWNET), "return from a network namespace")
        return made
    finally:
        os.close(ours)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """This thread, and the children it starts, are in that namespace."""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _called(_libc.setns(namespace, _CLONE_NEWNET), "enter a network namespace")
        yield
    finally:
        _called(_libc.setns(ours, _CLONE_NEWNET), "return from a network namespace")
        os.close(ours)


def open_tun(name: str) -> int:
    """A new TUN device in this thread's namespace; raises OSError (EBUSY: the name is taken).

    It goes when its file is closed. Packets on it have a `HEADER`.
    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), flags))
    except OSError:
        os.close(device)
        raise
    return device


def join_segments(device: int, *, joined: bool) -> None:
    """Whether the kernel hands over runs of TCP segments as one packet: a tenth of the work."""
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS if joined else 0)


def new_tun(mark: str) -> int:
    """The device of a host, in whose namespace this thread is; marks that as well."""
    device = open_tun(DEVICE)
    ip(f'link set lo up alias "{mark}"')
    return device


def set_up(name: str, address: str, *, mtu: int, join_bytes: int) -> None:
    """Give a device its address; all connections over it use cubic.

    The route says so, not the namespace: a kernel lets only listed ones be a namespace's.
    """
    subnet = address.rsplit(".", 1)[0] + ".0/24"
    ip(
        f"link set dev {name} mtu {mtu} txqueuelen {_PACKETS_QUEUED} gso_max_size {join_bytes} up",
        f"addr add {address}/24 dev {name} noprefixroute",
        f"route add {subnet} dev {name} src {address} congctl {CONGESTION}",
    )


def ip(*commands: str) -> str:
    """What `ip` prints for commands, in this thread's namespace. Raises SettingsError."""
    text = "\n".join(commands) + "\n"
    done = subprocess.run(["ip", "-batch", "-"], input=text, text=True, capture_output=True)
    if done.returncode != 0:
        raise SettingsError(f"ip (iproute2) can't do `{commands[0]}` ...: {done.stderr.strip()}")
    return done.stdout


def wake_on_time() -> None:
    """Let the kernel end this thread's waits when they are over, not up to 50 us later."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _called(result: int, what: str) -> None:
    if result != 0:
        raise SettingsError(
            f"can't {what}: {os.strerror(ctypes.get_errno())}; emulation needs root on Linux"
        )
