"""Runs a program that must not outlive the process that started it.

A script of its own: `python -I -S tether.py MODE PARENT PIPE PROGRAM ARGUMENTS...`.
With mode `signal` (Linux) the kernel kills the program when the *thread* that
started it ends; that survives `exec`, so nothing stays between. Setting it here
rather than in a `preexec_fn` keeps the parent, which has threads, from running
Python between fork and exec. With mode `pipe` (elsewhere) this process stays and
kills the program when the other end of PIPE closes, which happens however the
parent ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
ORPHANED = 70


def main(arguments: list[str]) -> int:
    """Become or guard the program; returns its exit code in mode `pipe`."""
    mode, parent, pipe, *command = arguments
    if mode == "pipe":
        return guard(int(pipe), command)
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return ORPHANED  # it died before the signal was asked for
    os.execv(command[0], command)


def guard(pipe: int, command: list[str]) -> int:
    """Run `command` until it ends, or until the other end of `pipe` closes."""
    with subprocess.Popen(command, close_fds=False) as child:

        def pass_on(_signal: int, _frame: object) -> None:
            child.terminate()

        def kill_when_alone() -> None:
            os.read(pipe, 1)
            child.kill()

        signal.signal(signal.SIGTERM, pass_on)
        threading.Thread(target=kill_when_alone, daemon=True).start()
        return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
