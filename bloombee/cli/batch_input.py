"""The lines of a batch: what each asks for, and by which key its answer is known.

A key is a digest of all that an answer depends on: the line's number and bytes, the
flags that hold for all lines, the model. So an output tells by itself which lines it
answers, and a line or flag that has changed since is noticed.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bloombee.client.openai_requests import chat_request, completion_request
from bloombee.errors import BloomBeeError, RequestError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from bloombee.client import Request, SamplingParams

_log = logging.getLogger(__name__)

Form = Literal["chat", "text"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_FORM = 1
"""Raised when the same line would be answered in another way."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input, by its number and key."""

    number: int
    key: str
    custom_id: str
    form: Form = "text"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't be asked."""

    line: Line
    error: BloomBeeError


@dataclass(frozen=True, slots=True)
class Job:
    """What the keys of a run depend on, beside the lines: see `BatchFile`."""

    fingerprint: str
    dtype: str
    defaults: SamplingParams

    @property
    def digest(self) -> bytes:
        """All of it."""
        told = f"{_FORM}\n{self.fingerprint}\n{self.dtype}\n{self.defaults!r}"
        return hashlib.sha256(told.encode()).digest()


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found in an input: how many lines, and who has which custom id first."""

    lines: int
    open_lines: int
    first_with: Mapping[str, int]


class BatchFile:
    """The input of a run."""

    def __init__(self, path: Path, job: Job) -> None:
        self._path = path
        self._job = job
        self._digest = job.digest

    def survey(self, answered: Collection[str], output: Path) -> Survey:
        """Read all lines once, and hold them against the keys of the answers there are.

        Raises SettingsError when it can't be read, or `output` answers other lines.
        """
        lines = known = 0
        first_with: dict[str, int] = {}
        for number, key, raw in self._raw_lines():
            lines += 1
            known += key in answered
            given = _custom_id(raw)
            if given is not None:
                first_with.setdefault(given, number)
        if known < len(answered):
            raise SettingsError(
                f"--output: {len(answered) - known} of {len(answered)} answers in {output} are "
                "to other lines, flags or another model; give the old ones or another file"
            )
        return Survey(lines, lines - known, first_with)

    def open_lines(self, answered: Collection[str], survey: Survey) -> Iterator[Request | BadLine]:
        """The lines without an answer, in order; the key of a request is its Line.

        Raises SettingsError when it can't be read.
        """
        for number, key, raw in self._raw_lines():
            if key in answered:
                continue
            custom_id = _custom_id(raw) or f"line-{number}"
            line = Line(number, key, custom_id)
            try:
                first = survey.first_with.get(custom_id, number)
                if first != number:
                    raise RequestError(f"custom_id {custom_id!r} is that of line {first}, too")
                yield _parse(raw, line, self._job.defaults)
            except BloomBeeError as error:
                yield BadLine(line, error)

    def _raw_lines(self) -> Iterator[tuple[int, str, bytes]]:
        """Number, key and bytes of every line that is not blank."""
        try:
            with self._path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    text = raw.removeprefix(_BOM) if number == 1 else raw
                    if text := text.strip():
                        yield number, self._key(number, text), text
        except OSError as error:
            raise SettingsError(
                f"--input: can't read {self._path}: {error.strerror}; give a file of prompts"
            ) from error

    def _key(self, number: int, raw: bytes) -> str:
        return hashlib.sha256(self._digest + b"%d\n" % number + raw).hexdigest()[:24]


class _Named(msgspec.Struct, frozen=True):
    custom_id: Any = None


def _custom_id(raw: bytes) -> str | None:
    """The custom id of a line; None without one, or where the line is no JSON object."""
    try:
        found = msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, str) and found else None


def _parse(raw: bytes, line: Line, defaults: SamplingParams) -> Request:
    """What a line asks for. Raises RequestError."""
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"not JSON: {error}") from None
    if not isinstance(told, dict):
        raise RequestError("not a JSON object")
    fields: dict[str, Any] = told
    custom_id = fields.pop("custom_id", None)
    if custom_id is not None and not (isinstance(custom_id, str) and custom_id):
        raise RequestError("custom_id: should be a text that is not empty")
    if "body" in fields or "url" in fields:
        form, body = _openai(fields)
    elif "messages" in fields:
        form, body = "chat", fields
    elif "prompt" in fields:
        form, body = "text", fields
    else:
        raise RequestError("give prompt, messages, or url and body")
    make = chat_request if form == "chat" else completion_request
    return make(body, defaults, replace(line, form=form))


def _openai(fields: dict[str, Any]) -> tuple[Form, dict[str, Any]]:
    """The form and the body of a line of OpenAI's batch format. Raises RequestError."""
    if unknown := sorted(set(fields) - {"method", "url", "body"}):
        raise RequestError(f"{unknown[0]}: unknown beside url and body")
    if fields.get("method", "POST") != "POST":
        raise RequestError("method: should be POST")
    url, body = fields.get("url"), fields.get("body")
    if url not in (CHAT, TEXT):
        raise RequestError(f"url: should be {CHAT} or {TEXT}")
    if not isinstance(body, dict):
        raise RequestError("body: should be a JSON object")
    named: dict[str, Any] = body
    return "chat" if url == CHAT else "text", named
