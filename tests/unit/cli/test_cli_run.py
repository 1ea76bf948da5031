"""`outrider run`: where the prompt comes from, what goes to the engine, and what is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reciting import SONG, Stage

from outrider.cli.screen import STYLES
from outrider.core.errors import ConfigError
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.loading.memory import ReservedMemory

ASK = "Sing: "


def ansi(hex_colour: str) -> str:
    """How a terminal of 256 colours is told this colour, by rich's own account."""
    from rich.color import Color, ColorSystem

    return ";".join(Color.parse(hex_colour).downgrade(ColorSystem.EIGHT_BIT).get_ansi_codes())


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_json_is_one_object_with_everything(cli, stage):
    ran = cli("run", ASK, "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert told["text"] == SONG
    assert told["tokens"] == [*SONG.encode(), 256]
    assert told["finish_reason"] == "stop"
    assert told["stats"]["tokens"] == len(SONG) + 1
    assert told["stats"]["prompt_tokens"] == len(ASK)
    assert told["stats"]["accepted"] == sum(p["origin"] == "accepted" for p in told["provenance"]) > 10
    assert "plain" not in told
    assert "identical" not in told


def test_compare_json_holds_both_runs(cli, stage):
    told = json.loads(cli("run", ASK, "--json", "--compare").out)
    assert told["identical"] is True
    assert told["first_difference"] is None
    assert told["plain"]["text"] == told["text"] == SONG
    assert told["plain"]["stats"]["drafted"] == 0
    assert told["stats"]["drafted"] > 0
    assert told["stats"]["shared_tokens"] == 0
    speeds = [run["stats"]["decode_tokens_per_second"] for run in (told, told["plain"])]
    assert told["speedup"] == pytest.approx(speeds[0] / speeds[1])


def test_temperature_and_seed_decide_the_text(cli, stage):
    def text(seed: int) -> str:
        words = ("--temperature", "6", "--max-tokens", "40", "--seed", str(seed))
        told = json.loads(cli("run", ASK, "--json", "--compare", *words).out)
        assert told["identical"] is True
        assert told["seed"] == seed
        return told["text"]

    assert text(7) == text(7) != text(8)


@pytest.mark.parametrize("source", ["argument", "--prompt", "--file", "stdin"])
def test_every_prompt_source_gives_the_same_prompt(cli, stage, tmp_path, source):
    prompt = "Ünïcode: "
    file = tmp_path / "prompt.txt"
    file.write_text(prompt + "\n", encoding="utf-8")
    words = {"argument": [prompt], "--prompt": ["--prompt", prompt], "--file": ["--file", str(file)], "stdin": []}
    ran = cli("run", "--json", *words[source], piped=prompt + "\n" if source == "stdin" else None)
    assert json.loads(ran.out)["stats"]["prompt_tokens"] == len(prompt.encode())


def test_a_named_prompt_leaves_a_pipe_unread(cli, stage):
    assert json.loads(cli("run", "--json", "--prompt", ASK, piped="").out)["text"] == SONG


@pytest.mark.parametrize(
    ("words", "piped", "says"),
    [
        ([], None, "no prompt"),
        ([], "", "no prompt"),
        ([""], None, "no prompt"),
        (["a", "--prompt", "b"], None, "PROMPT and --prompt"),
        (["--prompt", "b", "--file", "c"], None, "--prompt and --file"),
        (["--file", "no-such-file"], None, "no-such-file"),
        (["a", "--system", "b", "--raw"], None, "--system uses the chat template and --raw leaves it out"),
        (["a", "--chat", "--raw"], None, "--chat uses the chat template"),
        (["a\udcff"], None, "the prompt is not UTF-8 text (character 1)"),
        (["a", "--system", "\udcff"], None, "--system is not UTF-8"),
        (["a", "--prediction", "\udcff"], None, "--prediction is not UTF-8"),
        (["a", "--logprobs", "1"], None, "--json"),
        (["a", "--compare", "--n", "2"], None, "--n"),
        (["a", "--json", "--svg", "x"], None, "--svg"),
        (["a", "--drafter", "none", "--speculative-config", "{}"], None, "--speculative-config"),
        (["a", "--rule", "token"], None, "--mode distribution"),
        (["a", "--mode", "seded"], None, "did you mean seeded?"),
        (["a", "--temperature", "-1"], None, "temperature"),
        (["a", "--top-p", "x"], None, "--top-p"),
        (["a", "--stop-token-ids", "1,x"], None, "--stop-token-ids"),
        (["a", "--logit-bias", "[1]"], None, "--logit-bias"),
        (["a", "--drafter", "sufix"], None, "did you mean 'suffix'"),
        (["a", "--speculative-config", "{"], None, "JSON"),
    ],
)
def test_what_cannot_be_ends_with_2_and_one_line(cli, stage, words, piped, says):
    ran = cli("run", *words, piped=piped)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert stage.asked == {}, "nothing was loaded"


def test_a_file_that_is_no_text_is_refused(cli, stage, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"abc\xff")
    ran = cli("run", "--file", str(file))
    assert ran.code == 2
    assert "byte 3" in ran.err


def test_a_failed_request_ends_with_1(cli, stage):
    ran = cli("run", ASK, "--allowed-token-ids", "5", "--banned-token-ids", "5", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["finish_reason"] == "error"
    assert ran.err.startswith("error: ")
    for words in ([], ["--no-stream"], ["--compare"], ["--compare", "--no-stream"]):
        ran = cli("run", ASK, "--allowed-token-ids", "5", "--banned-token-ids", "5", *words)
        assert (ran.code, ran.out) == (1, "\n")
        assert ran.err.startswith("error: ")


def test_options_reach_the_loader(cli, stage):
    words = ["--model", "org/name", "--revision", "v1", "--device", "cpu", "--dtype", "float32", "--quantize", "none"]
    words += ["--context", "64", "--cache-tokens", "128", "--max-batch", "3", "--pinned", "--threads", "2"]
    assert cli("run", ASK, "--json", *words).code == 0
    del stage.asked["progress"]
    assert stage.asked.pop("drafts")(Path("nowhere")) == (15, ReservedMemory())
    assert stage.asked == {
        "max_round_tokens": 2048,
        "pinned": True,
        "model": "org/name",
        "revision": "v1",
        "device": "cpu",
        "dtype": "float32",
        "quantize": "none",
        "context": 64,
        "cache_tokens": 128,
        "max_batch": 3,
        "threads": 2,
    }


def test_a_vllm_speculative_config_makes_the_drafter(cli, stage, monkeypatch):
    built: list[PromptLookupConfig] = []
    build = PromptLookupConfig.build
    monkeypatch.setattr(PromptLookupConfig, "build", lambda self, setting: built.append(self) or build(self, setting))
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    told = json.loads(cli("run", ASK, "--json", "--speculative-config", json.dumps(config)).out)
    assert (built[0].k, built[0].max_match, built[0].min_match) == (3, 2, 1)
    assert list(told["stats"]["drafters"]) == ["prompt-lookup"]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_prediction_is_drafted_from(cli, stage, tmp_path, as_file):
    stage.answer = "the quick brown fox jumps over a lazy dog"
    file = tmp_path / "expected.txt"
    file.write_text(stage.answer)
    given = f"@{file}" if as_file else stage.answer
    told = json.loads(cli("run", ASK, "--json", "--drafter", "prediction", "--prediction", given).out)
    assert told["text"] == stage.answer
    assert told["stats"]["accepted"] > 20


def test_chat_wraps_the_prompt_as_a_message(cli, stage):
    assert cli("run", "Sing.", "--chat", "--system", "You sing.").code == 0
    assert stage.tokenizer.chats == [[{"role": "system", "content": "You sing."}, {"role": "user", "content": "Sing."}]]


@pytest.mark.parametrize(
    ("template", "words", "chats", "row"),
    [
        ("a template", [], 1, r"prompt +chat +a user message, by the model's chat template; --raw completes"),
        ("a template", ["--chat"], 1, r"prompt +chat "),
        ("a template", ["--raw"], 0, r"prompt +raw +completed as it is *\n"),
        ("", [], 0, r"prompt +raw +completed as it is: the model has no chat template"),
        ("", ["--raw"], 0, r"prompt +raw "),
        ("", ["--system", "You sing."], 1, r"prompt +chat "),
    ],
)
def test_a_chat_model_s_template_is_used_and_said(cli, stage, template, words, chats, row):
    stage.tokenizer.template = template
    ran = cli("run", ASK, *words)
    assert (ran.code, ran.out) == (0, SONG + "\n")
    assert len(stage.tokenizer.chats) == chats
    assert re.search(row, ran.err)
    told = json.loads(cli("run", ASK, "--json", *words).out)
    assert told["prompt_format"] == ("chat" if chats else "raw")
    told = json.loads(cli("run", ASK, "--json", "--compare", *words).out)
    assert told["prompt_format"] == ("chat" if chats else "raw")


def test_bad_input_that_only_the_model_shows_ends_with_2(cli, stage):
    for words in (["--drafter", "suffix", "--prediction", "text"], ["--stop-token-ids", "999"]):
        ran = cli("run", ASK, *words)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
    stage.context = 4
    assert cli("run", ASK).code == 2


@pytest.mark.parametrize(("verb", "locale"), [("run", "C.UTF-8"), ("run", "C"), ("chat", "C.UTF-8"), ("chat", "C")])
def test_a_pipe_that_is_no_text_is_refused(verb, locale):
    """In a process of its own: what Python makes of such bytes depends on the locale."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import outrider.llm; from reciting import Stage; outrider.llm.load = Stage().load
from outrider.cli.main import main; main([{verb!r}])"""
    env = os.environ | {"LC_ALL": locale}
    env.pop("OUTRIDER_DEBUG", None)
    ran = subprocess.run([sys.executable, "-c", code], input=b"abc\xff\n", capture_output=True, check=False, env=env)
    assert ran.returncode == 2
    assert ran.stderr.decode() == "error: the text piped in is not UTF-8; convert it first, as with iconv\n"


def test_a_missing_draft_model_is_called_the_draft(cli, monkeypatch, tmp_path):
    stage = Stage()

    def load(model, **options):
        if model != "demo":
            raise ConfigError(f"there is no {model}")
        return stage.load(model, **options)

    monkeypatch.setattr("outrider.llm.load", load)
    ran = cli("run", ASK, "--drafter", "draft-model:model=small")
    assert (ran.code, ran.err) == (2, "error: draft model: there is no small\n")


def test_stops_and_limits_reach_the_engine(cli, stage):
    def told(*words: str) -> dict:
        return json.loads(cli("run", ASK, "--json", *words).out)

    assert told("--stop", "zzz", "--stop", "three")["text"] == "one two "
    assert told("--max-tokens", "3")["text"] == "one"
    assert told("--stop-token-ids", f"1,{ord('w')}")["text"] == "one t"
    assert told("--max-tokens", "60", "--ignore-eos")["finish_reason"] == "length"
    assert told("--logit-bias", json.dumps({ord("X"): 50}), "--max-tokens", "2")["text"] == "XX"
    assert len(told("--logprobs", "2")["logprobs"][0]["top"]) == 2


def test_piped_output_is_the_text_alone(cli, stage):
    for words in ([], ["--no-stream"], ["--compare"], ["--compare", "--no-stream"]):
        ran = cli("run", ASK, *words)
        assert ran.out == SONG + "\n"
        assert "tok/s" in ran.err
        assert "\x1b" not in ran.err
    assert "identical" in ran.err


def test_several_answers(cli, stage):
    words = ["--temperature", "6", "--max-tokens", "30", "--seed", "3", "--n", "3"]
    told = json.loads(cli("run", ASK, "--json", *words).out)
    assert len({told["text"], *(other["text"] for other in told["others"])}) == 3
    ran = cli("run", ASK, *words)
    assert "text 3 of 3" in ran.err
    assert ran.out.count("\n") >= 3


def test_a_terminal_shows_where_each_token_came_from(cli, stage, monkeypatch):
    told = json.loads(cli("run", ASK, "--json").out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = cli("run", ASK)
    legend, _, rest = ran.out.partition("\n\n")
    answer, _, table = rest.partition("\n\n")
    assert without_colours(answer) == SONG
    for word in ("accepted", "recovered", "bonus", "plain"):
        assert word in legend
    for figure in ("tok/s", "α", "γ", "τ"):
        assert figure in table
    for origin in ("accepted", "recovered", "bonus"):
        shown = "".join(re.findall(rf"\x1b\[{ansi(STYLES[origin])}m(.*?)\x1b\[0m", answer))
        meant = "".join(
            chr(t) for t, p in zip(told["tokens"], told["provenance"], strict=True) if p["origin"] == origin
        )
        assert shown.replace(" ", "") == meant.replace("\u0100", "").replace(" ", "")
        assert shown


def test_a_terminal_counts_the_plain_run_and_then_streams(cli, stage, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = cli("run", ASK, "--compare")
    assert f"plain decoding first, to compare: {len(SONG) + 1} tokens" in ran.err
    _, answer, table = without_colours(ran.out).split("\n\n")
    assert answer == SONG
    for figure in ("tok/s plain", "tok/s speculative", "speed-up", "α", "γ", "τ measured", "τ by formula", "identical"):
        assert figure in table


def test_comparing_needs_no_more_room_than_the_prompt(cli, stage):
    stage.context = len(ASK) + 2
    told = json.loads(cli("run", ASK, "--compare", "--json").out)
    assert told["text"] == SONG[:2]


def test_no_color_means_none(cli, stage, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = cli("run", ASK, "--no-color")
    assert ran.out == SONG + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli("run", ASK).out == SONG + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_text_of_a_model_cannot_drive_the_terminal(cli, stage, monkeypatch, terminal):
    stage.answer = "a\x1b]0;owned\x07b\x1b[31mc\x9b2Jd\re\x08f [bold]g[/bold] \\[h]"
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    ran = cli("run", ASK, "--max-tokens", "200")
    shown = without_colours(ran.out)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "[bold]g[/bold] \\[h]" in shown
    assert "owned" in shown
    if not terminal:
        assert "\x1b" not in ran.out


def test_json_is_safe_to_print_and_exact(cli, stage):
    stage.answer = "a\x1b[31mb\x9bc é"
    ran = cli("run", ASK, "--json")
    assert ran.out.isascii()
    assert "\x1b" not in ran.out
    assert json.loads(ran.out)["text"] == stage.answer


def test_the_comparison_says_where_texts_part(cli, stage, monkeypatch):
    from dataclasses import replace

    from outrider.engine.results import Comparison
    from outrider.llm import LLM

    compare = LLM.compare

    def tampered(self: LLM, *args: object, **options: object) -> Comparison:
        both = compare(self, *args, **options)  # type: ignore[arg-type]
        tokens = (*both.plain.tokens[:5], 0, *both.plain.tokens[6:])
        return replace(both, plain=replace(both.plain, tokens=tokens))

    monkeypatch.setattr(LLM, "compare", tampered)
    ran = cli("run", ASK, "--compare")
    assert re.search(r"identical +no +first difference at token 5", ran.err)
    assert json.loads(cli("run", ASK, "--compare", "--json").out)["first_difference"] == 5


def test_a_picture_holds_answer_and_figures_and_fetches_nothing(cli, stage, tmp_path):
    file = tmp_path / "out.svg"
    assert cli("run", ASK, "--compare", "--svg", str(file)).code == 0
    svg = Path(file).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"/ ]+", svg)) <= {"http://www.w3.org", "https://www.textualize.io"}
    assert "url(" not in svg.replace("url(#", "")
    for colour in filter(None, STYLES.values()):
        assert colour in svg
    assert "speed-up" in svg


def test_a_drawn_seed_is_reported_and_gives_the_same_text_again(cli, stage):
    words = ("run", ASK, "--temperature", "6", "--max-tokens", "40", "--no-color")
    drawn = cli(*words)
    (seed,) = re.findall(r"seed +(\d+) +drawn", drawn.out + drawn.err)
    again = cli(*words, "--seed", seed)
    assert "drawn" not in again.out + again.err
    assert drawn.out.splitlines()[0] == again.out.splitlines()[0]
    assert "drawn" not in cli("run", ASK, "--no-color").err


def test_a_picture_that_has_no_folder_is_refused_before_the_answer(cli, stage, tmp_path):
    ran = cli("run", ASK, "--svg", str(tmp_path / "nowhere" / "out.svg"))
    assert ran.code == 2
    assert "there is no folder" in ran.err
    assert SONG not in ran.out
    ran = cli("run", ASK, "--svg", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert "that is a folder; name a file" in ran.err


def test_a_few_drafted_tokens_are_no_verdict(cli, stage):
    assert "too few to say more" in cli("run", ASK, "--max-tokens", "12", "--no-color").err
    assert "too few" not in cli("run", ASK, "--no-color").err


def test_a_prediction_alone_brings_a_drafter_that_uses_it(cli, stage):
    told = json.loads(cli("run", ASK, "--json", "--prediction", SONG).out)
    assert told["text"] == SONG
    assert {each["drafter"] for each in told["provenance"] if each["origin"] == "accepted"} >= {"prediction"}


def test_a_controller_decides_unless_drafts_are_fixed(cli, stage, monkeypatch):
    made = []
    monkeypatch.setattr("outrider.llm.CostMeter.controller", lambda meter, drafter: made.append(drafter.traits.name))
    assert cli("run", ASK, "--fixed").code == 0
    assert made == []
    assert cli("run", ASK).code == 0
    assert made == ["suffix+prediction"]
