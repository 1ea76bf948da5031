"""Captured passes against the plain decoder on the same weights and cache, and through the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from outrider.bench.syncs import SyncCounter
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Span
from outrider.drafters.base import DrafterContext
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.drafters.none import NoDraft
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.models.config import DecoderConfig, LayerConfig, RopeConfig
from outrider.models.decoder import Decoder, Layer, Norm, Weights
from outrider.models.linear import Linear
from outrider.runners.base import Scores
from outrider.runners.cuda_graphs import BatchShape
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ByteTokenizer
from outrider.verify.base import make_verifier

pytestmark = pytest.mark.gpu
VOCAB = 1000


def decoder(
    layers: int = 3, *, bias: bool = False, window: int | None = None, qk_norm: bool = False, seed: int = 0
) -> Decoder:
    """Random weights, sizes like SmolLM2's."""
    device, hidden, wide, heads, kv, dim = torch.device("cuda"), 576, 1536, 9, 3, 64
    g = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=g, device=device) * columns**-0.5).bfloat16()

    def norm() -> Norm:
        return Norm(torch.rand(hidden, generator=g, device=device) + 0.5, 1e-5, torch.bfloat16)

    config = DecoderConfig(
        model_type="llama", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=wide, heads=heads, kv_heads=kv,
        head_dim=dim, layers=(LayerConfig(window=window),) * layers, ropes=(RopeConfig(),), max_positions=2048,
        norm_eps=1e-5, activation="silu", attention_scale=dim**-0.5, dtype=torch.bfloat16, qkv_bias=bias,
        qk_norm=qk_norm,
    )  # fmt: skip
    width = (heads + 2 * kv) * dim
    blocks = [
        Layer(
            norm(),
            Linear(matrix(width, hidden), matrix(1, width)[0] if bias else None),
            Linear(matrix(hidden, heads * dim)),
            norm(),
            Linear(matrix(2 * wide, hidden)),
            Linear(matrix(hidden, wide)),
            Norm(torch.rand(heads + kv, dim, generator=g, device=device) + 0.5, 1e-5) if qk_norm else None,
        )
        for _ in range(layers)
    ]
    table = torch.randn(VOCAB, hidden, generator=g, device=device).bfloat16()
    return Decoder(config, Weights(table, blocks, norm(), Linear(matrix(VOCAB, hidden))), torch.bfloat16)


@contextmanager
def without_kernels(target: NativeRunner) -> Iterator[None]:
    """Score in plain PyTorch, with neither captured passes nor the prompt kernel."""
    graphs, target.graphs, target.model.fused = target.graphs, None, False
    yield
    target.graphs, target.model.fused = graphs, True


def plainly(target: NativeRunner, spans: list[Span]) -> torch.Tensor:
    with without_kernels(target):
        return target.score(spans).logits


DRAFTS = {
    "none": [EMPTY] * 3,
    "chains": [Draft((3, 4, 5, 6, 7))] * 3,
    "mixed": [EMPTY, Draft((5, 6, 7)), Draft((1, 2, 3, 4, 5, 6))],
    "trees": [Draft((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2)), Draft((1, 2), (-1, -1)), Draft((3, 4, 5), (-1, 0, 0))],
    "wide": [Draft(tuple(range(20)))] * 3,
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"window": 64}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("text", [1, 3])
def test_a_captured_pass_is_the_plain_one(drafts, kind, text):
    target = NativeRunner(decoder(**kind), 4096)
    graphs = target.graphs
    assert graphs is not None
    rng = random.Random(1)
    spans = []
    for i, (length, draft) in enumerate(zip((5, 200, 700), DRAFTS[drafts], strict=True)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        target.pool.open(i, prompt, str(i))
        assert target.pool.reserve(i, length + 40)
        with without_kernels(target):
            target.score([Span(i, 0, tuple(prompt))])
        spans.append(Span(i, length, tuple(rng.randrange(VOCAB) for _ in range(text)), draft))
    with without_kernels(target):
        plain = target.score(spans).logits
    for _ in range(2):
        got = target.score(spans).logits
        assert got.shape == plain.shape
        assert float((got - plain).norm() / plain.norm()) < 2e-2
    assert len(graphs.captured) == 1


@pytest.mark.parametrize("window", [None, 64])
def test_a_prompt_is_read_as_plainly_and_with_texts_that_decode(window):
    """Prompts by the kernel, a decoding sequence by a captured pass, in one call: as one by one without either."""
    target = NativeRunner(decoder(window=window), 4096)
    rng = random.Random(2)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (300, 77, 400, 150)]
    cuts, drafts = (150, 70, 399, 0), (EMPTY, EMPTY, Draft((3, 4, 5)), EMPTY)
    told = []
    for kernels in (False, True):
        spans = []
        for i, (text, cut, draft) in enumerate(zip(texts, cuts, drafts, strict=True)):
            seq = i + 10 * kernels
            target.pool.open(seq, text, f"{seq}")
            assert target.pool.reserve(seq, len(text) + 8)
            if cut:
                with nullcontext() if kernels else without_kernels(target):
                    target.score([Span(seq, 0, tuple(text[:cut]), wanted=False)])
            spans.append(Span(seq, cut, tuple(text[cut:]), draft))
        told.append(target.score(spans).logits if kernels else torch.cat([plainly(target, [span]) for span in spans]))
    assert told[0].shape == told[1].shape == (7, VOCAB)
    assert float((told[0] - told[1]).norm() / told[0].norm()) < 2e-2


RAGGED = {
    "one is wide": [EMPTY, Draft((3, 4, 5, 6, 7, 8, 9)), EMPTY, EMPTY, EMPTY, EMPTY],
    "chains": [Draft((1,)), Draft(tuple(range(7))), EMPTY, Draft((5, 6)), EMPTY, Draft((9, 8, 7, 6))],
    "trees": [EMPTY, Draft((5, 6, 7, 8, 9), (-1, -1, 0, 1, 2)), Draft((1, 2), (-1, -1)), EMPTY, Draft((4,)), EMPTY],
}


@pytest.mark.parametrize("drafts", RAGGED)
@pytest.mark.parametrize("taps", [(), (0, 2)])
@pytest.mark.parametrize("kind", [{}, {"bias": True, "window": 64}], ids=str)
def test_a_packed_pass_scores_every_text_as_alone(drafts, taps, kind):
    """Logits and tapped outputs; also in a round behind it, which is scored from the state alone."""
    target = NativeRunner(decoder(**kind), 8192)
    graphs = target.graphs
    assert graphs is not None
    target.tap(taps)
    list(target.capture(8, 8))
    made, spans = set(graphs.captured), ragged_spans(target, RAGGED[drafts])
    for count in (4, 6):
        shape = graphs.shape_of(spans[:count])
        assert shape is not None
        assert shape.packed == (32 if (drafts, count) == ("chains", 6) else 16)
    alone = [copied(target.score([span])) for span in spans]
    compare(copied(target.score(spans[:4])), alone[:4])
    scores = target.score(spans)
    compare(copied(scores), alone)
    choices, texts = ways(spans)
    state = target.advance(scores, torch.tensor(choices, device="cuda"))
    assert state is not None
    assert state.lengths.tolist() == [span.start + len(text) for span, text in zip(spans, texts, strict=True)]
    assert state.last.tolist() == [text[-2:] for text in texts]
    behind = [Span(i, 0, (0,), draft) for i, draft in enumerate(RAGGED["chains"])]
    told = copied(target.score(behind, state))
    known = [
        Span(i, span.start + len(text) - 1, (text[-1],), RAGGED["chains"][i])
        for i, (span, text) in enumerate(zip(spans, texts, strict=True))
    ]
    compare(told, [copied(target.score([span])) for span in known])
    assert set(graphs.captured) == made


def ragged_spans(target: NativeRunner, drafts: list[Draft]) -> list[Span]:
    """Texts of different length that were read, each with a token and a draft to score."""
    rng = random.Random(7)
    spans = []
    for i, (length, draft) in enumerate(zip((5, 200, 700, 31, 64, 90), drafts, strict=True)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        target.pool.open(i, prompt, str(i))
        assert target.pool.reserve(i, length + 40)
        target.score([Span(i, 0, tuple(prompt))])
        spans.append(Span(i, length, (i,), draft))
    return spans


def ways(spans: list[Span]) -> tuple[list[int], list[list[int]]]:
    """Choices that accept the way to the last node of each draft, then 900; and each text's tokens from its span on."""
    choices: list[int] = []
    texts: list[list[int]] = []
    for span in spans:
        path = span.draft.path(len(span.draft) - 1) if len(span.draft) else ()
        after = {parent: span.draft.tokens[node] for parent, node in zip((-1, *path), path, strict=False)}
        choices += [after.get(row, 900) for row in range(-1, len(span.draft))]
        texts.append([*span.tokens, *(span.draft.tokens[node] for node in path), 900])
    return choices, texts


def copied(scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tapped outputs as they are now."""
    return scores.logits.clone(), torch.cat([each.clone() for each in scores.features or [scores.logits[:, :1]]])


def compare(together: tuple[torch.Tensor, torch.Tensor], alone: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for part, each in enumerate(together):
        judge = torch.cat([own[part] for own in alone])
        assert each.shape == judge.shape
        assert float((each - judge).norm() / judge.norm()) < 2e-2
        assert float((each - judge).norm(dim=-1).max() / judge.norm(dim=-1).mean()) < 5e-2  # of every row


MANY = 70  # texts, of 5 rows each: more than passes have room for where nobody asked for it


def many_texts(target: NativeRunner) -> list[Span]:
    """Texts of different length, read by plain passes, each with a chain of four draft tokens."""
    rng = random.Random(5)
    spans = []
    for i in range(MANY):
        prompt = [rng.randrange(VOCAB) for _ in range(3 + 7 * (i % 9))]
        target.pool.open(i, prompt, str(i))
        assert target.pool.reserve(i, len(prompt) + 8)
        plainly(target, [Span(i, 0, tuple(prompt))])
        spans.append(Span(i, len(prompt), (i,), Draft(tuple(rng.randrange(VOCAB) for _ in range(4)))))
    return spans


@pytest.mark.parametrize("room", [False, True])
def test_many_texts_are_scored_in_one_pass_where_room_was_made_for_them(room):
    """Else in several, as right, after which only the host knows the state of its sequences."""
    target = NativeRunner(decoder(), 16384)
    graphs = target.graphs
    assert graphs is not None
    if room:
        list(target.capture(MANY, 5))
        assert graphs.max_rows == 128 * 6
    spans = many_texts(target)
    plain = plainly(target, spans)
    for _ in range(2):
        scores = target.score(spans)
        got = scores.logits
        assert got.shape == plain.shape
        assert float((got - plain).norm() / plain.norm()) < 2e-2
    assert max(shape.rows for shape in graphs.captured) == (128 * 6 if room else 32 * 6)
    state = target.advance(scores, got.argmax(-1))
    assert (state is not None) == room
    if state is not None:
        for i, (span, choices) in enumerate(zip(spans, got.argmax(-1).view(MANY, 5).tolist(), strict=True)):
            drafted = list(span.draft.tokens)
            accepted = next((n for n in range(4) if drafted[n] != choices[n]), 4)
            assert int(state.lengths[i]) == span.start + 2 + accepted
            assert state.last[i].tolist() == [[i, *drafted][accepted], choices[accepted]]


def test_passes_captured_before_room_was_made_for_more_keep_theirs():
    """Bit for bit: what is captured later writes elsewhere."""
    target = NativeRunner(decoder(), 16384)
    graphs = target.graphs
    assert graphs is not None
    spans = many_texts(target)
    list(target.capture(2, 2))
    few = [span._replace(draft=EMPTY) for span in spans[:2]]
    first, made = target.score(few).logits, graphs.captured_pass(BatchShape(2, 1))[0]
    list(target.capture(MANY, 5))
    assert graphs._buffers is not made.buffers
    assert graphs.captured_pass(BatchShape(2, 1))[0] is made
    target.score(spans)
    assert torch.equal(target.score(few).logits, first)


@pytest.mark.parametrize("rows", [6, 96, 768])
def test_logits_are_summed_up_in_float32(rows):
    """From the rows of the last norm to float32, with nothing rounded to bfloat16 in between: judged in float64."""
    target = NativeRunner(decoder(), 16384)
    graphs = target.graphs
    assert graphs is not None
    graphs.make_room([BatchShape(128, 6)])
    made, graph = graphs.captured_pass(BatchShape(rows // 6, 6))
    made.load(many_texts(target)[: rows // 6])
    graph.replay()
    real = [row for row in range(min(rows, 6 * MANY)) if row % 6 < 5]  # what only fills up may be no number
    exact = made.buffers.normed[real].double() @ made.head.double().t()
    assert float((made.logits[real] - exact).norm() / exact.norm()) < 1e-4


def launched_behind(engine: Engine) -> bool:
    """Whether the round in flight was launched behind another: then neither host nor drafter took time of its own."""
    return bool(engine._in_flight) and engine._in_flight[0].times.draft == engine._in_flight[0].times.host == 0


def test_rounds_of_many_texts_follow_each_other():
    """Launched behind one another: with room made for all their rows a round is one pass."""
    target, draft = NativeRunner(decoder(), 32768), NativeRunner(decoder(), 32768)
    list(target.capture(MANY, 5))
    model = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), DraftModelConfig(model="-", k=4))
    limits = EngineLimits(max_batch=MANY, max_round_tokens=2048)
    engine = Engine(target, model, make_verifier("seeded"), ByteTokenizer(), limits=limits)
    model.capture(MANY)
    captured = set(target.graphs.captured)
    lengths: dict[int, int] = {}
    for i in range(MANY):
        params = SamplingParams(max_tokens=100, seed=i, ignore_eos=True)
        lengths[engine.submit(Request(prompt=(i + 1, 2, 3), params=params))[0]] = 0
    behind, rounds = 0, 0
    while engine.busy:
        for event in engine.step():
            lengths[event.seq_id] += len(event.tokens)
        rounds += 1
        behind += launched_behind(engine)
    engine.check()
    assert set(lengths.values()) == {100}
    assert behind > 0.6 * rounds
    assert engine.stats.all.alpha > 0.8  # the draft is the target: what differs are near-ties
    assert set(target.graphs.captured) == captured


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_over_captured_passes_differs_at_near_ties_only(temperature):
    """bfloat16, unpinned: the first difference, if any, is where the target's own choices lay close together."""
    target, draft = NativeRunner(decoder(), 8192), NativeRunner(decoder(1), 8192)
    model = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), DraftModelConfig(model="-", k=4))
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, ignore_eos=True, logprobs=2)
    told = []
    for drafter in (NoDraft(), model):
        engine = Engine(target, drafter, make_verifier("seeded"), ByteTokenizer())
        salt = drafter.traits.name
        ids = [engine.submit(Request(prompt=(i + 1, 2, 3), params=params, salt=salt))[0] for i in range(4)]
        events = {i: [] for i in ids}
        while engine.busy:
            for event in engine.step():
                events[event.seq_id] += zip(event.tokens, event.logprobs, strict=True)
        engine.check()
        told.append(list(events.values()))
    for plain, spec in zip(*told, strict=True):
        assert len(plain) == len(spec) == 60
        for (a, chance), (b, _) in zip(plain, spec, strict=True):
            if a != b:
                if temperature == 0:
                    (_, best), (_, second) = chance.top
                    assert best - second < 0.1
                break


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pinned_texts_are_identical_with_and_without_speculation(temperature):
    """bfloat16, to the last token: a row's bits do not depend on the rows beside it."""
    target, draft = NativeRunner(decoder(), 8192, pinned=True), NativeRunner(decoder(1), 8192)
    told = []
    for k in (0, 2, 5):
        config = DraftModelConfig(model="-", k=max(1, k))
        drafter = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), config) if k else NoDraft()
        engine = Engine(target, drafter, make_verifier("seeded"), ByteTokenizer())
        texts = []
        for i in range(6):
            params = SamplingParams(max_tokens=80, temperature=temperature, seed=i, ignore_eos=True)
            engine.submit(Request(prompt=(i + 1, 2, 3, 4, 5), params=params, salt=str(k)))
            texts.append([token for _ in range(90) for event in engine.step() for token in event.tokens])
            engine.check()
        told.append(texts)
    assert told[0] == told[1] == told[2]
    assert all(len(text) == 80 for text in told[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pinned_texts_are_identical_in_any_batch(temperature):
    """Batches whose texts begin and end at different times, prompts read in between: as one by one, undrafted."""
    target, draft = NativeRunner(decoder(), 16384, pinned=True), NativeRunner(decoder(1), 16384)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(2, 150))) for _ in range(14)]
    told = []
    for batch, k in ((1, 0), (5, 0), (5, 4), (8, 5)):
        config = DraftModelConfig(model="-", k=max(1, k))
        drafter = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), config) if k else NoDraft()
        limits = EngineLimits(max_batch=batch, max_round_tokens=100)
        engine = Engine(target, drafter, make_verifier("seeded"), ByteTokenizer(), limits=limits)
        texts: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=20 + 7 * i, temperature=temperature, seed=i, ignore_eos=True)
            texts[engine.submit(Request(prompt=prompt, params=params, salt=f"{batch} {k}"))[0]] = []
        while engine.busy:
            for event in engine.step():
                texts[event.seq_id] += event.tokens
        engine.check()
        told.append(list(texts.values()))
    assert told[0] == told[1] == told[2] == told[3]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=["whole", "truncated"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 4])
def test_rounds_follow_each_other_without_the_host(k, temperature, cut):
    """Launched behind one another, with the target for its own draft: all is accepted, and texts are the plain ones.

    Pinned: then the target drafts what it will say, bit for bit. Drafts go by temperature alone, so that truncation
    to nine tenths of the mass rules out a tenth of all draft tokens, and with each those behind it.
    """
    target, draft = (NativeRunner(decoder(), 8192, pinned=True) for _ in range(2))
    told = []
    for drafted in (False, True):
        config = DraftModelConfig(model="-", k=max(1, k))
        context = DrafterContext(vocab_size=VOCAB, context=2048)
        drafter = DraftModel(draft, context, config) if drafted and k else NoDraft()
        engine = Engine(target, drafter, make_verifier("seeded"), ByteTokenizer(), limits=EngineLimits(max_batch=4))
        texts: dict[int, list[int]] = {}
        for i in range(4):
            params = SamplingParams(max_tokens=60 - 9 * i, temperature=temperature, seed=i, ignore_eos=True, **cut)
            texts[engine.submit(Request(prompt=(i + 1, 2, 3), params=params, salt=str(drafted)))[0]] = []
        behind, rounds = 0, 0
        while engine.busy:
            for event in engine.step():
                texts[event.seq_id] += event.tokens
            rounds += 1
            behind += launched_behind(engine)
        engine.check()
        told.append(list(texts.values()))
        assert behind > 0.6 * rounds
        tally = engine.stats.all
        assert tally.accepted == tally.drafted or (cut and temperature and tally.accepted > 0.5 * tally.drafted)
        assert tally.drafted > 0 or not (drafted and k)
    assert told[0] == told[1]


def test_what_cannot_be_pinned_is_refused():
    with pytest.raises(ConfigError, match="no path whose bits"):
        NativeRunner(plain_float32(), 1024, pinned=True)


def test_a_draft_too_wide_to_be_pinned_is_refused_at_start():
    target = NativeRunner(decoder(1), 1024, pinned=True)
    with pytest.raises(ConfigError, match="drafts of 32 tokens are too wide; it takes 31 at most"):
        list(target.capture(2, 33))


def plain_float32() -> Decoder:
    made = decoder(1)
    made.dtype = torch.float32
    return made


def test_what_is_got_ready_is_all_a_run_needs():
    """After `capture`, serving captures no pass and takes no memory from the device."""
    target, draft = NativeRunner(decoder(), 8192), NativeRunner(decoder(1), 8192)
    assert list(target.capture(4, 5))
    model = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), DraftModelConfig(model="-", k=4))
    model.capture(4)
    engine = Engine(target, model, make_verifier("seeded"), ByteTokenizer())

    def serve(salt: str) -> None:
        for i in range(4):
            params = SamplingParams(max_tokens=30 + i, temperature=0.5 * (i % 2), seed=i, ignore_eos=True)
            engine.submit(Request(prompt=tuple(range(1, 60 + i)), params=params, salt=salt))
        while engine.busy:
            engine.step()

    serve("first")
    captured, reserved = set(target.graphs.captured), torch.cuda.memory_reserved()
    for i in range(5):
        serve(str(i))
    assert set(target.graphs.captured) == captured
    assert all(s.batch <= 4 and s.width <= 6 for s in captured if s.batch > 1)  # of one: short prompts too
    assert torch.cuda.memory_reserved() == reserved


def test_a_round_waits_for_the_device_once():
    """Draft, pass and choice are launched one after the other; the host waits for the choices alone."""
    target, draft = NativeRunner(decoder(), 8192), NativeRunner(decoder(1), 8192)
    model = DraftModel(draft, DrafterContext(vocab_size=VOCAB, context=2048), DraftModelConfig(model="-", k=4))
    engine = Engine(target, model, make_verifier("seeded"), ByteTokenizer())
    for i in range(3):
        engine.submit(Request(prompt=(1, 2, 3, i), params=SamplingParams(max_tokens=200, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    with SyncCounter() as waited:
        for _ in range(4):
            engine.step()
    assert waited.count <= 4, waited.where


def test_a_draft_model_may_run_elsewhere():
    """A draft on the CPU for a target on CUDA: the same pinned text as without it, and it does draft."""
    target = NativeRunner(decoder(), 4096, pinned=True)
    far = decoder(1)
    there = Decoder(far.config, _moved(far.weights, "cpu"), torch.bfloat16)
    told = []
    for drafter in (
        NoDraft(),
        DraftModel(
            NativeRunner(there, 4096), DrafterContext(vocab_size=VOCAB, context=2048), DraftModelConfig(model="-", k=3)
        ),
    ):
        engine = Engine(target, drafter, make_verifier("seeded"), ByteTokenizer())
        engine.submit(Request(prompt=(5, 6, 7), params=SamplingParams(max_tokens=60, ignore_eos=True)))
        tokens = []
        while engine.busy:
            tokens += [token for event in engine.step() for token in event.tokens]
        told.append(tokens)
    assert told[0] == told[1]
    assert engine.stats.all.drafted > 0


def _moved(weights: Weights, device: str) -> Weights:
    def norm(n: Norm) -> Norm:
        return Norm(n.weight.to(device), 1e-5, torch.bfloat16)

    def linear(p: Linear) -> Linear:
        return Linear(p.weight.to(device), None if p.bias is None else p.bias.to(device))

    layers = [
        Layer(norm(x.attention_norm), linear(x.qkv), linear(x.out), norm(x.mlp_norm), linear(x.gate_up), linear(x.down))
        for x in weights.layers
    ]
    return Weights(weights.embedding.to(device), layers, norm(weights.norm), linear(weights.head))


def test_passes_captured_before_a_layer_was_tapped_are_captured_again():
    """A head may come to a target that others run already: passes return what it reads, as if tapped from the start."""
    late, early = NativeRunner(decoder(), 8192), NativeRunner(decoder(), 8192)
    list(late.capture(4, 8))
    for target in (late, early):
        target.tap((0, 2))
        list(target.capture(4, 8))
    spans = [ragged_spans(target, RAGGED["chains"])[:3] for target in (late, early)]
    compare(copied(late.score(spans[0])), [copied(early.score([span])) for span in spans[1]])


def test_engines_of_several_drafters_share_captured_passes():
    """The second captures narrower passes: those of the first stay, and are taken behind a round in flight."""
    target = NativeRunner(decoder(), 2048, context=512)
    list(target.capture(4, 16))
    packed = target.graphs._packed
    list(target.capture(4, 4))
    assert target.graphs.max_decode == 16
    assert {*packed} <= {*target.graphs._packed}


def test_a_pass_behind_another_takes_no_prompt():
    target = NativeRunner(decoder(), 2048, context=512)
    list(target.capture(2, 4))
    for seq_id in range(2):
        target.pool.open(seq_id, ())
        target.pool.reserve(seq_id, 64)
    scores = target.score([Span(seq_id, 0, (5,)) for seq_id in range(2)])
    state = target.advance(scores, scores.logits.argmax(-1))
    with pytest.raises(ValueError, match="takes 4 rows of a sequence, not 9"):
        target.score([Span(0, 1, (5,), Draft(tuple(range(8)))), Span(1, 1, (5,))], state)
