"""What a batch writes: answers, each at once and whole, and the lines that have none.

Answers are appended to a file that belongs to one run at a time, and say which line they
are to (`batch_input`). A run that was killed leaves at most a torn last line, which the
next cuts off. Errors go to a file of their own, which every run begins anew: what
failed is asked again by the next run, and the output only ever holds answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Self

import msgspec

from bloombee.client.openai_answers import ChatCompletion, TextCompletion
from bloombee.errors import BloomBeeError, SettingsError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from bloombee.cli.batch_input import Line

_PREFIX = "batch_req_"


class Response(msgspec.Struct, frozen=True):
    """As from a server of OpenAI's API."""

    request_id: str
    body: ChatCompletion | TextCompletion
    status_code: int = 200


class ErrorForm(msgspec.Struct, frozen=True):
    """Why a line has no answer."""

    code: str
    message: str


class Record(msgspec.Struct, frozen=True):
    """A line of OpenAI's batch output; `line` is the number of the input's."""

    id: str
    custom_id: str
    line: int
    response: Response | None
    error: ErrorForm | None


class _Written(msgspec.Struct, frozen=True):
    id: str


def answer_record(line: Line, body: ChatCompletion | TextCompletion) -> bytes:
    """The line of the output for an answer."""
    response = Response(f"req_{line.key}", body)
    return _encoded(Record(_PREFIX + line.key, line.custom_id, line.number, response, None))


def error_record(line: Line, error: BloomBeeError) -> bytes:
    """The line of the errors file for a line without an answer."""
    told = ErrorForm(error.code, str(error))
    return _encoded(Record(_PREFIX + line.key, line.custom_id, line.number, None, told))


def _encoded(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


class AnswerFile:
    """The output of one run, with the keys of the lines that it answers. A context manager.

    Entering raises SettingsError when it can't be written, another run writes it, or it
    holds something else; a torn last line is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: set[str] = set()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o644)
                stack.callback(os.close, self._descriptor)
                self._lock()
                self._read()
            except OSError as error:
                raise SettingsError(
                    f"--output: can't write {self.path}: {error.strerror}; "
                    "give a file in a folder you own"
                ) from error
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)  # and the lock is gone

    def write(self, record: bytes) -> None:
        """Append a line; it is the system's when this returns. Raises BloomBeeError."""
        try:
            write_all(self._descriptor, record)
        except OSError as error:
            raise BloomBeeError(
                f"can't write {self.path}: {error.strerror}; make room and run the same again"
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"--output: another run writes {self.path}: wait for its end, or give another file"
            ) from None

    def _read(self) -> None:
        whole = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self.answered.add(self._key(number, line))
                whole += len(line)
        os.ftruncate(self._descriptor, whole)

    def _key(self, number: int, line: bytes) -> str:
        try:
            written = msgspec.json.decode(line, type=_Written).id
        except (msgspec.DecodeError, UnicodeDecodeError):
            written = ""
        if not written.startswith(_PREFIX):
            raise SettingsError(
                f"--output: line {number} of {self.path} is no answer of a batch; give another file"
            )
        return written.removeprefix(_PREFIX)


class ErrorFile:
    """The lines that a run could not answer; there is no file without any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def begin(self) -> None:
        """Forget what an earlier run left. Raises SettingsError when it can't be written."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(
                f"--errors: can't write {self.path}: {error.strerror}; give another file"
            ) from error

    def write(self, record: bytes) -> None:
        """Append a line. Raises BloomBeeError when it can't be written."""
        try:
            with self.path.open("ab") as file:
                file.write(record)
        except OSError as error:
            raise BloomBeeError(f"can't write {self.path}: {error.strerror}") from error
        self.count += 1


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
