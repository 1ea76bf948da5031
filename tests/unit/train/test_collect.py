"""Collected answers are the target's own; a collection that was cut is continued; a full disk loses nothing."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from small_collection import SMALL, make_prompts, run_collect

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.train import corpus as corpus_module
from outrider.train.collect import CollectConfig, answer_all, begin, load_engine
from outrider.train.corpus import CorpusWriter, done_prompts, load_corpus
from outrider.train.files import DiskError
from outrider.train.workers import collect


def test_answers_are_the_targets_own_half_greedy_half_sampled(target_folder, answers_folder):
    prompts, corpus = make_prompts(90), load_corpus(answers_folder)
    assert corpus.prompts.tolist() == list(range(90))
    assert corpus.sampled.tolist() == [bool(i % 2) for i in range(90)]
    assert {corpus.index.kinds[k] for k in corpus.kinds} == {"ask", "tell"}
    with LLM(target_folder, drafter="none", device="cpu", cache_tokens=512) as llm:
        for i in (0, 7, 8):
            text = prompts[i].messages[0]["content"]
            params = SamplingParams(max_tokens=24, temperature=float(i % 2), seed=i)
            expected = [*llm.tokenizer.encode(text), *llm.generate(text, params).tokens]
            assert corpus.text(i).tolist() == expected
            assert corpus.prompt_lens[i] == len(text)


def test_a_killed_collection_is_continued(target_folder, answers_folder, tmp_path, monkeypatch):
    """Cut twice by an interrupt in the middle, it ends with the answers of a collection that was never cut."""
    monkeypatch.setattr(corpus_module, "SHARD_ANSWERS", 7)
    prompts = make_prompts(90)
    for stop_at in (20, 30):
        made = []

        def report(answers, tokens, made=made, stop_at=stop_at):
            made.append(tokens)
            if len(made) == stop_at:
                raise KeyboardInterrupt

        todo = begin(target_folder, prompts, tmp_path, SMALL)
        with load_engine(target_folder, SMALL) as llm, pytest.raises(KeyboardInterrupt):
            answer_all(llm, todo, CorpusWriter(tmp_path, "0"), SMALL, report)
    assert len(done_prompts(tmp_path)) == 50
    assert len(run_collect(target_folder, prompts, tmp_path)) == 40
    assert run_collect(target_folder, prompts, tmp_path) == [], "nothing is left to do"
    whole, again = load_corpus(answers_folder), load_corpus(tmp_path)
    assert np.array_equal(whole.tokens, again.tokens)
    assert np.array_equal(whole.starts, again.starts)


def test_a_shard_is_lost_at_most_where_the_process_dies_without_a_chance_to_write(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "SHARD_ANSWERS", 7)

    class Killed(BaseException):
        """Not caught by anything on the way, as SIGKILL is not."""

    made = []

    def report(answers, tokens):
        made.append(tokens)
        if len(made) == 20:
            raise Killed

    todo = begin(target_folder, make_prompts(30), tmp_path, SMALL)
    with load_engine(target_folder, SMALL) as llm, pytest.raises(Killed):
        answer_all(llm, todo, CorpusWriter(tmp_path, "0"), SMALL, report)
    assert len(done_prompts(tmp_path)) == 14
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")], "no half-written file"
    assert len(run_collect(target_folder, make_prompts(30), tmp_path)) == 16


def test_a_full_disk_keeps_what_was_written(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "SHARD_ANSWERS", 7)
    written, sync = [], os.fsync

    def full(handle):
        written.append(handle)
        if len(written) > 2:  # the index and one shard
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"shard-0-00001\.safetensors: the disk is full.*run the same command again"):
        run_collect(target_folder, make_prompts(30), tmp_path)
    monkeypatch.undo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "shard-0-00000.safetensors"]
    assert len(done_prompts(tmp_path)) == 7
    assert len(run_collect(target_folder, make_prompts(30), tmp_path)) == 23


def test_another_collection_in_the_same_folder_is_refused(target_folder, answers_folder):
    with pytest.raises(ConfigError, match="other prompts, count"):
        run_collect(target_folder, make_prompts(10), answers_folder)
    with pytest.raises(ConfigError, match="other max_tokens"):
        run_collect(target_folder, make_prompts(90), answers_folder, replace(SMALL, max_tokens=9))


def test_prompts_that_are_too_long_are_left_out(target_folder, tmp_path):
    run_collect(target_folder, make_prompts(30), tmp_path, replace(SMALL, max_prompt=6))
    assert load_corpus(tmp_path).prompts.tolist() == [0, 1, 2, 3, 6, 9], "ask 0, tell 1, tell 4, ask 9, ask 36, ask 81"


def test_several_processes_answer_the_same(target_folder, answers_folder, tmp_path):
    run_collect(target_folder, make_prompts(90), tmp_path, replace(SMALL, workers=2))
    assert {file.name.split("-")[1] for file in tmp_path.glob("shard-*")} == {"0", "1"}
    assert np.array_equal(load_corpus(tmp_path).tokens, load_corpus(answers_folder).tokens)


def test_processes_that_are_interrupted_write_what_they_have(target_folder, tmp_path):
    made = []

    def report(answers, tokens):
        made.append(tokens)
        if len(made) == 10:
            raise KeyboardInterrupt

    config = replace(SMALL, workers=2)
    with pytest.raises(KeyboardInterrupt):
        collect(target_folder, make_prompts(400), tmp_path, config, lambda total, done: None, report)
    assert len(done_prompts(tmp_path)) >= 10


def test_an_error_of_a_process_is_told(tmp_path, target_folder):
    config = CollectConfig(max_tokens=8, max_prompt=8, batch=1, workers=2, device="cuda")
    with pytest.raises(ConfigError, match="device 'cuda' is not here"):
        run_collect(target_folder, make_prompts(4), tmp_path, config)


def test_a_folder_without_answers_says_how_to_make_them(tmp_path):
    with pytest.raises(ConfigError, match="outrider train collect"):
        load_corpus(tmp_path)


def test_the_split_depends_on_prompts_alone(answers_folder):
    corpus = load_corpus(answers_folder)
    train, held = corpus.split()
    assert sorted([*train, *held]) == list(range(90))
    assert held.tolist() == [78, 79], "a greedy and a sampled one"
