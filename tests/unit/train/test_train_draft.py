"""A draft model distilled from its target: what it learns, what it is written as, and who reads that."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.cli.main import main
from outrider.cli.train import DraftOptions
from outrider.core.errors import ConfigError
from outrider.llm import LLM
from outrider.models.load import load_decoder
from outrider.testing.synthetic import synthetic_pair
from outrider.train.acceptance import Tally
from outrider.train.config import TrainConfig
from outrider.train.corpus import load_corpus
from outrider.train.draft import DraftRecipe, DraftTrainConfig, make_draft, write_draft
from outrider.train.packing import pack
from outrider.train.target import TrainingTarget

NEW = {
    "shared": DraftTrainConfig(layers=2, seed=4),
    "narrow": DraftTrainConfig(layers=1, hidden_size=32, seed=4),
    "own": DraftTrainConfig(layers=1, own_embedding=True, intermediate_size=40, seed=4),
}


def run(*words):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


@pytest.fixture(scope="module")
def start_folder(target_folder, tmp_path_factory):
    """An ordinary model of the target's vocabulary, with an output head of its own."""
    _, draft = synthetic_pair("tiny", seed=8).save(tmp_path_factory.mktemp("start"))
    return str(draft)


def recipe_of(target_folder, answers_folder, config):
    decoder, corpus = load_decoder(Path(target_folder), device="cpu"), load_corpus(answers_folder)
    model = make_draft(config.head_config(decoder.config), decoder, config)
    recipe = DraftRecipe(model, TrainingTarget(decoder, ()), config, corpus)
    rows = pack(corpus, corpus.split()[0][:12], 96)
    return recipe, rows, corpus


def read_by_transformers(recipe, config, target_folder, out):
    """Written, read back by Transformers, and given the float32 weights that writing rounds."""
    write_draft(out, recipe.head, config.start, Path(target_folder), 1 << 40)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    exact = {f"model.{n}" if n != "lm_head.weight" else n: t for n, t in recipe.head.state_dict().items()}
    left = model.load_state_dict(exact, strict=False)
    assert not left.unexpected_keys
    if recipe.head.embed_tokens is None:
        weights = recipe.head.decoder.weights
        model.model.embed_tokens.weight.data = weights.embedding
        model.lm_head.weight.data = weights.head.weight
    return model.eval()


def texts_of(rows):
    """(row, columns) of each packed text."""
    for row in range(len(rows)):
        for text in sorted({int(each) for each in rows.texts[row]} - {-1}):
            yield row, torch.nonzero(rows.texts[row] == text)[:, 0]


@pytest.mark.parametrize("name", [*NEW, "started"])
def test_the_loss_is_that_of_transformers_model(name, target_folder, answers_folder, start_folder, tmp_path):
    """One text at a time, by the written model and Transformers' target."""
    config = NEW.get(name) or DraftTrainConfig(start=start_folder)
    recipe, rows, _ = recipe_of(target_folder, answers_folder, config)
    reference = read_by_transformers(recipe, config, target_folder, tmp_path / "drafter")
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="eager")
    terms = []
    for row, columns in texts_of(rows):
        ids = rows.tokens[row, columns][None]
        q = reference(ids).logits[0].log_softmax(-1)
        with torch.no_grad():
            p = target(ids).logits[0].softmax(-1)
        answered = rows.in_answer[row, columns][1:]
        terms.append((-(p * q).sum(-1)[:-1])[answered])
    wanted = torch.cat(terms).mean()
    wanted.backward()
    found = recipe.backward(rows, recipe.target.read(rows), torch.zeros(rows.tokens.shape), 1.0)
    assert float(found["loss"]) == pytest.approx(float(wanted.detach()), rel=1e-5)
    ours = recipe.head.layers[0].self_attn.k_proj.weight.grad
    theirs = reference.model.layers[0].self_attn.k_proj.weight.grad
    assert torch.allclose(ours, theirs, atol=1e-6 + 1e-4 * float(theirs.abs().max()))


def test_what_it_begins_with_is_the_checkpoint(target_folder, answers_folder, start_folder, tmp_path):
    config = DraftTrainConfig(start=start_folder)
    recipe, _, _ = recipe_of(target_folder, answers_folder, config)
    write_draft(tmp_path / "drafter", recipe.head, start_folder, Path(target_folder), 1 << 40)
    before = load_file(Path(start_folder) / "model.safetensors")
    after = load_file(tmp_path / "drafter" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].equal(before[name].bfloat16()) for name in before)
    told = [json.loads((folder / "config.json").read_text()) for folder in (Path(start_folder), tmp_path / "drafter")]
    assert told[1] == told[0] | {"torch_dtype": "bfloat16"}


def test_chains_are_judged_as_they_would_be_drafted(target_folder, answers_folder, tmp_path):
    """Of greedy answers, chain by chain with Transformers' model; of sampled ones the overlap at every token."""
    config = DraftTrainConfig(layers=2, seed=4, chain=3)
    recipe, rows, corpus = recipe_of(target_folder, answers_folder, config)
    reference = read_by_transformers(recipe, config, target_folder, tmp_path / "drafter")
    reached, accepted = torch.zeros(2, 3), torch.zeros(2, 3)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.no_grad():
        for row, columns in texts_of(rows):
            ids, how = rows.tokens[row, columns], int(corpus.sampled[int(rows.answers[row, columns[0]])])
            logits, p = reference(ids[None]).logits[0], target(ids[None]).logits[0].softmax(-1)
            first = int(rows.in_answer[row, columns].int().argmax())
            for start in range(first - 1, len(ids) - 1):
                chance = 1.0
                for j in range(min(3, len(ids) - 1 - start)):
                    reached[how, j] += chance
                    overlap = float(torch.minimum(p[start + j], logits[start + j].softmax(-1)).sum())
                    right = float(int(logits[start + j].argmax()) == int(ids[start + j + 1]))
                    chance *= overlap if how else right
                    accepted[how, j] += chance
        tally = Tally(3, len(corpus.index.kinds), torch.device("cpu"))
        recipe.judge(rows, recipe.target.read(rows), torch.zeros(rows.tokens.shape), tally)
    found = tally.overall()
    for how, chances in enumerate((found.greedy, found.sampled)):
        wanted = torch.where(reached[how] > 0, accepted[how] / reached[how].clamp(min=1e-9), 0)
        assert chances == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def trained(target_folder, tmp_path_factory):
    """A model that knows a few texts by heart, by the command line."""
    folder = tmp_path_factory.mktemp("draft")
    (folder / "p.txt").write_text("\n".join(f"tell {i}" for i in range(6)))
    assert not run("train", "collect", target_folder, "--prompts", folder / "p.txt", "--out", folder / "answers",
                   "--max-tokens", 40, "--device", "cpu", "--batch", 4)  # fmt: skip
    words = ("train", "draft", target_folder, "--answers", folder / "answers", "--out", folder / "run", "--length", 128,
             "--device", "cpu", "--epochs", 60, "--lr", 0.01, "--layers", 1, "--looks", 2, "--measured", 2)  # fmt: skip
    assert not run(*words)
    return folder, words


def test_it_drafts_and_changes_nothing(trained, target_folder):
    folder, _ = trained
    corpus = load_corpus(folder / "answers")
    with LLM(target_folder, drafter=f"draft-model:model={folder / 'run' / 'drafter'},k=4", adaptive=False, device="cpu",
             cache_tokens=2048) as llm:  # fmt: skip
        for i in (0, 2):
            text, at = corpus.text(i).tolist(), int(corpus.prompt_lens[i])
            found = llm.generate(text[:at], max_tokens=40)
            assert [*text[:at], *found.tokens] == text
            assert found.stats.tau > 1.5, "known by heart"


def test_it_leaves_a_page_and_resumes(trained, capsys):
    folder, words = trained
    page = (folder / "run" / "report.html").read_text()
    assert "--drafter draft-model:model=" in page
    assert "speed-up, measured" in page
    assert run(*words) == 2
    assert "--resume" in capsys.readouterr().err
    before = (folder / "run" / "drafter" / "model.safetensors").read_bytes()
    assert not run(*words, "--resume")
    assert (folder / "run" / "drafter" / "model.safetensors").read_bytes() == before


def test_transformers_reads_it_with_the_targets_tokenizer(trained, target_folder):
    folder, _ = trained
    drafter = folder / "run" / "drafter"
    assert AutoTokenizer.from_pretrained(drafter)("a b c") == AutoTokenizer.from_pretrained(target_folder)("a b c")
    model = AutoModelForCausalLM.from_pretrained(drafter)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 1


def test_what_cannot_be_is_refused(target_folder, answers_folder, start_folder, tmp_path):
    decoder = load_decoder(Path(target_folder), device="cpu")
    with pytest.raises(ConfigError, match="hidden_size is a multiple of"):
        DraftTrainConfig(hidden_size=33).head_config(decoder.config)
    folder = tmp_path / "odd"
    folder.mkdir()
    told = json.loads((Path(start_folder) / "config.json").read_text())
    for change, said in (
        ({"vocab_size": 300}, "has 300 tokens and the target 512"),
        ({"model_type": "mistral", "sliding_window": 8}, "cannot be trained further here"),
    ):
        (folder / "config.json").write_text(json.dumps(told | change))
        (folder / "model.safetensors").write_bytes((Path(start_folder) / "model.safetensors").read_bytes())
        with pytest.raises(ConfigError, match=said):
            DraftTrainConfig(start=str(folder)).head_config(decoder.config)


def test_options_are_named_and_defaulted_as_in_the_library():
    made = DraftTrainConfig()
    assert {f.name: f.default for f in fields(DraftOptions)} == {
        f.name: getattr(made, f.name) for f in fields(DraftOptions)
    }
    shared = {f.name for f in fields(TrainConfig)}
    assert {f.name for f in fields(DraftTrainConfig)} - shared == {f.name for f in fields(DraftOptions)}
