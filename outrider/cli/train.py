"""`outrider train`: collect a target's answers, and train a drafter with them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.options import argument, flatten_options, option
from outrider.cli.screen import Screen
from outrider.cli.train_screen import CollectScreen, TrainScreen
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.train.report import ReportData
    from outrider.train.session import TrainTask

app = typer.Typer(
    name="train",
    help="Train a drafter for a target: first collect its answers, then train on them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Collection."""

    target: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="TARGET")
    prompts: str | None = option(None, "A .jsonl, .txt or .log file, or a folder of them", metavar="PATH")
    out: str | None = option(None, "Folder for the answers; continued if it has some", metavar="FOLDER")
    limit: int | None = option(None, "Take only so many prompts (all)")
    max_tokens: int = option(400, "Max tokens of an answer")
    max_prompt: int = option(1024, "Longer prompts are left out")
    batch: int = option(0, "Sequences at once in a process; 0: by device")
    workers: int = option(0, "Processes; 0: up to 8 on CUDA, else 1")
    seed: int = option(0, "Of the sampled half")
    device: str = option("auto", "cpu, cuda, cuda:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Run."""

    target: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="TARGET")
    answers: str | None = option(None, "Folder that `train collect` made", metavar="FOLDER")
    out: str | None = option(None, "Folder for the drafter and its report", metavar="FOLDER")
    resume: bool = option(False, "Continue the run in --out")
    device: str = option("auto", "cpu, cuda, cuda:1")
    measured: int = option(8, "Prompts to measure the speed on at the end")

    def task(self) -> TrainTask:
        from outrider.train.session import TrainTask

        answers, out = _required("--answers", self.answers), _required("--out", self.out)
        return TrainTask(
            target=self.target,
            answers=answers,
            out=out,
            device=self.device,
            resume=self.resume,
            measured=self.measured,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Optimization. Named and defaulted as in TrainConfig."""

    epochs: float = option(3.0, "How often each answer is read")
    max_minutes: float = option(0.0, "End after this time; 0: no limit")
    length: int = option(1024, "Tokens of a packed row")
    step_tokens: int = option(0, "Tokens of a step; 0: up to 8192")
    pass_tokens: int = option(0, "Tokens of a pass; 0: by device")
    reuse: int = option(4, "Uses of an answer once read, if not all fit")
    adamw: bool = option(False, "All by AdamW, not matrices by Muon")
    lr: float = option(3e-3, "Highest learning rate")
    warmup: float = option(0.04, "Share of the steps with a rising rate")
    weight_decay: float = option(0.0, "AdamW's")
    clip: float = option(1.0, "Longest gradient")
    seed: int = option(0, "Of weights and order")
    looks: int = option(20, "At the held-out answers while training")
    eval_tokens: int = option(65_536, "Held-out tokens read each time")
    save_seconds: float = option(60.0, "Seconds between checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Block head. Named and defaulted as in BlockTrainConfig."""

    block: int = option(7, "Tokens drafted in one pass")
    layers: int = option(2, "Layers of the head")
    taps: str | None = option(None, "Layers of the target to read (three)", metavar="N,N,...")
    intermediate_size: int = option(0, "Of its MLPs; 0: the target's")
    markov_rank: int = option(32, "Of the bias by the token before; 0: none")
    draft_vocab: int = option(16_384, "Tokens it can draft, the most frequent; 0: all")
    ce: float = option(0.1, "Weight of the cross entropy")
    l1: float = option(0.9, "Weight of the distance to the target")
    mask_token: bool = option(False, "Mask by a token's embedding, as vLLM reads")
    confidence: float = option(1.0, "Weight of the confidence; 0: none")
    decay: float = option(4.0, "Position k weighs exp(-k / this)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingOptions:
    """Writing. Of heads that can have a reduced vocabulary."""

    with_lm_head: bool = option(False, "Write its rows of the output head, for vLLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options:
    """EAGLE-3 head. Named and defaulted as in Eagle3TrainConfig."""

    steps: int = option(5, "Tokens of a chain it is trained for")
    layers: int = option(1, "Layers of the head")
    taps: str | None = option(None, "Layers of the target to read (three)", metavar="N,N,...")
    intermediate_size: int = option(0, "Of its MLP; 0: the target's")
    draft_vocab: int = option(16_384, "Tokens it can draft, the most frequent; 0: all")
    decay: float = option(0.8, "Each step weighs this much of the one before")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions:
    """Medusa heads. Named and defaulted as in MedusaTrainConfig."""

    heads: int = option(4, "Tokens drafted in one pass")
    layers: int = option(1, "Residual layers of each head")
    decay: float = option(0.8, "Each head weighs this much of the one before")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """Draft model. Named and defaulted as in DraftTrainConfig."""

    start: str = option("", "Checkpoint to begin with (random layers)", metavar="MODEL")
    layers: int = option(4, "Its layers, without --start as all sizes")
    hidden_size: int = option(0, "0: the target's")
    intermediate_size: int = option(0, "Of its MLPs; 0: in proportion")
    own_embedding: bool = option(False, "Train one, in place of the target's")
    chain: int = option(5, "Tokens of the chains that are judged")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersOptions:
    """Search."""

    target: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="TARGET")
    answers: str | None = option(None, "Folder that `train collect` made", metavar="FOLDER")
    tokens: int = option(4096, "Tokens of answers to search on")
    length: int = option(512, "Tokens of a packed row")
    device: str = option("auto", "cpu, cuda, cuda:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """History."""

    answers: str | None = option(None, "Folder that `train collect` made", metavar="FOLDER")
    out: str | None = option(None, "File for the history", metavar="FILE")
    tokens: int = option(65_536, "Max tokens of its answers")


def collect(given: CollectOptions) -> None:
    """Collect the target's own answers: half greedy, half at temperature 1. Defaults are in brackets."""
    from outrider.train.collect import CollectConfig
    from outrider.train.corpus import load_corpus
    from outrider.train.prompts import read_prompts
    from outrider.train.workers import collect as run

    prompts, out = _required("--prompts", given.prompts), _required("--out", given.out)
    if given.limit is not None and given.limit < 1:
        raise ConfigError(f"--limit is at least 1, got {given.limit}")
    config = CollectConfig(**{f.name: getattr(given, f.name) for f in fields(CollectConfig)})
    found = read_prompts(prompts, given.limit)
    screen = Screen()
    with CollectScreen(screen.notes) as told:
        run(given.target, found, out, config, told.start, told.add)
    corpus = load_corpus(out)
    screen.say(str(out), f": {len(corpus):,} answers, {len(corpus.tokens):,} tokens with their prompts")


def block(run: RunOptions, optimizer: OptimizerOptions, head: BlockOptions, writing: WritingOptions) -> None:
    """Train a block drafter (DSpark): a whole block of tokens in one pass. Defaults are in brackets."""
    from outrider.train.block import BlockTrainConfig
    from outrider.train.session import train_block

    options: dict[str, Any] = _values(optimizer) | _values(head) | {"taps": parse_taps(head.taps)}
    config, task, screen = BlockTrainConfig(**options), replace(run.task(), **_values(writing)), Screen()
    with TrainScreen(screen.notes) as watcher:
        data = train_block(task, config, watcher)
    _say_done(screen, data, task.out)


def eagle3(run: RunOptions, optimizer: OptimizerOptions, head: Eagle3Options, writing: WritingOptions) -> None:
    """Train an EAGLE-3 drafter: a chain of small steps over its own outputs. Defaults are in brackets."""
    from outrider.train.eagle3 import Eagle3TrainConfig
    from outrider.train.session import train_eagle3

    options: dict[str, Any] = _values(optimizer) | _values(head) | {"taps": parse_taps(head.taps)}
    config, task, screen = Eagle3TrainConfig(**options), replace(run.task(), **_values(writing)), Screen()
    with TrainScreen(screen.notes) as watcher:
        data = train_eagle3(task, config, watcher)
    _say_done(screen, data, task.out)


def medusa(run: RunOptions, optimizer: OptimizerOptions, head: MedusaOptions) -> None:
    """Train Medusa heads: small, and blind to the tokens between. Defaults are in brackets."""
    from outrider.train.medusa import MedusaTrainConfig
    from outrider.train.session import train_medusa

    config, task, screen = MedusaTrainConfig(**_values(optimizer), **_values(head)), run.task(), Screen()
    with TrainScreen(screen.notes) as watcher:
        data = train_medusa(task, config, watcher)
    _say_done(screen, data, task.out)


def draft(run: RunOptions, optimizer: OptimizerOptions, model: DraftOptions) -> None:
    """Distil a draft model: a small ordinary model with the target's tokenizer. Defaults are in brackets."""
    from outrider.train.draft import DraftTrainConfig
    from outrider.train.session import train_draft

    config, task, screen = DraftTrainConfig(**_values(optimizer), **_values(model)), run.task(), Screen()
    with TrainScreen(screen.notes) as watcher:
        data = train_draft(task, config, watcher)
    _say_done(screen, data, task.out)


def layers(given: LayersOptions) -> None:
    """Search for the layers to leave out where the target drafts for itself. Defaults are in brackets."""
    from outrider.drafters.layer_skip import write_layers
    from outrider.train.corpus import load_corpus
    from outrider.train.layers import LayerChoice, LayerSearch, search_rows
    from outrider.train.session import load_target

    corpus, screen = load_corpus(_required("--answers", given.answers)), Screen()
    rows = search_rows(corpus, given.tokens, given.length)
    decoder = load_target(given.target, given.device)

    def tell(choice: LayerChoice) -> None:
        screen.note(
            f"without {write_layers(choice.skip)}: {choice.agreement:.2f} of tokens the same, "
            f"{choice.cost:.2f} of the bytes, {choice.speedup:.2f} x with k={choice.k}"
        )

    best = LayerSearch(decoder, rows.to(decoder.device)).search(tell)
    screen.say("expected", f": {best.speedup:.2f} x plain decoding, where time is bytes read")
    if best.speedup <= 1:
        screen.say("advice", ": no layers to leave out pay for this target; use another drafter")
        return
    drafter = f"layer-skip:skip={write_layers(best.skip)},k={best.k}"
    screen.say("use it", f": outrider serve {given.target} --drafter {drafter}")


def ngram(given: NgramOptions) -> None:
    """Make a history for the drafter suffix: answers that share much with others. Defaults are in brackets."""
    from outrider.drafters.history import history_bytes
    from outrider.train.corpus import load_corpus
    from outrider.train.files import write_bytes
    from outrider.train.ngram import choose_answers

    corpus, out, screen = load_corpus(_required("--answers", given.answers)), _required("--out", given.out), Screen()
    chosen = choose_answers(corpus, given.tokens)
    write_bytes(out, history_bytes(chosen, corpus.index.vocab_size))
    screen.say(str(out), f": {len(chosen):,} answers, {sum(map(len, chosen)):,} tokens")
    screen.say("use it", f": outrider serve {corpus.index.target} --drafter suffix:history={out}")


def parse_taps(text: str | None) -> tuple[int, ...]:
    """Layer numbers with commas between them; empty for None."""
    try:
        return tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(
            f"--taps takes layer numbers with commas between them, such as 1,14,27; got {text!r}"
        ) from error


def _say_done(screen: Screen, data: ReportData | None, out: Path) -> None:
    if data is None:  # of several processes, only the first one reports
        return
    screen.say(
        "expected τ on held-out answers",
        f": {data.after.tau:.2f} greedy, {data.after.tau_sampled:.2f} sampled; untrained {data.before.tau:.2f}",
    )
    if data.measured is not None:
        screen.say("measured", f": τ {data.measured.tau:.2f}, {data.measured.speedup:.2f} x plain decoding")
    screen.say("report", f": {out / 'report.html'}")
    slower = data.measured is not None and data.measured.speedup <= 1
    if slower:
        screen.say(
            "not faster", ": here plain decoding is as fast or faster; more answers and more steps may change that"
        )
    screen.say("try it" if slower else "use it", f": outrider serve {data.target} --drafter {data.drafter}")


def _required(name: str, value: str | None) -> Path:
    if value is None:
        raise ConfigError(f"{name} is missing; `outrider train --help` tells what each command needs")
    return Path(value).expanduser()


def _values(options: Any) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(options)}


app.command("collect")(flatten_options(collect))
app.command("block")(flatten_options(block))
app.command("eagle3")(flatten_options(eagle3))
app.command("medusa")(flatten_options(medusa))
app.command("draft")(flatten_options(draft))
app.command("layers")(flatten_options(layers))
app.command("ngram")(flatten_options(ngram))
