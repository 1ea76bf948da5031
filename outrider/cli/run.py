"""`outrider run`: answer one prompt."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outrider.cli.figures import comparison, figures
from outrider.cli.options import WITH_PREDICTION, Drafting, Model, Sampling, argument, build, option, read_text
from outrider.cli.show import Screen, bars
from outrider.core.errors import ConfigError, OutriderError, RequestError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.events import Event
    from outrider.engine.results import Result
    from outrider.engine.stats import Stats
    from outrider.llm import LLM

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompt: one of these, or text piped in."""

    text: str | None = argument(None, "The prompt", metavar="PROMPT")
    prompt: str | None = option(None, "The prompt", metavar="TEXT")
    file: Path | None = option(None, "A UTF-8 file, less its last newline", metavar="FILE")  # noqa: RUF009 - a field
    chat: bool = option(False, "Ask as a user, in the model's chat template")
    system: str | None = option(None, "System message; with --chat", metavar="TEXT")
    prediction: str | None = option(None, "Text the answer should hold; @FILE reads it", metavar="TEXT")

    def read(self) -> Prompt:
        """The prompt, from the one place that gives it."""
        if self.system is not None and not self.chat:
            raise ConfigError("--system is part of a conversation; add --chat")
        text = self._text()
        if not self.chat:
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]

    def options(self) -> dict[str, Any]:
        """What goes to the engine beside prompt and sampling."""
        if self.prediction is None:
            return {}
        if not self.prediction.startswith("@"):
            return {"prediction": self.prediction}
        return {"prediction": read_text("--prediction", Path(self.prediction[1:]))}

    def _text(self) -> str:
        given = {"PROMPT": self.text, "--prompt": self.prompt, "--file": self.file}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} each give a prompt; give one of them")
        if self.file is not None:
            text = read_text("--file", self.file)
        elif named:
            text = self.text if self.text is not None else self.prompt
        else:
            text = _piped()
        if not text:
            raise ConfigError("no prompt: write it after `run`, give --prompt or --file, or pipe text in")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Output."""

    compare: bool = option(False, "Time plain decoding in the same run too")
    n: int = option(1, "Answers, each with a seed of its own")
    logprobs: int | None = option(None, "Of each token and so many others; in --json")
    json: bool = option(False, "One JSON object on stdout")
    no_stream: bool = option(False, "Print the answer when it is whole")
    no_color: bool = option(False, "Plain text")
    svg: Path | None = option(None, "Save a picture of answer and figures", metavar="FILE")  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class Question:
    """What is put to the engine."""

    prompt: Prompt
    params: SamplingParams
    options: dict[str, Any]
    drawn: int | None = None
    """The seed, where chance decides and none was given."""


def run(asked: Asked, drafting: Drafting, model: Model, sampling: Sampling, output: Output) -> None:
    """Answer one prompt, each token coloured by who brought it.

    Defaults stand in brackets. `outrider drafters` lists what --drafter takes.
    """
    _check(output)
    params = sampling.params(n=output.n, logprobs=output.logprobs)
    question = _ask(asked, params)
    if asked.prediction is not None:
        drafting = drafting.else_with(WITH_PREDICTION)
    screen = Screen(no_color=output.no_color)
    with bars(screen.notes) as progress:
        llm = build(model, drafting, progress)
    if output.json:
        _print_json(llm, question, output.compare)
        return
    if output.compare:
        table = _compare(screen, llm, question, output)
    elif output.no_stream or output.n > 1:
        table = _whole(screen, llm, question)
    else:
        table = _stream(screen, llm, question)
    screen.figures(table)
    if output.svg is not None:
        screen.picture(output.svg, "outrider run", table)


def _ask(asked: Asked, params: SamplingParams) -> Question:
    """The question; a seed is drawn where one is needed, so that it can be told, and the answer had again."""
    if params.seed is not None or not params.temperature:
        return Question(asked.read(), params, asked.options())
    drawn = secrets.randbelow(1 << 32)
    return Question(asked.read(), replace(params, seed=drawn), asked.options(), drawn)


def _check(output: Output) -> None:
    if output.svg is not None and not output.svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {output.svg}: there is no folder {output.svg.parent}")
    if output.logprobs is not None and not output.json:
        raise ConfigError("--logprobs are told with --json; add it")
    if output.svg is not None and output.json:
        raise ConfigError("--svg is a picture of what is shown, and --json shows nothing; leave one of them out")
    if output.compare and output.n > 1:
        raise ConfigError("--compare answers one prompt twice, plain and speculative; leave --n out")


def _stream(screen: Screen, llm: LLM, question: Question) -> Table:
    """Draw the answer as it comes."""
    stats: Stats | None = None
    for event in llm.stream(question.prompt, question.params, **question.options):
        screen.event(event)
        stats = event.stats
        if event.finish == "error":
            screen.end()
            raise RequestError(event.error)
    screen.end()
    if stats is None:
        raise OutriderError("the answer has no end")
    return figures(stats, question.drawn)


def _whole(screen: Screen, llm: LLM, question: Question) -> Table:
    """Finish the answer, or several, before any is drawn."""
    from outrider.engine.stats import total

    first = _answer(llm, question)
    answers = [first, *first.others]
    for i, answer in enumerate(answers):
        if len(answers) > 1:
            screen.note(f"answer {i + 1} of {len(answers)}, seed {answer.seed}")
        screen.result(answer)
    _raise_error(answers)
    return figures(total(answer.stats for answer in answers), question.drawn if len(answers) == 1 else None)


def _compare(screen: Screen, llm: LLM, question: Question, output: Output) -> Table:
    """Answer plain, with only a count to see, then speculative."""
    plain_tokens = 0

    def watch(kind: str, event: Event) -> None:
        nonlocal plain_tokens
        if kind == "plain":
            plain_tokens += len(event.tokens)
            screen.passing(f"plain decoding first, to compare: {plain_tokens} tokens")
        elif not output.no_stream:
            screen.event(event)

    both = llm.compare(question.prompt, question.params, watch=watch, **question.options)
    if output.no_stream:
        screen.result(both.speculative)
    else:
        screen.end()
    _raise_error([both.plain, both.speculative])
    return comparison(both, llm.mode)


def _print_json(llm: LLM, question: Question, compare: bool) -> None:
    """One object on stdout. ASCII only, since model text may hold what a terminal would obey."""
    if compare:
        both = llm.compare(question.prompt, question.params, **question.options)
        results = [both.plain, both.speculative]
        told = both.speculative.as_dict() | {
            "plain": both.plain.as_dict(),
            "identical": both.identical,
            "first_difference": both.first_difference,
            "speedup": both.speedup,
        }
    else:
        result = _answer(llm, question)
        results, told = [result, *result.others], result.as_dict()
    sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    sys.stdout.flush()
    _raise_error(results)


def _answer(llm: LLM, question: Question) -> Result:
    prompt, params, options = question.prompt, question.params, question.options
    return llm.generate(prompt, params, **options) if isinstance(prompt, str) else llm.chat(prompt, params, **options)


def _raise_error(results: list[Result]) -> None:
    """Raise what ended an answer before its time."""
    for result in results:
        if result.finish_reason == "error":
            raise RequestError(result.error)


def _piped() -> str:
    """Text piped into stdin; empty where stdin is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text (byte {error.start}); convert it first") from error
