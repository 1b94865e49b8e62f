"""`bloombee-batch`: answer a file of prompts with a swarm, and go on where a run ended."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bloombee.cli.batch_progress import BatchProgress
from bloombee.cli.serving import FAILED, INTERRUPTED, read_swarm_key
from bloombee.config.batch import BatchSettings
from bloombee.config.environment import use_passive_threads, use_quiet_grpc
from bloombee.config.flags import USAGE_ERROR, parse
from bloombee.errors import BloomBeeError, Fault, SettingsError
from bloombee.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bloombee.cli.batch_input import BatchFile, Line, Survey
    from bloombee.cli.batch_output import AnswerFile, ErrorFile
    from bloombee.client import Completion, DistributedModelForCausalLM, Request, SamplingParams

PROG = "bloombee-batch"
GIVE_UP = 8
"""So many lines in a row that the swarm failed at mean that it is gone: each was retried
for a minute already, and the rest can wait for another run."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: all lines are answered; 1: some are not; 2: asked for wrongly; 130: interrupted.
    """
    settings = parse(BatchSettings, argv, prog=PROG, description="Answer a file of prompts.")
    use_passive_threads()
    use_quiet_grpc()
    configure_logging(settings.log_level)
    try:
        return run(settings)
    except BloomBeeError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return USAGE_ERROR if error.fault is Fault.CALLER else FAILED
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; the same command goes on where it ended", file=sys.stderr)
        return INTERRUPTED


def run(settings: BatchSettings) -> int:
    """Answer what is not answered yet; returns the exit code.

    Raises SettingsError or RequestError for what can't be meant, and what loading and
    joining raise.
    """
    errors_path = settings.errors or settings.output.with_name(settings.output.name + ".errors")
    _check_paths(settings.input, settings.output, errors_path)
    defaults = read_defaults(settings)
    # torch and transformers take seconds to import: not for --help or a wrong flag.
    from bloombee.cli.batch_input import BatchFile, Job
    from bloombee.cli.batch_output import AnswerFile, ErrorFile
    from bloombee.models import open_source

    source = open_source(settings.model)
    file = BatchFile(settings.input, Job(source.fingerprint, settings.dtype, defaults))
    with AnswerFile(settings.output) as answers:
        survey = file.survey(answers.answered, answers.path)
        errors = ErrorFile(errors_path)
        errors.begin()
        if not survey.open_lines:
            _log.info("all %d lines are answered in %s", survey.lines, answers.path)
            return 0
        if answers.answered:
            _log.info("%d of %d lines are answered", len(answers.answered), survey.lines)
        with BatchProgress(survey.lines, len(answers.answered)) as progress:
            batch = Batch(file, survey, answers, errors, progress)
            answer(settings, batch)
    told = f"{progress.answered} of {survey.lines} lines are answered, {progress.summary()}"
    _log.info("%s%s", told, f": see {errors.path}" if errors.count else "")
    return FAILED if errors.count else 0


def answer(settings: BatchSettings, batch: Batch) -> None:
    """Join the swarm and answer the lines that are open.

    Raises what loading and joining raise, and the swarm's error when it is gone.
    """
    from bloombee.client import AutoDistributedModelForCausalLM

    requests = batch.requests()
    first = next(requests, None)
    if first is None:
        return  # nobody needs a swarm to hear that all lines are bad
    model = AutoDistributedModelForCausalLM.from_pretrained(
        settings.model,
        initial_peers=settings.initial_peers,
        dtype=settings.dtype,
        swarm_key=read_swarm_key(settings.swarm_key),
        identity=settings.identity,
    )
    try:
        batch.run(model, first, requests, settings.concurrency)
    finally:
        model.close()


@dataclass
class Batch:
    """One run: what it reads, and where it writes."""

    file: BatchFile
    survey: Survey
    answers: AnswerFile
    errors: ErrorFile
    progress: BatchProgress
    _failed_in_a_row: int = field(default=0, init=False)

    def requests(self) -> Iterator[Request]:
        """What the open lines ask for; bad ones are told of and left out."""
        from bloombee.cli.batch_input import BadLine

        for found in self.file.open_lines(self.answers.answered, self.survey):
            if isinstance(found, BadLine):
                self._fail(found.line, found.error)
            else:
                yield found

    def run(
        self,
        model: DistributedModelForCausalLM,
        first: Request,
        rest: Iterator[Request],
        concurrency: int | None,
    ) -> None:
        """Ask for all and write what comes. After an interrupt what was finished is written.

        Raises the swarm's error when it is gone.
        """
        found = model.generate_many(
            _chain(first, rest),
            concurrency=concurrency,
            ordered=False,
            on_token=self.progress.count_token,
        )
        try:
            for completion in found:
                self._write(model, completion)
        except BaseException:
            found.close()
            for completion in found.finished():
                self._write(model, completion, is_last=True)
            raise

    def _write(
        self, model: DistributedModelForCausalLM, found: Completion, *, is_last: bool = False
    ) -> None:
        from bloombee.cli.batch_output import answer_record
        from bloombee.client.openai_answers import Stamp, chat_completion, text_completion

        line: Line = found.key
        if found.error is not None:
            self._fail(line, found.error)
            self._failed_in_a_row += found.error.fault is not Fault.CALLER
            if self._failed_in_a_row >= GIVE_UP and not is_last:
                raise found.error
            return
        self._failed_in_a_row = 0
        stamp = Stamp(line.key, int(time.time()), model.source.name)
        form = chat_completion if line.form == "chat" else text_completion
        self.answers.write(answer_record(line, form(found, model.words, stamp)))
        self.progress.count_line(failed=False)

    def _fail(self, line: Line, error: BloomBeeError) -> None:
        from bloombee.cli.batch_output import error_record

        _log.warning("line %d: %s", line.number, error)
        self.errors.write(error_record(line, error))
        self.progress.count_line(failed=True)


def read_defaults(settings: BatchSettings) -> SamplingParams:
    """The parameters of lines that say nothing of them. Raises RequestError."""
    from bloombee.client.parameters import SamplingParams

    return SamplingParams(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        stop=settings.stop,
        seed=settings.seed,
    )


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _check_paths(source: Path, output: Path, errors: Path) -> None:
    """Raise SettingsError when one of the files would be written over another."""
    if not source.is_file():
        raise SettingsError(f"--input: there is no file {source}; give a file of prompts")
    named = {"--input": source.resolve(), "--output": output.resolve()}
    for flag, path in named.items():
        if path == errors.resolve():
            raise SettingsError(f"--errors: {errors} is the {flag} too; give another file")
    if named["--input"] == named["--output"]:
        raise SettingsError(f"--output: {output} is the --input too; give another file")


if __name__ == "__main__":
    sys.exit(main())
