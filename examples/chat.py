"""A chat in the terminal, streamed, with the statistics of every answer.

    outrider serve demo                   # in one terminal
    python examples/chat.py               # in another; an empty line ends it
    python examples/chat.py --sample      # asks what the demo model can answer

It uses OpenAI's own client; only the lines of statistics are special to this server. Every question
is asked a second time without drafts, to compare: --once does not.

The demo model, SmolLM2-135M, is very small: it knows a few simple facts, and can write again what
was said, which is where drafts help most. It is often wrong about anything else.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, OpenAI

SAMPLE = (
    "What is the capital of France?",
    "Write a list of the seven days of the week.",
    "Write the same list again.",
)


@dataclass
class Answer:
    """An answer, and how it came about."""

    text: str = ""
    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    """Draft tokens among them."""
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a served model.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=random.getrandbits(31), help="same seed, same answers")
    parser.add_argument("--sample", action="store_true", help="ask some questions that are given here")
    parser.add_argument("--once", action="store_true", help="do not ask again without drafts")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
    messages: list[Any] = [{"role": "system", "content": args.system}]
    questions = iter(SAMPLE) if args.sample else iter(ask, "")
    for question in questions:
        if args.sample:
            print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = stream(client, messages, args, show=True)
        print(f"\n[{answer.tokens} tokens in {answer.passes} passes, {answer.accepted} of them accepted draft tokens]")
        if not args.once:
            compare(answer, stream(client, messages, args, speculation={"off": True}))
        messages.append({"role": "assistant", "content": answer.text})


def ask() -> str:
    """The next question; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def compare(answer: Answer, plain: Answer) -> None:
    same = "the same text" if plain.text == answer.text else "ANOTHER TEXT"
    print(f"[without drafts: {plain.passes} passes, {same}; {plain.seconds:.2f} s against {answer.seconds:.2f} s]\n")


def stream(
    client: OpenAI, messages: list[Any], args: argparse.Namespace, *, show: bool = False, **options: Any
) -> Answer:
    """The answer, shown while it is generated."""
    began = time.perf_counter()
    chunks = client.chat.completions.create(
        model=args.model,
        messages=messages,
        max_completion_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": str(options), **options},  # a cache of its own: neither run reads the other's
    )
    answer, figures = Answer(), {}
    for chunk in chunks:
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            if show:
                print(choice.delta.content or "", end="", flush=True)
        extra: dict[str, Any] = chunk.model_extra or {}
        figures = extra.get("metrics", {}).get("speculative_decoding", figures)
        answer.tokens = chunk.usage.completion_tokens if chunk.usage else answer.tokens
    answer.seconds = time.perf_counter() - began
    answer.passes, answer.accepted = figures["num_target_passes"], figures["num_accepted_draft_tokens"]
    return answer


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as error:
        print(f"error: no server at {error.request.url}; start one: outrider serve demo", file=sys.stderr)
        sys.exit(2)
