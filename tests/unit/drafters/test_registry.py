"""Names and options to configurations, and errors that help."""

import sys
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import outrider
from outrider.cli.list import list_drafters
from outrider.core.errors import ConfigError
from outrider.drafters.mix import MixConfig
from outrider.drafters.none import NoDraftConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.registry import DRAFTERS, ENTRY_POINT_GROUP, describe_drafters, parse_drafter
from outrider.drafters.suffix import SuffixConfig


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("none", NoDraftConfig()),
        ("off", NoDraftConfig()),
        ("prompt-lookup", PromptLookupConfig()),
        ("Prompt_Lookup", PromptLookupConfig()),
        ("ngram:k=12", PromptLookupConfig(k=12)),
        ("prompt-lookup: k = 7 , min-match=2", PromptLookupConfig(k=7, min_match=2)),
        ("suffix:factor=1.5,min_prob=0.05,width=2", SuffixConfig(factor=1.5, min_prob=0.05, width=2)),
        ("suffix:", SuffixConfig()),
        ("suffix:min_prob=auto", SuffixConfig(min_prob=None)),
        ("prediction:k=32", PredictionConfig(k=32)),
        ("mix", MixConfig()),
        (
            "suffix+prompt-lookup:k=3+prediction",
            MixConfig(of=(SuffixConfig(), PromptLookupConfig(k=3), PredictionConfig())),
        ),
        ("mix:of=suffix:k=4,width=2+prediction", MixConfig(of=(SuffixConfig(k=4, width=2), PredictionConfig()))),
        ("mix:of=suffix", MixConfig(of=(SuffixConfig(),))),
        ("none+mix:of=suffix+prediction", MixConfig(of=(NoDraftConfig(), SuffixConfig(), PredictionConfig()))),
        ("mix+none", MixConfig(of=(*MixConfig().of, NoDraftConfig()))),
    ],
)
def test_a_spec_is_read(spec, config):
    assert parse_drafter(spec) == config


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sufix", r"no drafter called 'sufix'; did you mean 'suffix'\? choose one of: none, prompt-lookup, suffix"),
        ("", "no drafter called ''; choose one of: none"),
        ("banana", "no drafter called 'banana'; choose one of"),
        ("suffix+", "no drafter called ''"),
        ("suffix:kk=3", r"suffix has no option 'kk'; did you mean 'k'\?"),
        ("suffix:min_porb=3", r"did you mean 'min_prob'\? choose one of: k, factor, min_prob"),
        ("suffix:k", "suffix: k has no value; write k=15"),
        ("suffix:k=two", "suffix: k must be a whole number, got 'two'"),
        ("suffix:k=2.5", "suffix: k must be a whole number, got '2.5'"),
        ("suffix:min_prob=x", "suffix: min_prob must be a number, got 'x'"),
        ("suffix:k=0", "suffix: k must be 1 to 256, got 0"),
        ("suffix:k=1,k=2", "suffix: k is given twice"),
        ("none:k=1", "none has no option 'k'; it has no options"),
        ("mix:k=3", "mix has no option 'k'; it has: of"),
        ("mix:of=", "mix: of names no drafter"),
        ("mix:of=sufix", r"did you mean 'suffix'\?"),
        ("draft-model", "draft-model needs a model"),
    ],
)
def test_a_wrong_spec_says_what_would_work(spec, message):
    with pytest.raises(ConfigError, match=message):
        parse_drafter(spec)


def test_a_draft_model_is_named_either_way():
    for spec in ("draft-model:model=org/name,k=3", "draft_model:k=3,model=org/name"):
        config = parse_drafter(spec)
        assert (config.model, config.k) == ("org/name", 3)


def test_the_default_members_can_be_joined_by_a_draft_model():
    config = parse_drafter("mix+draft-model:model=small")
    assert [type(member).__name__ for member in config.of] == [
        "SuffixConfig",
        "PromptLookupConfig",
        "PredictionConfig",
        "DraftModelConfig",
    ]


NEED_MORE = {"draft-model", "cross-model", "layer-skip", "block", "eagle", "medusa", "mtp", "mix", "auto"}
"""Need a model, a head or a native target, or go by their members' names."""


def test_every_name_is_a_class_that_its_own_name_makes(context):
    for name in set(DRAFTERS) - NEED_MORE:
        assert DRAFTERS[name]().build(context).traits.name == name
    assert DRAFTERS["mix"]().build(context).traits.name == "suffix+prompt-lookup+prediction"
    assert len(DRAFTERS) == len(list(DRAFTERS)) == len(set(DRAFTERS))


def test_every_drafter_and_every_option_is_described():
    described = {info.name: info for info in describe_drafters()}
    assert list(described) == list(DRAFTERS)
    for name, summary, options in described.values():
        assert summary.endswith("."), name
        assert all(option.doc for option in options), name
    k, *_ = described["suffix"].options
    assert k == ("k", 15, "Max tokens proposed in one round.")
    assert {o.name: o.default for o in described["suffix"].options}["min_prob"] == "auto"


OWN = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from outrider.drafters.base import Traits
from outrider.drafters.none import NoDraft

@dataclass(frozen=True)
class OwnConfig:
    """A drafter of somebody else."""
    k: int = 3
    """Max tokens."""
    rate: None | float = None
    """A rate."""
    kind: Literal["a", "b"] = "a"
    """One of two."""
    sizes: tuple[int, ...] = (1, 2)
    """Sizes."""

    def __post_init__(self):
        if self.k > 8:
            raise ValueError("k is at most 8")

    @property
    def traits(self):
        return Traits(name="own", max_tokens=self.k)

    def build(self, context):
        return NoDraft()

@dataclass
class Needy:
    table: str
    traits: Traits
    def build(self, context): ...

@dataclass
class Bare:
    k: int = 3

class Plain:
    pass

instance = OwnConfig()
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package `own_drafters` with a module `own`, and modules that cannot be imported."""
    package = tmp_path / "own_drafters"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text(OWN)
    (package / "broken.py").write_text("1 / 0\n")
    (package / "incomplete.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "own_at_the_top.py").write_text("from own_drafters.own import OwnConfig\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("own_drafters.own").OwnConfig
    for name in [name for name in sys.modules if name.startswith(("own_drafters", "own_at_the_top"))]:
        del sys.modules[name]


def test_a_class_of_ones_own_is_imported(own):
    assert parse_drafter("own_drafters.own:OwnConfig") == own()
    assert parse_drafter(" own_at_the_top : OwnConfig : k = 5, rate=0.5 ,kind=b") == own(k=5, rate=0.5, kind="b")
    assert parse_drafter("own_drafters.own:OwnConfig:rate=auto") == own()
    mixed = MixConfig(of=(SuffixConfig(k=4), own(k=2)))
    assert parse_drafter("suffix:k=4+own_drafters.own:OwnConfig:k=2") == mixed
    assert parse_drafter("mix:of=suffix:k=4+own_drafters.own:OwnConfig:k=2") == mixed


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "own_drafters.nothing:C",
            "own_drafters.nothing:C: no module called 'own_drafters.nothing'; install",
        ),
        ("nowhere.own:C", "no module called 'nowhere'; install it, or put its folder on PYTHONPATH$"),
        ("sufix:k", "no module called 'sufix'.*did you mean the drafter 'suffix'"),
        ("own_drafters.broken:C", "importing own_drafters.broken failed: ZeroDivisionError: division by zero"),
        ("own_drafters.incomplete:C", "importing own_drafters.incomplete failed: ModuleNotFoundError: .*not_there"),
        ("own_drafters.own:Nobody", "module own_drafters.own has no 'Nobody'"),
        ("own_drafters.own:Plain", "own_drafters.own:Plain is no dataclass"),
        ("own_drafters.own:instance", "own_drafters.own:instance is no dataclass"),
        ("own_drafters.own:Bare", "own_drafters.own:Bare has no traits and no build"),
        ("own_drafters.own:Needy", "own_drafters.own:Needy needs table; write own_drafters.own:Needy:table=VALUE"),
        ("own_drafters.own:Needy:table", "table has no value; write table=VALUE"),
        ("own_drafters.own:OwnConfig:kk=3", r"own_drafters.own:OwnConfig has no option 'kk'; did you mean 'k'\?"),
        ("own_drafters.own:OwnConfig:k=9", "own_drafters.own:OwnConfig: k is at most 8"),
        ("own_drafters.own:OwnConfig:kind=c", "kind must be one of a, b, got 'c'"),
        ("own_drafters.own:OwnConfig:sizes=3", "sizes cannot be written as text; make the configuration in Python"),
        ("own_drafters.own", "no drafter called 'own_drafters.own'.*or one of your own as MODULE:CLASS"),
        ("own_drafters.own:k=3", "no drafter called 'own_drafters.own'.*or one of your own as MODULE:CLASS"),
        ("..own:OwnConfig", "no drafter called '..own'"),
    ],
)
def test_what_is_wrong_with_a_class_of_ones_own_is_said(own, spec, message):
    with pytest.raises(ConfigError, match=message):
        parse_drafter(spec)


def test_installed_packages_register_drafters(own, monkeypatch):
    points = [
        EntryPoint("Own_One", "own_drafters.own:OwnConfig", ENTRY_POINT_GROUP),
        EntryPoint("suffix", "own_drafters.own:OwnConfig", ENTRY_POINT_GROUP),
        EntryPoint("twice", "own_drafters.own:OwnConfig", ENTRY_POINT_GROUP),
        EntryPoint("twice", "own_drafters.own:Bare", ENTRY_POINT_GROUP),
        EntryPoint("broken", "own_drafters.broken:C", ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(
        "outrider.drafters.registry.entry_points", lambda *, group: EntryPoints(points).select(group=group)
    )
    assert parse_drafter("own-one:k=5") == own(k=5)
    assert parse_drafter("suffix") == SuffixConfig()
    with pytest.raises(ConfigError, match=r"several packages register it; write one of own_drafters\.own:Bare, own"):
        parse_drafter("twice")
    with pytest.raises(ConfigError, match=r"importing own_drafters\.broken failed"):
        parse_drafter("broken")
    with pytest.raises(ConfigError, match=r"did you mean 'own-one'\?"):
        parse_drafter("own-on")
    *_, broken, usable, twice = describe_drafters()
    assert broken[:2] == (
        "broken",
        "Cannot be used: own_drafters.broken:C: importing own_drafters.broken failed: "
        "ZeroDivisionError: division by zero.",
    )
    assert usable.name == "own-one"
    assert usable.summary == "A drafter of somebody else."
    assert usable.options[0] == ("k", 3, "Max tokens.")
    assert twice.summary.startswith("Cannot be used: twice: several packages")
    assert len(describe_drafters()) == len(DRAFTERS) + 3


def test_a_registered_drafter_is_listed_on_the_command_line(own, monkeypatch, capsys):
    points = EntryPoints([EntryPoint("own", "own_drafters.own:OwnConfig", ENTRY_POINT_GROUP)])
    monkeypatch.setattr("outrider.drafters.registry.entry_points", lambda *, group: points.select(group=group))
    list_drafters()
    shown = capsys.readouterr().out
    assert "own  A drafter of somebody else." in shown
    assert "sizes=1+2" in shown


def test_the_server_reads_no_spec():
    """A spec imports code: it comes from whoever starts the server, and from no request."""
    server = Path(outrider.__file__).parent / "server"
    assert not [file.name for file in server.rglob("*.py") if "parse_drafter" in file.read_text()]


def test_the_drafter_of_the_docs_is_used_without_editing_the_registry(tmp_path, monkeypatch):
    page = (Path(outrider.__file__).parents[1] / "docs" / "add_a_drafter.md").read_text()
    (tmp_path / "echo.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "echo", raising=False)
    (spec,) = {word for word in page.split() if word.startswith("echo:EchoConfig:")} - {"echo:EchoConfig:k=5`"}
    config = parse_drafter(spec)
    assert (type(config).__name__, config.traits.max_tokens) == ("EchoConfig", 5)
    del sys.modules["echo"]


def test_auto_takes_a_draft_model_and_refuses_a_length_without_one():
    assert parse_drafter("auto").traits.name == "suffix+prediction"
    named = parse_drafter("auto:model=small,k=3").traits
    assert [each.model for each in named.loads] == ["small"]
    with pytest.raises(ConfigError, match=r"auto: k=3 is of a model; name one, as in auto:model=NAME,k=3"):
        parse_drafter("auto:k=3")
