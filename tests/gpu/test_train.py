"""Training on CUDA: the losses of the CPU, and a drafter that the engine runs."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from outrider.llm import LLM
from outrider.models.load import load_decoder
from outrider.testing.synthetic import synthetic_pair
from outrider.train.block import BlockTrainConfig
from outrider.train.collect import CollectConfig
from outrider.train.corpus import load_corpus
from outrider.train.eagle3 import Eagle3TrainConfig
from outrider.train.loop import Trainer
from outrider.train.medusa import MedusaTrainConfig
from outrider.train.prompts import ChatPrompt
from outrider.train.session import TrainTask, plan_block, plan_eagle3, plan_medusa, train_block
from outrider.train.target import TrainingTarget
from outrider.train.workers import collect

pytestmark = pytest.mark.gpu
SHARED = {"length": 128, "step_tokens": 1024, "epochs": 1.0}
KINDS = {
    "block": (BlockTrainConfig(block=4, layers=1, draft_vocab=200, **SHARED), plan_block),
    "eagle3": (Eagle3TrainConfig(steps=3, draft_vocab=200, **SHARED), plan_eagle3),
    "medusa": (MedusaTrainConfig(heads=3, **SHARED), plan_medusa),
}


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A tiny target, and answers that two processes collected on the GPU."""
    folder = tmp_path_factory.mktemp("train")
    target, _ = synthetic_pair("tiny", seed=3).save(folder)
    prompts = [ChatPrompt(({"role": "user", "content": f"tell {i}"},), "tell") for i in range(80)]
    config = CollectConfig(max_tokens=40, max_prompt=32, batch=16, workers=2)
    collect(str(target), prompts, folder / "answers", config, lambda total, done: None, lambda answers, tokens: None)
    return target, folder / "answers"


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_cpu(collected, kind, tmp_path):
    folder, answers = collected
    corpus, (config, plan) = load_corpus(answers), KINDS[kind]
    assert len(corpus) == 80
    losses = []
    for device in ("cpu", "cuda"):
        decoder = load_decoder(folder, device=device)
        made = plan(decoder, corpus, config)
        target = TrainingTarget(decoder, made.config.taps)
        state = Trainer(made.recipe, target, corpus, config, tmp_path / device, asdict(config)).run()
        losses.append([each["loss"] for each in state.history if "loss" in each])
    # anchors of blocks are drawn by the device's own generator
    assert losses[1] == pytest.approx(losses[0], rel=0.1 if kind == "block" else 0.03)


def test_a_drafter_trained_on_the_gpu_is_used(collected, tmp_path):
    folder, answers = collected
    task = TrainTask(target=str(folder), answers=answers, out=Path(tmp_path), device="cuda", measured=2)
    data = train_block(task, KINDS["block"][0])
    assert data.measured is not None
    with LLM(str(folder), drafter=data.drafter, adaptive=False, device="cuda") as llm:
        assert len(llm.generate("tell 3", max_tokens=16, ignore_eos=True).tokens) == 16
    torch.cuda.empty_cache()
