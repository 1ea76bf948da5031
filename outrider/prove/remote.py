"""The proof of any OpenAI-compatible server, through its API alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from outrider.prove.api import Api, ApiError, Body, Completion
from outrider.prove.checks import Check
from outrider.prove.evalues import LawTest, threshold
from outrider.prove.journal import Journal, Task
from outrider.prove.remote_texts import RemoteCase, Server, check_texts
from outrider.prove.sampled import TOKENS, LawBets, options_of, pool_rows, pooled_tests, row_check
from outrider.prove.settings import PromptText, option_rows
from outrider.prove.stated_law import REST, Law, Stated, stated_law
from outrider.prove.texts import LOGPROB_TOLERANCE, TIE_FACTOR

LISTED = (20, 5)  # numbers of alternatives to ask for at each token; the first that a server accepts is used
SEED = 20_000
MIN_DRAWS = 16
UNLISTED = "\0unlisted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Which server to prove, and how thoroughly."""

    url: str
    plain_url: str | None = None
    model: str | None = None
    key: str = ""
    seeded: bool = False
    """Whether the server promises the same text for the same seed, whatever is drafted: then seeded texts are compared
    too."""
    draws: int = 1536
    max_tokens: int = 24
    batch: int = 16
    prompts: tuple[PromptText, ...] = ()


class RemoteProof:
    """The tasks of a proof over the API."""

    def __init__(self, settings: RemoteSettings, journal: Journal) -> None:
        self.settings, self.journal = settings, journal
        self.server = connect(settings)
        self.told = {"server": self.server.kind.name, "model": self.server.api.model}
        self.prompts = [_text(prompt) for prompt in settings.prompts]
        self.rows = option_rows(remote_options(more=self.server.kind.more))
        self.limit = threshold(len(self.rows) + pooled_tests(self.rows))

    def tasks(self) -> Iterator[Task]:
        """The tasks, in order: the first texts also measure the rounding, which later tasks need."""
        yield Task("server", self._server)
        yield Task("texts, greedy", lambda: check_texts(self.server, self._greedy()))
        yield Task("texts, options", lambda: check_texts(self.server, self._with_options(), self._rounding))
        if self.server.listed:
            for at, (name, options) in enumerate(self.rows.items()):
                yield Task(f"sampled, {name}", lambda n=name, o=options, at=at: [self._draw(n, o, at)])
            yield Task("pooled", self._pooled)

    def _server(self) -> Iterable[Check]:
        server = self.server
        facts = {
            "speculation can be turned off": server.plain is not None,
            "the cache can be left out": bool(server.kind.salt or server.kind.cold),
            "alternatives at each token": server.listed,
            "log-probabilities of prompts": server.echoes,
        }
        yield Check(
            group="server",
            name=f"{server.kind.name} at {server.api.url}",
            status="holds" if server.listed and (server.plain is not None or server.echoes) else "not checked",
            detail=", ".join(f"{name}: {value}" for name, value in facts.items()),
            figures=facts,
        )

    def _greedy(self) -> list[RemoteCase]:
        base = self._base() | {"temperature": 0}
        return [RemoteCase(f"greedy, prompt {i + 1}", prompt, base) for i, prompt in enumerate(self.prompts)]

    def _with_options(self) -> list[RemoteCase]:
        """Stops inside a text, penalties, and, where the server promises them, seeded texts."""
        base = self._base()
        first = self.server.api.complete(self.prompts[0], **base, temperature=0).text
        middle = len(first) // 2
        greedy = base | {"temperature": 0}
        penalties = {"presence_penalty": 0.9, "frequency_penalty": 0.7}
        cases = [
            RemoteCase(f"greedy, penalties, prompt {i + 1}", p, greedy | penalties)
            for i, p in enumerate(self.prompts[:3])
        ]
        if len(first[middle - 1 : middle + 2].strip()) > 1:
            stop = first[middle - 1 : middle + 2]
            cases.append(RemoteCase(f"greedy, stop string {stop!r}", self.prompts[0], greedy | {"stop": [stop]}))
        if self.settings.seeded:
            for i, prompt in enumerate(self.prompts):
                own = base | {"temperature": 0.8, "seed": SEED + i}
                cases.append(RemoteCase(f"temperature 0.8, prompt {i + 1}", prompt, own))
        return cases

    def _base(self) -> Body:
        return {"max_tokens": self.settings.max_tokens} | (
            {"logprobs": self.server.listed} if self.server.listed else {}
        )

    @property
    def _rounding(self) -> float:
        return self.journal.done["texts, greedy"][0].figures["rounding"]

    def _draw(self, name: str, options: Body, at: int) -> Check:
        """Draw many short texts with one row of options, with speculation and in a batch, and compare their law."""
        draws = max(MIN_DRAWS, self.settings.draws // len(self.rows))
        prompt = self.prompts[at % min(3, len(self.prompts))]
        asked = {"temperature": 1.0, "max_tokens": TOKENS, "logprobs": self.server.listed} | options
        bodies = [{"prompt": prompt} | asked | {"seed": SEED + 10_000 * at + i} for i in range(draws)]
        texts = self.server.api.complete_together(bodies, self.settings.batch)
        tolerance = TIE_FACTOR * self._rounding + LOGPROB_TOLERANCE
        text, likely = compare_draws(texts, {"temperature": 1.0} | options, self.server.listed, tolerance)
        found = {"text": text, "likely and rare tokens": likely}
        return row_check(name, found, self.limit, draws=draws, options=options_of(name))

    def _pooled(self) -> Iterable[Check]:
        rows = [c for key, done in self.journal.done.items() if key.startswith("sampled, ") for c in done]
        return pool_rows("server", rows, self.limit)


def compare_draws(
    texts: Seq[Completion], options: dict[str, Any], listed: int, tolerance: float
) -> tuple[LawTest, LawTest]:
    """(text, likely and rare tokens): bets on every token after an output that came before, against the law that the
    server stated when that output came first."""
    laws: dict[tuple[str, ...], Law | None] = {}
    bets = LawBets()
    for text in texts:
        for i, token in enumerate(text.tokens):
            output = text.tokens[:i]
            if output not in laws:  # the listed alternatives may depend on the chosen token: no bet is made on this one
                laws[output] = stated_law(_likeliest(text.top[i], listed - 1), output, options, tolerance)
                continue
            law = laws[output]
            if law is not None:
                known = [*law, UNLISTED]  # tokens outside the law have a probability of 0
                outcome = token if token in law else REST if REST in law else UNLISTED
                chances = torch.tensor([*law.values(), 0.0], dtype=torch.float64)
                bets.add(output, chances, known.index(outcome))
    return bets.text, bets.likely


def _likeliest(top: dict[str, float], count: int) -> Stated:
    """The `count` most likely of the listed tokens: one less than asked for, since servers list the chosen one too."""
    kept = sorted(top, key=lambda token: -top[token])[:count]
    return Stated({token: top[token] for token in kept}, count)


def connect(settings: RemoteSettings) -> Server:
    """Find out the server's kind and abilities, and where its plain texts come from."""
    api = Api(settings.url, settings.key, settings.model)
    kind = api.kind()
    plain: Api | None = None
    off: Body = {}
    if settings.plain_url is not None:
        plain = Api(settings.plain_url, settings.key, settings.model)
        plain.kind()
    elif kind.off is not None:
        plain, off = api, kind.off
    listed = next((count for count in LISTED if _states(api, logprobs=count)), 0)
    echoes = bool(listed) and _states(api, logprobs=2, echo=True)
    return Server(api, plain, off, kind, listed, echoes, settings.batch)


def _states(api: Api, **options: Any) -> bool:
    """Whether a request with these options is answered with log-probabilities, with echo those of the prompt too."""
    try:
        answer = api.complete("One two three four", max_tokens=1, temperature=0, **options)
    except ApiError as error:
        if error.status is None:
            raise
        return False
    return len(answer.top) > (1 if options.get("echo") else 0) and bool(answer.tokens)


def remote_options(*, more: bool) -> dict[str, Body]:
    """One value of each option whose law can be computed from listed tokens. more: also those OpenAI's API lacks."""
    options: dict[str, Body] = {
        "top_p": {"top_p": 0.85},
        "presence_penalty": {"presence_penalty": 0.9},
        "frequency_penalty": {"frequency_penalty": 0.7},
    }
    if more:
        options |= {"top_k": {"top_k": 6}, "min_p": {"min_p": 0.04}, "temperature": {"temperature": 0.7, "top_k": 8}}
    return options


def _text(prompt: PromptText) -> str:
    """The text of a prompt; for messages, that of the last one, since a completion has no roles."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
