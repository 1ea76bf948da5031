"""The native target: our decoder over a paged cache."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kernels.attention import attend_block, attend_rows
from outrider.kvcache.pages import PagePool
from outrider.models.decoder import Attend, Decoder
from outrider.runners.base import ChainStart
from outrider.runners.device_state import MAX_WIDTH, DeviceState
from outrider.runners.layout import Layout, lay_out, look_back
from outrider.runners.reduced_head import OutputHeads, ReducedHead

if TYPE_CHECKING:
    from outrider.runners.graph_runner import GraphRunner
    from outrider.runners.graphed_chain import GraphedChains

WHOLE_PROMPT = 32  # rows from which on a part is a prompt being read, and its rows share their keys


class NativeRunner:
    """Scores spans with a Decoder. Rollback is a length; only a tree's kept branch is moved."""

    scores_trees = True
    rewinds = True

    def __init__(
        self, decoder: Decoder, cache_tokens: int, *, context: int = 0, pinned: bool = False, page_size: int = 16
    ) -> None:
        """context: most tokens of one text; 0 takes the model's own limit.

        pinned: a row's bits do not depend on the rows scored beside it. ConfigError where that cannot
        be promised. Packed weights on the CPU always keep to it.
        """
        config = decoder.config
        self.decoder = decoder
        self.vocab_size, self.context = config.vocab_size, context or config.max_positions
        self.device, self.row_block = decoder.device, decoder.row_block
        if self.device.type != "cpu":  # there forward does it as texts grow
            decoder.reserve(self.context + MAX_WIDTH)  # rows that only fill up a pass stand somewhere too
        self.pool = PagePool(-(-cache_tokens // page_size), page_size)
        # one page more than the pool hands out: captured passes write there what only fills up
        shape = (len(config.layers), (self.pool.count + 1) * page_size, config.kv_heads, config.head_dim)
        self._tainted: set[int] = set()
        """Pages where a pass wrote keys or values that are no numbers."""
        self.keys, self.values = (_blank(shape, decoder.dtype, self.device) for _ in range(2))
        # each layer's keys and values, [slots, kv_heads, head_dim] both
        self.caches = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self.heads = OutputHeads(decoder)
        self._captured = _captured(self, pinned)
        self.launches = self._captured is not None
        self._whole = False
        """The last pass was a recorded one for all its texts."""
        self._loops: GraphedChains | None = None

    @property
    def captured(self) -> GraphRunner | None:
        """Its recorded passes; None where nothing is recorded."""
        return self._captured

    @torch.inference_mode()
    def score(self, spans: Seq[Span]) -> Tensor:
        if self._captured is None:
            return self._plain(spans)
        spans = self._captured.cut(spans)
        narrow = [self._captured.takes(span) for span in spans]
        self._whole = all(narrow)
        if self._whole:
            return self._captured.score(spans)
        if not any(narrow):
            return self._plain(spans)
        parts: dict[bool, list[Tensor]] = {}
        for kind, score in ((True, self._captured.score), (False, self._plain)):
            chosen = [span for span, mine in zip(spans, narrow, strict=True) if mine is kind]
            parts[kind] = list(score(chosen).split([span.rows for span in chosen]))
        return torch.cat([parts[mine].pop(0) for mine in narrow])

    def prepare(self, batch: int, width: int, steps: int = 0) -> Iterator[str]:
        """Get ready for passes of up to so many sequences of so many rows, and chains of `steps`; says what it does.

        Afterwards nothing is compiled, recorded or allocated for them. Nothing to do where nothing is recorded.
        ConfigError where passes are pinned and so many rows cannot be.
        """
        if self._captured is None:
            return
        self._captured.check_width(width)
        for shape in self._captured.prepare(batch, width):
            yield f"passes of {shape.batch} x {shape.width}"
        if steps:
            for size in self._chain_loops(self._captured).prepare(batch, steps):
                yield f"drafts of {size} x {steps}"

    def stand(self, choices: Tensor) -> DeviceState | None:
        return None if self._captured is None or not self._whole else self._captured.stand(choices)

    @torch.inference_mode()
    def score_behind(self, standing: DeviceState, seq_ids: Seq[int], drafts: Seq[Draft]) -> Tensor:
        if self._captured is None:
            raise OutriderError("nothing is in flight: this target's passes are waited for")
        self._whole = True
        spans = [Span(seq_id, 0, (0,), draft) for seq_id, draft in zip(seq_ids, drafts, strict=True)]
        return self._captured.score(spans, standing)

    def draft_chains(
        self, starts: Seq[ChainStart], steps: int, behind: DeviceState | None = None
    ) -> Seq[Seq[Token]] | None:
        """Chains of `steps` tokens, drafted on the device in one go; None where that cannot be.

        Each start's pages are reserved for its chain. Afterwards its text and all guesses but the
        last are cached.
        """
        return None if self._captured is None else self._chain_loops(self._captured).run(starts, steps, behind)

    def narrow(self, tokens: Seq[Token]) -> ReducedHead | None:
        return self.heads.use(tokens)

    def _chain_loops(self, captured: GraphRunner) -> GraphedChains:
        if self._loops is None:
            from outrider.runners.graphed_chain import GraphedChains

            self._loops = GraphedChains(captured)
        return self._loops

    def _plain(self, spans: Seq[Span]) -> Tensor:
        """A pass that is not recorded: any device, any width."""
        logits, broken = self._pass(spans)
        return self._without_drafts(logits, spans, broken) if broken else logits

    def _pass(self, spans: Seq[Span]) -> tuple[Tensor, list[int]]:
        """Logits, and which spans have drafts beside rows that are no numbers."""
        if self._tainted:
            self._clean(spans)
        layout = lay_out(spans, self.pool, self.device)
        attend = self._attend(spans, layout)
        hidden = self.decoder.forward(layout.ids, layout.positions, attend)
        logits = self.heads.logits(hidden[layout.wanted])
        if not isinstance(attend, _Attend) or bool(hidden.sum().isfinite()):
            return logits, []
        bad = ~hidden.isfinite().all(-1)
        self._tainted.update((layout.slots[bad] // self.pool.size).tolist())
        rows = [bool(bad[part].any()) for part in layout.rows]
        return logits, [i for i, span in enumerate(spans) if rows[i] and len(span.draft)]

    def _attend(self, spans: Seq[Span], layout: Layout) -> Attend:
        """The kernel where there is one: what a row does not see counts for nothing there, be it NaN."""
        if self._captured is not None and all(span.draft.is_chain for span in spans):
            from outrider.runners.prompt_attention import PromptAttention

            return PromptAttention(self, self._captured.tables, spans, layout)
        return _Attend(self, spans, layout)

    def _without_drafts(self, logits: Tensor, spans: Seq[Span], broken: list[int]) -> Tensor:
        """Score those spans again, bare: a guess that breaks the model must not break the text that refuses it.

        Nothing is then known of what follows their guesses.
        """
        parts = list(logits.split([span.rows for span in spans]))
        for i in broken:
            parts[i] = torch.full_like(parts[i], float("nan"))
            parts[i][:1] = self._pass([replace(spans[i], draft=EMPTY)])[0]
        return torch.cat(parts)

    @torch.inference_mode()
    def keep(self, span: Span, path: Seq[int], *, trim: bool = True) -> int:
        end = span.start + len(span.tokens)
        if any(node != i for i, node in enumerate(path)):
            table, size = self.pool.table(span.seq_id), self.pool.size
            slots = torch.tensor([table[p // size] * size + p % size for p in range(end, end + len(span.draft))])
            source, destination = slots[list(path)].to(self.device), slots[: len(path)].to(self.device)
            for cache in (self.keys, self.values):
                cache[:, destination] = cache[:, source]
        if trim:
            self.pool.trim(span.seq_id, end + len(path))
        return end + len(path)

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self.pool.close(seq_id, unpublish=unpublish)

    def _clean(self, spans: Seq[Span]) -> None:
        """Wipe what a broken pass left where these spans will write.

        A masked key weighs nothing, but nothing times NaN is NaN: whoever takes over a tainted
        page, or goes on after a draft that broke, must find numbers there.
        """
        size = self.pool.size
        for span in spans:
            for index, page in enumerate(self.pool.table(span.seq_id)):
                free = max(span.start - index * size, 0)
                if page in self._tainted and free < size:
                    self.keys[:, page * size + free : (page + 1) * size] = 0
                    self.values[:, page * size + free : (page + 1) * size] = 0
                    if free == 0:
                        self._tainted.remove(page)


def _captured(target: NativeRunner, pinned: bool) -> GraphRunner | None:
    """Recorded passes where the device and the model allow them. Triton is imported only there."""
    if target.device.type == "cuda":
        from outrider.runners import graph_runner

        if graph_runner.fits(target.decoder):
            return graph_runner.GraphRunner(target, pinned=pinned)
    if pinned and not target.decoder.weights.packed:
        what = f"{target.decoder.config.model_type} in {target.decoder.dtype} on {target.device}"
        raise ConfigError(
            f"pinned: {what} has no path whose bits do not depend on the batch; use quantize='int4' on the CPU, or a "
            "Llama-like model in bfloat16 on CUDA"
        )
    return None


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU the memory is taken only as it is written, so that a roomy cache costs nothing at start.

    And in small pages there: a text that begins where none was before would else wait for 2 MB of
    zeros in every layer, which takes longer than to read a short prompt.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)


class _Attend:
    """One pass's view of the cache: writes each layer's keys and values, then attends part by part."""

    def __init__(self, target: NativeRunner, spans: Seq[Span], layout: Layout) -> None:
        self.caches = target.caches
        self.slots, self.parts = layout.slots, look_back(spans, layout, target.pool, target.device)
        config = target.decoder.config
        self.windows = [layer.window or 0 for layer in config.layers]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap or 0.0
        self.shared = target.device.type != "cpu"
        """Whether rows always share their keys."""
        self.whole = WHOLE_PROMPT if not target.decoder.weights.packed else 1 << 30

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (keys, values), window, parts = self.caches[layer], self.windows[layer], self.parts
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        rows = [q] if len(parts) == 1 else [q[part.rows] for part in parts]
        out = [
            (attend_block if self.shared or len(own) >= self.whole else attend_rows)(
                own, keys[part.keys], values[part.keys], part.mask(window, q.dtype), self.scale, self.softcap
            )
            for own, part in zip(rows, parts, strict=True)
        ]
        return (out[0] if len(out) == 1 else torch.cat(out)).reshape(q.shape[0], -1)
