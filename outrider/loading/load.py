"""From a model's name to a runner: find the folder, choose device and dtype, size the cache, load the weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from outrider.checkpoints.folder import gguf_of, source_bits, weight_files
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.storage import Progress, outrider_home
from outrider.core.collector import collector_paused
from outrider.core.errors import ConfigError
from outrider.core.sampling import MAX_BATCH, MAX_TOKENS, check_int
from outrider.loading.memory import MIN_CACHE_TOKENS, MemoryPlan, ReservedMemory, Workload, plan_memory
from outrider.models.config import DTYPES
from outrider.models.decoder import Decoder
from outrider.models.linear import Quantization
from outrider.models.load import load_decoder, read_config
from outrider.models.tokenizer import Tokenizer
from outrider.runners.base import Runner
from outrider.runners.compile_counter import COUNTER
from outrider.runners.native import NativeRunner
from outrider.runners.pass_work import PACKED_BYTES, decoder_work
from outrider.runners.threads import MAX_THREADS, threads_of, use_threads

MAX_CACHE_TOKENS = 1 << 30
DEFAULT_MEMORY = 8 << 30  # bytes assumed to be free where the system does not say
DraftNeeds = Callable[[Path], tuple[int, ReservedMemory]]
"""From a model's folder to `max_draft` and `reserved` of LoadOptions."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its tokenizer."""

    name: str
    folder: Path
    target: Runner
    tokenizer: Tokenizer
    format: str
    """The format of its weights: float32, bfloat16, float16, int8 or int4."""
    memory: MemoryPlan | None = None
    """How a CUDA device's memory is divided; None on other devices."""
    pinned: bool = False
    """Whether its text is bit-identical with and without speculation; see LoadOptions."""
    threads: str = ""
    """The number of CPU threads that its passes begin with, as text for people; empty where passes run elsewhere."""
    stored: str = ""
    """The format of its weights on disk, such as Q4_K or float32; empty where it is not known."""
    kernels: str = ""
    """The instruction set of the CPU kernels that run its passes (`Library.kernels`); empty where PyTorch does."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk."""
        return sum(file.stat().st_size for file in weight_files(self.folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where and how a model runs."""

    device: str = "auto"
    """cpu, cuda or cuda:1; auto takes CUDA where there is one. mps is refused: it has no float64."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto is float32 on the CPU. Elsewhere it is the checkpoint's own 16 bits, or
    bfloat16 where the checkpoint is a GGUF file or in float32."""
    quantize: str = "auto"
    """int4 or int8 weights on the CPU, or none; auto packs weights that were stored in 4 or 8 bits."""
    context: int | None = None
    """Max tokens of one sequence; None takes the model's own limit."""
    cache_tokens: int | None = None
    """Tokens the KV cache holds in all, at least 64; None sizes it by the free memory."""
    pinned: bool = False
    """Bit-identical text with and without speculation on CUDA, at some cost; refused where it is impossible."""
    max_batch: int = 8
    """Max sequences at once; an unset cache_tokens is at most this many times the context."""
    threads: int | None = None
    """CPU threads of loading and of passes on the CPU; None measures which number is fastest, also while it runs."""
    max_round_tokens: int = 2048
    """Max tokens in one forward pass; on CUDA, what the workspace is measured for."""
    max_draft: int | None = None
    """Max draft tokens of a sequence in one round, None: any number; on CUDA, what graphs get memory for."""
    reserved: ReservedMemory = field(default_factory=ReservedMemory)
    """On CUDA, the memory left free for a draft model."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1, MAX_BATCH)
        check_int("max_round_tokens", self.max_round_tokens, 1, MAX_TOKENS)
        optional = (
            ("context", 2, MAX_CACHE_TOKENS),
            ("cache_tokens", MIN_CACHE_TOKENS, MAX_CACHE_TOKENS),
            ("max_draft", 0, MAX_TOKENS),
            ("threads", 1, MAX_THREADS),
        )
        for name, low, high in optional:
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, high)


def load(
    model: str,
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    drafts: DraftNeeds | None = None,
    **given: Any,
) -> LoadedModel:
    """Load a folder, a Hugging Face id, a .gguf file or `demo`. Options are a LoadOptions, or its fields by name.

    drafts: gives `max_draft` and `reserved` for the model's folder, where they depend on the model. Raises ConfigError
    for what is impossible: before any weight is read, unless there is too little memory or the model cannot be pinned.
    The tokenizer is read in parallel with the weights.
    """
    if options is not None and given:
        raise ConfigError(f"load: {', '.join(given)} beside LoadOptions: put all options in one of the two")
    options = options or LoadOptions(**_check_names(given))
    with use_threads(options.threads), COUNTER.start_up(), collector_paused(), ThreadPoolExecutor(1) as beside:
        return _load(model, options, progress, drafts, beside)


def _load(
    model: str, options: LoadOptions, progress: Progress | None, drafts: DraftNeeds | None, beside: Executor
) -> LoadedModel:
    device, dtype = choose_device(options.device), choose_dtype(options.dtype)
    if device.type == "cuda":
        keep_compiled_kernels()
    folder = resolve(model, revision=options.revision, progress=progress)
    if drafts is not None:
        max_draft, reserved = drafts(folder)
        options = replace(options, max_draft=max_draft, reserved=reserved)
    config = read_config(folder)
    quantize = choose_quantize(options.quantize, source_bits(folder), config is not None, device, dtype)
    reference = gguf_of(folder)
    if config is None and reference is not None:
        raise ConfigError(
            f"{model} runs on Transformers' code, which does not read it in place; convert it with "
            f"`outrider pull {reference.file}`, and name the folder that writes"
        )
    if config is None:
        return _load_fallback(model, folder, device, dtype, options)
    context = choose_context(options.context, config.max_positions, model)
    reading = beside.submit(Tokenizer.from_folder, folder)
    decoder = load_decoder(folder, device=device, dtype=dtype, quantize=quantize, progress=progress)
    tokenizer = reading.result()
    bytes_per_token = config.token_bytes(decoder.dtype)
    max_tokens = max(MIN_CACHE_TOKENS, context * options.max_batch)
    plan = _plan_cuda(decoder, context, max_tokens, options) if device.type == "cuda" else None
    tokens = plan.tokens if plan else options.cache_tokens
    if tokens is None:
        tokens = _affordable_tokens(bytes_per_token, max_tokens)
    if options.context is not None and tokens < context:
        raise ConfigError(
            f"{model}: a cache of {tokens} tokens cannot hold one sequence of {context}; "
            f"a token takes {bytes_per_token} bytes: lower context or raise cache_tokens"
        )
    target = NativeRunner(decoder, tokens, context=context, pinned=options.pinned)
    threads = target.model.threads = threads_of(device, options.threads, target.decode_one)
    target.work = decoder_work(config, PACKED_BYTES[quantize] if quantize else decoder.dtype.itemsize)
    kernels = "" if target.cpu_pass is None else target.cpu_pass.library.kernels
    name = quantize or _dtype_name(decoder.dtype)
    stored = reference.storage if reference else _dtype_name(config.dtype)
    return LoadedModel(model, folder, target, tokenizer, name, plan, options.pinned, threads.told, stored, kernels)


def _plan_cuda(decoder: Decoder, context: int, max_tokens: int, options: LoadOptions) -> MemoryPlan:
    work = Workload(
        context=context,
        max_round_tokens=options.max_round_tokens,
        max_batch=options.max_batch,
        max_width=Runner.max_width if options.max_draft is None else 1 + options.max_draft,
        pinned=options.pinned,
    )
    exact = options.cache_tokens
    return plan_memory(decoder, work, max_tokens=max_tokens, exact_tokens=exact, reserved=options.reserved)


def _load_fallback(
    model: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    options: LoadOptions,
) -> LoadedModel:
    """A model that only Transformers can run. Its cache grows as it is used, so only tokens are counted."""
    from outrider.runners.fallback import FallbackRunner

    if options.pinned:
        raise ConfigError(f"{model} runs on Transformers' code, which is not bit-identical: leave out pinned")
    tokenizer = Tokenizer.from_folder(folder)
    tokens = 4096 * options.max_batch if options.cache_tokens is None else options.cache_tokens
    target = FallbackRunner.load(folder, device=device, dtype=dtype, cache_tokens=tokens)
    target.context = choose_context(options.context, target.context, model)
    target.threads = threads_of(device, options.threads, target.decode_one)
    return LoadedModel(model, folder, target, tokenizer, _dtype_name(target.model.dtype), threads=target.threads.told)


def keep_compiled_kernels() -> None:
    """Let Triton keep compiled kernels in Outrider's folder for the next start, unless its own variables say where."""
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        os.environ["TRITON_CACHE_DIR"] = str(outrider_home() / "triton")


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA where there is one, else the CPU. ConfigError where it is not usable."""
    if name in ("", "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    here = ", ".join(f"{kind}:{i}" if i else kind for kind, count in counts.items() for i in range(count))
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"no device called {name!r}; here are: {here}") from None
    if device.type == "mps":
        raise ConfigError(f"device {name!r} cannot be used: sampling needs float64, which mps lacks; here are: {here}")
    if (device.index or 0) >= counts.get(device.type, 0):
        raise ConfigError(f"device {name!r} is not here, or nothing runs on it; here are: {here}")
    return device


def _check_names(given: dict[str, Any]) -> dict[str, Any]:
    names = LoadOptions.__slots__
    for name in given:
        if name not in names:
            raise ConfigError(f"load has no option {name!r}; it has: {', '.join(names)}")
    return given


def choose_dtype(name: str) -> torch.dtype | None:
    """The dtype of this name; None for `auto`. Raises ConfigError for any other name."""
    if name in ("", "auto"):
        return None
    if name not in DTYPES:
        raise ConfigError(f"no dtype called {name!r}; choose one of: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_quantize(
    name: str, bits: int, native: bool, device: torch.device, dtype: torch.dtype | None
) -> Quantization | None:
    """How weights are packed; None: they are not. bits: per weight before the model was converted, 0: not known.
    native: it runs on this package's decoder."""
    packed = get_args(Quantization)
    if name not in ("auto", "none", "", *packed):
        raise ConfigError(f"no quantization called {name!r}; choose one of: auto, none, {', '.join(packed)}")
    if name in packed:
        if not native or device.type != "cpu" or dtype is not None:
            raise ConfigError(
                f"quantize={name} packs the weights of a native model on the CPU, without a dtype; "
                f"here: {'a native model' if native else 'a model that runs on Transformers'}, {device}, dtype {dtype}"
            )
        return cast(Quantization, name)
    if name != "auto" or not native or device.type != "cpu" or dtype is not None:
        return None
    return "int4" if 0 < bits <= 4 else "int8" if 0 < bits <= 8 else None


def choose_context(requested: int | None, own: int, model: str) -> int:
    """Max tokens of one sequence: as requested, up to the model's own limit, which is the default."""
    if requested is None:
        return own
    if not 1 < requested <= own:
        raise ConfigError(f"{model}: context must be 2 to {own}, the model's own limit; got {requested}")
    return requested


def _affordable_tokens(bytes_per_token: int, max_tokens: int) -> int:
    """Tokens of a cache in host memory: max_tokens, or as many as fit in a quarter of the available memory."""
    free = available_memory() // 4
    tokens = min(max_tokens, free // bytes_per_token)
    if tokens < MIN_CACHE_TOKENS:
        raise ConfigError(
            f"there is room for {tokens} tokens of cache ({free} bytes, {bytes_per_token} a token): free memory first"
        )
    return tokens


def available_memory() -> int:
    """Bytes of host memory available without swapping; the page cache counts, since it is released on demand."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        pass  # not Linux, or an old kernel
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")) or DEFAULT_MEMORY
    except (AttributeError, OSError, ValueError):
        return DEFAULT_MEMORY


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")
