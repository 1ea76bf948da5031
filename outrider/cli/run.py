"""`outrider run`: complete one prompt."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from outrider.cli.options import (
    DraftingOptions,
    ModelOptions,
    SamplingOptions,
    argument,
    build_llm,
    check_utf8,
    option,
    read_stdin,
    read_text,
)
from outrider.cli.screen import Screen, progress_bars
from outrider.cli.stats_tables import add_prompt_row, comparison_table, stats_table
from outrider.core.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.events import Event
    from outrider.engine.results import Result
    from outrider.engine.stats import Stats
    from outrider.llm import LLM

TextOrMessages = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Prompt: one of these, or text piped in."""

    text: str | None = argument(None, "The prompt", metavar="PROMPT")
    prompt: str | None = option(None, "The prompt", metavar="TEXT")
    file: Path | None = option(None, "A UTF-8 file, less its last newline", metavar="FILE")  # noqa: RUF009 - a field
    chat: bool = option(False, "As a user message, by the chat template (if any)")
    raw: bool = option(False, "Complete the text as it is, without chat template")
    system: str | None = option(None, "System message, by the chat template", metavar="TEXT")
    prediction: str | None = option(None, "Text the output may repeat; @FILE reads it", metavar="TEXT")

    def read(self) -> str:
        """The prompt's text. Raises ConfigError unless exactly one source is given."""
        if self.raw and (self.chat or self.system is not None):
            other = "--chat" if self.chat else "--system"
            raise ConfigError(f"{other} uses the chat template and --raw leaves it out; give one of them")
        for name, text in (("--system", self.system), ("--prediction", self.prediction)):
            check_utf8(name, text or "")
        return check_utf8("the prompt", self._text())

    def format(self, text: str, template: str) -> TextOrMessages:
        """The text as it is with --raw or where the model has no chat template, else as messages."""
        if self.raw or not (self.chat or self.system is not None or template):
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]

    def options(self) -> dict[str, Any]:
        """The options of LLM.generate besides prompt and sampling parameters."""
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
            text = "".join(read_stdin()).removesuffix("\n")
        if not text:
            raise ConfigError("no prompt: write it after `run`, give --prompt or --file, or pipe text in")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Output."""

    compare: bool = option(False, "Time plain decoding in the same run too")
    n: int = option(1, "Texts, each with a seed of its own")
    logprobs: int | None = option(None, "Of each token and this many others; in --json")
    json: bool = option(False, "One JSON object on stdout")
    no_stream: bool = option(False, "Print the text when it is complete")
    no_color: bool = option(False, "Plain text")
    svg: Path | None = option(None, "Save text and statistics as a picture", metavar="FILE")  # noqa: RUF009 - a field


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One call of LLM.generate or LLM.chat."""

    prompt: TextOrMessages
    params: SamplingParams
    options: dict[str, Any]
    drawn: int | None = None
    """The seed that was drawn; None where none was needed."""

    @property
    def prompt_format(self) -> Literal["chat", "raw"]:
        return "raw" if isinstance(self.prompt, str) else "chat"


def run(
    prompt: PromptOptions,
    drafting: DraftingOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Answer or complete one prompt, each token coloured by where it came from.

    A chat model answers; --raw completes. Defaults are in brackets; see also `outrider drafters`.
    """
    _check_output(output)
    params = sampling.params(n=output.n, logprobs=output.logprobs)
    text, options = prompt.read(), prompt.options()
    screen = Screen(no_color=output.no_color)
    with progress_bars(screen.notes) as progress:
        llm = build_llm(model, drafting, progress)
    template = llm.tokenizer.template_text()
    request = _build_request(prompt.format(text, template), params, options)
    if output.json:
        _print_json(llm, request, output.compare)
        return
    if output.compare:
        table = _print_comparison(screen, llm, request, output)
    elif output.no_stream or output.n > 1:
        table = _print_whole(screen, llm, request)
    else:
        table = _print_stream(screen, llm, request)
    add_prompt_row(table, request.prompt_format, has_template=bool(template))
    screen.print_stats(table)
    if output.svg is not None:
        screen.save_svg(output.svg, "outrider run", table)


def _build_request(prompt: TextOrMessages, params: SamplingParams, options: dict[str, Any]) -> RunRequest:
    """The request. A seed is drawn where one is needed, so that it can be shown and the text generated again."""
    if params.seed is not None or not params.temperature:
        return RunRequest(prompt, params, options)
    drawn = secrets.randbelow(1 << 32)
    return RunRequest(prompt, replace(params, seed=drawn), options, drawn)


def _check_output(output: OutputOptions) -> None:
    if output.svg is not None and not output.svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {output.svg}: there is no folder {output.svg.parent}")
    if output.svg is not None and output.svg.is_dir():
        raise ConfigError(f"--svg {output.svg}: that is a folder; name a file")
    if output.logprobs is not None and not output.json:
        raise ConfigError("--logprobs are part of --json; add it")
    if output.svg is not None and output.json:
        raise ConfigError("--svg saves what is shown, and --json shows nothing; leave one of them out")
    if output.compare and output.n > 1:
        raise ConfigError("--compare completes one prompt twice, plain and speculative; leave --n out")


def _print_stream(screen: Screen, llm: LLM, request: RunRequest) -> Table:
    """Print the text while it is generated."""
    stats: Stats | None = None
    for event in llm.stream(request.prompt, request.params, **request.options):
        screen.event(event)
        stats = event.stats
        if event.finish == "error":
            screen.end()
            raise OutriderError(event.error)
    screen.end()
    if stats is None:
        raise OutriderError("the text has no end")
    return stats_table(stats, request.drawn)


def _print_whole(screen: Screen, llm: LLM, request: RunRequest) -> Table:
    """Generate the text, or several, then print."""
    from outrider.engine.stats import total

    first = _generate(llm, request)
    results = [first, *first.others]
    for i, result in enumerate(results):
        if len(results) > 1:
            screen.note(f"text {i + 1} of {len(results)}, seed {result.seed}")
        screen.result(result)
    _raise_error(results)
    return stats_table(total(result.stats for result in results), request.drawn if len(results) == 1 else None)


def _print_comparison(screen: Screen, llm: LLM, request: RunRequest, output: OutputOptions) -> Table:
    """Decode plainly, showing only a count of tokens, then speculatively."""
    plain_tokens = 0

    def watch(kind: str, event: Event) -> None:
        nonlocal plain_tokens
        if kind == "plain":
            plain_tokens += len(event.tokens)
            screen.transient_note(f"plain decoding first, to compare: {plain_tokens} tokens")
        elif not output.no_stream:
            screen.event(event)

    both = llm.compare(request.prompt, request.params, watch=watch, **request.options)
    if output.no_stream:
        screen.result(both.speculative)
    else:
        screen.end()
    _raise_error([both.plain, both.speculative])
    return comparison_table(both, llm.mode)


def _print_json(llm: LLM, request: RunRequest, compare: bool) -> None:
    """One object on stdout. ASCII only, since model output may hold control sequences."""
    if compare:
        both = llm.compare(request.prompt, request.params, **request.options)
        results = [both.plain, both.speculative]
        found = both.speculative.as_dict() | {
            "plain": both.plain.as_dict(),
            "identical": both.identical,
            "first_difference": both.first_difference,
            "speedup": both.speedup,
        }
    else:
        result = _generate(llm, request)
        results, found = [result, *result.others], result.as_dict()
    found["prompt_format"] = request.prompt_format
    sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
    sys.stdout.flush()
    _raise_error(results)


def _generate(llm: LLM, request: RunRequest) -> Result:
    prompt, params, options = request.prompt, request.params, request.options
    return llm.generate(prompt, params, **options) if isinstance(prompt, str) else llm.chat(prompt, params, **options)


def _raise_error(results: list[Result]) -> None:
    """Raise the error of a text that ended with one."""
    for result in results:
        if result.finish_reason == "error":
            raise OutriderError(result.error)
