"""Whole passes of the CPU kernels: those of the reference within rounding, and the same bits in any company."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.tensors import open_tensors
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Span
from outrider.models import blocks
from outrider.models.load import load_decoder
from outrider.native.library import Library
from outrider.native.tensors import BlockTensor, Kind
from outrider.runners.layout import lay_out
from outrider.runners.native import NativeRunner
from outrider.runners.threads import use_threads

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from tiny_gguf import random_model, write_gguf

TEXT = (
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    5,
    35,
    89,
    79,
    32,
    38,
    46,
    26,
    43,
    38,
    32,
    79,
    50,
    28,
    84,
    19,
    71,
    69,
    39,
    93,
    75,
    10,
    58,
)
LONG = tuple(int(token) for token in np.random.default_rng(5).integers(0, 90, 540))
"""Of three chunks of keys, of 256 each."""
TREE = Draft(tokens=(5, 6, 7, 8, 9, 10), parents=(-1, -1, 0, 0, 2, 1))
Q4_1 = gguf.GGMLQuantizationType.Q4_1
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with an untied head": ("llama", {"tie_word_embeddings": False}),
    "wide groups": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "hidden_size": 96}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "a window": ("mistral", {"sliding_window": 10}),
}


@pytest.fixture(autouse=True)
def own_home(native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `native`: the kernels are not built anew."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def save(name: str, file: Path, kind: gguf.GGMLQuantizationType | None = Q4_1) -> Path:
    model_type, options = MODELS[name]
    write_gguf(file, random_model(model_type, **options), kind=kind)
    return resolve(str(file))


def runner_of(folder: Path, quantize: Any = "int4", tokens: int = 512) -> NativeRunner:
    runner = NativeRunner(load_decoder(folder, device="cpu", quantize=quantize), tokens)
    assert runner.cpu_pass is not None
    return runner


def score(runner: NativeRunner, span: Span) -> Tensor:
    return score_all(runner, [span])[0]


def score_all(runner: NativeRunner, spans: list[Span]) -> list[Tensor]:
    for span in spans:
        if span.seq_id not in runner.pool:
            runner.pool.open(span.seq_id, ())
        runner.pool.reserve(span.seq_id, span.start + span.width)
    return list(runner.score(spans).logits.split([span.rows for span in spans]))


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is packed as the floats it stands for, so that rows are not rounded to 8 bits."""

    def as_floats(self: blocks.BlockPacker, stored: Any, columns: int, order: Tensor | None) -> BlockTensor:
        values = np.ascontiguousarray(stored.dequantize(0, len(stored.data)))
        return BlockTensor.pack(self.library, Kind.F32, values.view(np.uint8), columns, order)

    monkeypatch.setattr(blocks.BlockPacker, "_in_blocks", as_floats)


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_taps_are_those_of_the_reference(kernels: Library, name: str, tmp_path: Path):
    """Where nothing is rounded to 8 bits the two differ by the order of sums alone."""
    folder = save(name, tmp_path / "m.gguf")
    fused, exact = runner_of(folder), NativeRunner(load_decoder(folder, device="cpu"), 512)
    assert exact.cpu_pass is None
    rows, taps = [], []
    for runner in (fused, exact):
        runner.tap([1, 0])
        texts = [Span(0, 0, TEXT[:20]), Span(1, 0, TEXT[5:12])]
        parts = texts, [Span(0, 20, TEXT[20:21], TREE), Span(1, 7, TEXT[:9])]
        rows += [torch.cat(score_all(runner, spans)) for spans in parts]
        taps.append(torch.cat(list(runner.score(parts[1]).features or ())))
    assert torch.allclose(torch.cat(rows[:2]), torch.cat(rows[2:]), atol=1e-4, rtol=1e-4)
    assert torch.allclose(*taps, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_texts_bits_do_not_depend_on_chunks_company_or_threads(kernels: Library, name: str, tmp_path: Path):
    runner = runner_of(save(name, tmp_path / "m.gguf"))
    whole = score(runner, Span(0, 0, TEXT))
    for sequence, sizes in enumerate(((1,) * len(TEXT), (7, 16, 8), (30, 1), (2, 29)), start=1):
        start, own = 0, whole
        for i, size in enumerate(sizes):
            others = [Span(100 + other, 0, TEXT[: 3 + i % 5 + other]) for other in range(i % 3)]
            spans = [*others, Span(sequence, start, TEXT[start : start + size])]
            with use_threads(1 + i % 2):
                own = score_all(runner, spans)[-1]
            for other in others:
                runner.release(other.seq_id)
            start += size
        assert torch.equal(own, whole), f"bits move with chunks of {sizes}"


@pytest.mark.parametrize("name", MODELS)
def test_every_node_of_a_tree_has_the_bits_of_its_chain(kernels: Library, name: str, tmp_path: Path):
    runner = runner_of(save(name, tmp_path / "m.gguf"))
    score(runner, Span(0, 0, TEXT[:-1]))
    last = Span(0, len(TEXT) - 1, TEXT[-1:])
    plain = score(runner, last)
    tree = score(runner, Span(0, last.start, last.tokens, TREE))
    assert torch.equal(tree[:1], plain)
    for node in range(len(TREE)):
        chain = Draft(tokens=tuple(TREE.tokens[i] for i in TREE.path(node)))
        assert torch.equal(score(runner, Span(0, last.start, last.tokens, chain))[-1], tree[node + 1]), f"node {node}"


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize("window", [0, 300])
def test_chunks_of_keys_are_joined_as_the_reference_weighs_them(kernels: Library, window: int, tmp_path: Path):
    """With a tree whose nodes lie on both sides of a chunk's end."""
    folder = save_long(tmp_path / "m.gguf", window)
    runners = runner_of(folder, tokens=2048), NativeRunner(load_decoder(folder, device="cpu"), 2048)
    rows = [
        torch.cat([score(runner, Span(0, 0, LONG[:510])), score(runner, Span(0, 510, LONG[510:511], TREE))])
        for runner in runners
    ]
    assert torch.allclose(*rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 300])
def test_bits_do_not_depend_on_who_computes_which_chunk(kernels: Library, window: int, tmp_path: Path):
    """Threads share the chunks of a few rows; more rows are computed a tile at a time."""
    runner = runner_of(save_long(tmp_path / "m.gguf", window), tokens=4096)
    whole = score(runner, Span(0, 0, LONG))
    for sequence, sizes in enumerate(((539, 1), (250, 7, 1, 260, 1, 21), (511, 2, 27)), start=1):
        start, own = 0, whole
        for i, size in enumerate(sizes):
            with use_threads(1 + (i + sequence) % 2):
                own = score(runner, Span(sequence, start, LONG[start : start + size]))
            start += size
        assert torch.equal(own, whole), f"bits move with chunks of {sizes}"
    for text in (509, 512):  # nodes behind a text that ends before a chunk's end, and at it
        plain = [score(runner, Span(1, text, LONG[text : text + 1], chain))[-1] for chain in chains_of(TREE)]
        for threads in (1, 2):
            with use_threads(threads):
                assert torch.equal(score(runner, Span(1, text, LONG[text : text + 1], TREE)), torch.stack(plain))


def save_long(file: Path, window: int) -> Path:
    options: dict[str, Any] = {"sliding_window": window} if window else {}
    model = random_model("mistral" if window else "llama", max_position_embeddings=1024, **options)
    write_gguf(file, model, kind=Q4_1)
    return resolve(str(file))


def chains_of(tree: Draft) -> list[Draft]:
    """No token, then the way down to each node."""
    paths = [(), *(tree.path(node) for node in range(len(tree)))]
    return [Draft(tokens=tuple(tree.tokens[i] for i in path)) for path in paths]


def test_blocks_are_the_files_own(native: Library, tmp_path: Path):
    folder = save("qwen2", tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    decoder = runner_of(folder, "int8").model.decoder
    with open_tensors(folder) as tensors:
        down = tensors.read("model.layers.1.mlp.down_proj.weight", torch.device("cpu"), torch.float32)
    product = decoder.weights.layers[1].down
    assert isinstance(product, blocks.BlockLinear)
    assert product.parts[0].kind is Kind.Q8_0
    assert torch.equal(product.parts[0].rows(torch.arange(len(down))), down)


def test_fewer_bits_than_the_files_are_packed_anew(native: Library, tmp_path: Path):
    folder = save("llama", tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    product = runner_of(folder, "int4").model.decoder.weights.layers[0].out
    assert isinstance(product, blocks.BlockLinear)
    assert product.parts[0].kind is Kind.INT4


def test_a_type_without_a_kernel_is_converted_and_told(native: Library, tmp_path: Path, caplog: Any):
    from outrider.checkpoints.gguf.weights import StoredRows

    kind = gguf.GGMLQuantizationType.TQ1_0
    values = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], (32, 256)).astype(np.float32)
    stored = StoredRows(np.asarray(gguf.quants.quantize(values, kind)), int(kind), "m.gguf: tensor 'x'")
    packer = blocks.BlockPacker(native, None, "int4", keeps_blocks=True, head_dim=8)  # pyright: ignore
    tensor = packer._in_blocks(stored, 256, None)
    assert tensor.kind is Kind.Q8_0
    assert torch.allclose(tensor.rows(torch.arange(32)), torch.from_numpy(values), atol=0.01)
    assert "m.gguf: tensor 'x' is stored as TQ1_0, which has no kernel" in caplog.text


def test_what_is_out_of_bounds_is_refused(native: Library, tmp_path: Path):
    runner = runner_of(save("llama", tmp_path / "m.gguf"))
    runner.pool.open(0, ())
    runner.pool.reserve(0, 16)
    for token in (10_000, -1):
        with pytest.raises(OutriderError, match="token, position or slot is out of bounds"):
            runner.score([Span(0, 0, (1, token))])
    span = Span(0, 0, (1,))
    layout = lay_out([span], runner.pool, runner.device)
    runner.pool.table(0)[0] = 1 << 20
    with pytest.raises(OutriderError, match="page is out of bounds"):
        runner.cpu_pass.run([span], layout)


def test_without_kernels_the_packed_operators_of_pytorch_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    runner = NativeRunner(load_decoder(save("llama", tmp_path / "m.gguf"), device="cpu", quantize="int4"), 64)
    assert runner.cpu_pass is None
    assert score(runner, Span(0, 0, TEXT[:5])).isfinite().all()
