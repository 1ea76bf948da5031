"""Names and options to configurations, and errors that help."""

import pytest

from outrider.core.errors import ConfigError
from outrider.drafters.mix import MixConfig
from outrider.drafters.none import NoDraftConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.registry import DRAFTERS, describe_drafters, parse_drafter
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


def test_every_name_is_a_class_that_its_own_name_makes(context):
    for name in DRAFTERS:
        if name not in ("draft-model", "mix"):  # one needs a model to load, the other goes by its members' names
            assert DRAFTERS[name]().build(context).traits.name == name
    assert DRAFTERS["mix"]().build(context).traits.name == "suffix+prompt-lookup+prediction"
    assert len(DRAFTERS) == len(list(DRAFTERS)) == 7


def test_every_drafter_and_every_option_is_described():
    described = {info.name: info for info in describe_drafters()}
    assert list(described) == list(DRAFTERS)
    for name, summary, options in described.values():
        assert summary.endswith("."), name
        assert all(option.doc for option in options), name
    k, *_ = described["suffix"].options
    assert k == ("k", 15, "Max tokens proposed in one round.")
    assert {o.name: o.default for o in described["suffix"].options}["min_prob"] == "auto"
