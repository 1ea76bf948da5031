"""Characters of a game that answer within a deadline: answers are JSON, and the same seed gives the same game.

    outrider serve demo                   # in one terminal
    python examples/game_dialogue.py      # in another

All characters of a turn are asked at once. Each answer matches a JSON schema; tokens that the
schema forces are drafted and cost almost nothing. A character that misses the deadline shrugs,
and the server cancels the request when the client disconnects.
The demo model is very small: its answers have the right form, and often make little sense.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from typing import Any

from openai import APIConnectionError, APITimeoutError, AsyncOpenAI

WORLD = "A market town in the hills, at dusk. A stranger asks for the road to the old mine."
CHARACTERS = {
    "Mira": "an innkeeper who likes to talk",
    "Tam": "a guard who trusts nobody",
    "Odo": "a miner who lost his lamp",
}
TURNS = ("Good evening. Which way to the old mine?", "Is it safe at night?", "Will one of you come with me?")
REPLY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["friendly", "wary", "afraid"]},
        "does": {"enum": ["nods", "points", "steps back", "shrugs"]},
        "says": {"type": "string", "maxLength": 90},
    },
    "required": ["mood", "does", "says"],
    "additionalProperties": False,
}
SHRUG = {"mood": "wary", "does": "shrugs", "says": "..."}


async def main() -> None:
    parser = argparse.ArgumentParser(description="Let the characters of a game speak.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--deadline", type=float, default=15.0, help="seconds a character has")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer; one cut short is a shrug")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same game")
    args = parser.parse_args()

    key = os.environ.get("OUTRIDER_API_KEY", "none")
    client = AsyncOpenAI(base_url=args.base_url, api_key=key, timeout=args.deadline, max_retries=0)
    past: list[str] = []
    for turn, line in enumerate(TURNS):
        print(f"Stranger: {line}")
        past.append(f"Stranger: {line}")
        began = time.perf_counter()
        replies = await asyncio.gather(*(speak(client, args, name, past, turn) for name in CHARACTERS))
        for name, reply in zip(CHARACTERS, replies, strict=True):
            print(f"{name} ({reply['mood']}, {reply['does']}): {reply['says']}")
            past.append(f"{name}: {reply['says']}")
        late = sum(reply is SHRUG for reply in replies)
        print(
            f"[turn {turn + 1}: {time.perf_counter() - began:.2f} s, {late} had nothing to say in time]\n", flush=True
        )


async def speak(client: AsyncOpenAI, args: argparse.Namespace, name: str, past: list[str], turn: int) -> dict[str, str]:
    """What a character does and says next, or a shrug."""
    system = f"{WORLD} You are {name}, {CHARACTERS[name]}. Answer as JSON with mood, does and says."
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(past)}]
    try:
        answer = await client.chat.completions.create(
            model=args.model,
            messages=messages,
            max_completion_tokens=args.max_tokens,
            temperature=0.8,
            seed=zlib.crc32(f"{args.seed} {turn} {name}".encode()),
            response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": REPLY, "strict": True}},
        )
    except APITimeoutError:
        return SHRUG
    if answer.choices[0].finish_reason != "stop":  # no complete object
        return SHRUG
    reply: dict[str, str] = json.loads(answer.choices[0].message.content or "{}")
    return reply | {"says": " ".join(reply["says"].split())}


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except APIConnectionError as error:
        print(f"error: no server at {error.request.url}; start one: outrider serve demo", file=sys.stderr)
        sys.exit(2)
