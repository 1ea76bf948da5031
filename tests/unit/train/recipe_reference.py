"""A block head as it is published, one block of one text at a time, in float64 and without the package's layers."""

import math

import torch

from outrider.train.packing import PackedRows


def reference_logits(head, tensors, target, ids, anchor, tokens):
    """One block of one text, [K, outputs]: attention by explicit loops over what the block may see, in float64."""
    state = {name: each.double() for name, each in tensors.items()}
    config, decoder = head.config, target.decoder
    features = target_features(target, ids).double()
    heads, groups, dim = config.heads, config.heads // config.kv_heads, config.head_dim

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * state[weight]

    def rotated(x, positions):
        frequencies = config.rope.theta ** (-torch.arange(0, dim, 2).double() / dim)
        angle = torch.tensor(positions).double()[:, None, None] * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    context = norm(features[:anchor] @ state["fc.weight"].T, "hidden_norm.weight")
    block = config.block_size
    x = torch.stack([decoder.weights.embedding[ids[anchor]].double(), *[state["mask_embedding"]] * (block - 1)])
    inside = list(range(anchor, anchor + block))
    for i in range(config.layers):
        part = f"layers.{i}."
        normed = norm(x, f"{part}input_layernorm.weight")

        def project(rows, name, part=part):
            made = (rows @ state[f"{part}self_attn.{name}_proj.weight"].T).view(len(rows), -1, dim)
            return made if name == "v" else norm(made, f"{part}self_attn.{name}_norm.weight")

        q = rotated(project(normed, "q"), inside)
        keys = rotated(project(torch.cat([context, normed]), "k"), [*range(anchor), *inside])
        values = project(torch.cat([context, normed]), "v")
        out = torch.zeros(block, heads * dim, dtype=torch.float64)
        for row in range(block):
            for h in range(heads):
                weights = (keys[:, h // groups] @ q[row, h] / math.sqrt(dim)).softmax(0)
                out[row, h * dim : (h + 1) * dim] = weights @ values[:, h // groups]
        x = x + out @ state[f"{part}self_attn.o_proj.weight"].T
        normed = norm(x, f"{part}post_attention_layernorm.weight")
        gate, up = (normed @ state[f"{part}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ state[f"{part}mlp.down_proj.weight"].T
    hidden = norm(x, "norm.weight")
    logits = hidden @ decoder.weights.head.weight[tokens].double().T
    before = torch.tensor([ids[anchor + k] for k in range(block)])
    markov = state["markov_head.markov_w1.weight"][before] @ state["markov_head.markov_w2.weight"].T
    both = torch.cat([hidden, state["markov_head.markov_w1.weight"][before]], 1)
    stated = both @ state["confidence_head.proj.weight"].T + state["confidence_head.proj.bias"]
    return logits + markov, stated[:, 0]


def draws_of(rows, seed):
    return torch.rand(rows.tokens.shape, generator=torch.Generator().manual_seed(seed))


def one_text(ids):
    tokens, zeros = torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64)
    return PackedRows(tokens, zeros, torch.arange(len(ids))[None], zeros.bool(), zeros)


def target_features(target, ids):
    return target.read(one_text(ids)).features


def target_probs(target, ids):
    hidden = target.read(one_text(ids)).hidden
    return target.logits(hidden).double().softmax(-1)
