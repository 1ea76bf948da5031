"""What is written for other engines, held against what was recorded of them and against an installed one."""

import json
import shlex

import jsonschema
import pytest
import yaml

from outrider.advise.export import ENGINES, Choice, export_to, vllm_config
from outrider.advise.export_check import FOLDER, check_export, schema_faults
from outrider.advise.saved import read_choice
from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.drafters.shipped import shipped_heads

RECORDED = {name: json.loads((FOLDER / "schemas" / f"{name}.json").read_text()) for name in ENGINES}


def advice(drafter="suffix", length=None, **more):
    """What advise writes, with a best length of 2."""
    at = {"temperature": 0.0, "batch": 1, "context": 0}
    rounds = [at | {"length": n, "draft": 0, "verify": s, "host": 0} for n, s in ((0, 1), (3, 1.5))]
    acceptance = [{"temperature": 0.0, "length": 3, "drafted": [1, 1, 1], "accepted": [0.9, 0.9, 0.0]}]
    measured = {"drafter": drafter, "max_tokens": 3, "lengths": [0, 3], "fixed_length": False, "answer_tokens": 9.0}
    chosen = {"drafter": drafter, "length": length, "temperature": 0.0, "batch": 1, "measured": 1.5}
    whole = {"target": "org/big", "chosen": chosen, "shipped": ""}
    return whole | {"measured": [measured | {"acceptance": acceptance, "rounds": rounds}]} | more


@pytest.fixture
def saved(tmp_path):
    def save(**given):
        file = tmp_path / "advise.json"
        file.write_text(json.dumps(advice(**given)))
        return file

    return save


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["export", *map(str, words)])
    return end.value.code


SGLANG = "python -m sglang.launch_server --model-path t "
LLAMA = "llama-server --model t.gguf "
COMMANDS = [
    ("vllm", "prompt-lookup:max_match=3", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}),
    ("vllm", "cross-model:model=d", {"method": "draft_model", "model": "d", "use_heterogeneous_vocab": True}),
    ("vllm", "mtp", {"method": "mtp"}),
    ("vllm", "suffix:factor=1.5,min_prob=auto,max_depth=32", {
        "method": "suffix", "suffix_decoding_max_spec_factor": 1.5, "suffix_decoding_max_tree_depth": 32,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "drafter", "arguments"), COMMANDS)
def test_vllms_arguments(engine, drafter, arguments):
    made = export_to(engine, Choice("t", drafter, 5))
    assert made.arguments == arguments | {"num_speculative_tokens": 5}
    words = shlex.split(made.command)
    assert words[:4] == ["vllm", "serve", "t", "--speculative-config"]
    assert json.loads(words[4]) == made.arguments == vllm_config(Choice("t", drafter, 5))


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("prompt-lookup", "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6"),
        (
            "draft-model:model=d",
            "--speculative-algorithm STANDALONE --speculative-draft-model-path d --speculative-num-steps 5 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
        ),
        (
            "mtp",
            "--speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 6",
        ),
    ],
)
def test_sglangs_command(drafter, words):
    assert export_to("sglang", Choice("t", drafter, 5)).command == SGLANG + words


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (
            "prompt-lookup",
            "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 5",
        ),
        ("suffix", "--spec-type ngram-mod --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 5"),
        (
            "draft-model:model=d.gguf",
            "--spec-type draft-simple --model-draft d.gguf --spec-draft-n-max 5 --spec-draft-n-min 0",
        ),
        ("mtp", "--spec-type draft-mtp --spec-draft-n-max 5 --spec-draft-n-min 0"),
    ],
)
def test_llama_cpps_command(drafter, words):
    assert export_to("llama.cpp", Choice("t.gguf", drafter, 5)).command == LLAMA + words


def test_tensorrts_file_is_yaml_of_its_arguments():
    made = export_to("tensorrt-llm", Choice("t", "draft-model:model=my draft", 5), "spec.yaml")
    assert made.command == "trtllm-serve t --config spec.yaml"
    assert yaml.safe_load(made.config) == {
        "speculative_config": {"decoding_type": "Draft_Target", "speculative_model": "my draft", "max_draft_len": 5},
        "disable_overlap_scheduler": True,
    }
    assert yaml.safe_load(export_to("tensorrt-llm", Choice("t", "suffix", 5)).config)["speculative_config"] == {
        "decoding_type": "SA",
        "enable_global_pool": True,
        "max_draft_len": 5,
    }


@pytest.mark.parametrize(
    ("kind", "engine", "expected"),
    [
        ("eagle3", "vllm", {"method": "eagle3", "model": "h", "num_speculative_tokens": 6}),
        ("dspark", "vllm", {"method": "dspark", "model": "h", "num_speculative_tokens": 6}),
        (
            "eagle3",
            "tensorrt-llm",
            {
                "speculative_config": {
                    "decoding_type": "Eagle3",
                    "speculative_model": "h",
                    "max_draft_len": 6,
                    "use_dynamic_tree": True,
                    "dynamic_tree_max_topK": 8,
                    "max_total_draft_tokens": 24,
                }
            },
        ),
        ("dspark", "tensorrt-llm", None),
        ("eagle", "tensorrt-llm", None),
        ("eagle", "llama.cpp", None),
        (
            "dflash",
            "sglang",
            {
                "speculative-algorithm": "DFLASH",
                "speculative-draft-model-path": "h",
                "speculative-dflash-block-size": 7,
            },
        ),
        (
            "eagle3",
            "sglang",
            {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": "h",
                "speculative-num-steps": 6,
                "speculative-eagle-topk": 4,
                "speculative-num-draft-tokens": 24,
            },
        ),
    ],
)
def test_heads_and_trees(kind, engine, expected, monkeypatch):
    monkeypatch.setattr(Choice, "head", property(lambda _: kind))
    drafter = "block:model=h" if kind.startswith("d") else "eagle:model=h,tree=24"
    choice = Choice("t.gguf", drafter, 6)
    if expected is None:
        with pytest.raises(ConfigError, match="no counterpart"):
            export_to(engine, choice)
        return
    made = export_to(engine, choice)
    assert made.arguments == expected
    check_export(made)
    if engine == "vllm" and choice.tree:
        assert any("chains: 6 tokens in place of a tree of 24" in note for note in made.notes)


def test_the_shipped_head_is_exported_by_its_folder():
    shipped = next(shipped_heads())
    folder = str(shipped.folder)
    named = json.loads((shipped.folder / "config.json").read_text())["speculators_model_type"]
    made = export_to("vllm", Choice("t", shipped.drafter, 3, shipped=folder))
    assert made.arguments == {"method": named, "model": folder, "num_speculative_tokens": 3}
    assert export_to("vllm", Choice("t", shipped.drafter, 3, folder, draft="/srv/h")).arguments["model"] == "/srv/h"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drafter", ["layer-skip", "prediction", "grammar", "suffix+draft-model:model=d"])
def test_what_no_engine_has_is_refused_by_name(engine, drafter):
    with pytest.raises(ConfigError, match=drafter.replace("+", ".")):
        export_to(engine, Choice("t.gguf", drafter, 5))


def test_what_one_engine_lacks_is_refused_with_what_it_has():
    with pytest.raises(ConfigError, match=r"SGLang has no counterpart of 'suffix'; it has NGRAM"):
        export_to("sglang", Choice("t", "suffix", 5))
    with pytest.raises(ConfigError, match=r"--target FILE\.gguf"):
        export_to("llama.cpp", Choice("org/t", "suffix", 5))
    with pytest.raises(ConfigError, match=r"--draft FILE\.gguf"):
        export_to("llama.cpp", Choice("t.gguf", "draft-model:model=d", 5))
    with pytest.raises(ConfigError, match="--draft NAME"):
        export_to("vllm", Choice("t", "draft-model", 5))


def test_notes_tell_what_differs():
    notes = " ".join(export_to("vllm", Choice("t", "suffix:history=h.json", 5, adaptive=True)).notes)
    for words in ("mode seeded", "here it is 5, always", "history=h.json", "arctic-inference"):
        assert words in notes, words
    assert export_to("vllm", Choice("t", "none", 0)).notes == ()
    assert export_to("vllm", Choice("t", "none", 0)).command == "vllm serve t"


@pytest.mark.parametrize("engine", ENGINES)
def test_recorded_schemas_are_sound_and_judge_as_jsonschema_does(engine):
    schema = RECORDED[engine]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    sound = export_to(engine, Choice("t.gguf", "prompt-lookup", 5)).arguments
    inner = sound.get("speculative_config", sound)
    number = next(name for name, value in inner.items() if isinstance(value, int) and not isinstance(value, bool))
    kind = next(iter(name for name, value in inner.items() if isinstance(value, str)))
    assert not schema_faults(sound, schema)
    for change in ({"no-such": 1}, {number: "5"}, {number: True}, {kind: "no-such"}, {number: -1}, {kind: None}):
        wrong = inner | change
        wrong = sound | {"speculative_config": wrong} if inner is not sound else wrong
        told = bool(schema_faults(wrong, schema))
        assert told == bool(list(judge.iter_errors(wrong))), change
        assert told or change == {number: -1}, change
    missing = {name: value for name, value in sound.items() if name not in schema["required"]}
    assert schema_faults(missing, schema)


def test_a_wrong_export_is_told_by_the_recorded_schema():
    made = export_to("sglang", Choice("t", "prompt-lookup", 5))
    checked = check_export(made)
    assert (checked.installed, checked.version) == (False, "SGLang 0.5.23")
    made.arguments["speculative-algorithm"] = "GUESS"
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.23 does not take .* must be one of EAGLE"):
        check_export(made)


def test_an_installed_llama_server_is_asked(tmp_path, monkeypatch):
    server = tmp_path / "llama-server"
    server.write_text(
        "#!/bin/sh\nif [ $1 = --version ]; then echo 'version: 9999 (abc)' >&2; else "
        "echo '--spec-type none,ngram-mod --spec-ngram-mod-n-max N --spec-ngram-mod-n-min N'; fi\n"
    )
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    checked = check_export(export_to("llama.cpp", Choice("t.gguf", "suffix", 5)))
    assert str(checked) == "taken by the installed llama-server version: 9999 (abc)"
    with pytest.raises(ConfigError, match="its --help has no --spec-ngram-simple-size-n"):
        check_export(export_to("llama.cpp", Choice("t.gguf", "prompt-lookup", 5)))


def test_the_length_of_an_adaptive_choice_is_the_best_single_one(saved):
    # 2 of 3 tokens are accepted, and a third costs time: 1 + 0.9 + 0.9 over 1 + 2 / 6, against 1 + 0.9 over 1 + 1 / 6
    found = read_choice(saved())
    assert (found.target, found.drafter, found.length, found.adaptive) == ("org/big", "suffix", 2, True)
    assert read_choice(saved(length=3)).length == 3
    assert read_choice(saved(chosen=None)).drafter == "none"


def test_another_drafter_has_the_length_that_was_measured_for_it(saved):
    other = {"drafter": "block", "length": 9, "temperature": 0.0, "batch": 1}
    whole = advice()
    first = whole["measured"][0]
    file = saved(chosen=other, measured=[first | {"drafter": "block"}, first])
    assert (read_choice(file).drafter, read_choice(file).length) == ("block", 9)
    found = read_choice(file, "suffix")
    assert (found.drafter, found.length, found.adaptive) == ("suffix", 2, True)
    assert read_choice(file, "prompt-lookup").length == 9, "nothing is known of it"


def test_an_advice_not_to_speculate_is_told(saved, capsys):
    assert run("vllm", "--from", saved(chosen=None), "--target", "t") == 0
    said = capsys.readouterr()
    assert said.out == "vllm serve t\n"
    assert "not to speculate" in said.err
    assert "checked" not in said.err


def test_other_files_are_refused(tmp_path, saved):
    file = tmp_path / "other.json"
    for text in ("[]", "{}", "no json", '{"measured": [], "chosen": {}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="not what advise writes"):
            read_choice(file)
    file.write_text('{"of": "x", "measured": []}')
    with pytest.raises(ConfigError, match="interrupted"):
        read_choice(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_choice(tmp_path / "none.json")


def test_the_command(saved, tmp_path, capsys):
    file = tmp_path / "vllm.yaml"
    assert run("vllm", "--from", saved(), "--out", file) == 0
    said = capsys.readouterr()
    assert said.out.strip() == f"vllm serve org/big --config {file}"
    assert "checked: as recorded of vLLM 0.32.0" in said.err
    assert yaml.safe_load(file.read_text()) == {"speculative-config": {"method": "suffix", "num_speculative_tokens": 2}}
    assert run("llama.cpp", "--from", saved(), "--target", "t.gguf", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["arguments"]["spec-type"] == "ngram-mod"
    assert (told["installed"], told["checked"]) == (False, "llama.cpp 0c1e57098")
    assert run("vlm", "--from", saved()) == 2
    assert "did you mean vllm?" in capsys.readouterr().err
    assert run("vllm") == 2
    assert run("sglang", "--from", saved(), "--python", tmp_path / "no-python", "--drafter", "prompt-lookup") == 2
