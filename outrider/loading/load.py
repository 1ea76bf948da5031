"""From a name to a target: find the folder, choose device and number format, size the cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from outrider.checkpoints.folder import source_bits
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.storage import Progress
from outrider.core.errors import ConfigError
from outrider.core.sampling import MAX_BATCH, MAX_TOKENS, check_whole
from outrider.loading.memory import MIN_TOKENS, MemoryPlan, ReservedMemory, Workload, plan_memory
from outrider.models.decoder import Decoder
from outrider.models.linear import Quantization
from outrider.models.load import load_decoder, read_config
from outrider.models.tokenizer import Tokenizer
from outrider.runners.base import Runner
from outrider.runners.device_state import MAX_WIDTH
from outrider.runners.native import NativeRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_CACHE = 1 << 30
UNKNOWN_MEMORY = 8 << 30  # taken to be free where the system does not say


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to score, with its tokenizer."""

    name: str
    folder: Path
    target: Runner
    tokenizer: Tokenizer
    format: str
    """The numbers it computes with: float32, bfloat16, float16, int8 or int4."""
    memory: MemoryPlan | None = None
    """How a CUDA device's memory is shared out; None elsewhere."""
    pinned: bool = False
    """Whether its text is bit-identical with and without speculation; see LoadOptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where and how a model runs."""

    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes CUDA where there is one."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is float32 on the CPU, the checkpoint's own elsewhere."""
    quantize: str = "auto"
    """int4 or int8 weights on the CPU, or none; auto packs what was stored in so few bits to begin with."""
    context: int | None = None
    """Most tokens of one text; None takes the model's own limit."""
    cache_tokens: int | None = None
    """Tokens the cache holds in all, at least 64; None sizes it by what is free."""
    pinned: bool = False
    """Bit-identical text with and without speculation on CUDA, at some cost; refused where it cannot be had."""
    max_batch: int = 8
    """Sequences at once; an unset cache_tokens is never larger than so many contexts."""
    max_round_tokens: int = 2048
    """Most tokens read in one pass; on CUDA, what the workspace is measured for."""
    max_draft: int | None = None
    """Most tokens drafted for a text in one round, None: any number; on CUDA, what recorded passes get room for."""
    beside: ReservedMemory = field(default_factory=ReservedMemory)
    """On CUDA, what will be loaded next to the model."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    def __post_init__(self) -> None:
        check_whole("max_batch", self.max_batch, 1, MAX_BATCH)
        check_whole("max_round_tokens", self.max_round_tokens, 1, MAX_TOKENS)
        open_ended = (
            ("context", 2, MAX_CACHE),
            ("cache_tokens", MIN_TOKENS, MAX_CACHE),
            ("max_draft", 0, MAX_TOKENS),
        )
        for name, low, high in open_ended:
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low, high)


def load(
    model: str, options: LoadOptions | None = None, *, progress: Progress | None = None, **given: Any
) -> LoadedModel:
    """Load a folder, a Hugging Face id, a .gguf file or `demo`. Options may be given by name instead.

    ConfigError says what cannot be, before any weight is read.
    """
    if options is not None and given:
        raise ConfigError(f"load: {', '.join(given)} beside LoadOptions: put all options in one of the two")
    options = options or LoadOptions(**_known(given))
    device, dtype = choose_device(options.device), _choose_dtype(options.dtype)
    folder = resolve(model, revision=options.revision, progress=progress)
    native = read_config(folder)
    quantize = _choose_quantize(options.quantize, folder, native is not None, device, dtype)
    tokenizer = Tokenizer.from_folder(folder)
    if native is None:
        return _load_fallback(model, folder, tokenizer, device, dtype, options)
    context = choose_context(options.context, native.max_positions, model)
    decoder = load_decoder(folder, device=device, dtype=dtype, quantize=quantize, progress=_layers(progress))
    a_token = native.token_bytes(decoder.dtype)
    wanted = max(MIN_TOKENS, context * options.max_batch)
    plan = _plan(decoder, context, wanted, options) if device.type == "cuda" else None
    tokens = plan.tokens if plan else options.cache_tokens
    if tokens is None:
        tokens = _affordable(a_token, wanted)
    if options.context is not None and tokens < context:
        raise ConfigError(
            f"{model}: a cache of {tokens} tokens cannot hold one text of {context}; "
            f"a token takes {a_token} bytes: lower context or raise cache_tokens"
        )
    target = NativeRunner(decoder, tokens, context=context, pinned=options.pinned)
    return LoadedModel(model, folder, target, tokenizer, quantize or _name(decoder.dtype), plan, options.pinned)


def _plan(decoder: Decoder, context: int, wanted: int, options: LoadOptions) -> MemoryPlan:
    work = Workload(
        round_tokens=options.max_round_tokens,
        batch=options.max_batch,
        width=MAX_WIDTH if options.max_draft is None else 1 + options.max_draft,
        pinned=options.pinned,
    )
    return plan_memory(decoder, context, work, wanted=wanted, asked=options.cache_tokens, beside=options.beside)


def _load_fallback(
    model: str,
    folder: Path,
    tokenizer: Tokenizer,
    device: torch.device,
    dtype: torch.dtype | None,
    options: LoadOptions,
) -> LoadedModel:
    """Everything else that Transformers can run. Its cache grows as it is used, so only tokens are counted."""
    from outrider.runners.fallback import FallbackRunner

    if options.pinned:
        raise ConfigError(f"{model} runs on Transformers' code, which promises no bits: leave out pinned")
    dtype = dtype or torch.float32
    tokens = 4096 * options.max_batch if options.cache_tokens is None else options.cache_tokens
    target = FallbackRunner.load(folder, device=device, dtype=dtype, cache_tokens=tokens)
    target.context = choose_context(options.context, target.context, model)
    return LoadedModel(model, folder, target, tokenizer, _name(dtype))


def _layers(progress: Progress | None) -> Callable[[int, int], None] | None:
    """Tell a progress bar of each layer read."""
    if progress is None:
        return None

    def tell(done: int, of: int) -> None:
        if done == 1:
            progress.start("reading weights", of)
        progress.advance(1)
        if done == of:
            progress.done()

    return tell


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if name in ("", "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "xpu": torch.xpu.device_count(),
    }
    here = ", ".join(f"{kind}:{i}" if i else kind for kind, count in counts.items() for i in range(count))
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"no device called {name!r}; here are: {here}") from None
    if (device.index or 0) >= counts.get(device.type, 0):
        raise ConfigError(f"device {name!r} is not here, or nothing runs on it; here are: {here}")
    return device


def _known(given: dict[str, Any]) -> dict[str, Any]:
    names = LoadOptions.__slots__
    for name in given:
        if name not in names:
            raise ConfigError(f"load has no option {name!r}; it has: {', '.join(names)}")
    return given


def _choose_dtype(name: str) -> torch.dtype | None:
    if name in ("", "auto"):
        return None
    if name not in DTYPES:
        raise ConfigError(f"no dtype called {name!r}; choose one of: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _choose_quantize(
    name: str, folder: Path, native: bool, device: torch.device, dtype: torch.dtype | None
) -> Quantization | None:
    packed = get_args(Quantization)
    if name not in ("auto", "none", "", *packed):
        raise ConfigError(f"no quantisation called {name!r}; choose one of: auto, none, {', '.join(packed)}")
    if name in packed:
        if not native or device.type != "cpu" or dtype is not None:
            raise ConfigError(
                f"quantize={name} packs the weights of a native model on the CPU, without a dtype; "
                f"here: {'a native model' if native else 'a model that runs on Transformers'}, {device}, dtype {dtype}"
            )
        return cast(Quantization, name)
    if name != "auto" or not native or device.type != "cpu" or dtype is not None:
        return None
    bits = source_bits(folder)
    return "int4" if 0 < bits <= 4 else "int8" if 0 < bits <= 8 else None


def choose_context(asked: int | None, own: int, model: str) -> int:
    """Most tokens of one text: what is asked for, if the model can do it, or the model's own limit."""
    if asked is None:
        return own
    if not 1 < asked <= own:
        raise ConfigError(f"{model}: context must be 2 to {own}, the model's own limit; got {asked}")
    return asked


def _affordable(a_token: int, wanted: int) -> int:
    """Tokens of cache in the machine's memory: what is wanted, or as many as a quarter of what is left holds."""
    free = _free_memory() // 4
    tokens = min(wanted, free // a_token)
    if tokens < MIN_TOKENS:
        raise ConfigError(
            f"there is room for {tokens} tokens of cache ({free} bytes, {a_token} a token): free memory first"
        )
    return tokens


def _free_memory() -> int:
    """Bytes that can be had without swapping: what the system caches of files is given up when asked for."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        pass  # no Linux, or an old one
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) or UNKNOWN_MEMORY
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_MEMORY


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")
