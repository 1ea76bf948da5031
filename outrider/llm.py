"""What a notebook touches: LLM, with generate, stream, chat and compare."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch

from outrider.checkpoints.storage import outrider_home
from outrider.core.errors import ConfigError, OutriderError, RequestError
from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import SamplingParams, Token, short_repr
from outrider.core.sequence import Constraint
from outrider.drafters.base import DrafterConfig, DrafterContext, ModelLoaded, for_target
from outrider.drafters.registry import parse_drafter
from outrider.engine.adaptive import CostMeter
from outrider.engine.arguments import (
    Conversation,
    Message,
    Params,
    Prompt,
    encode_prompt,
    merge_params,
    params_for,
    split_conversations,
    split_prompts,
)
from outrider.engine.calls import Calls, Watch
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.prepare import LateWork, ReadyMark, prepare, start_up
from outrider.engine.progress_line import is_shown
from outrider.engine.rehearsal import rehearse
from outrider.engine.request import EngineLimits, Request, encode_prediction, validate_request
from outrider.engine.results import Comparison, Result
from outrider.engine.scoring import Scoring
from outrider.engine.stats import Stats
from outrider.grammar import GrammarSpec, compile_constraint, read_response_format
from outrider.loading.load import LoadedModel, load
from outrider.loading.machine import draft_errors, memory_for_drafts, speed_facts
from outrider.loading.memory import ReservedMemory
from outrider.models.tokenizer import Tokenizer
from outrider.verify.base import make_verifier


def _read_drafter(drafter: str | DrafterConfig) -> DrafterConfig:
    """The configuration of a drafter that is given as a configuration or by name. ConfigError for anything else."""
    if isinstance(drafter, str):
        return parse_drafter(drafter)
    if isinstance(drafter, type):
        name = drafter.__name__
        raise ConfigError(f"LLM: drafter is the class {name}; give an instance of it, such as {name}()")
    if not isinstance(drafter, DrafterConfig):
        got = short_repr(drafter)
        raise ConfigError(f"LLM: a drafter is a name such as 'suffix:k=3', or a configuration with `build`; got {got}")
    return drafter


def _models_loaded(drafter: DrafterConfig, target: str, revision: str | None) -> list[ModelLoaded]:
    """The models that a drafter loads. What is part of the target's checkpoint gets the target's name and revision."""
    own = target if revision is None else f"{target.partition('@')[0]}@{revision}"
    return [each._replace(model=each.model or own) for each in drafter.traits.loads]


def _draft_needs(
    drafter: DrafterConfig, target: str, revision: str | None, device: str, folder: Path
) -> tuple[int, ReservedMemory]:
    """The max length of a draft and the memory that the drafter's models take. folder: the target's files."""
    drafter = for_target(drafter, folder)
    return drafter.traits.max_tokens, memory_for_drafts(_models_loaded(drafter, target, revision), device)


class LLM:
    """A model and a drafter, ready to answer.

        llm = LLM("demo", drafter="suffix")
        print(llm.generate("The outrider", max_tokens=32).text)

    Not thread-safe; `AsyncLLM` is for many callers. `close`, or the end of a `with` block, frees the model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        drafter: str | DrafterConfig = "auto",
        mode: Literal["seeded", "distribution"] = "seeded",
        rule: Literal["block", "token"] = "block",
        max_batch: int = 8,
        max_round_tokens: int | None = None,
        adaptive: bool = True,
        progress: Any = None,
        **options: Any,
    ) -> None:
        """adaptive: draft where and as far as measured costs and acceptance promise a gain; else always.

        `options` are those of `outrider.load`: device, dtype, quantize, context, cache_tokens, pinned, threads,
        revision.

        A model that is loaded already takes none of them.
        """
        verifier = make_verifier(mode, rule)
        config = _read_drafter(drafter)
        if isinstance(model, str | os.PathLike):
            for name in {"max_draft", "reserved"} & options.keys():
                raise ConfigError(f"LLM: {name} follows from the drafter; set that one's options, as in 'suffix:k=3'")
            model = load(
                os.fspath(model),
                progress=progress,
                max_batch=max_batch,
                max_round_tokens=2048 if max_round_tokens is None else max_round_tokens,
                drafts=partial(
                    _draft_needs, config, os.fspath(model), options.get("revision"), options.get("device", "auto")
                ),
                **options,
            )
        elif not isinstance(model, LoadedModel):
            got = short_repr(model)
            raise ConfigError(f"LLM: a model is a folder, a Hugging Face id, a .gguf file or demo; got {got}")
        elif options:
            raise ConfigError(f"LLM: {', '.join(options)}: this model is loaded already; give load such options")
        config = for_target(config, model.folder)
        self.loaded, self._threads = model, options.get("threads")
        target, self.tokenizer = self.loaded.target, self.loaded.tokenizer
        if max_round_tokens is None:
            max_round_tokens = 128 if target.device.type == "cpu" else 2048
        self.max_round_tokens = max_round_tokens
        self.max_batch, self.mode, self.rule = max_batch, mode, rule
        meter = None
        if adaptive and config.traits.max_tokens:
            meter = CostMeter(target, max_batch, outrider_home() / "costs", speed_facts(self.loaded))
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
            target_folder=self.loaded.folder,
            max_batch=max_batch,
            max_round_tokens=max_round_tokens,
            row_price=meter.row_price(1 + config.traits.max_tokens) if meter else None,
        )
        with start_up():
            self.drafter = config.build(context)
            target.tap(self.drafter.traits.taps)
            prepare(target, self.drafter, verifier, self.tokenizer, limits, progress)
            controller = meter.controller(self.drafter) if meter else None
            if controller is not None:
                rehearse(target, self.drafter, verifier, self.tokenizer, limits, controller)
            self.engine = engine = Engine(
                target,
                self.drafter,
                verifier,
                self.tokenizer,
                eos_ids=self.tokenizer.eos_ids,
                limits=limits,
                controller=controller,
            )
        self._ready = ReadyMark(target.device)
        self.closed = False
        self._calls = Calls(engine)

    @overload
    def generate(self, prompts: str | list[Token], params: Params = None, **options: Any) -> Result: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[Token]], params: Params = None, **options: Any
    ) -> list[Result]: ...
    def generate(
        self, prompts: Any, params: Params = None, *, progress: bool | None = None, **options: Any
    ) -> Result | list[Result]:
        """Complete one prompt, or several together; a prompt is text or token ids.

        params: one for all prompts, or a list with one for each. progress: whether several prompts
        show a progress bar on stderr; None shows it on a terminal. `options`: the fields of
        SamplingParams by name, prediction (text the output is expected to contain), max_draft
        (0 turns speculation off), salt (caches are shared only between equal salts),
        response_format (what the output must match, as in OpenAI's interface) or constraint (the
        same as a `GrammarSpec`, or a constraint of one's own), allow_special_tokens (whether special
        tokens in the prompt are control tokens; by default those in text are, those in messages not).
        """
        return self._answer(*split_prompts(prompts), params, progress, options)

    @overload
    def chat(self, messages: Conversation, params: Params = None, **options: Any) -> Result: ...
    @overload
    def chat(self, messages: list[str] | Seq[Seq[Message]], params: Params = None, **options: Any) -> list[Result]: ...
    def chat(
        self, messages: Any, params: Params = None, *, progress: bool | None = None, **options: Any
    ) -> Result | list[Result]:
        """Answer a conversation, or several together: messages with a role and content, written out by the
        model's template.

        A text is what a user says first. The rest is as for `generate`.
        """
        return self._answer(*split_conversations(messages), params, progress, options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[Event, None, None]:
        """The events of one text as they come. Walking away cancels it. `options` are those of `generate`."""
        request = self.request(prompt, params, **options)
        if request.params.n != 1:
            raise RequestError(f"stream tells one text, got n={request.params.n}; use generate for several")
        (seq_id,) = self._calls.submit(request)
        try:
            yield from self._calls.events(seq_id)
        finally:
            self._calls.drop([seq_id])

    def compare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, watch: Watch | None = None, **options: Any
    ) -> Comparison:
        """Generate twice, plain then speculative, each with cold caches and the same seed.

        A few rounds that are not reported come first, so that neither run pays the costs of a
        first one.
        """
        return self._calls.compare(self.request(prompt, params, **options), watch)

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
        allow_special_tokens: bool | None = None,
        **sampling: Any,
    ) -> Request:
        """What the engine is asked for this prompt."""
        self._check_open()
        params = merge_params(params, sampling)
        if prediction is not None and not self.drafter.traits.uses_prediction:
            name = self.drafter.traits.name
            raise RequestError(f"drafter {name!r} drafts from no prediction; use 'prediction' or 'suffix+prediction'")
        return Request(
            prompt=tuple(encode_prompt(self.tokenizer, prompt, allow_special_tokens)),
            params=params,
            prediction=self._expected(prediction) if prediction else (),
            max_draft=max_draft,
            salt=salt,
            constraint=self._constraint(response_format, constraint, salt),
        )

    def _constraint(
        self, response_format: Mapping[str, Any] | None, constraint: GrammarSpec | Constraint | None, salt: str
    ) -> Constraint | None:
        """The constraint, compiled, from whichever of the two is given; None for neither. RequestError for both."""
        if response_format is not None and constraint is not None:
            raise RequestError("response_format and constraint both say what the answer may be; give one of them")
        wanted = read_response_format(response_format) if constraint is None else constraint
        return compile_constraint(wanted, self.tokenizer, salt) if isinstance(wanted, GrammarSpec) else wanted

    def score_prompt(self, prompt: Prompt, top: int = 0) -> tuple[TokenLogprob, ...]:
        """The log-probability of each token of a text but the first, with the `top` most likely tokens at its place."""
        scoring = self.scoring(tuple(encode_prompt(self.tokenizer, prompt)), top)
        try:
            while not scoring.done:
                if not scoring.step():
                    raise RequestError(f"the cache has no room for a text of {len(scoring.tokens)} tokens; enlarge it")
        finally:
            scoring.close()
        return tuple(scoring.logprobs)

    def scoring(self, tokens: tuple[Token, ...], top: int = 0, salt: str = "") -> Scoring:
        """As `score_prompt`, but piece by piece, with rounds in between. RequestError for an invalid text."""
        self._check_open()
        validate_request(Request(prompt=tokens, params=SamplingParams(logprobs=top)), self.engine.target)
        return Scoring(self.engine.target, tokens, top, salt)

    @property
    def stats(self) -> Stats:
        """The figures of everything answered so far."""
        self._check_open()
        return self.engine.stats

    @property
    def late_work(self) -> LateWork:
        """What was compiled, captured or allocated on a CUDA device since this LLM was made: nothing, normally."""
        return self._ready.late_work

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def close(self) -> None:
        """Cancel what runs and free the model, where nobody else holds it. Nothing can be asked afterwards."""
        if self.closed:
            return
        self.closed = True
        self._calls.drop(list(self._calls.inbox))
        device = self.engine.target.device
        del self.engine, self.drafter, self.loaded, self._calls.engine
        gc.collect()  # the drafter's loader refers back to this object
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<LLM: closed>"
        loaded, drafter = self.loaded, self.drafter.traits.name
        return f"<LLM: {loaded.name}, {loaded.format} on {loaded.target.device}, drafter {drafter}, mode {self.mode}>"

    def _check_open(self) -> None:
        if self.closed:
            raise OutriderError("this LLM is closed; make a new one")

    def _expected(self, prediction: str) -> tuple[Token, ...]:
        """The token ids of a prediction, cut to the target's context."""
        encode = partial(self.tokenizer.encode, special=False)
        return encode_prediction(prediction, encode, self.loaded.target.context)

    def _answer(
        self, prompts: list[Any], single: bool, params: Params, progress: bool | None, options: dict[str, Any]
    ) -> Result | list[Result]:
        """Run prompts or conversations to their end, together."""
        each = params_for(params, len(prompts))
        requests = [self.request(*pair, **options) for pair in zip(prompts, each, strict=True)]
        results = self._calls.finish(requests, shown=is_shown(progress, len(prompts)))
        return results[0] if single else results

    def _load_draft(self, model: str, *, device: str, dtype: str, quantize: str) -> LoadedModel:
        """Load a draft model for the target, with a cache that holds as many tokens."""
        pool = self.loaded.target.pool
        with draft_errors():
            return load(
                model,
                device=device or str(self.loaded.target.device),
                dtype=dtype,
                quantize=quantize,
                cache_tokens=pool.count * pool.size,
                threads=self._threads,
                max_batch=self.max_batch,
                max_round_tokens=self.max_round_tokens,
                max_draft=1,  # in a round a draft model reads at most the last two tokens of a decoding sequence
            )
