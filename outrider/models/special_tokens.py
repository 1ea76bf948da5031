"""Find special tokens that are spelled out in a user's text, and encode them as text instead of as control tokens.

A chat template writes control tokens and users' strings into one text. To tell them apart, each
special token in a user's string is replaced by a placeholder before the template runs; every
special token in what the template then writes is its own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models


class SpecialTokens:
    """A tokenizer's special tokens, and an encoder that is told which of them are control tokens. Thread-safe."""

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.contents = {i: token.content for i, token in added.items() if token.special and token.content}
        self.mark = f"-{10**19 + secrets.randbelow(9 * 10**19)}"
        """Cannot be guessed, so no user writes it. Templates' filters leave it as it is, and no word begins with it."""
        self._backend = backend
        self._known = set(self.contents.values())
        self._prefixes = {text[:size] for text in self._known for size in range(1, len(text))}
        self._prefixes = {text for text in self._prefixes if not text.isspace()}  # templates trim these
        self._max_prefix = max(map(len, self._prefixes), default=0)
        self._first = re.compile(f"[{re.escape(''.join({text[0] for text in self._known}))}]") if self._known else None
        self._normalized = backend.normalizer is not None and any(t.special and t.normalized for t in added.values())
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))  # the text between tokens is one word
        self._finder.add_special_tokens(
            [AddedToken(t.content, single_word=t.single_word, normalized=False) for t in added.values() if t.content]
        )
        self._marked, self._meant = self._marked_backend(added)

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens are written in a text: start and end of each, in order."""
        if self._first is None or not self._first.search(text):
            return []
        return [(start, end) for start, end in self._finder.encode(text).offsets if text[start:end] in self._known]

    def occur_in(self, text: str) -> bool:
        """Whether the tokenizer finds special tokens in this text."""
        if self._normalized:  # it finds other spellings as well
            return not self.contents.keys().isdisjoint(self._backend.encode(text, add_special_tokens=False).ids)
        return bool(self.find(text))

    def unfinished(self, text: str) -> str:
        """The end of a text that other text could complete to a special token; the longest such end."""
        sizes = range(min(self._max_prefix, len(text)), 0, -1)
        return next((text[-size:] for size in sizes if text[-size:] in self._prefixes), "")

    def encode(self, text: str, meant: Iterable[tuple[int, int]] = (), *, special: bool) -> list[int]:
        """Text to ids: the special tokens at `meant` are control tokens, all others text.

        `special` adds what the tokenizer puts around a text.
        """
        parts: list[str] = []
        at = 0
        for start, end in meant:
            parts += [text[at:start], self.mark, text[start:end]]
            at = end
        encoded = self._encode("".join((*parts, text[at:])))
        return [self._meant.get(i, i) for i in self._marked.post_process(encoded, add_special_tokens=special).ids]

    def _encode(self, marked: str) -> Encoding:
        """Encode a marked text. Text that would become a special token is split after its first character."""
        encoded = self._marked.encode(marked, add_special_tokens=False)
        pieces: list[str] = []
        at = 0
        for i, (_, end) in zip(encoded.ids, encoded.offsets, strict=True):
            text = self.contents.get(i, "")
            if text and marked.endswith(text, 0, end):  # else it is the unknown token, for other text
                # a single character that only a special token writes cannot be split and is left out
                cut = end - len(text) + (len(text) > 1)
                pieces.append(marked[at:cut])
                at = max(cut, end - len(text) + 1)
        if not pieces:
            return encoded
        return Encoding.merge([self._encode(piece) for piece in (*pieces, marked[at:])], growing_offsets=False)

    def _marked_backend(self, added: Mapping[int, AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer of the same model that takes special tokens only after a mark, and their ids by its own ids."""
        made = Tokenizer(self._backend.model)  # shared, not copied
        made.normalizer, made.pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        made.post_processor = self._backend.post_processor
        for _, token in sorted(added.items()):
            made.add_special_tokens([token]) if token.special else made.add_tokens([token])
        made.encode_special_tokens = True
        special = [token for i, token in added.items() if i in self.contents]
        made.add_tokens([self._behind_mark(token) for token in special])
        ids = {token.content: i for i, token in made.get_added_tokens_decoder().items()}
        return made, {ids[self.mark + text]: i for i, text in self.contents.items()}

    def _behind_mark(self, token: AddedToken) -> AddedToken:
        flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
        return AddedToken(self.mark + token.content, normalized=False, special=False, **flags)


class Placeholders:
    """Replaces the special tokens in a user's strings, and puts them back after the template has run."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._texts: dict[str, str] = {}
        """Placeholder by the text that it stands for."""
        self.found = False
        """Whether any string had a special token, or ended with the beginning of one."""

    def replace(self, value: Any) -> Any:
        """A JSON value without special tokens in its strings and keys."""
        if isinstance(value, dict):
            return {self._replace(key): self.replace(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.replace(item) for item in value]
        return self._replace(value) if isinstance(value, str) else value

    def restore(self, rendered: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """What the template wrote with the user's own text, and where in it are the template's special tokens."""
        texts = {placeholder: text for text, placeholder in self._texts.items()}
        pattern = re.compile(rf"{self._special.mark}\d{{6}}")
        parts: list[str] = []
        meant: list[tuple[int, int]] = []
        at = length = 0
        for start, end in [*self._special.find(rendered), (len(rendered), len(rendered))]:
            parts += [pattern.sub(lambda found: texts[found[0]], rendered[at:start]), rendered[start:end]]
            length += len(parts[-2])
            meant.append((length, length + end - start))
            length, at = length + end - start, end
        return "".join(parts), tuple(meant[:-1])

    def _replace(self, text: str) -> str:
        self.found = self.found or self._special.occur_in(text)
        parts: list[str] = []
        at = 0
        for start, end in self._special.find(text):
            parts += [text[at:start], self._placeholder(text[start:end])]
            at = end
        rest = text[at:]
        unfinished = self._special.unfinished(rest)
        return "".join((*parts, rest.removesuffix(unfinished), self._placeholder(unfinished)))

    def _placeholder(self, text: str) -> str:
        if not text:
            return ""
        self.found = True
        return self._texts.setdefault(text, f"{self._special.mark}{len(self._texts):06d}")
