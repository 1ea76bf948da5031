"""Heads that come with the package: found by what the target is, and drafted with unasked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_block import block_config, random_block
from tiny_eagle import tiny_eagle

from outrider.checkpoints import folder as folder_module
from outrider.checkpoints.demo import demo_folder
from outrider.checkpoints.folder import InstalledModel, weight_files
from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.drafters import shipped
from outrider.drafters.base import for_target
from outrider.drafters.block import BlockConfig
from outrider.drafters.eagle import EagleConfig
from outrider.drafters.registry import parse_drafter
from outrider.drafters.shipped import shipped_for, shipped_heads
from outrider.llm import LLM
from outrider.models.decoder import Decoder
from outrider.models.heads.save import IDENTITY, TargetFacts, write_head
from outrider.models.identity import identify
from outrider.testing.synthetic import synthetic_pair
from outrider.testing.synthetic_checkpoint import save_decoder

MAX_BYTES = 20_000_000


def save_target(folder: Path, seed: int) -> tuple[Path, Decoder]:
    """A tiny model whose norms are its own."""
    pair = synthetic_pair("tiny", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in pair.target.weights.layers:
        layer.mlp_norm.weight.mul_(1 + 0.1 * torch.rand(layer.mlp_norm.weight.shape, generator=generator))
    save_decoder(pair.target, pair.config_of(pair.target), folder)
    return folder, pair.target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    return save_target(tmp_path_factory.mktemp("target") / "mine", 1)


@pytest.fixture
def package(target: tuple[Path, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder of heads, with a random one for the target in it."""
    folder, decoder = target
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    head = random_block(block_config(decoder.config, confidence=True, layers=1), decoder)
    facts = TargetFacts("mine", decoder.config, identify(folder))
    write_head(tmp_path / "shipped" / "small", head.config, head.state_dict(), facts, tokens=head.drafts)
    return tmp_path / "shipped"


def test_the_target_decides_not_its_name(target, package, tmp_path):
    folder, _ = target
    renamed = shutil.copytree(folder, tmp_path / "another name")
    other, _ = save_target(tmp_path / "mine", 2)
    for each in (folder, renamed):
        found = shipped_for(each)
        assert found is not None
        assert (found.name, found.kind, found.drafter) == ("small", "block", "block")
        assert found.target == identify(folder)
    assert shipped_for(other) is None  # the same sizes and the same name, but other weights
    assert shipped_for(tmp_path / "nowhere") is None


def test_block_takes_it_where_no_head_is_named(target, package, tmp_path):
    folder, _ = target
    small = str(package / "small")
    assert for_target(parse_drafter("block"), folder) == BlockConfig(model=small)
    assert for_target(parse_drafter("block:tree=9"), folder) == BlockConfig(model=small, tree=9)
    assert for_target(BlockConfig(model="mine"), folder) == BlockConfig(model="mine")
    mixed = for_target(parse_drafter("suffix+block"), folder)
    assert mixed.traits == parse_drafter(f"suffix+block:model={small}").traits
    other, _ = save_target(tmp_path / "other", 2)
    with pytest.raises(ConfigError, match=r"no head is shipped .*block:model=FOLDER.*outrider train block.*suffix"):
        for_target(parse_drafter("block"), other)


def test_auto_takes_it_as_one_of_its_candidates(target, package, tmp_path):
    folder, _ = target
    found = for_target(parse_drafter("auto"), folder).traits
    assert found == parse_drafter(f"suffix+prediction+block:model={package / 'small'}").traits
    other, _ = save_target(tmp_path / "other", 2)
    assert for_target(parse_drafter("auto"), other).traits == parse_drafter("suffix+prediction").traits
    named = parse_drafter("auto:model=draft")
    assert for_target(named, folder).traits == named.traits  # who names a draft model gets that


@pytest.mark.parametrize(("k", "limit"), [("", ""), (",k=2", ",k=2")])
def test_auto_takes_a_head_that_is_named(target, package, k, limit):
    head = package / "small"
    found = for_target(parse_drafter(f"auto:model={head}{k}"), target[0]).traits
    assert found == parse_drafter(f"suffix+prediction+block:model={head}{limit}").traits


def test_a_shipped_eagle_head_is_run_by_eagle(target, package):
    folder, decoder = target
    shutil.rmtree(package / "small")
    shutil.copytree(tiny_eagle("tiny-eagle3", decoder), package / "chain")
    config = package / "chain" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {IDENTITY: identify(folder).as_json()}))
    assert for_target(parse_drafter("auto"), folder).traits.name == "suffix+prediction+eagle"
    with pytest.raises(ConfigError, match="no head is shipped"):
        for_target(parse_drafter("block"), folder)
    assert for_target(parse_drafter("eagle:tree=9"), folder) == EagleConfig(model=str(package / "chain"), tree=9)
    with LLM(folder, drafter="none", device="cpu") as llm:
        plain = llm.generate("the sea", max_tokens=24)
    with LLM(folder, drafter="eagle", device="cpu", adaptive=False) as llm:
        drafted = llm.generate("the sea", max_tokens=24)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.all.drafted > 20


@pytest.mark.parametrize("drafter", ["block", "auto", "suffix+block"])
def test_texts_are_the_targets_own(target, package, drafter):
    folder, _ = target
    prompts = ["the sea", "a b c a b c a", "x"]
    with LLM(folder, drafter="none", device="cpu") as llm:
        plain = [each.text for each in llm.generate(prompts, max_tokens=24, temperature=0.7, seed=5)]
    with LLM(folder, drafter=drafter, device="cpu", adaptive=False) as llm:
        drafted = llm.generate(prompts, max_tokens=24, temperature=0.7, seed=5)
        asked = llm.stats.drafters
    assert [each.text for each in drafted] == plain
    assert drafted[0].stats.draft_failures == 0
    assert asked["block"].drafted > 20


def test_a_loaded_model_gets_it_too(target, package):
    from outrider.loading.load import load

    loaded = load(str(target[0]), device="cpu")
    with LLM(loaded, drafter="auto") as llm:
        assert llm.drafter.traits.name == "suffix+prediction+block"
        assert [part.traits.name for part in llm.drafter.parts] == ["suffix+prediction", "block"]


def test_list_tells_it(target, package, monkeypatch, capsys):
    folder, _ = target
    mine = InstalledModel(name="mine", path=folder, size=1, architecture="llama", parameters=1)
    monkeypatch.setattr(folder_module, "installed_models", lambda: [mine, replace(mine, path=Path("nowhere"))])
    monkeypatch.setenv("COLUMNS", "160")
    for words in (["list"], ["list", "--json"]):
        with pytest.raises(SystemExit):
            main(words)
        shown = capsys.readouterr().out
        if words[-1] == "list":
            assert shown.count("block, shipped") == 1
        else:
            assert [each["head"] for each in json.loads(shown)] == ["small", None]


def test_a_damaged_one_is_told(package):
    config = package / "small" / "config.json"
    told = json.loads(config.read_text())
    del told[IDENTITY]
    config.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="does not say which model"):
        list(shipped_heads())


def test_those_of_this_package_are_small_and_fit():
    for head in shipped_heads():
        size = sum(file.stat().st_size for file in head.folder.iterdir())
        assert size <= MAX_BYTES
        assert weight_files(head.folder)
        demo = demo_folder()
        if demo is not None:
            assert identify(demo) == head.target
