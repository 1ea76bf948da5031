"""Prompts to measure on: the user's, or those of the built-in suites, one of each in turn."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path

from outrider.bench import __file__ as bench_file
from outrider.core.errors import ConfigError
from outrider.models.tokenizer import Tokenizer
from outrider.train.collect import encode_prompt
from outrider.train.prompts import read_prompts

SUITES = Path(bench_file).parent / "suites"


def read_prompt_ids(tokenizer: Tokenizer, file: Path | None, limit: int, room: int) -> tuple[tuple[int, ...], ...]:
    """At most `limit` prompts as token ids, written by the chat template where there is one, without those longer than
    `room`. ConfigError where none is left."""
    if file is not None:
        prompts = read_prompts(file, limit)
    else:
        suites = [read_prompts(each) for each in sorted(SUITES.glob("*.jsonl"))]
        prompts = [each for each in chain(*zip_longest(*suites)) if each is not None][:limit]
    found = tuple(tuple(encode_prompt(tokenizer, each)) for each in prompts)
    fitting = tuple(each for each in found if 0 < len(each) <= room)
    if not fitting:
        raise ConfigError(f"no prompt of {file or 'the built-in suites'} fits in {room} tokens; raise --context")
    return fitting
