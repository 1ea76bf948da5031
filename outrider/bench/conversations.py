"""From a benchmark's prompt to the token ids of one turn: chat template, thinking mode, and filling up to a length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice

from outrider.bench.prompts import BenchPrompt, Message, read_suite
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.models.tokenizer import Tokenizer

SWITCH = "enable_thinking"
"""The option of chat templates that turns thinking on and off."""


@dataclass(frozen=True, slots=True)
class Item:
    """One turn of one prompt, as the token ids that every row reads."""

    prompt: str
    turn: int
    tokens: tuple[Token, ...]
    text: str = ""
    """The answer of plain decoding, once there is one."""
    digest: str = ""

    def answered(self, text: str, digest: str) -> Item:
        return replace(self, text=text, digest=digest)


class Conversations:
    """Encodes turns for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.template = tokenizer.template_text()

    def check_thinking(self, mode: str) -> None:
        if mode not in ("on", "off"):
            raise ConfigError(f"--thinking takes on, off or both (on,off), got {mode!r}")
        if SWITCH not in self.template:
            raise ConfigError(f"--thinking {mode}: this model's chat template has no {SWITCH}; leave --thinking out")

    def item(self, prompt: BenchPrompt, turn: int, before: Seq[Item], context: int, thinking: str) -> Item:
        """before: answered items, with the prompt's earlier turns. context: tokens to fill up to; 0: no filling."""
        answers = {each.turn: each.text for each in before if each.prompt == prompt.id}
        messages = list(prompt.history)
        for earlier in range(turn):
            messages.append({"role": "user", "content": prompt.turns[earlier]})
            messages.append({"role": "assistant", "content": answers[earlier]})
        messages.append({"role": "user", "content": prompt.turns[turn]})
        return Item(prompt.id, turn, tuple(self._filled(messages, context, thinking)))

    def _filled(self, messages: list[Message], context: int, thinking: str) -> list[Token]:
        """The token ids, with words put before the user's first message, as many as fit into `context` tokens."""
        plain = self._encode(messages, thinking)
        low, high = 0, max(0, context - len(plain))  # a word takes at least a token
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._encode(self._preceded(messages, middle), thinking)) <= context:
                low = middle
            else:
                high = middle - 1
        return self._encode(self._preceded(messages, low), thinking) if low else plain

    def _preceded(self, messages: Seq[Message], words: int) -> list[Message]:
        at = next(i for i, message in enumerate(messages) if message["role"] == "user")
        notes = " ".join(islice(cycle(self._words), words))
        filled = {"role": "user", "content": f"{notes}\n\n{messages[at]['content']}"}
        return [*messages[:at], filled, *messages[at + 1 :]]

    @cached_property
    def _words(self) -> list[str]:
        """The words to fill up with: the texts of the suite `summary`."""
        return " ".join(prompt.turns[0].partition("\n\n")[2] for prompt in read_suite("summary")).split()

    def _encode(self, messages: Seq[Message], thinking: str) -> list[Token]:
        """The token ids as the chat template writes them; without one, of the messages' texts one after another."""
        if not self.template:
            return self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        options = {SWITCH: thinking == "on"} if thinking else {}
        return self.tokenizer.encode_chat(messages, **options)
