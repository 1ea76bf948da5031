"""Logits on CUDA against Transformers' own model: as close to float32 as Transformers in bfloat16 is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Span
from outrider.models.decoder import Decoder
from outrider.models.load import load_decoder
from outrider.runners.base import Scores
from outrider.runners.cuda_graphs import padded_shape
from outrider.runners.native import NativeRunner

pytestmark = pytest.mark.gpu
VOCAB = 1000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**SIZES),
    "qwen2": hf.Qwen2Config(**SIZES),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=64),
}
TREE = Draft((5, 6, 7, 8, 9, 11), (-1, -1, 0, 1, 1, 3))
DRAFTS = {
    "none": [EMPTY] * 4,
    "chains": [Draft((3, 4, 5, 6)), EMPTY, Draft((7,)), Draft(tuple(range(20, 36)))],
    "trees": [TREE, Draft((1, 2), (-1, -1)), EMPTY, Draft((3, 4, 5))],
}
LENGTHS = (5, 40, 300, 601)


class Judge:
    """One model of random weights: in float32, in bfloat16, and as the package loads it."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
                else:  # norms, and biases
                    weight += torch.randn(weight.shape) * 0.3
        model.bfloat16().save_pretrained(folder)
        self.half = model.to("cuda")
        self.exact = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).to("cuda")  # the same weights: those of bfloat16
        self.folder = folder

    def decoder(self) -> Decoder:
        return load_decoder(self.folder, device="cuda", dtype=torch.bfloat16)

    @torch.inference_mode()
    def check(self, logits: Tensor, texts: list[list[int]]) -> None:
        """logits [M, vocab]: what follows each of these texts."""
        assert logits.shape == (len(texts), VOCAB)

        def after(model: Any) -> Tensor:
            ids = [torch.tensor([text], device="cuda") for text in texts]
            return torch.cat([model(input_ids=each, use_cache=False).logits[:, -1].float() for each in ids])

        exact, half = after(self.exact), after(self.half)
        ours, theirs = (float((each - exact).norm() / exact.norm()) for each in (logits, half))
        assert ours <= 1.5 * theirs + 1e-3, (ours, theirs)
        assert theirs < 0.05  # else the judge says nothing


@pytest.fixture(scope="module", params=CONFIGS)
def judge(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(request.param, tmp_path_factory.mktemp(request.param))


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def ways(spans: list[Span], texts: list[list[int]]) -> list[list[int]]:
    """What each row of the logits follows: the text with the span's tokens, then the path to each node."""
    return [
        [*text, *(span.draft.tokens[n] for n in span.draft.path(node))]
        for span, text in zip(spans, texts, strict=True)
        for node in range(-1, len(span.draft))
    ]


def read(runner: NativeRunner, texts: list[list[int]], ends: list[int]) -> Scores:
    """Read these texts up to these ends, all in one pass."""
    for i, text in enumerate(texts):
        runner.pool.open(i, text, str(i))
        assert runner.pool.reserve(i, len(text) + 48)
    return runner.score([Span(i, 0, tuple(text[:end])) for i, (text, end) in enumerate(zip(texts, ends, strict=True))])


@pytest.mark.parametrize("pinned", [False, True])
def test_prompts(judge: Judge, pinned: bool):
    """The short one by a captured pass, the long ones by the prompt kernel; pinned, all by captured passes."""
    texts = prompts()
    scores = read(NativeRunner(judge.decoder(), 4096, pinned=pinned), texts, [len(text) for text in texts])
    judge.check(scores.logits, texts)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("unread", [1, 3])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_decoding(judge: Judge, drafts: str, unread: int, pinned: bool):
    texts = prompts()
    runner = NativeRunner(judge.decoder(), 4096, pinned=pinned)
    assert runner.graphs is not None
    read(runner, texts, [len(text) - unread for text in texts])
    spans = [
        Span(i, len(text) - unread, tuple(text[-unread:]), draft)
        for i, (text, draft) in enumerate(zip(texts, DRAFTS[drafts], strict=True))
    ]
    judge.check(runner.score(spans).logits, ways(spans, texts))
    shape = padded_shape(len(spans), max(span.width for span in spans))
    if not runner.graphs.has_room(shape):  # pinned passes are smaller: in halves
        shape = padded_shape(len(spans) // 2, max(span.width for span in spans))
    assert shape in runner.graphs.captured


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_round_behind_another(judge: Judge, drafts: str):
    """After accepted nodes of trees were moved together in the cache, and from the state alone."""
    texts = prompts()
    runner = NativeRunner(judge.decoder(), 4096)
    read(runner, texts, [len(text) - 1 for text in texts])
    spans = [
        Span(i, len(text) - 1, (text[-1],), draft)
        for i, (text, draft) in enumerate(zip(texts, DRAFTS[drafts], strict=True))
    ]
    chosen: list[int] = []
    for i, span in enumerate(spans):  # the way to the last node is accepted, and 90 + i follows
        path = span.draft.path(len(span.draft) - 1)
        after = {parent: span.draft.tokens[node] for parent, node in zip((-1, *path), path, strict=False)}
        chosen += [after.get(row, 90 + i) for row in range(-1, len(span.draft))]
        texts[i] += [*(span.draft.tokens[node] for node in path), 90 + i]
    state = runner.advance(runner.score(spans), torch.tensor(chosen, device="cuda"))
    assert state is not None
    assert state.lengths.tolist() == [len(text) for text in texts]
    assert state.last.tolist() == [text[-2:] for text in texts]
    behind = [Span(i, 0, (0,), draft) for i, draft in enumerate(reversed(DRAFTS["trees"]))]
    judge.check(runner.score(behind, state).logits, ways(behind, texts))
