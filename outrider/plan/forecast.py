"""The memory plan of a target and its drafter on a device: use at start, text that fits, largest draft model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider.core.errors import ConfigError
from outrider.core.sampling import MAX_BATCH, check_int
from outrider.drafters.base import ModelLoaded, Traits, for_target
from outrider.drafters.draft_model import chain_lengths
from outrider.drafters.registry import parse_drafter
from outrider.loading.load import available_memory, choose_context, choose_device, choose_dtype, choose_quantize
from outrider.loading.memory import MIN_CACHE_TOKENS, PAGE_TOKENS, SPARE_BYTES, Workload
from outrider.models.config import DecoderConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.load import default_dtype
from outrider.native.library import library
from outrider.plan.estimate import (
    DRIVER,
    GRAPH,
    LIBRARIES,
    VOCABULARY_BYTES,
    ModelMemory,
    Role,
    decoder_memory,
    head_memory,
)
from outrider.plan.facts import ModelFacts, read_facts
from outrider.plan.weights import Format
from outrider.runners.cuda_graphs import capture_batches

ROUND_TOKENS = {"cpu": 128, "cuda": 2048}
"""The default of `max_round_tokens`, as in `LLM`."""
CPU_CACHE_SHARE = 4
"""On the CPU a cache takes at most the memory left beside the target's weights, divided by this."""
DEVICES = ("auto", "cpu", "cuda")
BATCHES = tuple(1 << i for i in range(9))
"""The batch sizes for which the longest context is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a plan: those of `LLM`, and `memory`."""

    device: str = "auto"
    """cpu, cuda or cuda:1; with `memory`, this machine need not have CUDA."""
    memory: int | None = None
    """Bytes to plan for; None: the memory that is free on the device."""
    dtype: str = "auto"
    quantize: str = "auto"
    context: int | None = None
    max_batch: int = 8
    cache_tokens: int | None = None
    max_round_tokens: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1, MAX_BATCH)
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"memory is a number of bytes above 0, got {self.memory}")


@dataclass(frozen=True, slots=True)
class Fit:
    """A batch, and the longest context that fits with it."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The plan. Sizes are in bytes unless said otherwise."""

    target: str
    drafter: str
    device: str
    memory: int
    models: Seq[ModelMemory]
    """The models on the device, the target first."""
    context: int
    max_batch: int
    tokens: int
    """The number of tokens that the cache holds."""
    own: int
    """Memory of the driver and libraries; on the CPU, of the vocabulary."""
    fits: bool
    problem: str
    """Why the plan does not fit; else empty."""
    largest: Seq[Fit]
    """The longest context for each batch size."""
    largest_draft: int
    """Bytes of weights of the largest draft model that fits beside the target alone, if its cache is to its weights as
    the target's are."""
    notes: Seq[str]

    @property
    def own_name(self) -> str:
        """What `own` is the memory of, in words."""
        return "vocabulary" if self.device == "cpu" else "driver and libraries"

    @property
    def per_token(self) -> int:
        return sum(model.per_token for model in self.models)

    @property
    def cache(self) -> int:
        """All caches, the scratch page included."""
        return (self.tokens + PAGE_TOKENS) * self.per_token

    @property
    def at_start(self) -> int:
        """Memory in use once the engine is ready."""
        passes = [model.transient for model in self.models]
        passing = sum(passes) - (0 if self.device == "cpu" else max(passes))
        return self.own + self.cache + sum(model.weights + model.workspace for model in self.models) - passing

    @property
    def peak(self) -> int:
        """The most memory that serving takes, with the longest prompts, and the longest drafts for all sequences."""
        if self.device == "cpu":
            return self.at_start + max(model.transient for model in self.models)  # one model's pass runs at a time
        return self.at_start + sum(max(0, m.kept_free - LIBRARIES - m.workspace) for m in self.models)

    def as_json(self) -> dict[str, Any]:
        models = [asdict(m) | {"workspace": m.workspace, "cache": self.tokens * m.per_token} for m in self.models]
        return {
            "target": self.target,
            "drafter": self.drafter,
            "device": self.device,
            "memory": self.memory,
            "fits": self.fits,
            "problem": self.problem,
            "at_start": self.at_start,
            "peak": self.peak,
            "driver_and_libraries": self.own,
            "models": models,
            "context": self.context,
            "max_batch": self.max_batch,
            "cache": {
                "tokens": self.tokens,
                "bytes": self.cache,
                "bytes_per_1k_tokens": {model.name: 1024 * model.per_token for model in self.models if model.per_token},
            },
            "largest": [asdict(fit) for fit in self.largest],
            "largest_draft_bytes": self.largest_draft,
            "notes": list(self.notes),
        }


def make_forecast(target: str, spec: str, options: PlanOptions) -> Forecast:
    """The plan for a target and a drafter, from their configurations and headers. spec: as for `parse_drafter`.

    ConfigError where a model cannot be read, or the device is not here and no memory is given.
    """
    drafter, facts = parse_drafter(spec), read_facts(target, options.revision)
    if facts.folder is not None:
        drafter = for_target(drafter, facts.folder)
    loads = [each._replace(model=each.model or target) for each in drafter.traits.loads]
    drafts = [(each, read_facts(each.model)) for each in loads]
    return _Planner(facts, drafts, drafter.traits, options).forecast(spec)


class _Planner:
    """Computes the memory of a target and its drafter for any batch and context."""

    def __init__(
        self, target: ModelFacts, drafts: Seq[tuple[ModelLoaded, ModelFacts]], traits: Traits, options: PlanOptions
    ) -> None:
        self.facts, self.max_draft, self.options = target, traits.max_tokens, options
        self.chains = len(chain_lengths(traits.max_tokens)) if traits.drafts_ahead else 0
        """The number of chain lengths that a draft model captures, each for every batch size."""
        self.device, self.memory = _memory_of(options)
        self.config = target.decoder()
        self.form = _format(target, self.config, self.device, options.dtype, options.quantize)
        self.limit = _limit(target, self.config)
        self.context = choose_context(options.context, self.limit, target.name)
        vocabulary = 0 if self.config is None else self.config.vocab_size * VOCABULARY_BYTES
        self.own = DRIVER + LIBRARIES if self.device == "cuda" else vocabulary
        self.notes: list[str] = []
        self.heads: list[tuple[str, HeadConfig, int]] = []
        self.drafts: list[tuple[ModelFacts, DecoderConfig | None, Format, int]] = []
        """Draft models on the target's device; last, the number of rows of each one's output head that are copied."""
        for load, facts in drafts:
            head = facts.head(module=load.module)
            if head is not None and self.config is not None:
                self.heads.append((facts.name, *head))
                continue
            config = facts.decoder()
            form = _format(facts, config, load.device.partition(":")[0] or self.device, "auto", "auto")
            if form.device == self.device:
                self.drafts.append((facts, config, form, load.vocab))

    def models(self, batch: int, context: int) -> list[ModelMemory]:
        """The memory of all models, for up to `batch` sequences of up to `context` tokens."""
        work = self._work(batch, context, self.max_draft)
        found = [self._model("target", self.facts, self.config, self.form, work)]
        found += [head_memory(*head, self.form, work) for head in self.heads]
        for facts, config, form, rows in self.drafts:
            part = self._model("draft model", facts, config, form, self._work(batch, context, 1))
            if config is not None:
                chains = self.chains * len(capture_batches(batch)) * GRAPH if self.device == "cuda" else 0
                copied = rows * config.hidden_size * form.dtype.itemsize
                part = replace(part, weights=part.weights + copied, graphs=part.graphs + chains)
            found.append(part)
        return found

    def _work(self, batch: int, context: int, max_draft: int) -> Workload:
        rows = self.options.max_round_tokens or ROUND_TOKENS[self.device]
        return Workload(context=context, max_round_tokens=rows, max_batch=batch, max_width=1 + max_draft)

    def _model(
        self, role: Role, facts: ModelFacts, config: DecoderConfig | None, form: Format, work: Workload
    ) -> ModelMemory:
        if config is not None:
            return decoder_memory(facts, role, config, form, work)
        note = f"{facts.name} runs on Transformers' code: its cache grows as it is used, and passes take more than told"
        if note not in self.notes:
            self.notes.append(note)
        size = form.dtype.itemsize
        return ModelMemory(
            name=facts.name, role=role, weights=facts.parameters * size, per_token=_token_numbers(facts) * size
        )

    def _needed(self, models: Seq[ModelMemory]) -> int:
        """The memory that the engine counts before it sizes the caches: all but the caches."""
        fixed = self.own + sum(model.weights for model in models)
        if self.device == "cpu":
            return fixed + sum(model.workspace for model in models)
        return fixed + models[0].kept_free * min(2, len(models)) + SPARE_BYTES  # all drafts count as one target

    def _room(self, models: Seq[ModelMemory]) -> int:
        """The number of tokens whose cache fits beside the models."""
        per_token = sum(model.per_token for model in models)
        left = self.memory - self._needed(models)
        return max(0, left) // per_token - PAGE_TOKENS if per_token else 0

    def _tokens(self, models: Seq[ModelMemory]) -> int:
        """The number of tokens that the engine's cache will hold, before it is rounded down to whole pages."""
        wanted = max(MIN_CACHE_TOKENS, self.context * self.options.max_batch)
        if self.options.cache_tokens is not None:
            return self.options.cache_tokens
        if self.device == "cuda":
            return max(0, min(wanted, self._room(models)))
        share = max(0, self.memory - models[0].weights) // CPU_CACHE_SHARE
        return min(wanted, share // max(1, models[0].per_token))

    def forecast(self, drafter: str) -> Forecast:
        batch = self.options.max_batch
        models = self.models(batch, self.context)
        tokens = self._tokens(models) // PAGE_TOKENS * PAGE_TOKENS
        problem = self._problem(models, tokens)
        return Forecast(
            target=self.facts.name,
            drafter=drafter,
            device=self.device,
            memory=self.memory,
            models=models,
            context=self.context,
            max_batch=batch,
            tokens=tokens,
            own=self.own,
            fits=not problem,
            problem=problem,
            largest=self._largest(),
            largest_draft=self._largest_draft(models[0], tokens),
            notes=self.notes,
        )

    def _problem(self, models: Seq[ModelMemory], tokens: int) -> str:
        room = self._room(models)
        if tokens > max(room, 0) or tokens < MIN_CACHE_TOKENS:
            return f"a cache of {max(tokens, MIN_CACHE_TOKENS)} tokens does not fit: there is room for {max(0, room)}"
        if self.options.context is not None and tokens < self.context:
            return f"a cache of {tokens} tokens cannot hold one sequence of {self.context}"
        return ""

    def _largest(self) -> list[Fit]:
        """The longest context for each of BATCHES, up to the first with which less than a page fits."""
        found: list[Fit] = []
        for batch in BATCHES:
            low, high = 0, self.limit
            while low < high:
                middle = (low + high + 1) // 2
                fits = self._room(self.models(batch, max(2, middle))) >= batch * middle
                low, high = (middle, high) if fits else (low, middle - 1)
            if low < PAGE_TOKENS:
                break
            found.append(Fit(batch, low))
        return found

    def _largest_draft(self, target: ModelMemory, tokens: int) -> int:
        """Assumes that a draft model's cache is to its weights as the target's are, and its passes are the target's."""
        left = self.memory - self._needed([target]) - (tokens + PAGE_TOKENS) * target.per_token
        left -= target.kept_free if self.device == "cuda" else target.workspace
        return max(0, round(left / (1 + tokens * target.per_token / max(1, target.weights))))


def _memory_of(options: PlanOptions) -> tuple[str, int]:
    """(cpu or cuda, bytes to plan for): as given, or what is free on the device."""
    kind = options.device.partition(":")[0] or "auto"
    if options.memory is not None:
        if kind not in DEVICES:
            raise ConfigError(f"no device called {options.device!r} to plan for; choose one of: {', '.join(DEVICES)}")
        return ("cuda" if torch.cuda.is_available() else "cpu") if kind == "auto" else kind, options.memory
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; say how much memory to plan for, as in --memory 24GiB")
    device = choose_device(options.device)
    if device.type == "cpu":
        return "cpu", available_memory()
    return "cuda", torch.cuda.mem_get_info(device)[0] + DRIVER


def _format(facts: ModelFacts, config: DecoderConfig | None, device: str, dtype: str, quantize: str) -> Format:
    chosen, place = choose_dtype(dtype), torch.device(device)
    packed = choose_quantize(quantize, facts.bits, config is not None, place, chosen)
    if chosen is None and config is not None:
        chosen = default_dtype(config, place)
    blocks = packed is not None and library() is not None
    return Format(device, chosen or (torch.float32 if device == "cpu" else torch.bfloat16), packed, blocks)


def _limit(facts: ModelFacts, config: DecoderConfig | None) -> int:
    if config is not None:
        return config.max_positions
    given = facts.config_json.get("max_position_embeddings") or facts.config_json.get("n_positions")
    return given if isinstance(given, int) and given > 1 else 4096


def _token_numbers(facts: ModelFacts) -> int:
    """How many numbers one token's keys and values have in a model that runs on Transformers' code; 0 where its
    configuration does not say."""
    given: Mapping[str, Any] = facts.config_json
    sizes = [given.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(each, int) and each > 0 for each in sizes):
        return 0
    layers, heads, hidden = (int(each or 0) for each in sizes)
    dim = given.get("head_dim") or hidden // heads
    return 2 * layers * int(given.get("num_key_value_heads") or heads) * int(dim)
