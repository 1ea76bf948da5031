"""An edit to a file, most of which stays unchanged: the file itself is sent as the prediction.

    outrider serve demo                   # in one terminal
    python examples/code_completion.py    # in another
    python examples/code_completion.py --file mine.py --instruction "rename n to count" --start "def f(count):"

The edit is typed up to some line, and the model completes the file. The demo model is very small:
it carries such an edit to the end, and rarely makes one by instruction alone. Larger ones do.

The prediction never changes the output; draft tokens are taken from it. Accepted ones cost one
forward pass for many tokens, and are counted in the response's usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from openai import APIConnectionError, OpenAI

FILE = '''\
def read_settings(path):
    """The settings in a file, one `key=value` a line."""
    settings = {}
    with open(path) as file:
        for line in file:
            key, value = line.split("=")
            settings[key.strip()] = value.strip()
    return settings


def write_settings(path, settings):
    """Write settings to a file, one `key=value` a line."""
    with open(path, "w") as file:
        for key, value in settings.items():
            file.write(f"{key}={value}\\n")
'''
INSTRUCTION = "read the settings as UTF-8"
START = '''\
def read_settings(path):
    """The settings in a file, one `key=value` a line."""
    settings = {}
    with open(path, encoding="utf-8") as file:'''


def main() -> None:
    parser = argparse.ArgumentParser(description="Edit a file, with the file as the prediction.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--file", type=Path, help="what to edit; a short one by default")
    parser.add_argument("--instruction", default=INSTRUCTION)
    parser.add_argument("--start", help="the beginning of the edited file, as far as it is typed")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    code = args.file.read_text() if args.file else FILE
    if args.start is None:
        args.start = "" if args.file else START
    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
    # two salts, so that the second request shares no cache with the first
    plain, seconds_plain = edit(client, args, code, {"speculation": {"off": True}, "cache_salt": "plain"})
    prediction = {"type": "content", "content": code}
    predicted, seconds = edit(client, args, code, {"prediction": prediction, "cache_salt": "predicted"})

    print(args.start + predicted.choices[0].text)
    details = predicted.usage.completion_tokens_details
    print(f"prediction: {details.accepted_prediction_tokens} tokens accepted, ", end="")
    print(f"{details.rejected_prediction_tokens} rejected, {predicted.usage.completion_tokens} written")
    print(f"passes: {passes(plain)} without it, {passes(predicted)} with it")
    print(f"seconds: {seconds_plain:.2f} without it, {seconds:.2f} with it")
    print(f"identical: {'yes' if plain.choices[0].text == predicted.choices[0].text else 'NO'}")


def edit(client: OpenAI, args: argparse.Namespace, code: str, extra: dict[str, Any]) -> tuple[Any, float]:
    """The edited file, and the seconds it took."""
    fence = "```"
    prompt = f"A file:\n{fence}python\n{code}{fence}\n\nTask: {args.instruction}.\nThe edited file:\n{fence}python\n"
    prompt += args.start
    began = time.perf_counter()
    answer = client.completions.create(
        model=args.model, prompt=prompt, max_tokens=args.max_tokens, temperature=0, stop=[fence], extra_body=extra
    )
    return answer, time.perf_counter() - began


def passes(answer: Any) -> int:
    """The number of forward passes of the target."""
    return answer.metrics["speculative_decoding"]["num_target_passes"]


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as error:
        print(f"error: no server at {error.request.url}; start one: outrider serve demo", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error}; --file is a text file that can be read", file=sys.stderr)
        sys.exit(2)
