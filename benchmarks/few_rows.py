"""Which kernel and tile is fastest for each product of a pass of 1 to 16 rows, and what the whole pass gains.

    python benchmarks/few_rows.py [--shapes smollm2-135m qwen-0.5b qwen-1.5b llama-8b] [--seconds 110]

Products run in the order of a pass, without attention, over random weights of more layers than the L2 cache holds, in
a captured graph. Every candidate is checked against float64, then timed alone (one product, layer after layer) and in
the pass beside the best tiles found so far: kernels begin while others end, so that what is best alone need not be best
there. The lines printed last belong in the tables of outrider/kernels/triton_tiles.py. A tile for 2 to 8 rows is the
one whose passes of 2, 4, 6 and 8 rows take least together.

Needs a CUDA device; with TRITON_INTERPRET=1, `--shapes tiny` runs anywhere, for testing this script.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.batch import RowPlaces
from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope, plain_linear
from outrider.kernels.triton_tiles import Tile, direct_tile, few_rows_tile, one_row_tile, small_tile
from outrider.testing.synthetic import SHAPES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
ROWS = {1: (1,), 8: (2, 4, 6, 8), 16: (16,)}
"""Numbers of rows, by the number that they are padded to."""
ALL_ROWS = tuple(rows for group in ROWS.values() for rows in group)
LAYER_BYTES = 220 << 20  # of all layers together: several times the L2 cache
MAX_LAYERS = 30
MAX_ERROR = 5e-3
EPS = 1e-5
MEDIUM, LARGE = 4 << 20, 64 << 20  # bytes of a matrix
ONE_ROW = ((1, 2), (2, 2), (4, 2), (8, 4))  # outputs and warps of blocks of 512 inputs, loaded before the wait
BY_WARPS = {  # outputs, inputs of a warp, warps, stages, ahead: by the least bytes of a matrix that they are tried for
    0: ((8, 64, 4, 3, 4), (8, 64, 8, 3, 4), (8, 128, 4, 3, 2), (16, 64, 4, 3, 4), (16, 64, 8, 3, 4), (8, 64, 2, 3, 5)),
    MEDIUM: ((8, 64, 8, 3, 4), (16, 64, 8, 3, 4), (16, 64, 4, 4, 2), (32, 64, 4, 4, 1), (32, 64, 8, 4, 1)),
    LARGE: ((32, 64, 4, 4, 1), (64, 64, 4, 3, 1), (64, 32, 8, 4, 1)),
}

DIRECT = ((16, 2), (16, 4), (16, 8), (32, 2), (32, 4))  # outputs and warps of tiles straight to the tensor cores


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a layer, or the output head."""

    name: str
    n: int
    k: int
    gated: bool = False
    normed: bool = False
    added: str = ""
    """residual, bias, or nothing."""
    heads: tuple[int, int, int] = (0, 0, 0)
    """Query heads, key/value heads and their dimension, where outputs are rotated."""

    @property
    def bytes(self) -> int:
        return 2 * self.n * (1 + self.gated) * self.k

    def current(self, rows: int) -> Tile:
        """The tile that a pass takes today."""
        direct = None if rows == 1 or INTERPRETED else direct_tile(self.n, self.k, self.gated, rows)
        return direct or small_tile(self.n, self.k, self.gated, rows) or self.split(rows)

    def split(self, rows: int) -> Tile:
        """The same without the kernel for small matrices."""
        if rows == 1:
            return one_row_tile(self.n, self.k, self.gated)
        tile = few_rows_tile(self.n, self.k, self.gated, 16)
        if tile is None:
            raise ValueError(f"no tile for {self.n} outputs and {self.k} inputs: take a shape whose sizes divide by 32")
        return tile

    def candidates(self, padded: int) -> list[Tile]:
        """Tiles to try, the current one first."""
        tiles = [self.current(padded), self.split(padded)]
        if padded == 1:
            tiles += [replace(tiles[1], outputs=more * tiles[1].outputs) for more in (2, 4)]
            tiles.append(replace(tiles[1], ahead=2))
            fewest = 2 if self.heads[0] else 1  # a pair is rotated
            tiles += [Tile(outputs, 512, 1, warps, 1, 4) for outputs, warps in ONE_ROW if outputs >= fewest]
        elif self.bytes < MEDIUM:
            blocks = self.k // tiles[1].inputs
            splits = [s for s in (3, 7, 9) if blocks % s == 0 and not self.gated]
            tiles += [replace(tiles[1], splits=s, ahead=1) for s in splits]
            tiles += [replace(tiles[1], outputs=outputs) for outputs in (16, 32)]
        for outputs, inputs, warps, stages, ahead in BY_WARPS[max(b for b in BY_WARPS if self.bytes >= b)]:
            most = min(ahead, -(-self.k // (inputs * warps)))
            tiles.append(Tile(outputs, inputs, 1, warps, stages, most, by_warps=True))
        if padded > 1 and not INTERPRETED:
            fits = [(o, w) for o, w in DIRECT if self.n % o == 0 and o * self.k * (1 + self.gated) <= 10240 * w]
            tiles += [Tile(outputs, 64, 1, warps, 1, rows=8) for outputs, warps in fits]
        return list(dict.fromkeys(tiles))


def products(shape: str) -> list[Product]:
    """In the order of a pass; the last is the output head."""
    config = SHAPES[shape]
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    bias = "bias" if config["model_type"] == "qwen2" else ""
    return [
        Product("qkv", (heads + 2 * kv) * dim, hidden, normed=True, added=bias, heads=(heads, kv, dim)),
        Product("out", hidden, heads * dim, added="residual"),
        Product("gate_up", wide, hidden, gated=True, normed=True),
        Product("down", hidden, wide, added="residual"),
        Product("head", config["vocab_size"], hidden),
    ]


class Operands:
    """What one product reads and writes: a matrix for each layer, and room for 16 rows."""

    def __init__(self, product: Product, layers: int) -> None:
        self.product = product
        g = torch.Generator(DEVICE).manual_seed(product.n + product.k)
        normal = partial(torch.randn, generator=g, device=DEVICE, dtype=HALF)
        outputs = product.n * (1 + product.gated)
        self.weights = [normal(outputs, product.k) * product.k**-0.5 for _ in range(layers)]
        self.x = normal(16, product.k)
        self.residual = normal(16, product.n) if product.added == "residual" else None
        self.bias = normal(product.n) if product.added == "bias" else None
        heads, kv, dim = product.heads
        self.out = torch.empty(16, product.n, device=DEVICE, dtype=torch.float32 if product.name == "head" else HALF)
        self.q = torch.empty(16, heads, dim, device=DEVICE, dtype=HALF)
        keys, values = torch.empty(2, 16, kv, dim, device=DEVICE, dtype=HALF)
        self.cache = keys, values
        still = torch.tensor([1.0, 0.0], device=DEVICE).repeat(16, dim // 2, 1)  # rotated by no angle
        self.places = RowPlaces(torch.arange(16, device=DEVICE), still)

    def launch(self, rows: int, tile: Tile, scratch: LinearWorkspace, layer: int = 0) -> None:
        x, w, eps = self.x[:rows], self.weights[layer], EPS if self.product.normed else None
        given: dict[str, Any] = {"eps": eps, "tile": tile, "pdl": not INTERPRETED}
        if self.product.heads[0]:
            linear_rope(x, w, self.q[:rows], self.cache, self.places.first(rows), scratch, bias=self.bias, **given)
            return
        residual = None if self.residual is None else self.residual[:rows]
        linear(x, w, self.out[:rows], scratch, residual=residual, gated=self.product.gated, **given)

    def result(self, rows: int) -> Tensor:
        if self.product.heads[0]:
            return torch.cat([self.q[:rows].flatten(1), *(t[:rows].flatten(1) for t in self.cache)], 1)
        return self.out[:rows]

    def judge(self) -> Tensor:
        """float64 [16, n]"""
        added = self.residual if self.bias is None else self.bias
        return plain_linear(
            self.x.double(), self.weights[0].double(), residual=None if added is None else added.double(),
            eps=EPS if self.product.normed else None, gated=self.product.gated,
        )  # fmt: skip

    def error(self, judge: Tensor, rows: int, tile: Tile, scratch: LinearWorkspace) -> float:
        for t in (self.q, self.out, *self.cache):
            t.fill_(torch.nan)
        self.launch(rows, tile, scratch)
        error = (self.result(rows).double() - judge[:rows]).norm() / judge[:rows].norm()
        return float("inf") if bool(error.isnan()) else float(error)


Job = tuple[Product, int, Tile]
"""A product, its rows, and the tile to compile it with."""


def job(product: Product, padded: int, tile: Tile) -> Job:
    """All of 2 to 16 rows share a kernel, other than by warps."""
    return product, padded if padded == 1 or tile.by_warps or tile.rows else 16, tile


def compile_tile(what: Job) -> str:
    """Compile a kernel into the cache that all processes share; what is wrong with it, if something is."""
    product, rows, tile = what
    try:
        Operands(product, 1).launch(rows, tile, LinearWorkspace(DEVICE))
        torch.cuda.synchronize()
    except Exception as error:  # a tile may not fit the device in many ways
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return ""


def compile_all(shapes: list[str], seconds: float) -> dict[Job, str]:
    """What is wrong with each candidate: nothing, or why it is left out. Takes little longer than `seconds`."""
    made = [product for shape in shapes for product in products(shape)]
    jobs = list(dict.fromkeys(job(p, padded, tile) for p in made for padded in ROWS for tile in p.candidates(padded)))
    if INTERPRETED:
        return dict.fromkeys(jobs, "")
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn"))
    futures = {each: pool.submit(compile_tile, each) for each in jobs}
    wait(futures.values(), timeout=seconds)
    pool.shutdown(cancel_futures=True)
    late = "not compiled in time"
    return {each: late if f.cancelled() else str(f.exception() or f.result()) for each, f in futures.items()}


def time_us(launch: Callable[[], None]) -> float:
    """Microseconds of these launches, captured and replayed: the least of three."""
    if INTERPRETED:
        began = time.perf_counter()
        launch()
        return 1e6 * (time.perf_counter() - began)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # `torch.cuda.graph` looks for garbage first, for 0.1 s
        graph.capture_begin()
        launch()
        graph.capture_end()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, replays = list[float](), 8
    for _ in range(4):  # the first warms up
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / replays)
    return min(times[1:])


class Pass:
    """The products of a shape, and for each number of padded rows the tiles found so far."""

    def __init__(self, shape: str) -> None:
        made = products(shape)
        layers = min(MAX_LAYERS, max(2, -(-LAYER_BYTES // sum(p.bytes for p in made[:-1]))))
        self.layers, self.scratch = 2 if INTERPRETED else layers, LinearWorkspace(DEVICE)
        self.operands = [Operands(p, self.layers if p.name != "head" else 1) for p in made]
        self.now = {p: {p2: p.current(p2) for p2 in ROWS} for p in made}
        self.tiles = {p: dict(tiles) for p, tiles in self.now.items()}

    def alone(self, ops: Operands, rows: int, tile: Tile) -> float:
        """Microseconds of one launch."""
        count = len(ops.weights)

        def launch() -> None:
            for layer in range(count):
                ops.launch(rows, tile, self.scratch, layer)

        return time_us(launch) / count

    def whole(self, rows: int, tiles: dict[Product, dict[int, Tile]]) -> float:
        """Microseconds of a pass."""
        padded = next(p for p in ROWS if p >= rows)

        def launch() -> None:
            for layer in range(self.layers):
                for ops in self.operands[:-1]:
                    ops.launch(rows, tiles[ops.product][padded], self.scratch, layer)
            self.operands[-1].launch(rows, tiles[self.operands[-1].product][padded], self.scratch)

        return time_us(launch)

    def choose(self, ops: Operands, wrong: dict[Job, str]) -> None:
        """Try every candidate of one product; print its times and keep the best."""
        product, judge = ops.product, ops.judge()
        print(f"\n{product.name} {product.n} x {product.k}, {product.bytes / 2**20:.2f} MiB: us alone | us of the pass")
        for padded, group in ROWS.items():
            best = float("inf")
            for tile in product.candidates(padded):
                name = f"  {','.join(map(str, group)):>7} rows {say(tile):45}"
                error = 0.0 if wrong[job(product, padded, tile)] else self.error(ops, judge, group, tile)
                if why := wrong[job(product, padded, tile)] or ("" if error < MAX_ERROR else f"WRONG by {error:.1e}"):
                    print(f"{name} left out: {why}")
                    continue
                tried = self.tiles | {product: self.tiles[product] | {padded: tile}}
                alone = [self.alone(ops, rows, tile) for rows in group]
                whole = [self.whole(rows, tried) for rows in group]
                mark = " now" if tile == self.now[product][padded] else ""
                print(name, *(f"{t:6.2f}" for t in alone), "|", *(f"{t:7.1f}" for t in whole), f"{error:.1e}{mark}")
                if sum(whole) < best:
                    best, self.tiles = sum(whole), tried

    def error(self, ops: Operands, judge: Tensor, group: tuple[int, ...], tile: Tile) -> float:
        return max(ops.error(judge, rows, tile, self.scratch) for rows in group)

    def summary(self) -> None:
        """The whole pass now and with the tiles found, and lines for the tables of triton_tiles.py."""
        print("\npass, us   rows", *(f"{rows:8}" for rows in ALL_ROWS))
        for name, tiles in (("now", self.now), ("found", self.tiles)):
            times = [self.whole(rows, tiles) for rows in ALL_ROWS]
            print(f"{name:15}", *(f"{t:8.1f}" for t in times))
            print(f"{'  over one row':15}", *(f"{t / times[0]:8.3f}" for t in times))
        for product, found in self.tiles.items():
            for padded, tile in found.items():
                if tile != self.now[product][padded]:
                    print(table_line(product, padded, tile))


def say(tile: Tile) -> str:
    numbers = f"{tile.outputs}, {tile.inputs}, {tile.splits}, {tile.warps}, {tile.stages}, {tile.ahead}"
    return f"Tile({numbers}{', by_warps=True' if tile.by_warps else ''}{f', rows={tile.rows}' if tile.rows else ''})"


def table_line(product: Product, padded: int, tile: Tile) -> str:
    """What makes this the tile of a product."""
    if tile.rows:
        return f"_DIRECT_TILES: ({product.n}, {product.k}, {product.gated}, {padded}): {say(tile)},"
    line = f"_SMALL_TILES: ({product.n}, {product.k}, {product.gated}, {padded}):"
    if tile.by_warps or (padded == 1 and tile != product.split(1)):
        return f"{line} {say(tile)},"
    return f"{line} None," + ("" if tile == product.split(padded) else f"  _FEW_ROWS_TILES, rows 16: {say(tile)},")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "qwen-0.5b", "qwen-1.5b", "llama-8b"])
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no product after this")
    args = parser.parse_args()
    began = time.perf_counter()
    wrong = compile_all(args.shapes, 0.6 * args.seconds)
    compiled = sum(not why for why in wrong.values())
    print(f"{compiled} of {len(wrong)} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)
    for shape in args.shapes:
        whole = Pass(shape)
        print(f"\n=== {shape}, {whole.layers} layers")
        for ops in whole.operands:
            if time.perf_counter() - began > args.seconds:
                print(f"{ops.product.name}: not tried, out of time")
                continue
            whole.choose(ops, wrong)
        whole.summary()
        print(f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
