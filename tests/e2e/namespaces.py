"""Hosts with addresses of their own on this machine, whose links can be cut.

The emulated network of the benchmarks, without limits: all it does here is to carry
packets, or not to.
"""

from __future__ import annotations

import pytest

from benchmarks.emulation.network import Emulation, missing
from bloombee.config.networks import HERE, HostKind, NetworkFile


def need_namespaces() -> None:
    """Skip the tests of this module where namespaces can't be made, and say why."""
    reason = missing()
    if reason:
        pytest.skip(reason)


class Network(Emulation):
    """Hosts by name; as a context manager. `here` is the address of this process."""

    def __init__(self, *names: str) -> None:
        hosts = tuple(HostKind(name=name) for name in names)
        super().__init__(NetworkFile(hosts=hosts, mtu=1500))

    def cut_here(self) -> None:
        """No packet goes to or from this process any more."""
        self.cut(HERE)

    def mend_here(self) -> None:
        """Undo `cut_here`."""
        self.mend(HERE)
