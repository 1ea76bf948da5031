"""The inputs of a proof: prompts, sampling options one by one and in pairs, and the texts to compare. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.sampling import SamplingParams, Token
from outrider.llm import LLM
from outrider.train.prompts import read_prompts

PromptText = str | tuple[dict[str, str], ...]
"""Text to complete, or messages to answer."""
Options = dict[str, Any]
"""Fields of SamplingParams by name."""

NO_OPTION = "no option"
BLOCK = 4  # options that are set together in one of the rows that cover all pairs
MIN_VOCAB = 64  # of a target whose options are proved
MAX_PROMPTS = 64  # taken from a file
PROMPTS: tuple[PromptText, ...] = (
    "Monday: soup and bread. Tuesday: rice and beans. Wednesday: soup and bread. Thursday: rice and beans. "
    "Friday: soup and",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width",
    ({"role": "user", "content": "Name three rivers in Europe and say one sentence about each of them."},),
    "The cat sat on the mat. The dog sat on the log. The cat sat on the",
    ({"role": "user", "content": "Correct the spelling and repeat the rest: Teh ship left teh harbour at dawn."},),
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41, "city": "Wilmslow"}\n{"name":',
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    ({"role": "user", "content": "What is seventeen plus twenty-six? Explain your steps."},),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """One text that is generated with and without speculation."""

    name: str
    prompt: tuple[Token, ...]
    params: SamplingParams
    """The sampling options, with a seed that no other case has."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other options of LLM.generate."""

    @property
    def is_plain(self) -> bool:
        """Whether no option but temperature changes the logits, and neither `more` nor log-probabilities are used."""
        return self.params.plain_logits and not self.more and self.params.logprobs is None


def option_values(likely: Seq[Token]) -> dict[str, Options]:
    """One value of each option that changes sampled texts. likely: next tokens after the prompt, most likely first."""
    return {
        "temperature": {"temperature": 0.7},
        "top_k": {"top_k": 6},
        "top_p": {"top_p": 0.85},
        "min_p": {"min_p": 0.04},
        "typical_p": {"typical_p": 0.85},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "presence_penalty": {"presence_penalty": 0.9},
        "frequency_penalty": {"frequency_penalty": 0.7},
        "logit_bias": {"logit_bias": {likely[1]: 1.5, likely[2]: -1.5}},
        "banned_token_ids": {"banned_token_ids": (likely[3],)},
        "allowed_token_ids": {"allowed_token_ids": tuple(likely[:48])},
        "min_tokens": {"min_tokens": 2, "stop_token_ids": (likely[5], likely[9])},
        "stop_token_ids": {"stop_token_ids": (likely[5], likely[9])},
    }


def cover_pairs(names: Seq[str], size: int = BLOCK) -> list[tuple[str, ...]]:
    """Blocks of up to `size` names, such that each pair of names is together in some block."""
    left = set(combinations(names, 2))
    blocks: list[tuple[str, ...]] = []
    while left:
        block = list(min(left))
        while len(block) < min(size, len(names)):
            rest = [name for name in names if name not in block]
            block.append(max(rest, key=lambda name: sum(pair in left for pair in _pairs(names, (*block, name)))))
        left -= set(_pairs(names, block))
        blocks.append(tuple(sorted(block, key=names.index)))
    return blocks


def option_rows(values: Mapping[str, Options]) -> dict[str, Options]:
    """The options of each row, by name: no option, each option alone, and blocks that cover all pairs."""
    rows: dict[str, Options] = {NO_OPTION: {}}
    rows |= {name: dict(options) for name, options in values.items()}
    for block in cover_pairs(list(values)):
        merged: Options = {}
        for name in block:
            merged |= values[name]
        rows[" + ".join(block)] = merged
    return rows


def text_cases(
    prompts: Seq[tuple[Token, ...]], rows: Mapping[str, Options], max_tokens: int, seed: int
) -> list[TextCase]:
    """Greedy and seeded texts of all prompts, then every row of options, spread over the prompts."""
    cases: list[TextCase] = []

    def add(name: str, prompt: int, **options: Any) -> None:
        own: Options = {"max_tokens": max_tokens, "seed": seed + len(cases)}
        params = SamplingParams(**(own | options))
        cases.append(TextCase(name=f"{name}, prompt {prompt + 1}", prompt=prompts[prompt], params=params))

    for i in range(len(prompts)):
        add("greedy", i)
    for i in range(len(prompts)):
        add("temperature 0.8", i, temperature=0.8)
    add("greedy, penalties", 0, repetition_penalty=1.3, presence_penalty=0.9, frequency_penalty=0.7)
    add("greedy, log-probabilities", 0, logprobs=3)
    add("log-probabilities", 1 % len(prompts), temperature=1.0, logprobs=3)
    add("logits processor", 2 % len(prompts), temperature=1.0, logits_processors=(no_immediate_repeat,))
    for at, (name, options) in enumerate(rows.items()):
        if " + " in name:
            add(name, at % len(prompts), **{"temperature": 1.0} | options)
    return cases


def stop_cases(plain: Mapping[str, tuple[TextCase, str, tuple[Token, ...]]]) -> list[TextCase]:
    """Cases that stop early, at a string or a token of their plain text. plain: (case, text, tokens) by name."""
    cases: list[TextCase] = []
    for name, (case, text, tokens) in plain.items():
        middle = len(text) // 2
        word = text[middle - 1 : middle + 2]
        if len(word.strip()) > 1:
            params = replace(case.params, stop=(word,))
            cases.append(replace(case, name=f"stop string, {name}", params=params))
        if len(tokens) > 4:
            params = replace(case.params, stop_token_ids=(tokens[len(tokens) // 2],))
            cases.append(replace(case, name=f"stop token, {name}", params=params))
            late = replace(params, min_tokens=len(tokens) // 2 + 2)
            cases.append(replace(case, name=f"stop token and min_tokens, {name}", params=late))
    return cases


def no_immediate_repeat(tokens: Seq[Token], logits: Tensor) -> Tensor:
    """A logits processor that depends on the text: it makes the last token unlikely."""
    out = logits.clone()
    out[tokens[-1]] -= 4.0
    return out


def _pairs(names: Seq[str], block: Seq[str]) -> list[tuple[str, str]]:
    return list(combinations(sorted(block, key=list(names).index), 2))


def read_prompt_file(file: Path | None) -> list[PromptText]:
    """The prompts of a file, as messages; the built-in ones where there is none."""
    if file is None:
        return list(PROMPTS)
    return [prompt.messages for prompt in read_prompts(file, MAX_PROMPTS)]


def encode_prompts(llm: LLM, prompts: Seq[PromptText]) -> tuple[tuple[Token, ...], ...]:
    """Prompts as token ids. Messages of a model without a chat template are read as their text."""
    template = llm.tokenizer.template_text()
    written = [each if isinstance(each, str) or template else each[-1]["content"] for each in prompts]
    return tuple(llm.request(each if isinstance(each, str) else list(each)).prompt for each in written)
