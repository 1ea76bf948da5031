"""The fallback target: any causal model Transformers can run, on Transformers' own code. Slower; the same contract."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from outrider.core.errors import ConfigError, OutriderError
from outrider.core.sampling import MAX_TOKENS, Token
from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners.base import Runner, Scores
from outrider.runners.device_state import DeviceState
from outrider.runners.pass_work import Experts, PassWork
from outrider.runners.threads import ThreadChooser

log = logging.getLogger(__name__)

CACHES = ("past_key_values", "cache_params", "state")  # what models call the cache they take and hand back
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
WAYS = ((False, True), (False, False), (True, True), (True, False))  # (one by one, positions given), the best first
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configurations call the number of experts
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
WHOLE = -1  # the key of a copy of a whole cache; copies of layers have 0, 1, ...


class FallbackRunner(Runner):
    """Scores spans with a Transformers model, one sequence at a time, each on a cache of its own.

    A cache that can be cropped is rolled back by cropping. Any other is copied before a draft is read, and put back
    unless the whole draft is accepted: `keep` then returns less than the text. The page pool only counts tokens; it
    holds no keys and values, and copies are not counted.
    """

    scores_trees = False

    def __init__(self, model: PreTrainedModel, cache_tokens: int, page_size: int = 16) -> None:
        """Raises ConfigError where the model cannot read on from a cache and give the same logits."""
        self.model = model.eval()
        self.device = model.device
        self.context = context_of(model.config)
        self.pool = PagePool(-(-cache_tokens // page_size), page_size, share=False)
        self.threads = ThreadChooser(())
        """Chooses the number of CPU threads of passes; by default torch's own."""
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = next((name for name in CACHES if name in self._takes), "")
        self._texts: dict[int, _Text] = {}
        self.one_by_one: bool
        """The model reads on from its cache correctly by single tokens only: drafts are verified, but save no time."""
        self.rewinds = False
        self._positions: bool  # the model is given its tokens' positions, and does not count them itself
        self.vocab_size = self._try_out()
        self.work = _work_of(model)

    @classmethod
    def load(
        cls, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None, cache_tokens: int
    ) -> FallbackRunner:
        """Load safetensors from a local folder; nothing is fetched and no code of the model's own is run.

        dtype None is `default_dtype`.
        """
        config = _config(folder)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                dtype=dtype or default_dtype(config.dtype, device),
                output_loading_info=True,
            )
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{folder}: Transformers could not load the model: {error}") from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(
                f"{folder}: the safetensors files lack weights of {type(model).__name__}: {len(missing)}, "
                f"{missing[0]!r} first; a checkpoint saved with its language model head is needed"
            )
        return cls(model.to(device), cache_tokens)

    @torch.inference_mode()
    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        if after is not None:
            raise OutriderError("this runner waits for its passes: no round is launched behind another")
        return Scores(torch.cat([self._score(span) for span in spans]), spans)

    @torch.inference_mode()
    def keep(self, span: Span, path: Seq[int], *, compacted: bool = False, trim: bool = True) -> int:
        text = self._texts[span.seq_id]
        if rejected := len(span.draft) - len(path):
            text.take_back(rejected)
        text.copies.clear()
        if trim:  # what is read again keeps its pages
            self.pool.trim(span.seq_id, span.start + len(span.tokens) + len(path))
        return text.length

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self._texts.pop(seq_id, None)
        self.pool.close(seq_id, unpublish=unpublish)

    @torch.inference_mode()
    def decode_one(self) -> None:
        """Run a pass of one row, for timing."""
        self._forward(_Text(), [0], 1)

    def _score(self, span: Span) -> Tensor:
        """[span.rows, vocab], leaving text and draft in the cache."""
        text = self._texts.setdefault(span.seq_id, _Text())
        if self.rewinds and span.start < text.length:
            text.take_back(text.length - span.start)
        if span.start != text.length:
            raise OutriderError(f"sequence {span.seq_id} has {text.length} tokens cached, its span says {span.start}")
        if not span.draft.is_chain:
            raise OutriderError(f"sequence {span.seq_id} was given a tree; {type(self).__name__} scores chains only")
        if not span.draft:
            return self._read(text, span.tokens, span.rows)
        # Text read along with a draft is read again where the draft is rejected and copies are put back:
        # cheaper than a pass of its own while it is short. Otherwise it goes in first, before the copies.
        long = self.one_by_one or len(span.tokens) > len(span.draft)
        apart = text.cache is None or (long and not text.croppable(span.width))
        head = [self._read(text, span.tokens, min(1, span.rows))] if apart else []
        rest = span.draft.tokens if apart else (*span.tokens, *span.draft.tokens)
        text.save(len(rest))
        return torch.cat([*head, self._read(text, rest, span.rows - sum(map(len, head)))])

    def _read(self, text: _Text, tokens: Seq[Token], rows: int) -> Tensor:
        """Read tokens onto the text's cache. Returns the logits after the last `rows` of them, [rows, vocab]."""
        step = 1 if self.one_by_one and text.cache is not None else len(tokens)
        out: list[Tensor] = []
        for start in range(0, len(tokens), step):
            unwanted = max(0, len(tokens) - rows - start)
            out.append(self._forward(text, tokens[start : start + step], max(0, step - unwanted)))
        return torch.cat(out)

    def _forward(self, text: _Text, tokens: Seq[Token], rows: int) -> Tensor:
        options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = max(1, rows)  # 0 would mean all
        if self._positions and "position_ids" in self._takes:
            options["position_ids"] = torch.arange(text.length, text.length + len(tokens), device=self.device)[None]
        if text.cache is not None:
            options[self._cache_name] = text.cache
        with self.threads.run_pass(len(tokens)):
            out = self.model(input_ids=torch.tensor([tokens], device=self.device), **options)
        text.cache = out.get(self._cache_name)
        text.length += len(tokens)
        logits = out.logits[0]  # [at least rows, vocab]
        return logits[len(logits) - rows :].float()

    @torch.inference_mode()
    def _try_out(self) -> int:
        """Choose the first of WAYS in which the model reads on correctly. Returns the vocabulary's size."""
        name, embedding = type(self.model).__name__, cast(Any, self.model.get_input_embeddings())
        tokens = [embedding.weight.shape[0] * i // 18 for i in range(1, 17)]
        expected = self.model(input_ids=torch.tensor([tokens], device=self.device)).logits[0].float()  # [16, vocab]
        wrong = ""
        for self.one_by_one, self._positions in WAYS:
            wrong = self._what_is_wrong(tokens, expected)
            if not wrong:
                break
        if wrong:
            raise ConfigError(f"{name} cannot be a target, since drafts are scored by reading on from a cache: {wrong}")
        if self.one_by_one:
            log.warning("%s reads on from its cache by single tokens only: drafts will save no time", name)
        return expected.shape[1]

    def _what_is_wrong(self, tokens: Seq[Token], expected: Tensor) -> str:
        """Read half of the tokens, another text, then the rest; say what is wrong with the logits, or return ""."""
        half, text = len(tokens) // 2, _Text()
        try:
            self._forward(text, tokens[:half], 0)
            self._forward(_Text(), tokens[::-1], 0)  # shows up a model that keeps what it read outside its cache
            off = self._read(text, tokens[half:], len(tokens) - half) - expected[half:]
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return f"it raised {type(error).__name__}: {error}"
        if text.cache is None:
            return "it hands back no cache; a decoder that does is needed"
        self.rewinds = not self.one_by_one and text.croppable(self.context)
        # Rounding is far below the logits' spread (measured: 1e-6 of it in float32); a cache misread is of its order.
        tolerance = 1e-3 if torch.finfo(self.model.dtype).eps < 1e-4 else 0.1
        distance = float(off.square().mean().sqrt() / expected.std())
        return "" if distance <= tolerance else f"its logits are then off by {distance:.2g} of their spread"


@dataclass(slots=True)
class _Text:
    """What the model holds of one sequence."""

    cache: Any = None
    """As the model made it; None before the first pass."""
    length: int = 0
    copies: dict[int, Any] = field(default_factory=dict[int, Any])
    """Copies, made at length `copied`, of the layers that cannot be cropped; empty where all can be."""
    copied: int = 0

    def croppable(self, width: int) -> bool:
        """Whether up to `width` more tokens could be taken back one by one."""
        return not self._fixed(width)

    def save(self, width: int) -> None:
        """Prepare to take back some of the next `width` tokens: copy what cannot be cropped."""
        self.copied = self.length
        self.copies = {place: copy.deepcopy(part) for place, part in self._fixed(width).items()}

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens; all since `save` where the cache cannot forget fewer."""
        if self.copies:
            count = self.length - self.copied
        self.length -= count
        if WHOLE in self.copies:
            self.cache = self.copies[WHOLE]
            return
        for i, layer in enumerate(self.cache.layers):
            if i in self.copies:
                self.cache.layers[i] = self.copies[i]
            elif layer.get_seq_length():  # a layer that shares another's keys stays empty
                layer.crop(-count)

    def _fixed(self, width: int) -> dict[int, Any]:
        """The parts of the cache that cannot be cropped once `width` more tokens are read."""
        if type(self.cache) is not DynamicCache:  # a subclass may hold more than its layers
            return {WHOLE: self.cache}
        return {i: layer for i, layer in enumerate(self.cache.layers) if not _croppable(layer, self.length + width)}


def _croppable(layer: Any, length: int) -> bool:
    """Whether a layer that has seen `length` tokens still holds each of them separately, so that it can be cropped."""
    if type(layer) is DynamicSlidingWindowLayer:
        return length < layer.sliding_window
    return type(layer) is DynamicLayer  # a subclass may hold more than keys and values


def context_of(config: Any) -> int:
    """Max tokens of one text; MAX_TOKENS where the model states no limit (ALiBi, recurrent models)."""
    config = config.get_text_config(decoder=True)
    limits = [limit for name in CONTEXTS if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    context = limits[0] if limits else MAX_TOKENS
    rope = getattr(config, "rope_parameters", None) or {}
    for rule in (rope, *rope.values()):
        # Beyond this length longrope rotates every position differently, and keys cached before would be wrong.
        if isinstance(rule, dict) and rule.get("rope_type") == "longrope":
            context = min(context, rule["original_max_position_embeddings"])
    return context


def _work_of(model: PreTrainedModel) -> PassWork:
    """Each pass reads all weights but an untied embedding's, and of experts, recognized by name, the chosen ones."""
    config: Any = model.config
    count = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    chosen = next((n for name in EXPERTS_PER_TOKEN if (n := getattr(config, name, None))), 0)
    experts = Experts(count, chosen) if 0 < chosen < count else None
    head, embedding = model.get_output_embeddings(), cast(Any, model.get_input_embeddings())
    tied = head is not None and cast(Any, head).weight is embedding.weight
    weights = [0, 0]  # of all rows, of experts
    for name, weight in model.named_parameters():
        if weight is not embedding.weight or tied:
            weights[experts is not None and ".experts." in name] += weight.numel()
    dense, routed, size = *weights, model.dtype.itemsize
    return PassWork(dense, dense * size, experts, routed, routed * size)


def default_dtype(stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype, as for native models: float32 on the CPU; elsewhere the checkpoint's own 16 bits, or bfloat16."""
    if device.type == "cpu":
        return torch.float32
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def _config(folder: Path) -> Any:
    """The folder's configuration, if it is of a decoder that Transformers itself has code for."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: Transformers has no code of its own for this model, and code from a model's folder "
            f"is never run; choose a model of an architecture it knows, or update it. It said: {error}"
        ) from error
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{folder}: {kind} is an encoder-decoder; a decoder-only language model is needed")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{folder}: Transformers has no causal language model head for {kind}; one is needed")
    config._attn_implementation = None  # Transformers' own choice: a configuration could name a kernel to fetch
    return config
