"""Random requests for the soak: what is asked, which decides the text, and how it is asked, which must not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from outrider import LLM, SamplingParams
from outrider.engine.results import Result

WORDS = ("the", "a", "column", "rider", "ahead", "news", "of", "comes", "back", "hill", "river", "and", "camp", "fire")
SHARED = "the outrider rides ahead of the column and comes back with news of the hill and the river. "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "hour": {"type": "integer", "minimum": 0}},
    "required": ["name", "hour"],
    "additionalProperties": False,
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "json_schema": {"name": "watch", "schema": SCHEMA}},
    {"type": "regex", "regex": "(north|south) by [0-9]{2}( and then (east|west))*"},
    {"type": "choice", "choice": ["turn back", "ride on", "ride on at night"]},
)
SALTS = (None, None, None, "one", "other")


@dataclass(frozen=True)
class Case:
    """What decides a text: the prompt, the options, the seed."""

    chat: bool
    prompt: str
    n: int
    seed: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Under the names that OpenAI's protocol and SamplingParams share."""
    response_format: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        asked: dict[str, Any] = self.options | {"n": self.n, "seed": self.seed}
        if self.response_format is not None:
            asked["response_format"] = self.response_format
        if self.chat:
            return asked | {"messages": [{"role": "user", "content": self.prompt}]}
        return asked | {"prompt": self.prompt}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True)
class Manner:
    """How a case is asked. The texts are the same whatever it says."""

    stream: bool
    leave_after: float | None
    """Seconds after which the client hangs up; None: never."""
    extra: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """One choice, as told."""

    text: str
    finish_reason: str


def random_case(rng: random.Random) -> Case:
    chat = rng.random() < 0.5
    prompt = (SHARED if rng.random() < 0.5 else "") + " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    options: dict[str, Any] = {"max_tokens": rng.choice((1, 5, 20, 60, 120)), "temperature": rng.choice((0, 0.7, 1.0))}
    for name, values in {
        "top_k": (5, 40),
        "top_p": (0.5, 0.9),
        "min_p": (0.05,),
        "repetition_penalty": (1.2,),
        "presence_penalty": (0.5,),
        "frequency_penalty": (-0.3, 0.4),
        "logit_bias": ({"101": 3.0, "32": -2.0},),
        "min_tokens": (1,),
        "ignore_eos": (True,),
        "stop": ([" the", "x"],),
    }.items():
        if rng.random() < 0.15:
            options[name] = rng.choice(values)
    shaped = rng.choice(FORMATS) if chat and rng.random() < 0.3 else None
    if shaped is not None:
        options = {name: options[name] for name in ("max_tokens", "temperature")}
    return Case(chat, prompt, rng.choice((1, 1, 1, 2, 3)), rng.getrandbits(63), options, shaped)


def random_manner(rng: random.Random, case: Case, expected: list[Said]) -> Manner:
    extra: dict[str, Any] = {"cache_salt": rng.choice(SALTS)}
    extra["speculation"] = rng.choice((None, None, {"off": True}, {"max_tokens": 2}, {"drafter": "none"}))
    if rng.random() < 0.3:
        extra["include_provenance"] = True
    if rng.random() < 0.2:
        extra["logprobs"] = True if case.chat else 2
    if rng.random() < 0.2:  # what will be said, in part wrong
        extra["prediction"] = {"type": "content", "content": f"so {expected[0].text[:40]} and no more"}
    stream = rng.random() < 0.6
    if stream and rng.random() < 0.3:
        extra["stream_options"] = {"include_usage": True, "include_obfuscation": rng.random() < 0.5}
    leave = rng.random() < 0.5  # some are answered before they leave: about a third of all are abandoned
    return Manner(stream, rng.expovariate(8) if leave else None, extra)


def params_of(case: Case) -> SamplingParams:
    """The case as the engine's own options; written apart from the server's translation, which it judges."""
    options = dict(case.options)
    options["logit_bias"] = {int(token): bias for token, bias in options.pop("logit_bias", {}).items()}
    return SamplingParams(n=case.n, seed=case.seed, **options)


def expected_of(llm: LLM, case: Case) -> list[Said]:
    """What the offline engine says."""
    prompt: Any = [{"role": "user", "content": case.prompt}] if case.chat else case.prompt
    ask = llm.chat if case.chat else llm.generate
    first: Result = ask(prompt, params_of(case), response_format=case.response_format)
    return [Said(each.text, each.finish_reason) for each in (first, *first.others)]
