"""What the memory plan counts, without a GPU: rows of logits, captured graphs, and what a draft model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafters.base import DrafterContext, ModelLoaded
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.registry import parse_drafter
from outrider.loading import memory
from outrider.loading.memory import SAMPLED_GRAPHS, ReservedMemory, Workload, reserved_memory_of
from outrider.runners.cuda_graphs import PROMPT_SIZES
from outrider.testing.synthetic import SHAPES, save_decoder, synthetic_pair
from outrider.testing.toy import ByteTokenizer

GRAPH, ROW = 3 << 20, 1 << 20


class FakeRecorder:
    """Takes the place of GraphRunner on a device that counts: a graph takes GRAPH bytes, a row of buffers ROW."""

    def __init__(self, rows: list[int], *, pinned: bool = True) -> None:
        self.pinned, self.prompts = pinned, SimpleNamespace(capture=self.capture_prompts)
        self.all_shapes = [SimpleNamespace(rows=each) for each in rows]
        self.model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(vocab_size=2))
        self.captured: list[int] = []
        self.room = 0

    def shapes(self, batch: int, width: int) -> list[SimpleNamespace]:
        return self.all_shapes[1:]

    def prompt_shapes(self, width: int) -> list[SimpleNamespace]:
        return self.all_shapes[:1]

    def make_room(self, shapes: list[SimpleNamespace]) -> None:
        self.room = max(shape.rows for shape in shapes)

    def captured_pass(self, shape: SimpleNamespace) -> None:
        self.captured.append(shape.rows)

    def capture_prompts(self, sizes: Sequence[int]) -> Iterator[int]:
        for rows in sizes:
            self.captured.append(rows)
            yield rows

    @property
    def taken(self) -> int:
        return self.room * ROW + len(self.captured) * GRAPH


@pytest.mark.parametrize("rows", [[1], [1, 2], [1, 4, 2, 8, 16], [*range(1, 33)]], ids=len)
def test_what_was_not_captured_is_counted_like_what_was(rows, monkeypatch):
    fake = FakeRecorder(rows)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: (1 << 40) - fake.taken)
    unseen = memory._capture_graphs(fake, Workload(context=64, max_batch=4, max_width=4))
    assert fake.taken + unseen == max(rows) * ROW + len(rows) * GRAPH
    assert fake.captured[0] == max(rows)
    assert len(fake.captured) <= 1 + SAMPLED_GRAPHS


def test_passes_over_prompts_are_counted_too(monkeypatch):
    """The largest is captured, and its buffers with it; the others share those, and count as graphs."""
    fake = FakeRecorder([1, 4, 2, 8], pinned=False)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: (1 << 40) - fake.taken)
    unseen = memory._capture_graphs(fake, Workload(context=64, max_batch=4, max_width=4))
    assert fake.captured[:2] == [8, PROMPT_SIZES[-1]]
    assert fake.taken + unseen == 8 * ROW + (4 + len(PROMPT_SIZES)) * GRAPH


def test_the_rows_of_a_round_are_bounded_by_its_tokens():
    assert Workload(context=64, max_batch=8, max_width=6).max_rows == 48
    assert Workload(context=64, max_batch=512, max_width=16).max_rows == 2048
    few = Workload(context=64, max_batch=512, max_width=16, max_round_tokens=100)
    assert few.max_rows == 512  # every sequence has its last token to read


SPECS = ["none", "suffix", "prompt-lookup:k=3", "prediction", "grammar", "mix", "suffix:k=4+prompt-lookup:k=9"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_drafters_width_is_known_before_it_is_built(spec):
    config = parse_drafter(spec)
    setting = DrafterContext(vocab_size=300, context=100, tokenizer=ByteTokenizer())
    assert config.traits == config.build(setting).traits


def test_a_tree_is_as_wide_as_its_nodes_and_a_mix_as_its_widest_member():
    assert DraftModelConfig(model="-", k=4, beams=3).traits.max_tokens == 12
    assert parse_drafter("suffix:k=4+draft-model:model=a,k=6").traits.max_tokens == 6


def test_a_mix_names_the_models_it_loads_and_what_they_copy():
    config = parse_drafter("suffix+draft-model:model=a,vocab=300,device=cuda:1")
    assert config.traits.loads == (ModelLoaded("a", "cuda:1", 300),)


def test_a_reduced_head_is_counted_with_the_weights(tmp_path):
    save_decoder(synthetic_pair("tiny", dtype=torch.float32).draft, SHAPES["tiny"] | {"num_hidden_layers": 2}, tmp_path)
    whole, reduced, all_of_it = (reserved_memory_of(str(tmp_path), vocab=vocab) for vocab in (0, 256, 512))
    number = whole.bytes_per_token // (2 * 2 * 2 * 16)  # of layers, key and value, heads and their dimensions
    assert number in (2, 4)
    assert reduced == whole + ReservedMemory(256 * 64 * number)
    assert all_of_it == whole
    assert whole.weights == number * sum(
        tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()
    )


def test_what_other_processes_take_meanwhile_is_not_counted(monkeypatch):
    fake = FakeRecorder([*range(1, 33)])
    others = iter((0, 40 << 30))
    monkeypatch.setattr(memory, "_free_bytes", lambda device: (1 << 40) - fake.taken - next(others))
    unseen = memory._capture_graphs(fake, Workload(context=64, max_batch=4, max_width=4))
    assert unseen == (31 - SAMPLED_GRAPHS) * memory.MAX_GRAPH_BYTES
