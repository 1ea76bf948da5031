"""Prompts and a small collection of a tiny target's answers."""

from outrider.train.collect import CollectConfig
from outrider.train.prompts import ChatPrompt
from outrider.train.workers import collect

SMALL = CollectConfig(max_tokens=24, max_prompt=64, batch=8, workers=1, device="cpu")


def make_prompts(count):
    texts = [f"{'tell' if i % 3 else 'ask'} {i * i}" for i in range(count)]
    return [ChatPrompt(({"role": "user", "content": text},), text.split()[0]) for text in texts]


def run_collect(target, prompts, out, config=SMALL):
    """Collect quietly; returns the answers that were made in this run."""
    made = []
    collect(target, prompts, out, config, lambda total, done: None, lambda answers, tokens: made.append(tokens))
    return made
