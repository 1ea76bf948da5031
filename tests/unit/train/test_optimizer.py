"""Muon and AdamW against their published formulas in float64, and against torch's own AdamW."""

import math

import pytest
import torch
from torch import nn

from outrider.train.optimizer import Muon, orthogonalized


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.tall = nn.Linear(12, 8, bias=False), nn.Linear(8, 12)
        self.table = nn.Embedding(40, 4)

    def forward(self, x):
        return self.tall(self.wide(x)).pow(2).mean() + self.table(torch.arange(5)).sin().sum()


def make():
    torch.manual_seed(3)
    return Small()


def train(module, optimizer, steps=5):
    inputs = torch.randn(steps, 6, 12, generator=torch.Generator().manual_seed(1))
    for x in inputs:
        module(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_without_matrices_it_is_adamw():
    own, theirs = make(), make()
    optimizer = Muon(own, betas=(0.9, 0.95), momentum=0.95, weight_decay=0.1, matrices=False)
    optimizer.set_rate(0.01)
    train(own, optimizer)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1))
    for (name, one), other in zip(own.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_singular_values_come_near_one():
    found = orthogonalized(torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    vectors = torch.linalg.svd(torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    exact = vectors.U @ vectors.Vh
    assert torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), 0) > 0.97


def reference(gradients, weight, rate, momentum):
    """Keller Jordan's update, with the scale that makes it AdamW's size."""
    moving, weight = torch.zeros_like(weight), weight.clone()
    for gradient in gradients:
        moving = momentum * moving + (1 - momentum) * gradient
        ahead = momentum * moving + (1 - momentum) * gradient
        x = ahead / ahead.norm()
        x = x.T if x.shape[0] > x.shape[1] else x
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if x.shape != weight.shape else x
        weight = weight - rate * 0.2 * math.sqrt(max(weight.shape)) * x
    return weight


def test_matrices_move_by_the_published_update():
    module = make()
    before = {name: each.detach().clone().double() for name, each in module.named_parameters()}
    gradients = {name: [] for name in before}
    optimizer = Muon(module, betas=(0.9, 0.95), momentum=0.9, weight_decay=0.0)
    optimizer.set_rate(0.05)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for name, each in module.named_parameters():
            each.grad = torch.randn(each.shape, generator=generator)
            gradients[name].append(each.grad.double())
        optimizer.step()
    now = dict(module.named_parameters())
    for name in ("wide.weight", "tall.weight"):
        expected = reference(gradients[name], before[name], 0.05, 0.9)
        torch.testing.assert_close(now[name].double(), expected, rtol=1e-3, atol=1e-5)
    for name in ("tall.bias", "table.weight"):
        assert now[name].sub(before[name]).abs().max().item() == pytest.approx(0.05 * 4, rel=0.5), "AdamW's steps"
