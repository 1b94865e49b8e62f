"""The only reader of the environment: variables of the platform, none of our own.

No setting of bloombee is an environment variable; each is a flag or a YAML key.
"""

from __future__ import annotations

import os

# Threads that spin while they wait starve the other processes of the machine:
# with three servers on two cores they cost 80 to 90 % of the speed.
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

# Else strangers who knock with anything but TLS write the log full, a line each.
QUIET_GRPC = {"GRPC_VERBOSITY": "ERROR"}


def variable(name: str) -> str | None:
    """What the environment says; an empty variable counts as unset."""
    return os.environ.get(name) or None


def use_passive_threads() -> None:
    """Make idle compute threads of this process sleep; call it before torch is imported.

    Modifies the environment of this process. What the user set stays.
    """
    for name, value in PASSIVE_THREADS.items():
        os.environ.setdefault(name, value)


def use_quiet_grpc() -> None:
    """Keep gRPC from printing handshakes that fail; call it before grpc is imported.

    Modifies the environment of this process. What the user set stays.
    """
    for name, value in QUIET_GRPC.items():
        os.environ.setdefault(name, value)


def child_environment(threads: int | None = None) -> dict[str, str]:
    """The environment for a child that computes, with `threads` OpenMP threads if given."""
    environment = {**PASSIVE_THREADS, **os.environ}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
