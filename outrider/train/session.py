"""A training run from a target's name and a collection to a drafter on disk and the page about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError
from outrider.loading.load import available_memory, choose_device
from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.save import TargetFacts, with_lm_head, write_head
from outrider.models.identity import identify
from outrider.models.load import default_dtype, load_decoder, read_config, weight_bytes
from outrider.train.acceptance import Acceptance, Tally, distinct_bigrams
from outrider.train.block import BlockRecipe, BlockTrainConfig, make_head
from outrider.train.corpus import Corpus, load_corpus
from outrider.train.distributed import Ranks, join_ranks
from outrider.train.draft import DraftModel, DraftRecipe, DraftTrainConfig, make_draft, write_draft
from outrider.train.eagle3 import Eagle3Recipe, Eagle3TrainConfig, make_eagle3
from outrider.train.files import DiskError, write_json, write_text
from outrider.train.loop import Silent, Trainer, Watcher
from outrider.train.measure import Measured, measure_speed
from outrider.train.medusa import MedusaRecipe, MedusaTrainConfig, make_medusa, write_medusa
from outrider.train.report import KindRow, ReportData, report_page, training_plots
from outrider.train.state import FILE, RunState
from outrider.train.steps import Recipe
from outrider.train.target import TrainingTarget
from outrider.train.vocabulary import coverage, frequent_tokens, token_counts

DRAFTER, REPORT, HISTORY = "drafter", "report.html", "history.json"
MEASURED_TOKENS = 128  # of each answer whose speed is measured
PLOTS = ("loss.svg", "tau.svg", "acceptance.svg")
MAX_FILE_BYTES = 15_000_000  # of the drafter's files; more is divided between several
CHANGEABLE = ("max_minutes", "looks", "eval_tokens", "save_seconds")
"""Options that may differ when a run is continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """What to train, from what, and where to."""

    target: str
    answers: Path
    """A folder that `train collect` made."""
    out: Path
    device: str = "auto"
    resume: bool = False
    measured: int = 8
    """Held-out prompts on which the speed is measured at the end; 0: none."""
    with_lm_head: bool = False
    """Write the rows of the target's output head that a reduced vocabulary drafts, for vLLM."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head to be trained, and how."""

    kind: str
    """The drafter that runs it."""
    config: HeadConfig
    recipe: Recipe
    coverage: float | None
    start: str = ""
    """The checkpoint that a draft model begins with."""


def train_block(task: TrainTask, config: BlockTrainConfig, watcher: Watcher | None = None) -> ReportData | None:
    """Train a block head, or continue. Writes the drafter, the plots and the page below `task.out`.

    Returns the data of the page; None where this is not the first of several processes.
    """
    return _train(task, config, plan_block, watcher or Silent())


def train_eagle3(task: TrainTask, config: Eagle3TrainConfig, watcher: Watcher | None = None) -> ReportData | None:
    """Train an EAGLE-3 head, or continue; as `train_block`."""
    return _train(task, config, plan_eagle3, watcher or Silent())


def plan_eagle3(decoder: Decoder, corpus: Corpus, config: Eagle3TrainConfig) -> HeadPlan:
    head_config = config.head_config(decoder.config)
    tokens, covered = _draft_tokens(corpus, head_config.draft_vocab_size)
    head = make_eagle3(head_config, decoder, tokens, config.seed)
    recipe = Eagle3Recipe(head, TrainingTarget(decoder, head_config.taps), config, corpus)
    return HeadPlan("eagle", head_config, recipe, covered)


def train_medusa(task: TrainTask, config: MedusaTrainConfig, watcher: Watcher | None = None) -> ReportData | None:
    """Train Medusa heads, or continue; as `train_block`."""
    return _train(task, config, plan_medusa, watcher or Silent())


def plan_medusa(decoder: Decoder, corpus: Corpus, config: MedusaTrainConfig) -> HeadPlan:
    head_config = config.head_config(decoder.config)
    head = make_medusa(head_config, decoder)
    recipe = MedusaRecipe(head, TrainingTarget(decoder, head_config.taps), config, corpus)
    return HeadPlan("medusa", head_config, recipe, None)


def train_draft(task: TrainTask, config: DraftTrainConfig, watcher: Watcher | None = None) -> ReportData | None:
    """Distil a draft model, or continue; as `train_block`."""
    return _train(task, config, plan_draft, watcher or Silent())


def plan_draft(decoder: Decoder, corpus: Corpus, config: DraftTrainConfig) -> HeadPlan:
    model_config = config.head_config(decoder.config)
    model = make_draft(model_config, decoder, config)
    recipe = DraftRecipe(model, TrainingTarget(decoder, ()), config, corpus)
    return HeadPlan("draft-model", model_config, recipe, None, config.start)


def _draft_tokens(corpus: Corpus, size: int) -> tuple[Tensor | None, float | None]:
    """The tokens that a head of `size` outputs can draft, and their share of the answers' tokens; None: all."""
    if not size:
        return None, None
    counts = token_counts(corpus, corpus.split()[0])
    tokens = frequent_tokens(counts, size)
    return tokens, coverage(counts, tokens)


def plan_block(decoder: Decoder, corpus: Corpus, config: BlockTrainConfig) -> HeadPlan:
    head_config = config.head_config(decoder.config)
    if not head_config.own_mask:
        head_config = replace(head_config, mask_token_id=rarest_token(corpus))
    tokens, covered = _draft_tokens(corpus, head_config.draft_vocab_size)
    head = make_head(head_config, decoder, tokens, config.seed)
    recipe = BlockRecipe(head, TrainingTarget(decoder, head_config.taps), config, corpus)
    return HeadPlan("block", head_config, recipe, covered)


def rarest_token(corpus: Corpus) -> int:
    """The token that occurs least often in prompts and answers, the lowest id of several."""
    return int(np.bincount(corpus.tokens, minlength=corpus.index.vocab_size).argmin())


def _train(task: TrainTask, config: Any, plan: Callable[..., HeadPlan], watcher: Watcher) -> ReportData | None:
    ranks = join_ranks(task.device)
    task = replace(task, device=ranks.device(task.device))
    corpus = load_corpus(task.answers)
    data = _train_head(task, corpus, config, plan, watcher if ranks.first else Silent(), ranks)
    if task.measured and data is not None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the engine takes what is free
        data = replace(data, measured=_measure(task, corpus, data.drafter, watcher))
        write_text(task.out / REPORT, report_page(data))
    return data


def _measure(task: TrainTask, corpus: Corpus, drafter: str, watcher: Watcher) -> Measured:
    """The speed on held-out prompts: of each kind in turn, until there are enough."""
    held = [int(i) for i in corpus.split()[1]]
    seen: dict[int, int] = {}
    turns: list[tuple[int, int]] = []
    for i in held:
        kind = int(corpus.kinds[i])
        seen[kind] = seen.get(kind, 0) + 1
        turns.append((seen[kind], i))
    chosen = [i for _, i in sorted(turns)[: task.measured]]
    prompts = [(corpus.text(i)[: corpus.prompt_lens[i]].tolist(), corpus.index.kinds[corpus.kinds[i]]) for i in chosen]
    tokens = min(MEASURED_TOKENS, corpus.index.max_tokens)
    return measure_speed(task.target, drafter, prompts, max_tokens=tokens, device=task.device, done=watcher.measured)


def _train_head(
    task: TrainTask, corpus: Corpus, config: Any, plan: Callable[..., HeadPlan], watcher: Watcher, ranks: Ranks
) -> ReportData | None:
    if (task.out / FILE).exists() and not task.resume:
        raise ConfigError(f"{task.out} holds a run already; continue it with --resume, or name another folder")
    decoder = load_target(task.target, task.device)
    if corpus.index.vocab_size != decoder.config.vocab_size:
        raise ConfigError(
            f"{task.answers} holds answers of {corpus.index.target} with {corpus.index.vocab_size} tokens, and "
            f"{task.target} has {decoder.config.vocab_size}; collect answers of this target"
        )
    made = plan(decoder, corpus, config)
    if task.with_lm_head and not made.config.draft_vocab_size:
        raise ConfigError(f"the {made.kind} head drafts from the whole vocabulary; leave out --with-lm-head")
    settings = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE}
    settings |= {"kind": made.kind, "answers": f"{corpus.index.prompts} {len(corpus)}", "target": corpus.index.target}
    target = TrainingTarget(decoder, made.config.taps)
    trainer = Trainer(made.recipe, target, corpus, config, task.out, settings, watcher, ranks)
    untrained = _judge(trainer) if ranks.first else None  # before a checkpoint is loaded
    state = trainer.run()
    ranks.leave()
    if untrained is None:
        return None
    trained = _judge(trainer)
    _write_drafter(task, made, decoder)
    data = _report_data(task, made, corpus, state, decoder, (untrained, trained))
    write_json(task.out / HISTORY, state.history)
    for name, plot in zip(PLOTS, training_plots(state.history), strict=True):
        write_text(task.out / name, plot)
    write_text(task.out / REPORT, report_page(data))
    return data


def load_target(name: str, device_name: str) -> Decoder:
    """The target's decoder, without a cache or graphs. ConfigError where it does not fit, or is not native."""
    folder, device = resolve(name), choose_device(device_name)
    config = read_config(folder)
    if config is None:
        raise ConfigError(f"{name}: the native decoder does not support it, so that no head can be trained for it")
    needed = weight_bytes(config, default_dtype(config, device))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if needed > free:
        raise ConfigError(
            f"{name} does not fit on {device}: its weights take {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free; "
            "free memory, or take a smaller target"
        )
    return load_decoder(folder, device=device)


def _judge(trainer: Trainer) -> Tally:
    """The acceptance on all held-out answers."""
    return trainer.judge(trainer.held_out())


def _write_drafter(task: TrainTask, made: HeadPlan, decoder: Decoder) -> None:
    folder, facts = task.out / DRAFTER, TargetFacts(task.target, decoder.config, identify(resolve(task.target)))
    tensors = made.recipe.tensors()
    if made.config.kind == "medusa":
        write_medusa(folder, made.config, tensors, task.target)
        return
    try:
        if made.config.kind == "draft":
            write_draft(folder, cast(DraftModel, made.recipe.head), made.start, resolve(task.target), MAX_FILE_BYTES)
            return
        tensors = with_lm_head(tensors, decoder) if task.with_lm_head else tensors
        write_head(folder, made.config, tensors, facts, tokens=made.recipe.positions, max_file_bytes=MAX_FILE_BYTES)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise DiskError(
            f"{folder} cannot be written ({error}); the training is kept: free some space and continue with --resume"
        ) from error


def _report_data(
    task: TrainTask, made: HeadPlan, corpus: Corpus, state: RunState, decoder: Decoder, found: tuple[Tally, Tally]
) -> ReportData:
    train, held = corpus.split()
    before, after = found
    drafter = task.out / DRAFTER
    weights = decoder.config, decoder.dtype
    return ReportData(
        title=f"{made.kind} drafter for {task.target}",
        target=task.target,
        drafter=f"{made.kind}:model={drafter}",
        answers=len(train),
        tokens=int((corpus.starts[train + 1] - corpus.starts[train]).sum()),
        steps=state.step,
        seconds=state.seconds,
        device=torch.cuda.get_device_name() if decoder.device.type == "cuda" else "the CPU",
        parameters=count_parameters(made.recipe.head),
        target_parameters=weight_bytes(*weights) // decoder.dtype.itemsize,
        size=sum(file.stat().st_size for file in drafter.iterdir()),
        coverage=made.coverage,
        before=before.overall(),
        after=after.overall(),
        kinds=_kind_rows(corpus, held, before.by_kind(), after.by_kind()),
        history=state.history,
        measured=None,
        settings=state.settings,
    )


def count_parameters(head: nn.Module) -> int:
    return sum(each.numel() for each in head.parameters())


def _kind_rows(
    corpus: Corpus, held: np.ndarray[Any, Any], before: list[Acceptance | None], after: list[Acceptance | None]
) -> list[KindRow]:
    rows: list[KindRow] = []
    for k, name in enumerate(corpus.index.kinds):
        own = [int(i) for i in held if corpus.kinds[i] == k]
        greedy = [corpus.text(i)[corpus.prompt_lens[i] :].tolist() for i in own if not corpus.sampled[i]]
        bigrams = float(np.mean([distinct_bigrams(text) for text in greedy])) if greedy else None
        rows.append(KindRow(name, len(own), bigrams, before[k], after[k]))
    return rows
