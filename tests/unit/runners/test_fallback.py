"""The fallback target against plain, uncached Transformers passes over the same text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.sampling import MAX_TOKENS
from outrider.core.sequence import Span
from outrider.runners.fallback import FallbackRunner, context_of, default_dtype
from outrider.runners.pass_work import Experts

VOCAB, HIDDEN = 61, 32
WIDTHS = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
SIZES = WIDTHS | {"num_attention_heads": 4, "intermediate_size": 48}
GPT2 = hf.GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=HIDDEN, n_layer=2, n_head=4)
CONFIGS: dict[str, hf.PreTrainedConfig] = {
    "gpt2": GPT2,
    "neox": hf.GPTNeoXConfig(**SIZES, max_position_embeddings=128),
    "bloom: alibi": hf.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2, n_head=4),
    "mpt: alibi": hf.MptConfig(vocab_size=VOCAB, d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=128),
    "opt: offset positions": hf.OPTConfig(
        **WIDTHS,
        word_embed_proj_dim=HIDDEN,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=128,
        do_layer_norm_before=True,
    ),
    "roberta: positions from 2": hf.RobertaConfig(**SIZES, max_position_embeddings=128, is_decoder=True),
    "falcon": hf.FalconConfig(**WIDTHS, num_attention_heads=4),
    "phi": hf.PhiConfig(**SIZES),
    "window": hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "window and full": hf.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8),
    "mamba: recurrent": hf.MambaConfig(**WIDTHS, state_size=8),
    "mamba2: recurrent": hf.Mamba2Config(**WIDTHS, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
    "rwkv: a list": hf.RwkvConfig(**WIDTHS, context_length=128),
    "qwen3-next: hybrid": hf.Qwen3NextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "bamba: needs positions": hf.BambaConfig(
        **SIZES,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
    "minimax: a cache of its own class": hf.MiniMaxConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
    ),
}
CROPPED = ("gpt2", "neox", "bloom: alibi", "falcon")
COPIED = ("mamba: recurrent", "mamba2: recurrent", "rwkv: a list", "qwen3-next: hybrid")
TEXT = [int(t) for t in torch.randint(4, VOCAB, (64,), generator=torch.Generator().manual_seed(5))]
# (drafted, accepted) a round: prefill, plain decoding, drafts accepted whole, in part and not at all
ROUNDS = [
    (0, 0),
    (0, 0),
    (4, 4),
    (4, 2),
    (4, 0),
    (3, 1),
    (1, 0),
    (1, 1),
    (5, 2),
    (2, 0),
    (2, 1),
    (5, 5),
    (0, 0),
    (4, 1),
]


def shake(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Random weights large enough that every token read before shows in the logits."""
    rng = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2, generator=rng)
    return model.eval()


def build(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(3)  # what `shake` leaves alone is drawn by Transformers
    return shake(hf.AutoModelForCausalLM.from_config(CONFIGS[name]))


@torch.inference_mode()
def plain(model: hf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: one pass over the whole text, no cache."""
    return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()


def draft_of(place: int, drafted: int, accepted: int) -> Draft:
    """The text itself for `accepted` tokens, then tokens that are not the text's."""
    right = TEXT[place : place + accepted]
    return Draft((*right, *((t + 1) % VOCAB for t in TEXT[place + accepted : place + drafted])))


class Walk:
    """Plays the engine for one sequence: opens, reserves, scores, keeps, reads again what was not kept."""

    def __init__(self, target: FallbackRunner, seq_id: int = 0, prompt: int = 6) -> None:
        self.target, self.id, self.length = target, seq_id, prompt
        self.cached = target.pool.open(seq_id, TEXT[:prompt])
        self.worst = 0.0

    def span(self, drafted: int, accepted: int) -> Span:
        draft = draft_of(self.length, drafted, accepted)
        span = Span(self.id, self.cached, tuple(TEXT[self.cached : self.length]), draft)
        assert self.target.pool.reserve(self.id, span.start + span.width)
        return span

    def commit(self, span: Span, accepted: int) -> None:
        self.cached = self.target.keep(span, range(accepted))
        self.length += accepted + 1
        assert self.cached < self.length

    def round(self, drafted: int, accepted: int) -> None:
        span = self.span(drafted, accepted)
        logits = self.target.score([span]).logits
        expected = plain(self.target.model, [*TEXT[: self.length], *span.draft.tokens])[-span.rows :]
        assert logits.shape == expected.shape
        assert logits.dtype == torch.float32
        self.worst = max(self.worst, (logits - expected).abs().max().item())
        self.commit(span, accepted)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_round_gives_the_logits_of_a_plain_pass(name: str) -> None:
    model = build(name)
    changed = plain(model, [TEXT[0] + 1, *TEXT[1:10]])[-1] - plain(model, TEXT[:10])[-1]
    assert changed.abs().max() > 1e-2  # else a cache that forgot everything would pass
    walk = Walk(FallbackRunner(model, cache_tokens=128))
    for drafted, accepted in ROUNDS:
        walk.round(drafted, accepted)
    assert walk.worst <= 1e-4


@pytest.mark.parametrize("name", CROPPED)
def test_a_cache_that_can_be_cropped_keeps_exactly_what_stands(name: str) -> None:
    target = FallbackRunner(build(name), cache_tokens=128)
    walk = Walk(target)
    for drafted, accepted in ROUNDS:
        span = walk.span(drafted, accepted)
        target.score([span])
        walk.commit(span, accepted)
        assert walk.cached == walk.length - 1


@pytest.mark.parametrize("name", COPIED)
def test_a_cache_that_cannot_be_cropped_is_put_back_unless_the_whole_draft_stands(name: str) -> None:
    walk = Walk(FallbackRunner(build(name), cache_tokens=128))
    walk.round(0, 0)
    assert walk.cached == 6
    walk.round(4, 4)
    assert walk.cached == 6 + 1 + 4
    walk.round(4, 2)  # one token of text: read with the draft, unless the model reads by single tokens anyway
    assert walk.cached == (6 + 1 + 4 + 1 if walk.target.one_by_one else 6 + 1 + 4)
    walk.round(4, 4)
    assert walk.cached == walk.length - 1
    assert walk.worst <= 1e-4


def test_a_window_is_cropped_until_it_is_full() -> None:
    walk = Walk(FallbackRunner(build("window"), cache_tokens=128), prompt=2)
    walk.round(0, 0)
    walk.round(4, 1)  # 7 tokens read, a window of 8
    assert walk.cached == walk.length - 1 == 4
    walk.round(3, 1)  # 8 tokens read: the first has left the cache, which holds what the next one sees
    assert walk.cached == 4
    assert walk.worst <= 1e-4


@pytest.mark.parametrize("name", COPIED)
def test_rejected_drafts_do_not_pile_up_text_to_read_again(name: str) -> None:
    walk = Walk(FallbackRunner(build(name), cache_tokens=128))
    walk.round(0, 0)
    for _ in range(12):
        walk.round(3, 1)
        assert walk.length - walk.cached <= 3 + 2 + 3
    assert walk.worst <= 1e-4


def test_a_draft_on_an_unread_prompt() -> None:
    for name in ("gpt2", "mamba2: recurrent"):
        walk = Walk(FallbackRunner(build(name), cache_tokens=128))
        walk.round(8, 2)
        assert walk.cached >= 6
        walk.round(4, 4)
        assert walk.worst <= 1e-4


@pytest.mark.parametrize("name", ["gpt2", "mamba: recurrent", "rwkv: a list", "window"])
def test_a_prompt_read_in_pieces(name: str) -> None:
    model = build(name)
    target = FallbackRunner(model, cache_tokens=128)
    target.pool.open(0, TEXT[:30])
    target.pool.reserve(0, 30)
    for start in (0, 11, 22):
        span = Span(0, start, tuple(TEXT[start : start + 11]), wanted=False)
        assert target.score([span]).logits.shape == (0, VOCAB)
        assert target.keep(span, ()) == start + 11
    logits = target.score([Span(0, 33, (TEXT[33],))]).logits
    torch.testing.assert_close(logits, plain(model, TEXT[:34])[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "window", "mamba2: recurrent", "rwkv: a list"])
def test_sequences_in_one_batch_do_not_touch_each_other(name: str) -> None:
    target = FallbackRunner(build(name), cache_tokens=256)
    together = [Walk(target, seq_id, prompt) for seq_id, prompt in enumerate((3, 9, 5))]
    alone = [Walk(target, seq_id, prompt) for seq_id, prompt in enumerate((3, 9, 5), start=10)]
    for step in range(6):
        plans = [ROUNDS[step], ROUNDS[step + 3], ROUNDS[-step]]
        spans = [walk.span(*plan) for walk, plan in zip(together, plans, strict=True)]
        logits = target.score(spans).logits.split([span.rows for span in spans])
        for i, walk in enumerate(alone):
            span = walk.span(*plans[i])
            assert torch.equal(target.score([span]).logits, logits[i])
            walk.commit(span, plans[i][1])
            together[i].commit(spans[i], plans[i][1])


@pytest.mark.parametrize("name", ["gpt2", "mamba2: recurrent"])
def test_release_gives_everything_back_and_the_id_can_be_used_again(name: str) -> None:
    target = FallbackRunner(build(name), cache_tokens=128)
    for unpublish in (False, True):
        walk = Walk(target)
        walk.round(0, 0)
        walk.round(4, 2)
        assert target.pool.used == 1
        target.pool.check()
        target.release(0, unpublish=unpublish)
        assert target.pool.used == 0
        assert 0 not in target.pool
        assert walk.worst <= 1e-4
    target.pool.open(1, TEXT[:4])
    target.release(1)  # before anything was read
    assert target.pool.free == target.pool.count == 8


def test_pages_are_counted_and_never_shared() -> None:
    target = FallbackRunner(build("gpt2"), cache_tokens=100, page_size=16)
    assert target.pool.count == 7
    walk = Walk(target, prompt=33)
    walk.round(0, 0)
    target.pool.publish(0, TEXT[:33], 33)
    assert target.pool.open(1, TEXT[:33]) == 0
    walk.round(20, 2)  # pages for 54 tokens while it is scored, for the 36 that are kept after
    assert target.pool.used == 3


def test_what_the_engine_must_not_do_is_refused() -> None:
    target = FallbackRunner(build("gpt2"), cache_tokens=64)
    target.pool.open(0, TEXT[:4])
    target.pool.reserve(0, 16)
    with pytest.raises(OutriderError, match="scores chains only"):
        target.score([Span(0, 0, tuple(TEXT[:4]), Draft((1, 2), parents=(-1, -1)))])
    with pytest.raises(OutriderError, match="has 0 tokens cached, its span says 2"):
        target.score([Span(0, 2, tuple(TEXT[2:4]))])


class Forgetful(hf.GPT2LMHeadModel):
    """Several tokens at once make it forget what is cached, as some recurrent models do."""

    def forward(self, input_ids, past_key_values=None, position_ids=None, use_cache=None):
        past = None if input_ids.shape[1] > 1 else past_key_values
        return super().forward(input_ids, past_key_values=past, position_ids=position_ids, use_cache=use_cache)


class Hoarder(hf.GPT2LMHeadModel):
    """Keeps its cache to itself, so that one text reads on from another."""

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        past = None if past_key_values is None else self.own
        out = super().forward(input_ids, past_key_values=past, use_cache=True)
        self.own = out.past_key_values
        return out


def test_a_model_that_forgets_is_read_one_token_at_a_time() -> None:
    target = FallbackRunner(shake(Forgetful(GPT2)), cache_tokens=128)
    assert target.one_by_one
    walk = Walk(target)
    for drafted, accepted in ROUNDS:
        walk.round(drafted, accepted)
    assert walk.worst <= 1e-4
    assert not FallbackRunner(build("gpt2"), cache_tokens=128).one_by_one


def test_a_model_that_cannot_read_on_is_refused() -> None:
    bert = hf.BertConfig(**SIZES)
    cases: list[tuple[hf.PreTrainedModel, str]] = [
        (hf.BertLMHeadModel(bert), "hands back no cache"),
        (hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=1, n_head=4)), "no cache"),
        (Hoarder(GPT2), "off by .* of their spread"),
    ]
    for model, why in cases:
        with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot be a target.*{why}"):
            FallbackRunner(shake(model), cache_tokens=64)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (GPT2, 128),
        (CONFIGS["neox"], 128),
        (CONFIGS["mpt: alibi"], 128),
        (CONFIGS["bloom: alibi"], MAX_TOKENS),
        (CONFIGS["mamba: recurrent"], MAX_TOKENS),
        (hf.Gemma3Config(text_config=hf.Gemma3TextConfig(**SIZES, max_position_embeddings=96)), 96),
        (
            hf.Phi3Config(
                **SIZES,
                pad_token_id=0,
                max_position_embeddings=512,
                original_max_position_embeddings=64,
                rope_parameters=LONGROPE,
            ),
            64,
        ),
    ],
)
def test_context(config: hf.PreTrainedConfig, context: int) -> None:
    assert context_of(config) == context


def load(folder, dtype: torch.dtype = torch.float32) -> FallbackRunner:
    return FallbackRunner.load(folder, device=torch.device("cpu"), dtype=dtype, cache_tokens=64)


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_a_saved_model_loads_with_its_weights(tmp_path, name: str) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    assert (target.vocab_size, target.context, target.device.type) == (VOCAB, 128, "cpu")
    target.pool.open(0, TEXT[:6])
    logits = target.score([Span(0, 0, tuple(TEXT[:6]))]).logits
    torch.testing.assert_close(logits, plain(model, TEXT[:6])[-1:], rtol=0, atol=1e-5)
    half = load(tmp_path, torch.bfloat16)
    assert half.model.dtype == torch.bfloat16
    half.pool.open(0, TEXT[:6])
    assert half.score([Span(0, 0, tuple(TEXT[:6]))]).logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("stored", "on_cuda"),
    [
        (None, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_a_checkpoint_runs_in_16_bits_on_a_device_and_in_float32_on_the_cpu(
    tmp_path, stored: torch.dtype | None, on_cuda: torch.dtype
) -> None:
    assert default_dtype(stored, torch.device("cuda")) is on_cuda
    copy.deepcopy(build("gpt2")).to(stored or torch.float32).save_pretrained(tmp_path)
    target = FallbackRunner.load(tmp_path, device=torch.device("cpu"), cache_tokens=64)
    assert target.model.dtype is torch.float32
    assert default_dtype(target.model.config.dtype, torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("name", ["gpt2", "falcon", "qwen3-next: hybrid", "minimax: a cache of its own class"])
def test_what_a_pass_reads_is_all_but_the_embedding_and_the_experts_not_chosen(name: str) -> None:
    model = build(name)
    work = FallbackRunner(model, cache_tokens=64).work
    assert work is not None
    embedding = model.get_input_embeddings().weight
    tied = any(weight is embedding for weight in model.get_output_embeddings().parameters())
    total = sum(weight.numel() for weight in model.parameters()) - (0 if tied else embedding.numel())
    assert work.weights + work.expert_weights == total
    assert work.bytes_read(10**6) == pytest.approx(4 * total)
    if name in ("gpt2", "falcon"):
        assert work.experts is None
        assert work.expert_weights == 0
    else:  # four experts a layer, of three matrices each
        inner = model.config.moe_intermediate_size if "qwen3" in name else model.config.intermediate_size
        assert work.experts == Experts(4, 2)
        assert work.expert_weights == 2 * 4 * 3 * HIDDEN * inner


def rewrite(folder, change: Callable[[dict], None]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_code_in_the_folder_is_never_run(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    (tmp_path / "trap.py").write_text("open(__file__ + '.ran', 'w')\nclass C: pass\nclass M: pass\n")
    auto = {"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.M"}
    rewrite(tmp_path, lambda config: config.update(auto_map=auto, attn_implementation="someone/kernel"))
    assert type(load(tmp_path).model) is hf.GPT2LMHeadModel  # a type Transformers knows is its own to run
    rewrite(tmp_path, lambda config: config.update(model_type="unheard-of"))
    with pytest.raises(ConfigError, match="is never run"):
        load(tmp_path)
    assert not list(tmp_path.glob("*.ran"))


def test_what_is_no_causal_model_is_refused(tmp_path) -> None:
    cases = [
        (hf.T5Config(vocab_size=VOCAB), "t5 is an encoder-decoder"),
        (hf.ViTConfig(), "no causal language model head for vit"),
    ]
    for config, why in cases:
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=why):
            load(tmp_path)


def test_weights_must_be_complete_and_safetensors(tmp_path) -> None:
    build("neox").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = next(name for name in weights if "embed_out" in name or "lm_head" in name)
    save_file({name: weight for name, weight in weights.items() if name != head}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack weights of GPTNeoXForCausalLM: 1, '(embed_out|lm_head)"):
        load(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="could not load"):
        load(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_every_round_on_the_device(name: str) -> None:
    walk = Walk(FallbackRunner(build(name).to("cuda"), cache_tokens=128))
    for drafted, accepted in ROUNDS:
        walk.round(drafted, accepted)
    assert walk.worst <= 1e-3


def test_a_cache_that_can_be_cropped_may_be_read_on_from_earlier():
    """What a draft model needs: a span that starts before the end of what is cached takes its place."""
    model = build("gpt2")
    target = FallbackRunner(model, 256)
    assert target.rewinds
    target.pool.open(0, [5])
    assert target.pool.reserve(0, 16)
    target.score([Span(0, 0, (5, 6, 7, 8, 9))])
    got = target.score([Span(0, 2, (11, 12))]).logits
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 11, 12]])).logits[0, -1:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_recurrent_state_does_not_rewind():
    assert not FallbackRunner(build("mamba2: recurrent"), 256).rewinds
