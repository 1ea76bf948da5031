"""Products on blocks: values are the gguf package's, sums are float64's, bits do not depend on company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_files import FILE_KINDS, random_blocks, values_of
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models.blocks import BlockLinear
from outrider.models.linear import quantize_int4, quantize_int8
from outrider.native.library import Library
from outrider.native.tensors import BlockTensor, Kind, int4_blocks, int8_blocks
from outrider.runners.threads import use_threads

ROWS, COLUMNS = 75, 512  # 75 is no multiple of a strip
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
every_kind = pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)


def inputs(rows: int, columns: int = COLUMNS) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 3


def eight_bits(x: Tensor) -> np.ndarray:
    """What a product multiplies with, in float64: blocks of 32, rounded to 255 levels."""
    blocks = x.numpy().reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    levels = np.rint(blocks * np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), 0).astype(np.float32))
    return (levels.astype(np.float64) * (most / np.float32(127))).reshape(len(x), -1)


def assert_product(tensor: BlockTensor, weight: np.ndarray, x: Tensor) -> None:
    exact = x.double().numpy() if tensor.kind in FLOATS else eight_bits(x)
    y = BlockLinear((tensor,))(x).double().numpy()
    size = np.abs(exact) @ np.abs(weight.T.astype(np.float64))  # of what is summed
    assert (np.abs(y - exact @ weight.T.astype(np.float64)) <= 1e-6 * size).all()


@every_kind
def test_values_are_those_of_the_gguf_package(native: Library, kind: Kind):
    blocks = random_blocks(kind, ROWS, COLUMNS)
    tensor = BlockTensor.pack(native, kind, blocks, COLUMNS)
    assert np.array_equal(tensor.rows(torch.arange(ROWS)).numpy(), values_of(kind, blocks))


@every_kind
def test_sums_are_those_of_float64(kernels: Library, kind: Kind):
    blocks = random_blocks(kind, ROWS, COLUMNS)
    assert_product(BlockTensor.pack(kernels, kind, blocks, COLUMNS), values_of(kind, blocks), inputs(25))


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8], ids=lambda kind: kind.name)
def test_our_own_formats(kernels: Library, kind: Kind):
    weight = torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(2))
    if kind is Kind.INT4:
        levels, scales = quantize_int4(weight)
        scale, zero = scales.float().transpose(0, 1).unbind(-1)  # [out, groups]
        packed = (levels.view(ROWS, -1, 32) - 8) * scale[..., None] + zero[..., None]
        blocks = int4_blocks(levels, scales)
    else:
        levels, scales = quantize_int8(weight)
        packed, blocks = levels * scales.float()[:, None], int8_blocks(levels, scales)
    tensor = BlockTensor.pack(kernels, kind, blocks, 96)
    assert torch.equal(tensor.rows(torch.arange(ROWS)), packed.reshape(ROWS, 96))
    assert_product(tensor, packed.reshape(ROWS, 96).numpy(), inputs(13, 96))


@every_kind
def test_a_rows_bits_do_not_depend_on_others_or_on_threads(kernels: Library, kind: Kind):
    product = BlockLinear((BlockTensor.pack(kernels, kind, random_blocks(kind, ROWS, COLUMNS), COLUMNS),))
    x = inputs(33)
    with use_threads(2):
        whole = product(x)
    for width in (*range(1, 18), 21, 28):
        for threads in (1, 2):
            with use_threads(threads):
                assert torch.equal(product(x[:width]), whole[:width]), f"bits move at {width} rows"
                assert torch.equal(product(x[-width:]), whole[-width:]), f"bits move at {width} rows"


@every_kind
def test_wider_registers_give_the_same_bits(native: Library, kind: Kind):
    before = native.kernels
    product = BlockLinear((BlockTensor.pack(native, kind, random_blocks(kind, ROWS, COLUMNS), COLUMNS),))
    names = (b"avx2", b"avx512", b"amx", b"neon", b"neon-dot")
    found = [product(inputs(30)) for name in names if native.call("use_kernels", name)]
    native.call("use_kernels", before.encode())
    assert all(torch.equal(each, found[0]) for each in found)


def test_tensors_side_by_side_with_a_bias(kernels: Library):
    kinds = (Kind.Q4_K, Kind.Q6_K, Kind.Q8_0)
    parts = [BlockTensor.pack(kernels, kind, random_blocks(kind, 21 + i, 256), 256) for i, kind in enumerate(kinds)]
    bias, x = torch.randn(66), inputs(7, 256)
    alone = torch.cat([BlockLinear((part,))(x) for part in parts], 1)
    assert torch.equal(BlockLinear(parts, bias)(x), alone + bias)


@every_kind
def test_rows_in_another_order_taken_and_put(native: Library, kind: Kind):
    blocks = random_blocks(kind, ROWS, COLUMNS)
    values = torch.from_numpy(values_of(kind, blocks))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    tensor = BlockTensor.pack(native, kind, blocks, COLUMNS, order)
    everything = torch.arange(ROWS)
    assert torch.equal(tensor.rows(everything), values[order])
    chosen = torch.tensor([74, 0, 17, 17, 33])
    taken = tensor.take(chosen)
    assert torch.equal(taken.rows(torch.arange(5)), values[order][chosen])
    taken.put(torch.tensor([1, 4]), tensor, torch.tensor([20, 21]))
    assert torch.equal(taken.rows(torch.arange(5)), values[order][torch.tensor([74, 20, 17, 17, 21])])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 9, 18])
def test_a_row_that_is_no_number_says_so_and_stays_alone(kernels: Library, rows: int, broken: float):
    product = BlockLinear((BlockTensor.pack(kernels, Kind.Q4_1, random_blocks(Kind.Q4_1, 32, 64), 64),))
    x = inputs(rows, 64)
    whole = product(x)
    for row in range(rows):
        faulty = x.clone()
        faulty[row, 7 * row % 64] = broken
        y = product(faulty)
        others = torch.arange(rows) != row
        assert y[row].isnan().all()
        assert torch.equal(y[others], whole[others])
    assert not product(torch.zeros(rows, 64)).any()


def quantized(kernels: Library, x: Tensor) -> list[np.ndarray]:
    """Rows in 8 bits, [rows, blocks, ..] each: numbers, d, d times their sum, sums of halves, what 8-bit levels add."""
    count, blocks = len(x), -(-x.shape[1] // 32)
    kinds = ((np.int8, 32), (np.float32, 1), (np.float32, 1), (np.int32, 2), (np.int32, 1))
    found = [np.zeros((count * blocks, each), kind) for kind, each in kinds]
    kernels.call("quantize", x.data_ptr(), count, x.shape[1], *(each.ctypes.data for each in found))
    groups = [np.arange(first, min(first + 16, count)) for first in range(0, count, 16)]
    at = [rows[0] * blocks + len(rows) * np.arange(blocks) + rows[:, None] - rows[0] for rows in groups]
    return [each[np.concatenate(at)] for each in found]


@pytest.mark.parametrize("columns", [64, 75, 80])
def test_rows_in_eight_bits_are_those_of_the_formula_in_any_company(kernels: Library, columns: int):
    x = inputs(21, columns)
    x[3], x[6, :32] = 0, 0
    x[9] *= 1e-38  # 127 / its largest is infinite
    alone = [quantized(kernels, row[None]) for row in x]
    for count in range(1, 22):
        for each, single in zip(quantized(kernels, x[:count]), zip(*alone, strict=True), strict=True):
            assert each.tobytes() == np.concatenate(single[:count]).tobytes(), f"bits move at {count} rows"
    levels, d, d_sums, sums, _ = (np.concatenate(each) for each in zip(*alone, strict=True))
    blocks = np.pad(x.numpy(), ((0, 0), (0, -columns % 32))).reshape(21, -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = np.where(most > 1e-36, np.float32(127) / np.maximum(most, np.float32(1e-36)), np.float32(0))
    assert np.array_equal(levels, np.rint(blocks * scale))
    assert np.array_equal(d, most / np.float32(127))
    assert np.array_equal(sums, levels.reshape(21, -1, 2, 16).sum(-1, dtype=np.int32))
    assert np.array_equal(d_sums, d * sums.sum(-1, keepdims=True).astype(np.float32))


def test_what_does_not_fit_is_refused(native: Library):
    blocks = random_blocks(Kind.Q4_1, 16, 64)
    with pytest.raises(OutriderError, match="whole blocks"):
        BlockTensor.pack(native, Kind.Q4_1, blocks, 63)
    with pytest.raises(OutriderError, match="bytes are not those"):
        BlockTensor.pack(native, Kind.Q4_1, blocks[:, :-1], 64)
    with pytest.raises(OutriderError, match="order"):
        BlockTensor.pack(native, Kind.Q4_1, blocks, 64, torch.full((16,), 16))
    tensor = BlockTensor.pack(native, Kind.Q4_1, blocks, 64)
    with pytest.raises(OutriderError, match="no such row"):
        tensor.rows(torch.tensor([16]))
    with pytest.raises(OutriderError, match="no such row"):
        tensor.take(torch.tensor([-1]))
    with pytest.raises(OutriderError, match="another width"):
        BlockLinear((tensor,))(torch.zeros(1, 128))
