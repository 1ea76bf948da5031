"""What a notebook touches: LLM, with generate, stream, chat and compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal, cast, overload

from outrider.core.errors import ConfigError, RequestError
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import SamplingParams, Token, derive_seeds, short_repr
from outrider.core.sequence import Constraint
from outrider.drafters.base import DrafterConfig, DrafterContext
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request, validate_request
from outrider.engine.results import Comparison, Result, build_result
from outrider.engine.scoring import Scoring
from outrider.engine.stats import Stats
from outrider.grammar import GrammarSpec, compile_constraint, read_response_format
from outrider.loading.load import LoadedModel, choose_device, load
from outrider.loading.memory import ReservedMemory, reserved_memory_of
from outrider.verify.base import make_verifier

Message = Mapping[str, Any]
Prompt = str | Seq[Token] | Seq[Message]
"""Text, token ids (whole numbers of any type), or the messages of a conversation."""
Watch = Callable[[Literal["plain", "speculative"], Event], None]
"""Called with each event of a comparison as it comes."""

WARM_UP_TOKENS = 16


def _reserved_memory(config: DrafterConfig, options: Mapping[str, Any]) -> ReservedMemory:
    """What a drafter's models will take of the target's device, where that is a CUDA one."""
    device = choose_device(options.get("device", "auto"))
    if device.type != "cuda":
        return ReservedMemory()
    here = [each for each in config.traits.loads if not each.device or choose_device(each.device) == device]
    return sum((reserved_memory_of(each.model, vocab=each.vocab) for each in here), ReservedMemory())


def _is_id(value: object) -> bool:
    """A whole number of any type, numpy's among them; not True or False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_call(params: object, unknown: Mapping[str, object]) -> None:
    """RequestError for what is no SamplingParams, and for options there are none of."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"the second argument is one SamplingParams for all prompts, got {short_repr(params)}")
    for name, value in unknown.items():
        if name in {f.name for f in fields(SamplingParams)}:
            raise RequestError(f"{name} is a way of sampling: give SamplingParams({name}={short_repr(value)}) instead")
        raise RequestError(f"no option {name!r}; there are prediction, max_draft, salt, response_format, constraint")


class LLM:
    """A model and a drafter, ready to answer.

        llm = LLM("demo", drafter="suffix")
        print(llm.generate("The outrider").text)

    Not thread-safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        drafter: str | DrafterConfig = "suffix",
        mode: Literal["seeded", "distribution"] = "seeded",
        rule: Literal["block", "token"] = "block",
        max_batch: int = 8,
        max_round_tokens: int | None = None,
        progress: Any = None,
        **options: Any,
    ) -> None:
        """`options` are those of `outrider.load`: device, dtype, quantize, context, cache_tokens, pinned, revision.

        A model that is loaded already takes none of them.
        """
        verifier = make_verifier(mode, rule)
        config = parse_drafter(drafter) if isinstance(drafter, str) else drafter
        if isinstance(model, str | os.PathLike):
            for name in {"max_draft", "reserved"} & options.keys():
                raise ConfigError(f"LLM: {name} follows from the drafter; set that one's options, as in 'suffix:k=3'")
            model = load(
                os.fspath(model),
                progress=progress,
                max_batch=max_batch,
                max_round_tokens=2048 if max_round_tokens is None else max_round_tokens,
                max_draft=config.traits.max_tokens,
                reserved=_reserved_memory(config, options),
                **options,
            )
        elif not isinstance(model, LoadedModel):
            got = short_repr(model)
            raise ConfigError(f"LLM: a model is a folder, a Hugging Face id, a .gguf file or demo; got {got}")
        elif options:
            raise ConfigError(f"LLM: {', '.join(options)}: this model is loaded already; give load such options")
        self.loaded = model
        target, self.tokenizer = self.loaded.target, self.loaded.tokenizer
        if max_round_tokens is None:
            max_round_tokens = 128 if target.device.type == "cpu" else 2048
        self.max_round_tokens = max_round_tokens
        limits = EngineLimits(max_batch=max_batch, max_round_tokens=max_round_tokens)
        context = DrafterContext(
            vocab_size=target.vocab_size,
            context=target.context,
            mode=mode,
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.eos_ids,
            device=target.device,
            load_runner=self._load_draft,
            target=target,
            max_batch=max_batch,
            max_round_tokens=max_round_tokens,
        )
        self.max_batch, self.mode, self.rule = max_batch, mode, rule
        self.drafter = config.build(context)
        target.tap(self.drafter.traits.taps)
        self.engine = Engine(
            target,
            self.drafter,
            verifier,
            self.tokenizer,
            eos_ids=self.tokenizer.eos_ids,
            limits=limits,
        )
        self._capture(progress)
        self._salts = 0
        self._inbox: dict[int, list[Event]] = {}

    @overload
    def generate(self, prompts: str | list[Token], params: SamplingParams | None = None, **options: Any) -> Result: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[Token]], params: SamplingParams | None = None, **options: Any
    ) -> list[Result]: ...
    def generate(self, prompts: Any, params: SamplingParams | None = None, **options: Any) -> Result | list[Result]:
        """Complete one prompt, or several together; a prompt is text or token ids.

        `options`: prediction (text the output is expected to contain), max_draft (0 turns
        speculation off), salt (caches are shared only between equal salts), response_format
        (what the output must match, as in OpenAI's interface) or constraint (the same as
        a `GrammarSpec`, or a constraint of one's own).
        """
        if not isinstance(prompts, str | Seq) and not hasattr(prompts, "__array__"):
            raise RequestError(f"a prompt is text or token ids, or a list of either; got {short_repr(prompts)}")
        if len(prompts) > 0 and isinstance(prompts[0], Mapping):
            raise RequestError("generate completes text or token ids; chat answers messages")
        single = isinstance(prompts, str) or (len(prompts) > 0 and _is_id(prompts[0]))
        requests = [self.request(prompt, params, **options) for prompt in ([prompts] if single else prompts)]
        results = self._finish(requests)
        return results[0] if single else results

    def chat(self, messages: str | Seq[Message], params: SamplingParams | None = None, **options: Any) -> Result:
        """Answer a conversation: messages with a role and content, written out by the model's template.

        A text is what a user says first. `options` as for `generate`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, Seq) or not all(isinstance(each, Mapping) for each in messages):
            raise RequestError(f"chat takes a list of messages with a role and content, got {short_repr(messages)}")
        return self._finish([self.request(messages, params, **options)])[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[Event, None, None]:
        """The events of one text as they come. Walking away cancels it."""
        request = self.request(prompt, params, **options)
        if request.params.n != 1:
            raise RequestError(f"stream tells one text, got n={request.params.n}; use generate for several")
        (seq_id,) = self._submit(request)
        try:
            yield from self._events(seq_id)
        finally:
            self._drop([seq_id])

    def compare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, watch: Watch | None = None, **options: Any
    ) -> Comparison:
        """Generate twice, plain then speculative, each with cold caches and the same seed.

        A few rounds that are not reported come first, so that neither run pays the costs of a
        first one.
        """
        request = self.request(prompt, params, **options)
        if request.params.seed is None:
            params = replace(request.params, seed=derive_seeds(request.params)[0])
            request = replace(request, params=params)
        self._warm_up(request)
        undrafted = replace(request, max_draft=0)
        plain = self._finish([self._cold(undrafted)], partial(watch, "plain") if watch else None)
        speculative = self._finish([self._cold(request)], partial(watch, "speculative") if watch else None)
        return Comparison(plain=plain[0], speculative=speculative[0])

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
        max_draft: int | None = None,
        salt: str = "",
        response_format: Mapping[str, Any] | None = None,
        constraint: GrammarSpec | Constraint | None = None,
        **unknown: object,
    ) -> Request:
        """What the engine is asked for this prompt."""
        _check_call(params, unknown)
        if prediction is not None and not self.drafter.traits.uses_prediction:
            name = self.drafter.traits.name
            raise RequestError(f"drafter {name!r} drafts from no prediction; use 'prediction' or 'suffix+prediction'")
        return Request(
            prompt=tuple(self._encode(prompt)),
            params=params or SamplingParams(),
            prediction=self._expected(prediction) if prediction else (),
            max_draft=max_draft,
            salt=salt,
            constraint=self._constraint(response_format, constraint),
        )

    def _constraint(
        self, response_format: Mapping[str, Any] | None, constraint: GrammarSpec | Constraint | None
    ) -> Constraint | None:
        """The one of the two that was given, compiled."""
        if response_format is not None and constraint is not None:
            raise RequestError("response_format and constraint both say what the answer may be; give one of them")
        wanted = read_response_format(response_format) if constraint is None else constraint
        return compile_constraint(wanted, self.tokenizer) if isinstance(wanted, GrammarSpec) else wanted

    def score_prompt(self, prompt: Prompt, top: int = 0) -> tuple[TokenLogprob, ...]:
        """How likely the model finds each token of a text but the first, with the `top` likeliest at its place."""
        scoring = self.scoring(tuple(self._encode(prompt)), top)
        try:
            while not scoring.done:
                if not scoring.step():
                    raise RequestError(f"the cache has no room for a text of {len(scoring.tokens)} tokens; enlarge it")
        finally:
            scoring.close()
        return tuple(scoring.logprobs)

    def scoring(self, tokens: tuple[Token, ...], top: int = 0, salt: str = "") -> Scoring:
        """The same piece by piece, with rounds in between. RequestError if it cannot be done at all."""
        validate_request(Request(prompt=tokens, params=SamplingParams(logprobs=top)), self.engine.target)
        return Scoring(self.engine.target, tokens, top, salt)

    @property
    def stats(self) -> Stats:
        """The figures of everything answered so far."""
        return self.engine.stats

    def _capture(self, progress: Any) -> None:
        """Compile, capture and allocate now what rounds will need, where the runner does such things."""
        for i, what in enumerate(self.loaded.target.capture(self.max_batch, self.drafter.traits.max_tokens + 1)):
            if progress is not None and i == 0:
                progress.start(f"capturing {what.split()[0]}", None)
            if progress is not None:
                progress.advance(1)
        if progress is not None and self.loaded.target.asynchronous:
            progress.done()

    def _cold(self, request: Request) -> Request:
        """The same request, with a salt that no cache has seen."""
        self._salts += 1
        return replace(request, salt=f"compare {self._salts}")

    def _warm_up(self, request: Request) -> None:
        """Take a few rounds like this request's; the end of its prompt twice over gives drafters something to draft."""
        twice = (request.prompt[-WARM_UP_TOKENS:] * 2)[: len(request.prompt)]
        params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=request.params.temperature, ignore_eos=True)
        self._finish([self._cold(replace(request, prompt=twice, params=params))])

    def _encode(self, prompt: Prompt) -> list[Token]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is text, token ids or messages; got {short_repr(prompt)}")
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(cast(Seq[Message], prompt))
        for token in prompt:
            if not _is_id(token):
                raise RequestError(f"a prompt of token ids holds whole numbers, got {short_repr(token)}")
        return [int(cast(Token, token)) for token in prompt]

    def _expected(self, prediction: str) -> tuple[Token, ...]:
        """As ids, no more than a text can hold: every one of them is indexed before the first round."""
        return tuple(self.tokenizer.encode(prediction, special=False)[: self.loaded.target.context])

    def _finish(self, requests: list[Request], watch: Callable[[Event], None] | None = None) -> list[Result]:
        """Run requests to their end, together. Whatever goes wrong, none is left behind."""
        submitted: list[list[int]] = []
        try:
            for request in requests:
                submitted.append(self._submit(request))  # noqa: PERF401 - what was submitted before an error is dropped
            seeds = {i: self.engine.live(i).seq.seed for ids in submitted for i in ids}
            results = [[build_result(list(self._events(i, watch)), seeds[i]) for i in ids] for ids in submitted]
        finally:
            self._drop([i for ids in submitted for i in ids])
        return [replace(first, others=tuple(others)) for first, *others in results]

    def _submit(self, request: Request) -> list[int]:
        ids = self.engine.submit(request)
        self._inbox.update({seq_id: [] for seq_id in ids})
        return ids

    def _events(self, seq_id: int, watch: Callable[[Event], None] | None = None) -> Iterator[Event]:
        """One text's events to its end, moving every other text along; theirs wait in the inbox."""
        inbox = self._inbox[seq_id]
        while True:
            while not inbox:
                if not self.engine.alive(seq_id):  # cancelled by another caller, who got its last event
                    return
                for event in self.engine.step():
                    if event.seq_id in self._inbox:  # else it was submitted to the engine directly
                        self._inbox[event.seq_id].append(event)
            event = inbox.pop(0)
            if watch is not None:
                watch(event)
            yield event
            if event.finish:
                return

    def _drop(self, ids: list[int]) -> None:
        for seq_id in ids:
            self.engine.cancel(seq_id)
            del self._inbox[seq_id]

    def _load_draft(self, model: str, *, device: str, dtype: str, quantize: str) -> LoadedModel:
        """Load a draft model for the target, with a cache that holds as many tokens."""
        pool = self.loaded.target.pool
        return load(
            model,
            device=device or str(self.loaded.target.device),
            dtype=dtype,
            quantize=quantize,
            cache_tokens=pool.count * pool.size,
            max_batch=self.max_batch,
            max_round_tokens=self.max_round_tokens,
            max_draft=1,  # of a decoding sequence it reads at most the last two tokens
        )
