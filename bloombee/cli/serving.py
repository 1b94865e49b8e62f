"""What every long-running command shares: signals, one-line errors, the ready file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bloombee.errors import BloomBeeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    LoopFactory = Callable[[], asyncio.AbstractEventLoop]

FAILED = 1
INTERRUPTED = 130
MIN_KEY_BYTES = 16
_ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What a process tells whoever started it, once it serves."""

    peer: str
    maddrs: tuple[str, ...]
    pid: int
    endpoint: str = ""
    span: str = ""


def write_ready_file(path: Path, report: ReadyReport) -> None:
    """Write `report` as JSON; a reader sees all of it or no file.

    Raises SettingsError when it can't be written there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise SettingsError(
            f"--ready-file: can't write {path}: {error.strerror}; give a path in a folder you own"
        ) from error


def read_swarm_key(path: Path | None) -> bytes | None:
    """The key of a private swarm from its file, without the line's end; None without a file.

    Raises SettingsError when the file can't be read or holds fewer than 16 bytes.
    """
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(
            f"--swarm-key: can't read {path}: {error.strerror}; give the file all members share"
        ) from error
    if len(key) < MIN_KEY_BYTES:
        raise SettingsError(
            f"--swarm-key: {path} holds {len(key)} bytes, too few for a secret; "
            f"make one with: openssl rand -hex 32 > {path}"
        )
    return key


def reader_gone() -> int:
    """The exit code when whoever read the output (`| head`) is gone.

    What is left of the output goes nowhere, or the interpreter's last flush would
    fail as well.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return 128 + signal.SIGPIPE


def run_to_end(prog: str, work: Callable[[], None]) -> int:
    """Run `work`, which ends by itself; returns the exit code.

    Errors of the tree become one line on standard error; Ctrl-C and a reader that went
    away end quietly.
    """
    try:
        work()
    except BloomBeeError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return reader_gone()
    return 0


def run_until_stopped(
    prog: str,
    work: Coroutine[Any, Any, None],
    loop_factory: LoopFactory | None = None,
    *,
    also: signal.Signals | None = None,
) -> int:
    """Run `work`, cancelling it on SIGINT and SIGTERM; returns the exit code.

    `work` cleans up in its `finally`; a second of them ends the process at once, in
    the default way. A signal `also` cancels it too, and does nothing more when it
    comes again. Being told to stop is success. Errors of the tree become one line on
    standard error and exit code 1.
    """
    told = False

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def stop() -> None:
            nonlocal told
            if task is not None and not told:
                told = True
                _end_at_the_next_signal(loop)
                task.cancel()

        for signum in _ENDING if also is None else (*_ENDING, also):
            loop.add_signal_handler(signum, stop)
        await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
    except BloomBeeError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    except asyncio.CancelledError:
        if not told:
            raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _end_at_the_next_signal(loop: asyncio.AbstractEventLoop) -> None:
    for signum in _ENDING:
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_DFL)
