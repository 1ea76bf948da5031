"""Traces: when requests arrive and how long they are, read from files of known layouts or generated."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError

LAYOUTS = (
    'lines of {"arrival": seconds, "prompt_tokens": n, "output_tokens": n}; Mooncake\'s {"timestamp": ms, '
    '"input_length", "output_length"}; BurstGPT\'s .csv; the .json that `outrider bench serve --export` writes'
)
GENERATORS = "poisson:rate=2,prompt=50-400,output=100,count=500 or closed:clients=8,prompt=200,output=100,count=500"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    seconds: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    arrivals: tuple[Arrival, ...]
    clients: int = 0
    """The number of clients, each of which sends its next request when one is answered. 0: requests have set times."""

    @property
    def rate(self) -> float:
        """Requests a second; 0 where clients ask one after another."""
        span = self.arrivals[-1].seconds - self.arrivals[0].seconds
        return (len(self.arrivals) - 1) / span if span > 0 else 0.0


def read_trace(name: str) -> Trace:
    """The trace of a file in one of LAYOUTS, or from one of GENERATORS. ConfigError for anything else."""
    kind, _, options = name.partition(":")
    if kind in ("poisson", "closed"):
        return _generate(name, kind, options)
    file = Path(name).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--fleet {name}: {error.strerror}; it is a file, or {GENERATORS}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--fleet {name}: not UTF-8 text; it is {LAYOUTS}") from error
    try:
        found = sorted(_read(file.suffix, text), key=lambda each: each.seconds)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--fleet {name}: not a trace ({_fault(error)}); it is {LAYOUTS}") from error
    if not found or any(each.prompt < 1 or each.output < 1 for each in found):
        raise ConfigError(f"--fleet {name}: no requests, or one without a token of prompt or output")
    return Trace(file.name, tuple(found))


def _read(suffix: str, text: str) -> list[Arrival]:
    if suffix == ".csv":
        rows = csv.DictReader(io.StringIO(text))
        made = [Arrival(float(r["Timestamp"]), int(r["Request tokens"]), int(r["Response tokens"])) for r in rows]
        return [each for each in made if each.output]  # BurstGPT has failed requests among its lines
    if suffix == ".json":
        run = json.loads(text)
        lists = (run["start_times"], run["input_lens"], run["output_lens"])
        return [Arrival(float(t), p, o) for t, p, o in zip(*lists, strict=True) if o]
    lines = enumerate(text.splitlines(), 1)
    return [_record(number, line) for number, line in lines if line.strip()]


def _record(number: int, text: str) -> Arrival:
    """The request in one line of a file. ValueError, with the line's number, where the line holds none."""
    try:
        line: dict[str, Any] = json.loads(text)
        if "input_length" in line:
            return Arrival(line["timestamp"] / 1e3, int(line["input_length"]), int(line["output_length"]))
        return Arrival(float(line["arrival"]), int(line["prompt_tokens"]), int(line["output_tokens"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line {number}: {_fault(error)}") from error


def _fault(error: Exception) -> str:
    """What is wrong with a trace, in terms of the file rather than of Python."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, KeyError):
        return f"without {error}"
    return "a value of another kind" if isinstance(error, TypeError) else str(error)


def _generate(name: str, kind: str, options: str) -> Trace:
    first = {"poisson": "rate", "closed": "clients"}[kind]
    try:
        given = dict(part.split("=", 1) for part in options.split(","))
        unknown = given.keys() - {first, "prompt", "output", "count", "seed"}
        if unknown:
            raise ValueError(f"no option {', '.join(sorted(unknown))}")
        if missing := {first, "prompt", "output"} - given.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        load, count, seed = float(given[first]), int(given.get("count", 500)), int(given.get("seed", 0))
        prompt, output = _range(given["prompt"]), _range(given["output"])
        if load <= 0 or count < 1 or (kind == "closed" and load != int(load)):
            raise ValueError(f"{first}={load:g}, count={count}")
    except ValueError as error:
        raise ConfigError(f"--fleet {name}: {error}; generators are {GENERATORS}") from error
    draw, now, made = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        made.append(Arrival(now, draw.randint(*prompt), draw.randint(*output)))
        now += draw.expovariate(load) if kind == "poisson" else 0.0
    return Trace(name, tuple(made), int(load) if kind == "closed" else 0)


def _range(text: str) -> tuple[int, int]:
    """(lowest, highest) of a text such as `200` or `50-400`; lengths are drawn uniformly between them."""
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"lengths {text}")
    return found


def closed_loop(lengths: Seq[tuple[int, int]], clients: int, name: str = "closed loop") -> Trace:
    """Clients that send requests of these prompt and output tokens, in this order."""
    return Trace(name, tuple(Arrival(0.0, prompt, output) for prompt, output in lengths), clients)
