"""The native runner: our decoder over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Verdict
from outrider.core.draws import Draws
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH
from outrider.kvcache.pages import PagePool
from outrider.models.decoder import Decoder
from outrider.runners.acceptance import accept_plainly, state_of_verdicts
from outrider.runners.attention import AttentionLayers, attention_of
from outrider.runners.base import ChainStart, Runner, Scores
from outrider.runners.cpu_pass import CpuPass, cpu_pass_of
from outrider.runners.device_state import DeviceState, resolve_spans, row_positions
from outrider.runners.layout import Layout, lay_out
from outrider.runners.paged_model import PagedModel
from outrider.runners.reduced_head import ReducedHead
from outrider.runners.threads import ThreadChooser

if TYPE_CHECKING:
    from outrider.runners.graph_runner import GraphRunner
    from outrider.runners.graphed_chain import GraphedChains


class NativeRunner(Runner):
    """Scores spans with a Decoder. Rolling back only sets a length; an accepted branch of a tree is moved together."""

    def __init__(
        self,
        decoder: Decoder,
        cache_tokens: int,
        *,
        context: int = 0,
        pinned: bool = False,
        page_size: int = 16,
        threads: ThreadChooser | None = None,
    ) -> None:
        """context: max tokens of one text; 0 takes the model's own limit.

        pinned: a row's bits do not depend on the other rows of the pass. ConfigError where that cannot be guaranteed;
        packed weights on the CPU always guarantee it. threads: chooses the number of CPU threads of its passes; None
        leaves torch's own.
        """
        context = context or decoder.config.max_positions
        pool = PagePool(-(-cache_tokens // page_size), page_size)
        self._run_on(PagedModel(decoder, pool, context, threads), pinned)

    def _run_on(self, model: PagedModel, pinned: bool) -> None:
        decoder = model.decoder
        self.model, self.pool, self.device = model, model.pool, model.device
        self.vocab_size, self.context, self.row_block = decoder.config.vocab_size, model.context, decoder.row_block
        if self.device.type != "cpu":  # on the CPU `forward` reserves as texts grow
            decoder.reserve(self.context + MAX_WIDTH)  # padding rows have positions too
        self._tainted: set[int] = set()
        """Pages where a pass wrote keys or values that are NaN or infinite."""
        self.graphs = _graphs(model, pinned)
        """The captured passes; None where nothing is captured."""
        self.asynchronous = self.graphs is not None
        self.cpu_pass = cpu_pass_of(model)
        """Runs a pass in one call of the CPU kernels; None where they do not support the model."""
        # a tree's row sums over the same keys in another order than a chain's, and may round differently
        self.scores_trees = self.graphs is None or not self.graphs.pinned
        self._chains: GraphedChains | None = None
        self._chain_reads = 2
        """The number of a text's last tokens that a chain reads before it drafts."""

    def with_layers(self, layers: Seq[int]) -> NativeRunner:
        """A runner of some of this one's layers, over the same pages.

        It drafts for texts that this runner has read but for their last token. It must read nothing before that token;
        what it writes from there on, this runner overwrites.
        """
        self._check_layers(layers, "run")
        part = object.__new__(NativeRunner)
        part._run_on(self.model.with_layers(layers), pinned=False)
        part._tainted, part._chain_reads = self._tainted, 1
        return part

    def tap(self, layers: Seq[int]) -> None:
        self._check_layers(layers, "tap")
        self.model.tap(layers)

    def keep_taps(self, layers: Seq[int]) -> None:
        """Keep these layers' outputs and the tokens in the pages of all text that is read. Called before `capture`."""
        self._check_layers(layers, "tap")
        self.model.keep_taps(layers)

    def _check_layers(self, layers: Seq[int], purpose: str) -> None:
        count = len(self.model.config.layers)
        for layer in layers:
            if not 0 <= layer < count:
                raise ConfigError(f"no layer {layer} to {purpose}: this model's layers are 0 to {count - 1}")

    @property
    def joins(self) -> bool:  # type: ignore[override]
        """True where passes are captured and do not return tapped outputs."""
        return self.graphs is not None and not self.model.returns_taps

    @torch.inference_mode()
    def read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        if self.graphs is None or not self.graphs.pinned:
            self._plain(spans)
            return after
        after = after and after.copied()  # the passes that read pinned rows overwrite states
        self.score(spans)
        return after

    @torch.inference_mode()
    def score_and_choose(self, spans: Seq[Span], after: DeviceState | None, draws: Draws) -> Scores:
        graphs = self.graphs
        if self.cpu_pass is not None and after is None and not self.model.heads.size:
            return self._choose_at_once(self.cpu_pass, spans, draws)
        if graphs is None or any(span.width > graphs.max_decode for span in spans):
            return self.score(spans, after)
        return graphs.score(spans, after, draws)

    def shared_tokens(self, lengths: Seq[int], longest: int) -> int:
        graphs = self.graphs
        return 0 if graphs is None or graphs.pinned else graphs.shared_tokens(lengths, longest)

    def can_repeat(self, scores: Scores, after: DeviceState) -> bool:
        return self.graphs is not None and self.graphs.can_repeat(scores, after)

    def repeat(self, scores: Scores) -> Scores:
        return cast("GraphRunner", self.graphs).repeat(scores)

    @torch.inference_mode()
    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        if self.graphs is None:
            if after is None:
                return self._plain(spans)
            spans = resolve_spans(spans, after)
            return replace(self._plain(spans), positions=partial(row_positions, spans))
        if not self.graphs.pinned:
            return self._score(spans, after, self.graphs)
        ahead = [self.graphs.read_ahead(span) for span in spans]
        scores = self._score([span for span, _ in ahead], after, self.graphs)
        if scores.features is not None and any(read for _, read in ahead):
            features = [torch.cat([*read, own]) for (_, read), own in zip(ahead, scores.features, strict=True)]
            scores = Scores(scores.logits, spans, features, scores.positions)
        return scores

    def _score(self, spans: Seq[Span], after: DeviceState | None, graphs: GraphRunner) -> Scores:
        """Score decoding sequences by a captured pass, prompts by a plain one, or a captured one of their own."""
        groups = graphs.split(spans)
        if after is not None and (len(groups) > 1 or not groups[0][1]):
            widest = max(span.width for span in spans)
            raise ValueError(f"a pass behind one in flight takes {graphs.max_decode} rows of a sequence, not {widest}")
        if len(groups) == 1:
            return graphs.score(spans, after) if groups[0][1] else self._plain(spans)
        logits: dict[int, Tensor] = {}
        features: dict[int, Tensor] = {}
        for rows, captured in groups:
            chosen = [spans[i] for i in rows]
            part = graphs.score(chosen) if captured else self._plain(chosen)
            logits.update(zip(rows, part.logits.split([span.rows for span in chosen]), strict=True))
            last = rows is groups[-1][0]  # the next captured pass overwrites what is in the buffers
            features.update(zip(rows, (each if last else each.clone() for each in part.features or ()), strict=False))
        merged = [features[i] for i in range(len(spans))] if self.model.returns_taps else None
        return Scores(torch.cat([logits[i] for i in range(len(spans))]), spans, merged)

    def capture(self, batch: int, width: int) -> Iterator[str]:
        if self.graphs is None:
            return
        for shape in self.graphs.capture(batch, width):
            yield f"passes of {shape.batch} x {shape.width}" + (f", {shape.rows} rows" if shape.packed else "")
        for rows in () if self.graphs.pinned else self.graphs.prompts.capture():
            yield f"prompts of {rows} rows"

    def pass_shapes(self, batch: int, width: int) -> list[tuple[int, int]]:
        if self.graphs is None:
            return super().pass_shapes(batch, width)
        return [(shape.batch, shape.width) for shape in self.graphs.shapes(batch, width) if not shape.packed]

    def packed_shapes(self, batch: int, width: int) -> list[tuple[int, int, int]]:
        shapes = [] if self.graphs is None else self.graphs.shapes(batch, width)
        widest = {(shape.batch, shape.rows): shape.width for shape in shapes if shape.packed}  # the last of each
        return [(batch, width, rows) for (batch, rows), width in widest.items()]

    def advance(self, scores: Scores, choices: Tensor) -> DeviceState | None:
        if not all(len(span.tokens) == 1 and span.wanted for span in scores.spans):
            return None
        if scores.handle is None or choices is not scores.choices:
            return self._advance(scores, choices)
        known = scores.handle.known_state(len(scores.spans))
        return self._advance(scores, None) if known is None else known

    @torch.inference_mode()
    def _advance(self, scores: Scores, choices: Tensor | None) -> DeviceState | None:
        """choices: None for the pass's own choices."""
        if scores.handle is not None:
            return scores.handle.accept(len(scores.spans), choices)
        return accept_plainly(self.model, scores, cast(Tensor, choices)) if self.device.type == "cpu" else None

    @torch.inference_mode()
    def advance_to(self, scores: Scores, verdicts: Seq[Verdict]) -> DeviceState | None:
        if scores.features is None:
            return None
        return state_of_verdicts(self.model, scores, scores.features, verdicts)

    def draft_chains(
        self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None
    ) -> Seq[Seq[Token]] | None:
        """The caller reserves pages for the chains. Afterwards texts and chains are cached, except each last token."""
        return None if self.graphs is None else self._graphed_chains(self.graphs).run(starts, steps, after)

    def capture_chains(self, batch: int, steps: Seq[int]) -> Iterator[str]:
        if self.graphs is None:
            return
        for length in steps:
            for size in self._graphed_chains(self.graphs).capture(batch, length):
                yield f"drafts of {size} x {length}"

    def reduce_vocab(self, tokens: Seq[Token]) -> ReducedHead | None:
        return self.model.heads.use(tokens)

    def _graphed_chains(self, graphs: GraphRunner) -> GraphedChains:
        if self._chains is None:
            from outrider.runners.graphed_chain import GraphedChains

            self._chains = GraphedChains(graphs, self._chain_reads)
        return self._chains

    def decode_one(self) -> None:
        """Run a pass of one row, for timing."""
        if self.cpu_pass is None:
            decode_one(self.model.decoder)
        else:
            self.cpu_pass.decode_one()

    def _plain(self, spans: Seq[Span]) -> Scores:
        """A pass on any device, of any width and any number of sequences; captured only where it reads prompts."""
        if len(spans) > MAX_SEQUENCES and self.model.fused:
            parts = [self._plain(spans[i : i + MAX_SEQUENCES]) for i in range(0, len(spans), MAX_SEQUENCES)]
            features = [each for part in parts for each in part.features or ()]
            return Scores(
                torch.cat([part.logits for part in parts]), spans, features if self.model.returns_taps else None
            )
        read = None if self.graphs is None or self._tainted else self.graphs.prompts.score(spans)
        if read is not None:
            return read
        with self.model.threads.run_pass(sum(span.width for span in spans)):
            logits, features, broken = self._forward(spans)
            if broken:
                logits = self._without_drafts(logits, spans, broken)
        return Scores(logits, spans, features)

    def _forward(self, spans: Seq[Span]) -> tuple[Tensor, list[Tensor] | None, list[int]]:
        """Logits, tapped outputs, and the indices of spans with drafts that have NaN or infinite rows."""
        if self._tainted:
            self._clean(spans)
        model = self.model
        layout = lay_out(spans, self.pool, self.device)
        if self.cpu_pass is not None:
            return self._forward_at_once(self.cpu_pass, spans, layout)
        attend = attention_of(model, AttentionLayers.of_model(model), spans, layout)
        tapped = dict.fromkeys(model.taps, layout.ids) or None  # filled by the pass
        hidden = model.decoder.forward(layout.ids, layout.positions, attend, tapped)
        logits = model.heads.logits(hidden[layout.wanted])
        block = None if tapped is None else torch.cat([tapped[layer] for layer in model.taps], -1)
        if block is not None and model.kept is not None:
            model.kept.store(layout.slots, layout.ids, block)
        features = self._returned(layout, block)
        if not attend.checks_rows or bool(hidden.sum().isfinite()):
            return logits, features, []
        bad = ~hidden.isfinite().all(-1)
        self._tainted.update((layout.slots[bad] // self.pool.size).tolist())
        rows = [bool(bad[part].any()) for part in layout.rows]
        return logits, features, [i for i, span in enumerate(spans) if rows[i] and len(span.draft)]

    def _forward_at_once(
        self, cpu_pass: CpuPass, spans: Seq[Span], layout: Layout
    ) -> tuple[Tensor, list[Tensor] | None, list[int]]:
        """As `_forward`, by the CPU kernels. They touch only keys that a row sees, so no row's NaN reaches another."""
        whole_head = not self.model.heads.size
        out = cpu_pass.run(spans, layout, logits=whole_head)
        logits = self.model.heads.logits(out.hidden) if out.logits is None else out.logits
        return logits, self._returned(layout, out.features), []

    def _choose_at_once(self, cpu_pass: CpuPass, spans: Seq[Span], draws: Draws) -> Scores:
        """A pass by the CPU kernels that also makes the target's choices."""
        with self.model.threads.run_pass(sum(span.width for span in spans)):
            layout = lay_out(spans, self.pool, self.device)
            out = cpu_pass.run(spans, layout, draws=draws)
            features = self._returned(layout, out.features)
        return Scores(cast(Tensor, out.logits), spans, features, choices=out.choices)

    def _returned(self, layout: Layout, block: Tensor | None) -> list[Tensor] | None:
        """The tapped outputs of each span, where passes return them. block: those of all rows."""
        return None if block is None or not self.model.returns_taps else [block[rows] for rows in layout.rows]

    def _without_drafts(self, logits: Tensor, spans: Seq[Span], broken: list[int]) -> Tensor:
        """Score those spans again without their drafts: a draft that breaks the model must not break the text.

        The logits after the draft's tokens are NaN.
        """
        parts = list(logits.split([span.rows for span in spans]))
        for i in broken:
            parts[i] = torch.full_like(parts[i], float("nan"))
            parts[i][:1] = self._forward([spans[i]._replace(draft=EMPTY)])[0]
        return torch.cat(parts)

    def keep(self, span: Span, path: Seq[int], *, compacted: bool = False, trim: bool = True) -> int:
        end = span.start + len(span.tokens)
        if not compacted and any(node != i for i, node in enumerate(path)):
            self._move_together(span, path)
        if trim:
            self.pool.trim(span.seq_id, end + len(path))
        return end + len(path)

    @torch.inference_mode()
    def _move_together(self, span: Span, path: Seq[int]) -> None:
        """Move the keys and values of a tree's path to the slots that a chain has."""
        table, size, end = self.pool.table(span.seq_id), self.pool.size, span.start + len(span.tokens)
        slots = torch.tensor([table[p // size] * size + p % size for p in range(end, end + len(span.draft))])
        self.model.move(slots[list(path)].to(self.device), slots[: len(path)].to(self.device))

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self.pool.close(seq_id, unpublish=unpublish)

    def _clean(self, spans: Seq[Span]) -> None:
        """Clear the slots these spans will write, where a pass wrote NaN or infinite values.

        A masked key has weight 0, but 0 times NaN is NaN: a sequence that takes over a tainted page, or continues after
        a draft that broke, must find numbers there.
        """
        size = self.pool.size
        for span in spans:
            for index, page in enumerate(self.pool.table(span.seq_id)):
                free = max(span.start - index * size, 0)
                if page in self._tainted and free < size:
                    self.model.clear(slice(page * size + free, (page + 1) * size))
                    if free == 0:
                        self._tainted.remove(page)


@torch.inference_mode()
def decode_one(decoder: Decoder) -> None:
    """Run a pass of one row that attends to nothing, for timing."""
    zero = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    decoder.logits(decoder.forward(zero, zero, lambda layer, q, k, v: q.reshape(len(q), -1)))


def _graphs(model: PagedModel, pinned: bool) -> GraphRunner | None:
    """Captured passes where the device and the model allow them. Triton is imported only there."""
    if model.device.type == "cuda":
        from outrider.runners import graph_runner

        if graph_runner.supports(model.decoder):
            model.fused = True
            return graph_runner.GraphRunner(model, pinned=pinned)
    if pinned and not model.decoder.weights.packed:
        what = f"{model.config.model_type} in {model.decoder.dtype} on {model.device}"
        raise ConfigError(
            f"pinned: {what} has no path whose bits do not depend on the batch; use quantize='int4' on the CPU, or a "
            "Llama-like model in bfloat16 on CUDA"
        )
    return None
