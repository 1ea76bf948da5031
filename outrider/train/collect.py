"""The target's own answers to prompts, half greedy and half sampled, by the batched engine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError, RequestError
from outrider.core.sampling import MAX_BATCH, MAX_TOKENS, SamplingParams, check_int
from outrider.engine.request import Request
from outrider.llm import LLM
from outrider.loading.load import choose_device
from outrider.models.load import read_config
from outrider.models.tokenizer import Tokenizer
from outrider.train.corpus import Answer, CorpusIndex, CorpusWriter, done_prompts, open_index
from outrider.train.prompts import ChatPrompt, digest_of

MAX_WORKERS = 64
CUDA_WORKERS = 8
GROUPS = 4  # sequences join in groups of a quarter of the batch: a round that reads prompts cannot overlap the next

Report = Callable[[int, int], None]
"""Called with the answers and tokens that were added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig:
    """How answers are collected."""

    max_tokens: int = 400
    """Max tokens of an answer."""
    max_prompt: int = 1024
    """Longer prompts, in tokens, are left out."""
    batch: int = 0
    """Sequences at once in each process; 0: 256 on CUDA, 16 on the CPU."""
    workers: int = 0
    """Processes, each with its own engine; 0: one for two cores, up to 8, on CUDA, where the host limits the speed of a
    small model; else 1."""
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_int("max_prompt", self.max_prompt, 1, MAX_TOKENS)
        check_int("batch", self.batch, 0, MAX_BATCH)
        check_int("workers", self.workers, 0, MAX_WORKERS)

    def for_device(self) -> CollectConfig:
        """The same with its zeros replaced by what suits the device."""
        cuda = choose_device(self.device).type == "cuda"
        return CollectConfig(
            max_tokens=self.max_tokens,
            max_prompt=self.max_prompt,
            batch=self.batch or (256 if cuda else 16),
            workers=self.workers or (min(CUDA_WORKERS, max(1, (os.cpu_count() or 1) // 2)) if cuda else 1),
            seed=self.seed,
            device=self.device,
        )


@dataclass(frozen=True, slots=True)
class Todo:
    """A prompt that has no answer yet."""

    number: int
    prompt: ChatPrompt
    kind: int


class NoText:
    """Takes the place of a tokenizer in the engine: nobody reads the text, and decoding it takes half of the host's
    time."""

    own_texts = None

    def decode(self, ids: list[int], /) -> str:
        return ""


def begin(target: str, prompts: list[ChatPrompt], out: Path, config: CollectConfig) -> list[Todo]:
    """Begin a collection in `out`, or continue the one that lies there; returns the prompts still to be answered."""
    folder = resolve(target)
    decoder = read_config(folder)
    if decoder is None:
        raise ConfigError(f"{target}: the native decoder does not support it, so that no head can be trained for it")
    kinds = tuple(sorted({prompt.kind for prompt in prompts}))
    index = CorpusIndex(
        target=target,
        vocab_size=decoder.vocab_size,
        prompts=digest_of(prompts),
        count=len(prompts),
        max_tokens=config.max_tokens,
        seed=config.seed,
        kinds=kinds,
    )
    open_index(out, index)
    done = done_prompts(out)
    return [Todo(i, prompt, kinds.index(prompt.kind)) for i, prompt in enumerate(prompts) if i not in done]


def load_engine(target: str, config: CollectConfig) -> LLM:
    """The target without a drafter, with a cache for the whole batch."""
    decoder = read_config(resolve(target))
    limit = config.max_prompt + config.max_tokens + 1
    context = limit if decoder is None else min(limit, decoder.max_positions)
    llm = LLM(
        target,
        drafter="none",
        adaptive=False,
        max_batch=config.batch,
        max_round_tokens=max(config.batch, 8192 if choose_device(config.device).type == "cuda" else 512),
        device=config.device,
        context=context,
        cache_tokens=config.batch * -(-context // 16) * 16,
    )
    llm.engine.tokenizer = NoText()
    return llm


def answer_all(llm: LLM, todo: Iterable[Todo], writer: CorpusWriter, config: CollectConfig, report: Report) -> None:
    """Answer every prompt and write the answers; what was answered before an interrupt is written too.

    Even prompts are answered greedily, odd ones at temperature 1 with a seed of their own.
    """
    engine, waiting = llm.engine, deque(todo)
    live: dict[int, tuple[Todo, tuple[int, ...], list[int]]] = {}
    group = max(1, config.batch // GROUPS)
    try:
        while waiting or live:
            room = config.batch - len(live)
            if waiting and room >= min(group, config.batch, len(waiting)):
                for _ in range(min(room, len(waiting))):
                    each = waiting.popleft()
                    request = _request(llm, each, config)
                    if request is not None:
                        live[engine.submit(request)[0]] = (each, request.prompt, [])
            for event in engine.step():
                each, prompt, tokens = live[event.seq_id]
                tokens.extend(event.tokens)
                if event.finish is None:
                    continue
                del live[event.seq_id]
                if event.finish != "error" and tokens:
                    sampled = bool(each.number % 2)
                    writer.add(Answer(each.number, each.kind, sampled, (*prompt, *tokens), len(prompt)))
                    report(1, len(tokens))
    except KeyboardInterrupt:
        writer.flush()
        raise
    finally:
        for seq_id in live:
            engine.cancel(seq_id)
    writer.flush()


def encode_prompt(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """A conversation by the model's template; as plain text for a model without one."""
    if tokenizer.template_text():
        return tokenizer.encode_chat(prompt.messages)
    return tokenizer.encode("\n".join(message["content"] for message in prompt.messages), allow_special_tokens=False)


def _request(llm: LLM, each: Todo, config: CollectConfig) -> Request | None:
    """None where the prompt is too long or the template refuses it."""
    try:
        prompt = tuple(encode_prompt(llm.tokenizer, each.prompt))
    except RequestError:
        return None
    room = min(config.max_prompt, llm.loaded.target.context - 1)
    if not 0 < len(prompt) <= room:
        return None
    seed = torch.iinfo(torch.int32).max * config.seed + each.number
    params = SamplingParams(max_tokens=config.max_tokens, temperature=float(each.number % 2), seed=seed)
    return Request(prompt=prompt, params=params)
