"""Pairs of tiny models and heads: sound ones, and the same ones broken in one way each."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.append(str(Path(__file__).parents[2] / "conformance"))

from tiny_block import block_config, random_block, save_block
from tiny_eagle import eagle_config, random_eagle, save_eagle
from tiny_medusa import HEADS as MEDUSA_HEADS
from tiny_medusa import LAYERS, medusa_tensors
from tiny_mtp import save_mtp

from outrider.models.load import load_decoder
from outrider.testing.synthetic import SHAPES, synthetic_pair

TEXT = ["the cat sat on the mat 1234", "def f(x): return x + 1", "Where is the House of the Cat?"] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|other|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n</think>{% endif %}"
PADDING = 8
CONTEXT = 2048


@cache
def tokenizer_json() -> dict[str, Any]:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    return json.loads(made.to_str())


def vocab_size() -> int:
    return len(tokenizer_json()["model"]["vocab"])


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(read(file) | values))


def write_tokenizer(folder: Path, made: dict[str, Any], **settings: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(made))
    own = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(own))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


@dataclass(frozen=True)
class Bench:
    """A sound target and draft, and a place for broken copies."""

    target: Path
    draft: Path
    place: Path

    @staticmethod
    def make(place: Path) -> Bench:
        shape = SHAPES["tiny"] | {"vocab_size": vocab_size() + PADDING, "num_hidden_layers": 12}
        shape |= {"max_position_embeddings": CONTEXT}
        target, draft = synthetic_pair(shape, layers=2, agreement=1.0, seed=5).save(place / "sound")
        for folder in (target, draft):
            write_tokenizer(folder, tokenizer_json())
            edit(folder / "config.json", eos_token_id=None)
        return Bench(target, draft, place)

    def copy(self, of: str = "draft") -> Path:
        folder = self.place / "broken" / of
        shutil.copytree(getattr(self, of), folder)
        return folder


Pair = tuple[Path, Path]


def swapped_ids(bench: Bench) -> Pair:
    draft, made = bench.copy(), json.loads(json.dumps(tokenizer_json()))
    vocab = made["model"]["vocab"]
    a, b = list(vocab)[-1], list(vocab)[-2]
    one, two = vocab[a], vocab[b]
    vocab[a], vocab[b] = two, one

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            held[name][[one, two]] = held[name][[two, one]]

    tensors(draft, change)
    write_tokenizer(draft, made)
    return bench.target, draft


def shifted_ids(bench: Bench) -> Pair:
    draft, made = bench.copy(), json.loads(json.dumps(tokenizer_json()))
    vocab = made["model"]["vocab"]
    made["model"]["vocab"] = {token: i + 1 for token, i in vocab.items()} | {"<new>": 0}
    made["added_tokens"] = [token | {"id": token["id"] + 1} for token in made["added_tokens"]]
    write_tokenizer(draft, made)
    return bench.target, draft


def _resize(folder: Path, rows: int) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            old = held[name]
            held[name] = torch.cat([old, torch.zeros(max(0, rows - len(old)), old.shape[1])])[:rows].contiguous()

    tensors(folder, change)
    edit(folder / "config.json", vocab_size=rows)


def short_vocabulary(bench: Bench) -> Pair:
    draft = bench.copy()
    _resize(draft, vocab_size() - 10)
    return bench.target, draft


def padded_vocabulary(bench: Bench) -> Pair:
    draft = bench.copy()
    _resize(draft, vocab_size() + 64)
    return bench.target, draft


def extra_token(bench: Bench) -> Pair:
    draft, made = bench.copy(), json.loads(json.dumps(tokenizer_json()))
    made["added_tokens"].append(made["added_tokens"][0] | {"id": vocab_size(), "content": "<|tool|>"})
    write_tokenizer(draft, made)
    return bench.target, draft


def other_bos(bench: Bench) -> Pair:
    draft = bench.copy()
    write_tokenizer(draft, tokenizer_json(), bos_token=SPECIALS[3])
    return bench.target, draft


def other_eos(bench: Bench) -> Pair:
    draft = bench.copy()
    write_tokenizer(draft, tokenizer_json(), eos_token=SPECIALS[3])
    return bench.target, draft


def unrelated_vocabulary(bench: Bench) -> Pair:
    draft = bench.copy()
    words = {f"w{i}q": i for i in range(vocab_size())} | {"<unk>": vocab_size()}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    write_tokenizer(draft, json.loads(made.to_str()), bos_token=None, eos_token=None)
    return bench.target, draft


def another_tokenizer(bench: Bench) -> Pair:
    """Of the same bytes, with other merges and another order."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=SPECIALS[::-1], initial_alphabet=alphabet)
    made.train_from_iterator(["lorem ipsum dolor sit amet"] * 3, trainer)
    draft = bench.copy()
    write_tokenizer(draft, json.loads(made.to_str()))
    return bench.target, draft


def other_normalizer(bench: Bench) -> Pair:
    draft = bench.copy()
    write_tokenizer(draft, tokenizer_json() | {"normalizer": {"type": "Lowercase"}})
    return bench.target, draft


def other_pre_tokenizer(bench: Bench) -> Pair:
    draft = bench.copy()
    made = tokenizer_json()["pre_tokenizer"] | {"add_prefix_space": True}
    write_tokenizer(draft, tokenizer_json() | {"pre_tokenizer": made})
    return bench.target, draft


def other_template(bench: Bench) -> Pair:
    draft = bench.copy()
    write_tokenizer(draft, tokenizer_json(), chat_template=OTHER_TEMPLATE)
    return bench.target, draft


def no_template(bench: Bench) -> Pair:
    draft = bench.copy()
    write_tokenizer(draft, tokenizer_json(), chat_template=None)
    return bench.target, draft


def thinking_target(bench: Bench) -> Pair:
    target = bench.copy("target")
    write_tokenizer(target, tokenizer_json(), chat_template=THINKING)
    return target, bench.draft


def short_context(bench: Bench) -> Pair:
    draft = bench.copy()
    edit(draft / "config.json", max_position_embeddings=CONTEXT // 4)
    return bench.target, draft


def stretched_positions(bench: Bench) -> Pair:
    draft = bench.copy()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
    edit(draft / "config.json", rope_scaling=yarn)
    return bench.target, draft


def missing_tensor(bench: Bench) -> Pair:
    draft = bench.copy()
    tensors(draft, lambda held: held.pop("model.layers.1.mlp.up_proj.weight"))
    return bench.target, draft


def pickled_weights(bench: Bench) -> Pair:
    draft = bench.copy()
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    return bench.target, draft


def broken_tokenizer(bench: Bench) -> Pair:
    draft = bench.copy()
    (draft / "tokenizer.json").write_text("{")
    return bench.target, draft


def broken_config(bench: Bench) -> Pair:
    draft = bench.copy()
    (draft / "config.json").write_text("{")
    return bench.target, draft


def draft_larger_than_target(bench: Bench) -> Pair:
    return bench.draft, bench.target


def target_itself(bench: Bench) -> Pair:
    return bench.target, bench.target


def recurrent_draft(bench: Bench) -> Pair:
    draft = bench.copy()
    config = {"model_type": "mamba", "state_size": 8, "hidden_size": 32, "vocab_size": vocab_size() + PADDING}
    (draft / "config.json").write_text(json.dumps(config))
    return bench.target, draft


def quantized_draft(bench: Bench) -> Pair:
    draft = bench.copy()
    edit(draft / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    return bench.target, draft


def restricted_licence(bench: Bench) -> Pair:
    draft, target = bench.copy(), bench.copy("target")
    (target / "README.md").write_text("---\nlicense: apache-2.0\n---\n# target\n")
    (draft / "README.md").write_text("---\ntags: [x]\nlicense: cc-by-nc-4.0\n---\n# draft\n")
    return target, draft


def stranger(bench: Bench) -> Pair:
    """A model of the same tokenizer that was trained on something else."""
    draft = bench.copy()

    def change(held: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(9)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            held[name] = torch.randn(held[name].shape, generator=generator)

    tensors(draft, change)
    return bench.target, draft


def not_a_number(bench: Bench) -> Pair:
    draft = bench.copy()
    tensors(draft, lambda held: held["model.norm.weight"].fill_(float("nan")))
    return bench.target, draft


def decoder_of(bench: Bench) -> Any:
    return load_decoder(bench.target, device="cpu")


def eagle3_head(bench: Bench, **options: Any) -> Pair:
    decoder = decoder_of(bench)
    config = eagle_config(decoder.config, draft_vocab_size=200, norm_output=True) if not options else None
    config = config or eagle_config(decoder.config, **options)
    return bench.target, save_eagle(bench.place / "broken" / "eagle3", random_eagle(config, decoder))


def eagle1_head(bench: Bench) -> Pair:
    decoder = decoder_of(bench)
    config = eagle_config(decoder.config, kind="eagle", bias=True)
    return bench.target, save_eagle(bench.place / "broken" / "eagle1", random_eagle(config, decoder))


def block_head(bench: Bench) -> Pair:
    decoder = decoder_of(bench)
    head = random_block(block_config(decoder.config, draft_vocab_size=100), decoder)
    return bench.target, save_block(bench.place / "broken" / "block", head)


def medusa_head(bench: Bench) -> Pair:
    folder = bench.place / "broken" / "medusa"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": LAYERS}))
    config = decoder_of(bench).config
    save_file(medusa_tensors(config.hidden_size, config.vocab_size), folder / "model.safetensors")
    return bench.target, folder


def mtp_module(bench: Bench) -> Pair:
    folder = bench.place / "broken" / "mtp"
    save_mtp(folder, "mimo", decoder_of(bench).config, {"model_type": "mimo"})
    return bench.target, folder


def foreseeing_medusa(bench: Bench) -> Pair:
    """A target that repeats its last token for ever, and heads that know it."""
    target = bench.copy("target")

    def still(held: dict[str, torch.Tensor]) -> None:
        for name in held:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                held[name].zero_()
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    tensors(target, still)
    _, folder = medusa_head(bench)
    table = load_file(target / "model.safetensors")["lm_head.weight"]

    def know(held: dict[str, torch.Tensor]) -> None:
        for name, tensor in held.items():
            held[name] = table.clone() if tensor.shape == table.shape else torch.zeros_like(tensor)

    tensors(folder, know)
    return target, folder


def eagle1_named_eagle3(bench: Bench) -> Pair:
    target, head = eagle1_head(bench)
    given = read(head / "config.json")
    edit(head / "config.json", speculators_model_type="eagle3", transformer_layer_config=given)
    return target, head


def eagle1_with_architecture_of_eagle3(bench: Bench) -> Pair:
    target, head = eagle1_head(bench)
    edit(head / "config.json", architectures=["LlamaForCausalLMEagle3"])
    return target, head


def head_of_other_hidden_size(bench: Bench) -> Pair:
    _, head = eagle3_head(bench)
    shape = SHAPES["tiny"] | {"vocab_size": vocab_size() + PADDING, "hidden_size": 96, "num_attention_heads": 6}
    target = synthetic_pair(shape | {"max_position_embeddings": CONTEXT}, seed=1).save(bench.place / "wide")[0]
    write_tokenizer(target, tokenizer_json())
    return target, head


def head_of_other_vocabulary(bench: Bench) -> Pair:
    target, head = bench.copy("target"), eagle3_head(bench)[1]
    _resize(target, vocab_size() + 64)
    return target, head


def head_beyond_the_layers(bench: Bench) -> Pair:
    target, head = eagle3_head(bench)
    edit(head / "config.json", eagle_aux_hidden_state_layer_ids=[1, 6, 40])
    return target, head


def head_without_a_tensor(bench: Bench) -> Pair:
    target, head = eagle3_head(bench)
    tensors(head, lambda held: held.pop("fc.weight"))
    return target, head


def head_of_other_layers(bench: Bench) -> Pair:
    _, head = eagle3_head(bench)
    edit(head / "config.json", num_target_layers=30)
    return bench.target, head


def draft_tokens_beyond(bench: Bench) -> Pair:
    target, head = eagle3_head(bench)
    tensors(head, lambda held: held["d2t"].add_(1000))
    return target, head


def draft_tokens_twice(bench: Bench) -> Pair:
    target, head = eagle3_head(bench)
    tensors(head, lambda held: held.update(d2t=-torch.arange(len(held["d2t"]))))
    return target, head


@dataclass(frozen=True)
class Case:
    """A pair, and what must be said of it."""

    make: Callable[[Bench], Pair]
    verdict: str
    code: str
    """Of the finding that names what is wrong; empty: nothing is."""
    smoke: bool = False
    exit_code: int = -1
    """-1: what the verdict implies."""

    @property
    def expected_exit(self) -> int:
        implied = {"refuse": 2, "needs cross-vocabulary": 1}.get(self.verdict, 0)
        return implied if self.exit_code < 0 else self.exit_code


USE, PAD, CROSS, REFUSE = "use", "use with padding", "needs cross-vocabulary", "refuse"
BROKEN = [
    Case(swapped_ids, CROSS, "token-ids"),
    Case(shifted_ids, CROSS, "token-ids"),
    Case(another_tokenizer, CROSS, "token-ids"),
    Case(short_vocabulary, CROSS, "rows"),
    Case(padded_vocabulary, PAD, "padding"),
    Case(extra_token, PAD, "extra-tokens"),
    Case(other_bos, CROSS, "bos"),
    Case(other_eos, CROSS, "eos"),
    Case(unrelated_vocabulary, REFUSE, "vocabulary"),
    Case(other_normalizer, USE, "normalizer"),
    Case(other_pre_tokenizer, USE, "pre-tokenizer"),
    Case(other_template, USE, "chat-template"),
    Case(no_template, USE, "chat-template"),
    Case(thinking_target, USE, "thinking"),
    Case(short_context, USE, "context", exit_code=1),
    Case(stretched_positions, USE, "rope"),
    Case(missing_tensor, REFUSE, "weights"),
    Case(pickled_weights, REFUSE, "files"),
    Case(broken_config, REFUSE, "files"),
    Case(broken_tokenizer, REFUSE, "tokenizer"),
    Case(draft_larger_than_target, USE, "size"),
    Case(target_itself, USE, "size"),
    Case(recurrent_draft, REFUSE, "state"),
    Case(quantized_draft, USE, "fallback"),
    Case(restricted_licence, USE, "licence"),
    Case(stranger, REFUSE, "acceptance", smoke=True),
    Case(not_a_number, REFUSE, "weights"),
    Case(eagle1_named_eagle3, REFUSE, "head-kind"),
    Case(eagle1_with_architecture_of_eagle3, USE, "head-kind"),
    Case(head_of_other_hidden_size, REFUSE, "head-hidden"),
    Case(head_of_other_vocabulary, REFUSE, "head-vocabulary"),
    Case(head_of_other_layers, REFUSE, "head-layers"),
    Case(head_beyond_the_layers, REFUSE, "head-taps"),
    Case(head_without_a_tensor, REFUSE, "weights"),
    Case(draft_tokens_beyond, REFUSE, "draft-vocabulary"),
    Case(draft_tokens_twice, REFUSE, "draft-vocabulary"),
    Case(eagle3_head, REFUSE, "acceptance", smoke=True),
]


def sound_pair(bench: Bench) -> Pair:
    return bench.target, bench.draft


GOOD = [
    Case(sound_pair, USE, "", smoke=True),
    Case(foreseeing_medusa, USE, "", smoke=True),
    Case(eagle3_head, USE, ""),
    Case(eagle1_head, USE, ""),
    Case(block_head, USE, ""),
    Case(medusa_head, USE, ""),
    Case(mtp_module, USE, ""),
]
