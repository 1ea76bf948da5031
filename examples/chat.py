"""A chat in the terminal, streamed, with the statistics of every answer.

    outrider serve demo                   # in one terminal
    python examples/chat.py               # in another; an empty line ends it

It uses OpenAI's own client; only the line of statistics is special to this server.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a served model.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, help="same seed, same answers")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
    messages: list[Any] = [{"role": "system", "content": args.system}]
    while question := ask():
        messages.append({"role": "user", "content": question})
        answer = stream(client, messages, args)
        messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    """The next question; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def stream(client: OpenAI, messages: list[Any], args: argparse.Namespace) -> str:
    """Print an answer while it is generated, then its statistics. Returns the answer."""
    chunks = client.chat.completions.create(
        model=args.model,
        messages=messages,
        max_completion_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer, figures, tokens = "", {}, 0
    for chunk in chunks:
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        extra: dict[str, Any] = chunk.model_extra or {}
        figures = extra.get("metrics", {}).get("speculative_decoding", figures)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    passes, accepted = figures["num_target_passes"], figures["num_accepted_draft_tokens"]
    print(f"\n[{tokens} tokens in {passes} passes, {accepted} of them accepted draft tokens]", flush=True)
    return answer


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as error:
        print(f"error: no server at {error.request.url}; start one: outrider serve demo", file=sys.stderr)
        sys.exit(2)
