"""A tiny target on disk, and a collection of its answers."""

import pytest
from small_collection import make_prompts, run_collect

from outrider.testing.synthetic import synthetic_pair


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder, _ = synthetic_pair("tiny", seed=3).save(tmp_path_factory.mktemp("target"))
    return str(folder)


@pytest.fixture(scope="session")
def answers_folder(target_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("answers")
    run_collect(target_folder, make_prompts(90), out)
    return out
