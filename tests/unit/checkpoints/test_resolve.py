"""From what a user types to a folder. The hub is played by a double: no test touches a network."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tiny_gguf import tiny_llama

from outrider.checkpoints import resolve as hub
from outrider.checkpoints import storage as cache
from outrider.checkpoints.folder import installed_models
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.storage import outrider_home
from outrider.core.errors import ConfigError, FetchError

SHA = "0123456789abcdef0123456789abcdef01234567"
INDEX_FILE = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A home and a hub cache of each test's own."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.float32)}, folder / "model.safetensors")
    return folder


def indexed_folder(folder: Path, name: str) -> Path:
    """A model folder whose index says that the weights lie in `name`."""
    model_folder(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    return folder


# --- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"OUTRIDER_HOME": "/somewhere"}, "/somewhere"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/outrider"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/me/.cache/outrider"),
        ("linux", {}, "/me/.cache/outrider"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/me/Library/Caches/outrider"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/outrider"),
        ("win32", {}, "/me/AppData/Local/outrider"),
    ],
)
def test_home_follows_the_platform(platform, variables, expected, monkeypatch):
    for name in ("OUTRIDER_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert outrider_home() == Path(expected)


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_sound_folder_is_itself(tmp_path):
    folder = model_folder(tmp_path / "m")
    assert resolve(str(folder)) == folder


def test_a_folder_with_an_index_is_itself(tmp_path):
    folder = indexed_folder(tmp_path / "m", "model.safetensors")
    assert resolve(str(folder)) == folder


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="merged into its base"):
        resolve(str(tmp_path))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickle files.*save_pretrained"):
        resolve(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="weights are missing"):
        resolve(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "../m2/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..",
        "model.bin",
        7,
        "a\\b.safetensors",
    ],
)
def test_an_index_may_only_name_files_of_its_folder(name, tmp_path):
    model_folder(tmp_path / "m2")
    with pytest.raises(ConfigError, match="beside the index"):
        resolve(str(indexed_folder(tmp_path / "m", name)))


def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"other\.safetensors is not there"):
        resolve(str(indexed_folder(tmp_path / "m", "other.safetensors")))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_a_broken_index_is_refused(text, tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(ConfigError, match="not a sound index"):
        resolve(str(folder))


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    other, folder = model_folder(tmp_path / "other"), model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")
    with pytest.raises(ConfigError, match="outside the model's folder"):
        resolve(str(folder))


def snapshot(tmp_path: Path, sha: str = SHA) -> Path:
    """A model as the hub library lays it out: links from the snapshot to the blobs."""
    repo = tmp_path / "hub" / "models--org--name"
    folder = model_folder(repo / "snapshots" / sha)
    (repo / "blobs").mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(repo / "blobs" / sha)
    (folder / "model.safetensors").symlink_to(Path("../../blobs") / sha)
    return folder


def test_links_into_the_hub_caches_own_blobs_are_fine(tmp_path):
    folder = snapshot(tmp_path)
    assert resolve(str(folder)) == folder


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "/no/such/folder", "missing.gguf", "a/b.gguf", "a/b/c", "../x", ""]
)
def test_what_is_neither_here_nor_an_id_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"Hugging Face id.*demo"):
        resolve(name)


def test_a_revision_of_what_has_none_is_refused(tmp_path):
    folder = model_folder(tmp_path / "m")
    for name in ("demo", str(folder)):
        with pytest.raises(ConfigError, match="leave the revision out"):
            resolve(name, revision="main")


# --- GGUF files ---------------------------------------------------------------------------------------------------


def test_a_gguf_file_gets_a_folder_once_and_another_when_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    tiny_llama(file)
    calls = []
    real = hub.refer_to_gguf
    monkeypatch.setattr(hub, "refer_to_gguf", lambda *given: (calls.append(given[0]), real(*given)))
    first = resolve(str(file))
    assert first.parent == tmp_path / "home" / "models"
    assert not list(first.glob("*.safetensors"))  # its weights stay in the file
    assert resolve(str(file)) == first
    assert len(calls) == 1
    assert resolve(first.name) == first  # the name `installed_models` gives
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match="has changed"):
        resolve(first.name)
    second = resolve(str(file))
    assert second != first
    assert len(calls) == 2
    assert [child.name for child in first.parent.iterdir()] == [second.name]  # the outdated one is dropped
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(second.name)


def test_a_gguf_models_size_and_parameters_are_those_of_the_file(tmp_path):
    file = tmp_path / "tiny.gguf"
    made = tiny_llama(file)
    folder = resolve(str(file))
    (found,) = installed_models()
    assert found.size == file.stat().st_size + sum(each.stat().st_size for each in folder.iterdir())
    assert found.parameters == sum(each.numel() for each in made.parameters())


def test_a_folder_that_refers_to_a_gguf_file_is_followed_only_at_home(tmp_path):
    """One that was downloaded, or copied, must not name files of this machine."""
    tiny_llama(tmp_path / "tiny.gguf")
    folder = resolve(str(tmp_path / "tiny.gguf"))
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"cannot be copied.*outrider pull"):
        resolve(str(copied))


def test_a_converted_gguf_file_can_be_copied_and_does_without_the_file(tmp_path):
    file = tmp_path / "tiny.gguf"
    made = tiny_llama(file)
    folder = hub.convert_file(file)
    assert hub.convert_file(file) == folder
    copied = shutil.copytree(folder, tmp_path / "elsewhere")
    file.unlink()
    assert resolve(str(copied)) == copied
    weights = load_file(copied / "model.safetensors")
    for name, value in made.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(weights[name], value.bfloat16() if value.dim() > 1 else value), name


def test_a_copy_by_an_earlier_version_is_left_alone_and_named(tmp_path, caplog):
    file = tmp_path / "tiny.gguf"
    tiny_llama(file)
    text = f"{file.resolve()}|{file.stat().st_size}|{file.stat().st_mtime_ns}|1"
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    old = model_folder(tmp_path / "home" / "models" / f"tiny-{key}")
    assert resolve(str(file)) != old
    assert f"{old} is a copy" in caplog.text
    assert resolve(old.name) == old


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is a file; a model is a folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_two_who_fill_the_same_folder_do_not_break_each_other(tmp_path):
    target, meet = tmp_path / "models" / "m", threading.Barrier(4)

    def fill(mark: str) -> None:
        with cache.atomic_folder(target) as folder:
            for part in ("a", "b"):
                (folder / part).write_text(mark)
            meet.wait()

    threads = [threading.Thread(target=fill, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (target / "a").read_text() == (target / "b").read_text()
    assert [child.name for child in target.parent.iterdir()] == ["m"]


def test_a_folder_that_cannot_be_put_in_place_is_an_error(tmp_path):
    (tmp_path / "m").write_text("a file in the way")
    with (
        pytest.raises(FetchError, match=r"cannot be written.*OUTRIDER_HOME"),
        cache.atomic_folder(tmp_path / "m") as folder,
    ):
        (folder / "a").write_text("x")
    assert [child.name for child in tmp_path.iterdir()] == ["m"]


# --- Hugging Face ids ---------------------------------------------------------------------------------------------


class Hub:
    """Plays the hub: one repository at one commit, and a note of what was asked."""

    def __init__(self, tmp_path: Path, files: tuple[str, ...] = ("config.json", "model.safetensors")) -> None:
        self.tmp_path, self.asked, self.error = tmp_path, [], None
        siblings = [SimpleNamespace(rfilename=name, size=10) for name in files]
        self.info = SimpleNamespace(sha=SHA, siblings=siblings)

    def model_info(self, repo, *, revision, files_metadata):
        self.asked.append(("info", repo, revision))
        if self.error:
            raise self.error
        return self.info

    def snapshot_download(self, repo, *, revision, allow_patterns, ignore_patterns, local_files_only=False):
        self.asked.append(("download", repo, revision, local_files_only))
        self.patterns = allow_patterns, ignore_patterns
        folder = self.tmp_path / "hub" / "models--org--name" / "snapshots" / revision
        if local_files_only and not folder.exists():
            raise LocalEntryNotFoundError("not here")
        return str(folder if folder.exists() else snapshot(self.tmp_path, revision))


@pytest.fixture
def play(monkeypatch, tmp_path):
    def start(**options) -> Hub:
        double = Hub(tmp_path, **options)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: double)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", double.snapshot_download)
        return double

    return start


def test_a_home_that_cannot_be_written_still_takes_models_of_the_hub(play, tmp_path):
    double = play()
    (tmp_path / "home").write_text("a file where the folder should be")
    assert resolve("org/name").is_dir()
    assert double.asked[-1] == ("download", "org/name", SHA, False)


def test_names_are_checked_without_fetching_anything(play, tmp_path):
    double = play()
    for name in ("demo", "org/name", "org/name@v2", str(model_folder(tmp_path / "model"))):
        hub.check_name(name)
    (tmp_path / "empty").mkdir()
    for name in ("demooo", "", "no.gguf", "org/no.gguf", "a/b/c", str(tmp_path / "empty")):
        with pytest.raises(ConfigError):
            hub.check_name(name)
    assert double.asked == []


def refusal(kind, message="no"):
    return kind(message, response=SimpleNamespace(headers={}, status_code=404, request=None))


@pytest.mark.parametrize(
    ("name", "revision", "asked"),
    [("org/name", None, "main"), ("org/name@v2", None, "v2"), ("org/name", "v2", "v2"), ("org/name@v2", "v2", "v2")],
)
def test_an_id_is_resolved_to_a_commit_and_that_is_fetched(name, revision, asked, play):
    double = play()
    folder = resolve(name, revision=revision)
    assert double.asked == [("info", "org/name", asked), ("download", "org/name", SHA, False)]
    assert folder.name == SHA


def test_two_different_revisions_are_refused(play):
    play()
    with pytest.raises(ConfigError, match="give one of them"):
        resolve("org/name@v1", revision="v2")


def test_only_data_of_known_kinds_is_fetched(play):
    double = play()
    resolve("org/name")
    allowed, ignored = double.patterns
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        INDEX_FILE,
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    never = [
        "modeling.py",
        "pytorch_model.bin",
        "x.pt",
        "x.pth",
        "x.pickle",
        "x.gguf",
        "sub/model.safetensors",
        "consolidated.safetensors",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(names + never, allow_patterns=allowed, ignore_patterns=ignored)
    assert list(kept) == names


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (refusal(GatedRepoError), "terms to be accepted.*hf auth login"),
        (refusal(RepositoryNotFoundError), "no model org/name.*spelling"),
        (refusal(RevisionNotFoundError), "no revision 'main'"),
        (ConnectionError("unreachable"), "could not be fetched.*unreachable.*network.*proxy"),
        (TimeoutError("slow"), "could not be fetched.*slow"),
    ],
)
def test_each_failure_says_what_would_work(error, complaint, play):
    double = play()
    double.error = error
    with pytest.raises(FetchError, match=complaint):
        resolve("org/name")


@pytest.mark.parametrize("revision", [None, "refs/pr/1"])
def test_without_a_network_the_commit_of_last_time_is_used(revision, play):
    double = play()
    folder = resolve("org/name", revision=revision)
    double.error = ConnectionError("unreachable")
    double.asked.clear()
    assert resolve("org/name", revision=revision) == folder
    assert double.asked[-1] == ("download", "org/name", SHA, True)


def test_an_interrupt_is_not_mistaken_for_a_missing_network(play):
    double = play()
    resolve("org/name")
    double.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (("config.json", "pytorch_model.bin"), "pickle"),
        (("model.Q4_K_M.gguf",), "no config.json.*by path"),
        (("config.json", "original/model.safetensors"), "no .safetensors"),
    ],
)
def test_a_repository_of_nothing_loadable_is_refused_before_a_byte_is_fetched(files, complaint, play):
    double = play(files=files)
    with pytest.raises(ConfigError, match=complaint):
        resolve("org/name")
    assert [asked[0] for asked in double.asked] == ["info"]


def test_progress_sees_the_whole_download(play):
    calls = []
    play()
    noting = SimpleNamespace(
        start=lambda label, total: calls.append((label, total)),
        advance=lambda amount: calls.append(amount),
        done=lambda: calls.append("done"),
    )
    resolve("org/name", progress=noting)
    assert calls[0] == ("downloading org/name", 20)
    assert sum(calls[1:-1]) == 20
    assert calls[-1] == "done"


# --- what is here -------------------------------------------------------------------------------------------------


def test_installed_lists_own_and_hub_models_and_no_broken_ones(tmp_path):
    assert installed_models() == []
    own = model_folder(tmp_path / "home" / "models" / "mine")
    model_folder(tmp_path / "home" / "models" / ".half.abc")
    (tmp_path / "home" / "models" / "broken").mkdir()
    damaged = model_folder(tmp_path / "home" / "models" / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 7)
    hubs = snapshot(tmp_path)
    found = installed_models()
    assert [(model.name, model.path) for model in found] == [("mine", own), (f"org/name@{SHA}", hubs)]
    for model in found:
        assert model.architecture == "LlamaForCausalLM"
        assert model.parameters == 2 * 3 + 5
        assert model.size == sum(file.stat().st_size for file in own.iterdir())
