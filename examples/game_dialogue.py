"""Characters of a game that answer within a deadline: answers are JSON, and the same seed gives the same game.

    outrider serve demo                   # in one terminal
    python examples/game_dialogue.py      # in another

All characters of a turn are asked at once. Each has lines that were written for it, as games with
recorded voices do; the model chooses the line, the mood and the gesture. A JSON schema allows
nothing else, and the tokens it forces are drafted: once a line has begun, its rest costs almost
nothing. A character that misses the deadline shrugs, and the server cancels the request when the
client disconnects. Every turn is asked a second time without drafts, to compare.

The demo model, SmolLM2-135M, is very small: left to itself it writes little that makes sense, and
its choice among lines is not always the best one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, APITimeoutError, AsyncOpenAI

WORLD = "A market town in the hills, at dusk. A stranger asks for the road to the old mine."
CHARACTERS = {
    "Mira": (
        "an innkeeper who likes to talk",
        "I am Mira, and this is my inn, where the soup is warm and there is a bed for you.",
        "The way to the old mine is north, over the bridge and two miles up the river.",
        "It is not safe at night, because the wolves come down from the hills.",
    ),
    "Tam": (
        "a guard who trusts nobody",
        "I am Tam, the guard of this gate, and I have never seen you before.",
        "The way to the old mine is closed, and I have orders to let nobody through.",
        "It is not safe at night, and I will not come to look for you.",
    ),
    "Odo": (
        "a miner who lost his lamp",
        "I am Odo, and I work in the mine, or did until I lost my lamp.",
        "The way to the old mine is along the river, and left at the broken wheel.",
        "It is not safe at night, and it is darker still without a lamp.",
    ),
}
"""Who each is, and the lines written for it."""
TURNS = ("Who are you?", "Which way to the old mine?", "Is it safe at night?")
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
    for turn, line in enumerate(TURNS):
        print(f"Stranger: {line}")
        asked = await ask_all(client, args, turn)
        for name, reply in zip(CHARACTERS, asked.replies, strict=True):
            print(f"{name} ({reply['mood']}, {reply['does']}): {reply['says']}")
        late = sum(reply is SHRUG for reply in asked.replies)
        print(f"[turn {turn + 1}: {asked.passes} passes, {asked.seconds:.2f} s, {late} had nothing to say in time]")
        plain = await ask_all(client, args, turn, speculation={"off": True})
        same = "the same" if plain.replies == asked.replies else "other"
        print(f"[without drafts: {plain.passes} passes, {plain.seconds:.2f} s, {same} replies]\n", flush=True)


@dataclass
class Turn:
    """What each character does and says, and what that took."""

    replies: list[dict[str, str]]
    passes: int
    seconds: float


async def ask_all(client: AsyncOpenAI, args: argparse.Namespace, turn: int, **options: Any) -> Turn:
    began = time.perf_counter()
    told = await asyncio.gather(*(speak(client, args, name, turn, options) for name in CHARACTERS))
    return Turn([reply for reply, _ in told], sum(passes for _, passes in told), time.perf_counter() - began)


async def speak(
    client: AsyncOpenAI, args: argparse.Namespace, name: str, turn: int, options: dict[str, Any]
) -> tuple[dict[str, str], int]:
    """What a character does and says next, or a shrug; and the passes of the model that it took."""
    who, *lines = CHARACTERS[name]
    known = "\n".join(lines)
    system = f"{WORLD} You are {name}, {who}. Answer as JSON with says, mood and does. You can say:\n{known}"
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": TURNS[turn]}]
    schema: Any = {"name": "reply", "schema": schema_of(lines), "strict": True}
    try:
        answer: Any = await client.chat.completions.create(
            model=args.model,
            messages=messages,
            max_completion_tokens=args.max_tokens,
            temperature=0.3,
            seed=zlib.crc32(f"{args.seed} {turn} {name}".encode()),
            response_format={"type": "json_schema", "json_schema": schema},
            extra_body={"cache_salt": str(options), **options},  # a cache of its own: neither run reads the other's
        )
    except APITimeoutError:
        return SHRUG, 0
    passes = answer.metrics["speculative_decoding"]["num_target_passes"]
    whole = answer.choices[0].finish_reason == "stop"
    return json.loads(answer.choices[0].message.content) if whole else SHRUG, passes


def schema_of(lines: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "says": {"enum": lines},
            "mood": {"enum": ["friendly", "wary", "afraid"]},
            "does": {"enum": ["nods", "points", "steps back", "shrugs"]},
        },
        "required": ["says", "mood", "does"],
        "additionalProperties": False,
    }


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except APIConnectionError as error:
        print(f"error: no server at {error.request.url}; start one: outrider serve demo", file=sys.stderr)
        sys.exit(2)
