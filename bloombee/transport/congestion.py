"""Congestion control per socket, for sockets that a library opened and does not show.

BBR, the default of some hosts, adds half a round trip to 40 KB messages, so we ask
for cubic. gRPC has no setting for it and hides its sockets; on Linux they are
found among the process's open files. Elsewhere, and where the kernel refuses,
the host's default stays.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_OPEN_FILES = "/proc/self/fd"
_CUBIC = b"cubic"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def prefer_cubic_listening(port: int) -> int:
    """Set cubic on our sockets that listen on `port`; accepted connections inherit it.

    Returns how many sockets use it now.
    """

    def listens(held: socket.socket) -> bool:
        address = _address(held.getsockname)
        return address is not None and address[1] == port

    return _prefer_cubic(listens)


def prefer_cubic_connected(host: str, port: int) -> int:
    """Set cubic on our sockets connected to `host:port`; returns how many use it now.

    When `host` is a name, on all sockets connected to `port`.
    """

    def connects(held: socket.socket) -> bool:
        address = _address(held.getpeername)
        return address is not None and address[1] == port and (named or address[0] == host)

    named = not _is_ip(host)
    return _prefer_cubic(connects)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _prefer_cubic(matches: Callable[[socket.socket], bool]) -> int:
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return 0
    try:
        names = os.listdir(_OPEN_FILES)
    except OSError as error:
        _log.debug("can't look for sockets: %s", error)
        return 0
    return sum(_set_if(matches, int(name), option) for name in names)


def _set_if(matches: Callable[[socket.socket], bool], descriptor: int, option: int) -> bool:
    """Set cubic on one open file, if it is a TCP socket that matches."""
    try:
        ours = os.dup(descriptor)
    except OSError:  # closed since it was listed
        return False
    if not stat.S_ISSOCK(os.fstat(ours).st_mode):
        os.close(ours)
        return False
    with socket.socket(fileno=ours) as held:
        if held.type != socket.SOCK_STREAM or held.family not in _FAMILIES or not matches(held):
            return False
        try:
            held.setsockopt(socket.IPPROTO_TCP, option, _CUBIC)
        except OSError as error:
            _log.debug("the kernel refuses cubic congestion control: %s", error)
            return False
        return True


def _address(ask: Callable[[], tuple[str, int]]) -> tuple[str, int] | None:
    """Host and port, an IPv4 address inside IPv6 as itself; None when not connected."""
    try:
        host, port = ask()[:2]
    except OSError:
        return None
    return host.removeprefix("::ffff:"), port
