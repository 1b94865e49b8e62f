"""The libp2p daemon (p2pd) as a child process that never outlives this one.

We start the daemon ourselves and let hivemind attach to its control socket. The
private key goes through a pipe, so no second copy of it lies on a disk. The
daemon gets a session of its own: Ctrl-C in a terminal reaches the whole process
group, and the daemon has to live until the record is withdrawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bloombee.config.environment import child_environment
from bloombee.errors import SettingsError, SwarmError
from bloombee.swarm import tether

if TYPE_CHECKING:
    from pathlib import Path

    from bloombee.swarm.runtime_folder import RuntimeFolder

_READY = b"Peer Addrs:"
_TAIL_BYTES = 2048
_KILL_AFTER_S = 2.0
_EXIT_POLLS, _EXIT_POLL_S = 100, 0.01


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How the daemon listens: multiaddresses, or None to be a pure client nobody dials.

    A daemon whose peers find it behind NAT keeps a slot at each of `relays`
    (multiaddresses with `/p2p/`), and is announced and reached through them; holes are
    punched where NATs allow it. Every daemon lends itself as a relay, but one that isn't
    known to be `public` cuts each circuit off at 128 KiB, too early for activations.
    """

    binary: str
    listen: str | None
    announce: str | None
    private_key: bytes
    map_ports: bool
    relays: tuple[str, ...] = ()
    public: bool = False
    start_deadline_s: float = 15.0


class Daemon:
    """A running p2pd. `control` is the path of its control socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], lifeline: int, folder: RuntimeFolder
    ) -> None:
        self.control = control_socket(folder)
        self.folder = folder.path
        self.pid = process.pid
        self._process = process
        self._output = _Output()
        # Runs at exit, too, when nobody closed the node.
        self._discard = weakref.finalize(self, _discard, process, lifeline, folder)

    @classmethod
    async def start(cls, options: DaemonOptions, folder: RuntimeFolder) -> Self:
        """Start p2pd, its sockets in `folder`, and wait until it serves.

        The calling thread must live as long as the daemon: on Linux the daemon is
        killed when that thread ends. Raises SettingsError when it can't listen where
        `options` say, SwarmError when it doesn't start.
        """
        control = control_socket(folder)
        control.unlink(missing_ok=True)  # of one that was killed: nobody can listen there again
        try:
            process, lifeline = _spawn(options, control)
        except OSError as error:
            raise SwarmError(
                f"can't start the libp2p daemon {options.binary}: {error.strerror}; "
                "reinstall hivemind for this platform"
            ) from error
        daemon = cls(process, lifeline, folder)
        try:
            async with asyncio.timeout(options.start_deadline_s):
                await daemon._until_ready(options)
        except BaseException as error:
            daemon.kill()
            if isinstance(error, TimeoutError):
                raise SwarmError(
                    f"the libp2p daemon did not start in {options.start_deadline_s:.0f} s: "
                    f"{daemon.last_words}; start again, or look for what slows this machine down"
                ) from error
            raise
        return daemon

    async def _until_ready(self, options: DaemonOptions) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self._output, self._process.stdout)
        await self._output.ready_or_ended.wait()
        if self._output.is_ready:
            return
        said = self._output.last_words
        if "listen" in said or "bind" in said:
            raise SettingsError(
                f"can't listen on {options.listen}: {said}; "
                "take another host or DHT port (0 is a free one)"
            )
        raise SwarmError(f"the libp2p daemon ended at its start: {said}; reinstall hivemind")

    @property
    def last_words(self) -> str:
        """How it ended and the end of what it printed, for error messages."""
        code = self._process.poll()
        return f"exit code {code}, {self._output.last_words}"

    @property
    def has_ended(self) -> bool:
        """Whether the daemon has ended, for whatever reason."""
        return self._output.ended.is_set()

    async def ended(self) -> None:
        """Return when the daemon has ended, for whatever reason."""
        await self._output.ended.wait()
        # Its output closes a moment before the kernel has its exit code.
        for _ in range(_EXIT_POLLS):
            if self._process.poll() is not None:
                return
            await asyncio.sleep(_EXIT_POLL_S)

    async def stop(self) -> None:
        """End the daemon, by force after two seconds. Never raises."""
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_AFTER_S):
                await self.ended()
        self.kill()

    def kill(self) -> None:
        """End the daemon at once. From any thread, and repeatedly."""
        self._discard()


class _Output(asyncio.Protocol):
    """What the daemon prints. Its end is the daemon's end."""

    def __init__(self) -> None:
        self.ready_or_ended = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_ready = False
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        """Keep the last few hundred bytes; look for the line that says it serves."""
        self._buffer += data
        if not self.is_ready and _READY in self._buffer:
            self.is_ready = True
            self._buffer = b""  # its greeting, less a few addresses, explains no later failure
            self.ready_or_ended.set()
        self._buffer = self._buffer[-_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Its standard output is closed."""
        self.ended.set()
        self.ready_or_ended.set()

    @property
    def last_words(self) -> str:
        lines = self._buffer.decode(errors="replace").split("\n")
        said = (line.strip() for line in reversed(lines))
        return next((line for line in said if line and not line.startswith("/")), "no message")


def control_socket(folder: RuntimeFolder) -> Path:
    """Where the daemon of `folder` listens for requests, every one that is started there."""
    return folder.path / "control.sock"


def _discard(process: subprocess.Popen[bytes], lifeline: int, folder: RuntimeFolder) -> None:
    process.kill()
    process.wait()
    os.close(lifeline)
    del folder  # held until here, or it would be removed under the daemon


def _spawn(options: DaemonOptions, control: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The daemon, and the end of a pipe that mode `pipe` watches: close it when it has ended."""
    key_read, key_write = os.pipe()
    alive_read, alive_write = os.pipe()
    try:
        os.write(key_write, options.private_key)
        mode = "signal" if sys.platform == "linux" else "pipe"
        tethered = [mode, str(os.getpid()), str(alive_read), *_command(options, control, key_read)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(tether.__file__), *tethered],
            pass_fds=(key_read, alive_read),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(options),
        )
    except BaseException:
        os.close(alive_write)
        raise
    finally:
        for descriptor in (key_read, key_write, alive_read):
            os.close(descriptor)
    return process, alive_write


def _environment(options: DaemonOptions) -> dict[str, str]:
    environment = {**child_environment(), "GOLOG_LOG_LEVEL": "error"}
    if options.public:
        # p2pd starts two relays, a strict one and ours, and the later one counts: with more
        # threads it was the strict one in a third of starts, with one in none of twenty.
        environment["GOMAXPROCS"] = "1"
    return environment


def _command(options: DaemonOptions, control: Path, key: int) -> list[str]:
    serves = options.listen is not None
    flags = {
        "listen": f"/unix{control}",
        "id": f"/dev/fd/{key}",
        "dhtServer" if serves else "dhtClient": "1",
        "natPortMap": str(int(options.map_ports)),
        "autonat": "1",
        "connManager": "1",
        "relay": "1",  # also for others; holes are punched with autonat
        "tls": "1",
        "b": "0",  # we dial the initial peers ourselves, with deadlines
        "idleTimeout": "60s",
    }
    if options.listen is None:
        flags["noListenAddrs"] = "1"
    else:
        flags["hostAddrs"] = options.listen
    if options.announce is not None:
        flags["announceAddrs"] = options.announce
    if options.public:
        flags["forceReachabilityPublic"] = "1"
    if options.relays:
        # Looking for more in the DHT would put off the first slot by three minutes.
        flags |= {"autoRelay": "1", "relayDiscovery": "0"}
        flags["trustedRelays"] = ",".join(options.relays)
    return [options.binary, *(f"-{name}={value}" for name, value in flags.items())]
