"""Which replica has read the beginning of a prompt: hashes of pages of text, and the replica each was last sent to."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Any

PAGE_CHARS = 256
"""Characters of a page of text, about 64 tokens; engines' cache pages hold 16 to 64 tokens."""
MAX_PAGES = 64
"""Pages of one prompt that are looked at; the text behind them is ignored."""
MAX_KNOWN_PAGES = 1 << 17


def page_hashes(salt: str, text: str) -> tuple[bytes, ...]:
    """A hash for each full page, of the salt and all text up to its end; without a full page, one of the whole text."""
    digest, hashes = hashlib.sha256(salt.encode() + b"\0"), []
    for start in range(0, min(len(text) - PAGE_CHARS + 1, MAX_PAGES * PAGE_CHARS), PAGE_CHARS):
        digest.update(text[start : start + PAGE_CHARS].encode())
        hashes.append(digest.copy().digest()[:16])
    if not hashes:
        digest.update(text.encode())
        hashes.append(digest.digest()[:16])
    return tuple(hashes)


def prompt_text(body: dict[str, Any]) -> str:
    """The beginning of a request's prompt, as text: prompts that begin alike have texts that begin alike.

    Of messages and token ids, not many more are taken than the pages that are looked at.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts, the first decides
    if isinstance(prompt, str):
        return prompt
    parts = body.get("messages") or body.get("input") or prompt or []
    parts = [parts] if isinstance(parts, str) else parts
    text = json.dumps([body.get("tools"), body.get("instructions")], ensure_ascii=False)
    if parts and isinstance(parts[0], int):
        parts = [parts[: MAX_PAGES * PAGE_CHARS]]
    for part in parts:
        if len(text) >= MAX_PAGES * PAGE_CHARS:
            break
        text += json.dumps(part, ensure_ascii=False)
        text += ","
    return text


class PrefixTable:
    """The replica that each page was last sent to. The least recently used pages are forgotten."""

    def __init__(self, max_pages: int = MAX_KNOWN_PAGES) -> None:
        self._owners: OrderedDict[bytes, str] = OrderedDict()
        self._max_pages = max_pages

    def owners(self, hashes: Seq[bytes]) -> list[str]:
        """The replicas that were last sent pages of this beginning, those with the longest part of it first."""
        return list(dict.fromkeys(self._owners[each] for each in reversed(hashes) if each in self._owners))

    def note(self, hashes: Seq[bytes], owner: str) -> None:
        """A prompt with these pages goes to `owner`."""
        for each in hashes:
            self._owners[each] = owner
            self._owners.move_to_end(each)
        while len(self._owners) > self._max_pages:
            self._owners.popitem(last=False)

    def forget(self, owner: str) -> None:
        """Forget the pages of a replica: its cache is gone."""
        for each in [page for page, name in self._owners.items() if name == owner]:
            del self._owners[each]
