"""From prompts to a drafter in use, by the command line; and what is said of bad input on the way."""

import json
import re
import sys

import pytest
import torch
from recipe_reference import reference_logits

from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.llm import LLM
from outrider.models.heads.block import BlockHead
from outrider.models.heads.checkpoint import check_target, load_weights, open_head, parse_head_config
from outrider.testing.synthetic import synthetic_pair
from outrider.train import session
from outrider.train.block import BlockTrainConfig
from outrider.train.corpus import load_corpus
from outrider.train.session import TrainTask, load_target, train_block
from outrider.train.target import TrainingTarget


def run(*words):
    """The command line; its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


@pytest.fixture(scope="module")
def trained(target_folder, tmp_path_factory):
    """Heads that know a few texts by heart: of a random target there is nothing else to learn."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "p.txt").write_text("\n".join(f"tell {i}" for i in range(6)))
    answers, options = folder / "answers", ("--length", 128, "--device", "cpu", "--draft-vocab", 0, "--epochs", 45)
    small = ("--layers", 1, "--lr", 0.005, "--measured", 2, "--looks", 2)
    assert not run("train", "collect", target_folder, "--prompts", folder / "p.txt", "--out", answers,
                   "--max-tokens", 40, "--device", "cpu", "--batch", 4)  # fmt: skip
    assert not run("train", "block", target_folder, "--answers", answers, "--out", folder / "block", *options, *small,
                   "--block", 4, "--markov-rank", 8)  # fmt: skip
    assert not run("train", "eagle3", target_folder, "--answers", answers, "--out", folder / "eagle3", *options, *small,
                   "--steps", 3)  # fmt: skip
    assert not run("train", "medusa", target_folder, "--answers", answers, "--out", folder / "medusa", "--length", 128,
                   "--device", "cpu", "--epochs", 45, "--lr", 0.03, "--heads", 3, "--measured", 0)  # fmt: skip
    return folder


@pytest.mark.parametrize(("kind", "drafter"), [("block", "block"), ("eagle3", "eagle"), ("medusa", "medusa")])
def test_the_drafter_is_used_and_changes_nothing(trained, target_folder, kind, drafter):
    corpus = load_corpus(trained / "answers")
    spec = f"{drafter}:model={trained / kind / 'drafter'}"
    with LLM(target_folder, drafter=spec, adaptive=False, device="cpu", cache_tokens=2048) as llm:
        for i in (0, 2):  # greedy ones that it was trained with
            prompt, answer = corpus.text(i).tolist(), int(corpus.prompt_lens[i])
            found = llm.generate(prompt[:answer], max_tokens=40)
            assert [*prompt[:answer], *found.tokens] == prompt
            assert found.stats.tau > 1.5, "known by heart"


def test_rounds_accept_what_the_reference_says(trained, target_folder):
    """Every round of the engine accepts as many tokens as the published head would draft right from there."""
    corpus, decoder = load_corpus(trained / "answers"), load_target(target_folder, "cpu")
    folder = str(trained / "block" / "drafter")
    config = check_target(parse_head_config(open_head(folder)), decoder.config, name=folder, kinds=("block",))
    head = BlockHead(config, decoder)
    load_weights(head, open_head(folder))
    target = TrainingTarget(decoder, config.taps)
    accepted = []
    with LLM(target_folder, drafter=f"block:model={folder}", adaptive=False, device="cpu", cache_tokens=2048) as llm:
        for i in range(0, 6, 2):
            ids, at = corpus.text(i).tolist(), int(corpus.prompt_lens[i])
            rounds = {}
            for each in llm.generate(ids[:at], max_tokens=40).provenance:
                rounds.setdefault(each.round, []).append(each)
            for members in rounds.values():
                count = members[-1].drafted
                if count and at + 4 < len(ids):
                    with torch.no_grad():
                        logits, _ = reference_logits(head, head.state_dict(), target, ids, at - 1, torch.arange(512))
                    right = [int(logits[k].argmax()) == ids[at + k] for k in range(count)]
                    accepted.append(len(members) - 1)
                    assert accepted[-1] == (right.index(False) if False in right else count)
                at += len(members)
    assert len(set(accepted)) > 1, "rounds of different luck"


def test_what_a_run_leaves(trained):
    out = trained / "block"
    names = {file.name for file in out.iterdir()}
    assert names == {
        "checkpoint.safetensors",
        "drafter",
        "history.json",
        "report.html",
        "loss.svg",
        "tau.svg",
        "acceptance.svg",
    }
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
    page = (out / "report.html").read_text()
    for words in (
        "untrained",
        "distinct bigrams",
        "speed-up, measured",
        "speed-up, predicted",
        "--drafter block:model=",
    ):
        assert words in page
    assert "<script" not in page
    assert not re.search(r'(src|href)="http', page), "nothing is fetched"
    assert page.count("<svg") == page.count("</svg>") == 3
    told = [each["step"] for each in json.loads((out / "history.json").read_text()) if "loss" in each]
    assert told == list(range(1, len(told) + 1))


def test_a_run_is_not_overwritten_and_a_finished_one_resumes_to_its_end(trained, target_folder, capsys):
    words = ("train", "block", target_folder, "--answers", trained / "answers", "--out", trained / "block",
             "--length", 128, "--device", "cpu", "--draft-vocab", 0, "--epochs", 45, "--layers", 1, "--lr", 0.005,
             "--block", 4, "--markov-rank", 8, "--measured", 0)  # fmt: skip
    assert run(*words) == 2
    assert "--resume" in capsys.readouterr().err
    before = (trained / "block" / "drafter" / "model.safetensors").read_bytes()
    assert not run(*words, "--resume")
    assert (trained / "block" / "drafter" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["collect", "T", "--out", "O"], "--prompts is missing"),
        (["collect", "T", "--prompts", "none.jsonl", "--out", "O"], "no prompts at"),
        (["collect", "T", "--prompts", "P", "--out", "O", "--limit", "0"], "--limit is at least 1"),
        (["block", "T", "--out", "O"], "--answers is missing"),
        (["block", "T", "--answers", "none", "--out", "O"], "outrider train collect"),
        (["block", "T", "--answers", "A", "--out", "O", "--taps", "1,x"], "--taps takes layer numbers"),
        (["block", "T", "--answers", "A", "--out", "O", "--taps", "9"], "layers of the target, 0 to 3"),
        (["block", "T", "--answers", "A", "--out", "O", "--lr", "0"], "lr must be"),
        (["eagle3", "T", "--answers", "A", "--out", "O", "--decay", "2"], "decay is above 0"),
    ],
)
def test_bad_input_is_told_in_one_line(target_folder, answers_folder, tmp_path, capsys, words, said):
    (tmp_path / "p.txt").write_text("one")
    names = {"T": target_folder, "A": str(answers_folder), "O": str(tmp_path / "o"), "P": str(tmp_path / "p.txt")}
    assert run("train", *(names.get(word, word) for word in words), "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_answers_of_another_target_are_refused(answers_folder, tmp_path):
    pair = synthetic_pair({"model_type": "llama", "vocab_size": 300} | SHAPE, layers=1)
    folder, _ = pair.save(tmp_path)
    task = TrainTask(target=str(folder), answers=answers_folder, out=tmp_path / "out", device="cpu")
    with pytest.raises(ConfigError, match=r"with 512 tokens, and .* has 300"):
        train_block(task, BlockTrainConfig(draft_vocab=0))


SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip


def test_a_target_that_does_not_fit_is_refused_before_it_is_read(target_folder, monkeypatch):
    monkeypatch.setattr(session, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="does not fit on cpu"):
        load_target(target_folder, "cpu")


def test_the_command_line_imports_no_torch_for_help():
    code = "import sys, outrider.cli.train; sys.exit('torch' in sys.modules)"
    import subprocess

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
