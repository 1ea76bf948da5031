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

from outrider.cli.figures import figures
from outrider.cli.options import Drafting, Model, Sampling, build, engine_options, option
from outrider.cli.show import Screen, bars
from outrider.cli.usage import did_you_mean
from outrider.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.stats import Stats
    from outrider.llm import LLM

COMMANDS = {
    "/help": "these commands",
    "/stats": "the figures of the last answer",
    "/clear": "forget the conversation",
    "/drafter": "who drafts; /drafter SPEC changes it",
    "/quit": "leave; so does Ctrl-D",
    "Ctrl-C": "stops an answer after its round; pressed twice at the prompt, leaves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Conversation."""

    system: str | None = option(None, "System message", metavar="TEXT")
    no_color: bool = option(False, "Plain text")


class Interrupt:
    """While entered, the first Ctrl-C is noted in `asked` and a second one raised.

    An answer so ends between two rounds, and never in the middle of one.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Chat:
    """A conversation in the making."""

    def __init__(self, screen: Screen, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.screen, self.llm, self.params = screen, llm, params
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.stats: Stats | None = None
        """The figures of the last answer that came to its end."""

    def answer(self, text: str) -> None:
        """Put one turn to the model. RequestError leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        with Interrupt() as interrupt, closing(self.llm.stream(asked, self.params)) as events:
            for event in events:
                said.append(event.text)
                self.screen.event(event)
                self.stats = event.stats or self.stats
                if event.finish == "error":
                    self.screen.end()
                    raise RequestError(event.error)
                if interrupt.asked:
                    break
        self.screen.end()
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if interrupt.asked:
            self.screen.note("stopped; the conversation goes on")
        elif self.stats and self.stats.prompt_tokens + self.stats.tokens >= self.llm.loaded.target.context:
            self.screen.note(f"the context of {self.llm.loaded.target.context} tokens is full; /clear starts anew")

    def figures(self) -> None:
        if self.stats is None:
            self.screen.note("no answer yet")
        else:
            self.screen.figures(figures(self.stats))

    def clear(self) -> None:
        self.messages = list(self.opening)
        self.screen.note("the conversation starts anew")

    def draft_with(self, spec: str, engine: dict[str, Any]) -> None:
        """Change the drafter; the model stays loaded and the conversation stands. ConfigError changes nothing."""
        if spec:
            from outrider.llm import LLM

            self.llm = LLM(self.llm.loaded, drafter=spec, **engine)
        self.screen.note(f"drafter: {spec or self.llm.drafter.traits.name}")


def chat(talk: Talk, drafting: Drafting, model: Model, sampling: Sampling) -> None:
    """Talk with a model, turn by turn; /help lists what else can be typed.

    Defaults stand in brackets. `outrider drafters` lists what --drafter takes.
    """
    params = sampling.params()
    screen = Screen(no_color=talk.no_color)
    with bars(screen.notes) as progress:
        llm = build(model, drafting, progress)
    talking = Chat(screen, llm, params, talk.system)
    failed = False
    for line in _turns(screen):
        try:
            if not line.startswith("/"):
                talking.answer(line)
            elif not _obey(talking, line, engine_options(drafting, model)):
                break
        except RequestError as error:
            failed = True
            screen.note(f"error: {error}; /clear starts the conversation anew", "red")
        except ConfigError as error:
            failed = True
            screen.note(f"error: {error}", "red")
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _obey(talking: Chat, line: str, engine: dict[str, Any]) -> bool:
    """Do what a line that starts with a slash says. False: leave."""
    word, _, rest = line.partition(" ")
    if word == "/quit":
        return False
    if word == "/help":
        for name, does in COMMANDS.items():
            talking.screen.note(f"{name:<9} {does}")
    elif word == "/stats":
        talking.figures()
    elif word == "/clear":
        talking.clear()
    elif word == "/drafter":
        talking.draft_with(rest.strip(), engine)
    else:
        talking.screen.note(f"no such command: {word}; {did_you_mean(word, COMMANDS)}/help lists them")
    return True


def _turns(screen: Screen) -> Iterator[str]:
    """What the user types, line by line, to the end of input. Blank lines are no turns."""
    if not sys.stdin.isatty():
        yield from filter(None, (line.strip() for line in sys.stdin))
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
