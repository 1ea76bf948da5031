"""The proof of an engine: a model and its drafter, on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, cast

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.drafters.base import DrafterConfig
from outrider.llm import LLM
from outrider.prove.checks import Check
from outrider.prove.enumerate_rules import check_rules
from outrider.prove.evalues import threshold
from outrider.prove.journal import Journal, Task
from outrider.prove.plain_passes import PlainPasses, Text, max_rounding, measure_rounding
from outrider.prove.probes import ProbeConfig
from outrider.prove.sampled import TOKENS, DrawPlan, draw_row, pool_rows, pooled_tests
from outrider.prove.settings import MIN_VOCAB, Options, TextCase, option_rows, option_values, stop_cases, text_cases
from outrider.prove.texts import FEW_VARIANTS, MIN_TOLERANCE, TIE_FACTOR, VARIANTS, PlainTexts, TextChecks
from outrider.verify.base import Mode, Rule

CHUNK = 8  # texts that are generated together
LIKELY = 64
MAX_SAMPLED_PROMPTS = 3
MAX_SAMPLED_PROMPT = 49
MIN_DRAWS = 16  # of a row
SEED = 20_000
ENGINE_OPTIONS: dict[str, Any] = {"adaptive": False, "max_round_tokens": 2048}
"""Options of each LLM: drafts are always made, and a draft model reads the whole batch's prompts before it drafts."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSettings:
    """What to prove, and how thoroughly."""

    drafter: str | DrafterConfig
    modes: tuple[Mode, ...] = ("seeded", "distribution")
    rule: Rule = "block"
    draws: int = 1536
    """Texts drawn for the sampled tests. Mode `seeded` takes half as many: it also compares sampled texts by token."""
    max_tokens: int = 24
    """Max tokens of each text that is compared token by token."""
    prompts: tuple[Text, ...] = field(default=())


class LocalProof:
    """The tasks of a proof. Only one engine is open at a time, since some drafters change how the target runs."""

    def __init__(self, llm: LLM, settings: ProofSettings, journal: Journal) -> None:
        """llm: the model with its drafter, in the first mode and with ENGINE_OPTIONS. The proof closes it."""
        self.settings, self.journal, self.loaded = settings, journal, llm.loaded
        if self.loaded.target.vocab_size < MIN_VOCAB:
            raise ConfigError(f"prove needs a vocabulary of at least {MIN_VOCAB} tokens")
        self.max_batch = llm.max_batch
        self.passes, self.plain = PlainPasses(self.loaded.target), PlainTexts()
        self._llm, self._key = llm, ("drafter", settings.modes[0])
        self._probe_texts: dict[int, tuple[Token, ...]] = {}
        self.sampled_prompts = [_whole_pages(prompt) for prompt in settings.prompts[:MAX_SAMPLED_PROMPTS]]
        names = option_rows(option_values(range(LIKELY)))
        self.row_count = len(names)
        self.limit = threshold(len(settings.modes) * (len(names) + pooled_tests(names)))

    def tasks(self) -> Iterator[Task]:
        """The tasks, in an order in which each comes after those whose results it needs."""
        yield Task("rounding", self._rounding)
        for mode in self.settings.modes:
            yield Task(f"rules, {mode}", lambda mode=mode: check_rules(mode, self.settings.rule))
            for at, piece in _chunks(self._cases(mode)):
                yield Task(f"texts, {mode}, {at}", lambda m=mode, c=piece: self._texts(m, c))
            for case in self._special():
                yield Task(f"texts, {mode}, {case.name}", lambda m=mode, c=case: self._texts(m, [c]))
            yield Task(f"texts, {mode}, stops", lambda m=mode: self._texts(m, self._stops(m, self._engine(m))))
            yield Task(f"drafts, {mode}", lambda mode=mode: self._drafts(mode))
            for plan in self._plans(self.settings.draws // (2 if mode == "seeded" else 1)):
                yield Task(f"sampled, {mode}, {plan.name}", lambda m=mode, p=plan: [self._draw(m, p)])
            yield Task(f"pooled, {mode}", lambda mode=mode: self._pooled(mode))
        for at, piece in _chunks(self._cases(self.settings.modes[0])):
            yield Task(f"known texts, {at}", lambda c=piece: self._probes(c))
        yield Task("known texts, stops", lambda: self._probes(self._stops(self.settings.modes[0], self._probe())))

    def close(self) -> None:
        self._llm.close()

    # engines

    def _engine(self, mode: Mode) -> LLM:
        return self._use(("drafter", mode), self.settings.drafter, mode)

    def _probe(self) -> LLM:
        mode = self.settings.modes[0]
        return self._use(("probe", mode), ProbeConfig(texts=self._probe_texts), mode)

    def _use(self, key: tuple[str, Mode], drafter: str | DrafterConfig, mode: Mode) -> LLM:
        if key != self._key:
            self._llm.close()
            options: dict[str, Any] = {"max_batch": self.max_batch} | ENGINE_OPTIONS
            self._llm = LLM(self.loaded, drafter=drafter, mode=mode, rule=self.settings.rule, **options)
            self._key = key
        return self._llm

    # what is asked for

    def _rows(self, prompt: Text) -> dict[str, Options]:
        (logits,) = self.passes.logits_after([prompt])
        return option_rows(option_values(logits.topk(LIKELY).indices.tolist()))

    def _cases(self, mode: Mode) -> list[TextCase]:
        """The texts to compare. In mode `distribution` only greedy ones: others may differ from plain decoding's."""
        prompts = self.settings.prompts
        cases = text_cases(prompts, self._rows(self.sampled_prompts[0]), self.settings.max_tokens, SEED)
        return [case for case in cases if mode == "seeded" or case.params.greedy]

    def _stops(self, mode: Mode, llm: LLM) -> list[TextCase]:
        """Texts with stops, made from the first greedy text and, in mode `seeded`, the first sampled one."""
        base = [case for case in self._cases(mode) if case.name in ("greedy, prompt 1", "temperature 0.8, prompt 1")]
        found = [(case, self.plain.of(llm, case)) for case in base]
        return stop_cases({case.name: (case, text.text, text.tokens) for case, text in found})

    def _special(self) -> Iterator[TextCase]:
        """Texts with other options than those of sampling: a prediction, where the drafter uses one, and a JSON schema,
        where the library for it is installed."""
        prompt, tokens = self.settings.prompts[0], self.settings.max_tokens
        params = SamplingParams(max_tokens=2 * tokens, seed=SEED - 1)
        if self._llm.drafter.traits.uses_prediction:
            text = self.loaded.tokenizer.decode(list(prompt))
            yield TextCase(name="greedy, prediction", prompt=prompt, params=params, more={"prediction": text})
        if find_spec("llguidance") is not None:
            schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
            yield TextCase(name="greedy, JSON schema", prompt=prompt, params=params, more={"response_format": schema})

    def _plans(self, total: int) -> list[DrawPlan]:
        """A plan for each row of options, with the prompts in turn. total: the texts to draw for all plans together."""
        plans: list[DrawPlan] = []
        rows = [self._rows(prompt) for prompt in self.sampled_prompts]
        draws = max(MIN_DRAWS, total // self.row_count)
        for at, name in enumerate(rows[0]):
            which = at % len(rows)
            own: Options = {"temperature": 1.0, "max_tokens": TOKENS, "seed": SEED + 10_000 * at}
            params = SamplingParams(**(own | rows[which][name]))
            plans.append(DrawPlan(name, self.sampled_prompts[which], params, draws))
        return plans

    # tasks

    def _rounding(self) -> Iterator[Check]:
        """Check the size of rounding. It comes first, since it decides which differences are ties."""
        target = self.loaded.target
        found = measure_rounding(target, self.settings.prompts[:MAX_SAMPLED_PROMPTS])
        bound = max_rounding(self.loaded.format)
        yield Check(
            group="rounding",
            name="logits, read alone, batched, or several tokens at once",
            status="holds" if found <= bound else "fails",
            detail=f"differ by at most {found:.2g}; more than {bound:g} would be no rounding of {self.loaded.format}",
            figures={"rounding": found, "bound": bound},
        )

    @property
    def rounding(self) -> float:
        return self.journal.done["rounding"][0].figures["rounding"]

    def _text_checks(self) -> TextChecks:
        return TextChecks(self.passes, self.plain, self.rounding, self.loaded.tokenizer.eos_ids)

    def _texts(self, mode: Mode, cases: Seq[TextCase]) -> Iterable[Check]:
        names = VARIANTS if all(case.is_plain for case in cases) else FEW_VARIANTS
        return self._text_checks().run(self._engine(mode), cases, mode, names)

    def _probes(self, cases: Seq[TextCase]) -> Iterable[Check]:
        """Check the same texts with a drafter that knows them in advance: see `probes.py`."""
        mode, own = self.settings.modes[0], self._probe()
        texts = [self.plain.of(own, case) for case in cases]
        for case, text in zip(cases, texts, strict=True):
            seed = cast(int, case.params.seed)
            self._probe_texts[seed] = max(self._probe_texts.get(seed, ()), text.tokens, key=len)
        return self._text_checks().run(own, cases, f"{mode}, known texts as drafts", FEW_VARIANTS)

    def _drafts(self, mode: Mode) -> Iterator[Check]:
        """Check that anything was drafted in the compared texts: otherwise they say nothing about speculation."""
        checks = [c for key, done in self.journal.done.items() if key.startswith(f"texts, {mode},") for c in done]
        drafted = sum(check.figures["drafted"] for check in checks)
        accepted = sum(check.figures["accepted"] for check in checks)
        wanted = self._engine(mode).drafter.traits.max_tokens > 0
        detail = f"{drafted} tokens drafted, {accepted} accepted in {len(checks)} texts"
        if wanted and not drafted:
            detail += "; give --prompts that it drafts for"
        yield Check(
            group="texts",
            name=f"{mode}: drafts were made",
            status="not checked" if wanted and not drafted else "holds",
            detail=detail,
            figures={"drafted": drafted, "accepted": accepted},
        )

    def _draw(self, mode: Mode, plan: DrawPlan) -> Check:
        tolerance = TIE_FACTOR * self.rounding / plan.params.temperature + MIN_TOLERANCE
        return draw_row(self._engine(mode), plan, self.passes, tolerance, self.limit)

    def _pooled(self, mode: Mode) -> list[Check]:
        rows = [c for key, done in self.journal.done.items() if key.startswith(f"sampled, {mode},") for c in done]
        drafted = sum(row.figures["drafted"] for row in rows)
        missing = not drafted and self._engine(mode).drafter.traits.max_tokens > 0
        made = Check(
            group="sampled",
            name=f"{mode}: drafts were made in sampled texts",
            status="not checked" if missing else "holds",
            detail=f"{drafted} tokens drafted" + ("; give --prompts that it drafts for" if missing else ""),
            figures={"drafted": drafted},
        )
        return [*pool_rows(mode, rows, self.limit), made]


def _chunks(cases: Seq[TextCase]) -> Iterator[tuple[int, Seq[TextCase]]]:
    """Pieces of CHUNK cases, numbered from 1."""
    return ((at // CHUNK + 1, cases[at : at + CHUNK]) for at in range(0, len(cases), CHUNK))


def _whole_pages(prompt: Text) -> Text:
    """The beginning of the prompt, one token longer than whole pages: later draws share all but that token."""
    length = min(len(prompt), MAX_SAMPLED_PROMPT)
    return prompt[: (length - 1) // 16 * 16 + 1] if length > 16 else prompt
