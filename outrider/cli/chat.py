"""`outrider chat`: a conversation, streamed and coloured."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.options import (
    DraftingOptions,
    ModelOptions,
    SamplingOptions,
    build_llm,
    engine_options,
    option,
    read_stdin,
)
from outrider.cli.screen import Screen, progress_bars
from outrider.cli.stats_tables import stats_table
from outrider.cli.usage import did_you_mean, exit_code
from outrider.core.errors import ConfigError, OutriderError, RequestError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.stats import Stats
    from outrider.llm import LLM

COMMANDS = {
    "/help": "these commands",
    "/stats": "the statistics of the last answer",
    "/clear": "forget the conversation",
    "/drafter": "the drafter; /drafter SPEC changes it",
    "/quit": "leave; so does Ctrl-D",
    "Ctrl-C": "stops an answer after its round; pressed twice at the prompt, leaves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Conversation."""

    system: str | None = option(None, "System message", metavar="TEXT")
    no_color: bool = option(False, "Plain text")


class GenerationError(OutriderError):
    """An answer ended with an error."""


class Interrupt:
    """While entered, the first Ctrl-C sets `requested` and a second one raises KeyboardInterrupt.

    So an answer ends between two rounds, never in the middle of one.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Chat:
    """A conversation: its messages, and the statistics of the last answer."""

    def __init__(self, screen: Screen, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.screen, self.llm, self.params = screen, llm, params
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.system)
        self.stats: Stats | None = None
        """The statistics of the last answer that was completed."""

    def answer(self, text: str) -> None:
        """Send one user message and print the answer. RequestError leaves the conversation unchanged."""
        messages = [*self.messages, {"role": "user", "content": text}]
        texts: list[str] = []
        with Interrupt() as interrupt, closing(self.llm.stream(messages, self.params)) as events:
            for event in events:
                texts.append(event.text)
                self.screen.event(event)
                self.stats = event.stats or self.stats
                if event.finish == "error":
                    self.screen.end()
                    raise GenerationError(event.error)
                if interrupt.requested:
                    break
        self.screen.end()
        self.messages = [*messages, {"role": "assistant", "content": "".join(texts)}]
        if interrupt.requested:
            self.screen.note("stopped; the conversation goes on")
        elif self.stats and self.stats.prompt_tokens + self.stats.tokens >= self.llm.loaded.target.context:
            self.screen.note(f"the context of {self.llm.loaded.target.context} tokens is full; /clear starts anew")

    def print_stats(self) -> None:
        if self.stats is None:
            self.screen.note("no answer yet")
        else:
            self.screen.print_stats(stats_table(self.stats))

    def clear(self) -> None:
        self.messages = list(self.system)
        self.screen.note("the conversation starts anew")

    def set_drafter(self, spec: str, engine: dict[str, Any]) -> None:
        """Change the drafter; the model stays loaded and the conversation continues. ConfigError changes nothing."""
        if spec:
            from outrider.llm import LLM

            self.llm = LLM(self.llm.loaded, drafter=spec, **engine)
        self.screen.note(f"drafter: {spec or self.llm.drafter.traits.name}")


def chat(options: ChatOptions, drafting: DraftingOptions, model: ModelOptions, sampling: SamplingOptions) -> None:
    """Chat with a model; /help lists the commands.

    Defaults are in brackets. `outrider drafters` lists what --drafter takes.
    """
    params = sampling.params()
    screen = Screen(no_color=options.no_color)
    with progress_bars(screen.notes) as progress:
        llm = build_llm(model, drafting, progress)
    conversation = Chat(screen, llm, params, options.system)
    code = 0
    for line in _read_lines(screen):
        try:
            if not line.startswith("/"):
                conversation.answer(line)
            elif not _run_command(conversation, line, engine_options(drafting, model)):
                break
        except (ConfigError, RequestError, GenerationError) as error:
            code = max(code, exit_code(error))
            hint = "" if isinstance(error, ConfigError) else "; /clear starts the conversation anew"
            screen.note(f"error: {error}{hint}", "red")
    if code and not sys.stdin.isatty():
        raise typer.Exit(code)


def _run_command(conversation: Chat, line: str, engine: dict[str, Any]) -> bool:
    """Run a line that starts with a slash. Returns False to leave the chat."""
    word, _, rest = line.partition(" ")
    if word == "/quit":
        return False
    if word == "/help":
        for name, does in COMMANDS.items():
            conversation.screen.note(f"{name:<9} {does}")
    elif word == "/stats":
        conversation.print_stats()
    elif word == "/clear":
        conversation.clear()
    elif word == "/drafter":
        conversation.set_drafter(rest.strip(), engine)
    else:
        conversation.screen.note(f"no such command: {word}; {did_you_mean(word, COMMANDS)}/help lists them")
    return True


def _read_lines(screen: Screen) -> Iterator[str]:
    """The lines that the user types or pipes in, stripped, without blank ones."""
    if not sys.stdin.isatty():
        yield from filter(None, (line.strip() for line in read_stdin()))
        return
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives input() a history and line editing
    interrupted = False
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if interrupted:
                return
            interrupted = True
            screen.note("Ctrl-C once more leaves, as do /quit and Ctrl-D")
            continue
        interrupted = False
        if line:
            yield line
