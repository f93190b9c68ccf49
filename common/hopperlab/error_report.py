"""How large the error of an output is, how it is distributed, and which K block it comes from.

A check (:mod:`hopperlab.check`) says right or wrong. This report describes: it measures an output against three products
of the same operands, and splits the error among the blocks of K, so that one bad scale or tile of data shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass

import torch

from hopperlab.quantize import BLOCK, ScaledTensor
from hopperlab.reference import matmul_exact, partial_products

# A segment of the output is blamed on one K block when a multiple of that block's partial product explains this share of
# its squared error, and more than the whole product does.
EXPLAINED = 0.9
FEWEST_FOR_BLAME = 8  # elements a segment must have before a one-parameter fit means anything
BINS_PER_DECADE = 2
DECADES = 12  # of a histogram, downwards from the largest error; what is smaller falls into the lowest bin
BAR = 40  # characters of the longest bar in the text


@dataclass(frozen=True)
class Statistics:
    """Of one kind of error, over ``count`` elements. All zero when there are none.

    ``bins`` has the count of errors with ``edges[i] <= log10(error) < edges[i + 1]``; ``zeros`` errors are exactly 0.
    """

    count: int
    max: float
    mean: float
    std: float
    zeros: int
    edges: list[float]
    bins: list[int]

    @staticmethod
    def of(error: torch.Tensor) -> Statistics:
        """error is float64, finite and not negative."""
        if not error.numel():
            return Statistics(0, 0.0, 0.0, 0.0, 0, [], [])
        positive = error[error > 0]
        edges, bins = [], []
        if positive.numel():
            exponent = (positive.log10() * BINS_PER_DECADE).floor().long()
            top = int(exponent.max())
            bottom = max(int(exponent.min()), top - DECADES * BINS_PER_DECADE)
            bins = torch.bincount(exponent.clamp_min(bottom) - bottom).tolist()
            edges = [i / BINS_PER_DECADE for i in range(bottom, top + 2)]
        return Statistics(error.numel(), float(error.max()), float(error.mean()), float(error.std(correction=0)),
                          error.numel() - positive.numel(), edges, bins)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """An output against one reference. ``absolute`` is |D - R|, ``relative`` is |D - R| / |R| where R is not zero.

    ``left_out`` elements are NaN or infinite in the output or in the reference and take part in neither.
    """

    reference: str
    absolute: Statistics
    relative: Statistics
    left_out: int


@dataclass(frozen=True)
class KBlockError:
    """What one K block has to do with the error.

    share           of the squared error of the whole output that multiples of the block's partial product explain, one free
                    factor per segment (1 x 128 outputs as a scale of A covers them, or 128 x 1, whichever explains more).
                    An unrelated error gives about 1/128.
    share_of_worst  the same within the segment whose squared error is largest relative to the squares of its partial products,
                    times its length
    """

    k_block: int
    share: float
    share_of_worst: float


@dataclass(frozen=True)
class ErrorReport:
    """See :func:`error_report`. ``str()`` is a table; ``to_json()`` a plain dict; ``plot()`` a figure."""

    shape: tuple[int, int, int]  # M, N, K
    operands: str
    out_dtype: str
    nan: int  # of the output
    infinite: int
    comparisons: list[Comparison]
    k_blocks: list[KBlockError]
    worst_segment: tuple[tuple[int, int], tuple[int, int]] | None  # rows and columns, each first and last
    suspect: int | None  # the K block that alone explains the worst segment

    def to_json(self) -> dict:
        """Dicts, lists, strings, ints and finite floats; a NaN or infinity becomes None."""
        return _plain(self)

    def __str__(self):
        m, n, k = self.shape
        heading = f"{'absolute: max':>15}{'mean':>11}{'std':>11}{'relative: max':>16}{'mean':>11}{'std':>11}"
        lines = [f"D ({m} x {n}, {self.out_dtype}), K = {k}, {self.operands}: {self.nan} NaN, {self.infinite} infinite", "",
                 f"{'error against':34}{heading}"]  # fmt: skip
        for c in self.comparisons:
            figures = f"{c.absolute.max:15.2e}{c.absolute.mean:11.2e}{c.absolute.std:11.2e}"
            figures += f"{c.relative.max:16.2e}{c.relative.mean:11.2e}{c.relative.std:11.2e}"
            lines.append(f"{c.reference:34}{figures}" + (f"   ({c.left_out} left out)" if c.left_out else ""))
        relative = self.comparisons[0].relative
        if relative.bins:
            lines += ["", f"relative error against {self.comparisons[0].reference} (exactly 0: {relative.zeros})"]
            for low, high, count in zip(relative.edges, relative.edges[1:], relative.bins):
                bar = "█" * math.ceil(BAR * count / max(relative.bins))
                lines.append(f"{10**low:9.1e} to {10**high:7.1e} {count:10d} {bar}")
        if self.worst_segment:
            (top, bottom), (left, right) = self.worst_segment
            lines += ["", f"share of the squared error that one K block explains; worst segment: rows {top} to {bottom}, "
                          f"columns {left} to {right}", f"{'K block':>9}{'whole output':>14}{'worst segment':>15}"]  # fmt: skip
            for block in self.k_blocks:
                bar = "█" * round(BAR * block.share_of_worst)
                lines.append(f"{block.k_block:9d}{block.share:14.3f}{block.share_of_worst:15.3f} {bar}".rstrip())
        if self.suspect is not None:
            lines += ["", f"K block {self.suspect} (k {self.suspect * BLOCK} to {min((self.suspect + 1) * BLOCK, k) - 1}) alone "
                          "explains the worst segment: look at its data, its scale and its place in the sum."]  # fmt: skip
        return "\n".join(lines)

    def plot(self, axes=None):
        """Histograms of the relative error and the shares of the K blocks, on two matplotlib axes. Returns the figure."""
        import matplotlib.pyplot as plt

        if axes is None:
            _, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
        left, right = axes
        for c, style in zip(self.comparisons, ("-", "--", "-")):  # FP64 and FP32 often coincide
            if c.relative.bins:
                edges = [10**edge for edge in c.relative.edges]
                left.stairs(c.relative.bins, edges, label=c.reference, linewidth=1.5, linestyle=style)
                left.set_xscale("log")
        left.set(xlabel="relative error", ylabel="outputs")
        if left.get_legend_handles_labels()[0]:
            left.legend(title="against", fontsize="small", loc="upper left")
        position = [block.k_block for block in self.k_blocks]
        right.bar([p - 0.2 for p in position], [b.share for b in self.k_blocks], 0.4, color="#9aa0a6", label="whole output")
        worst = [block.share_of_worst for block in self.k_blocks]
        right.bar([p + 0.2 for p in position], worst, 0.4, color="#76b900", label="worst segment")
        right.set(xlabel="K block", ylabel="share of squared error explained", ylim=(0, 1.02))
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend(fontsize="small")
        return left.figure


def error_report(out: torch.Tensor, a: ScaledTensor, b: ScaledTensor, *, a_source: torch.Tensor | None = None,
                 b_source: torch.Tensor | None = None) -> ErrorReport:  # fmt: skip
    """Describe the error of out (M, N), the product of A (M, K) and B (N, K) transposed, on any device.

    a_source (M, K) and b_source (N, K) are the tensors before quantisation. Three references:

    - the FP64 product of the dequantised operands: the kernel's own error;
    - their FP32 product, by torch: what a library without FP8 would give;
    - the BF16 product of the sources, so that the difference holds the error of quantisation; without them, of the
      dequantised operands rounded to BF16.

    Elements that are NaN or infinite are counted and left out. Raises ValueError for shapes that do not belong together.
    """
    if out.shape != (a.rows, b.rows):
        raise ValueError(f"out has shape {tuple(out.shape)}; A {a.rows} x K and B {b.rows} x K give ({a.rows}, {b.rows})")
    if (a_source is None) != (b_source is None):
        raise ValueError("give both a_source and b_source, or neither: a product needs two operands")
    for name, source, scaled in (("a_source", a_source, a), ("b_source", b_source, b)):
        if source is not None and source.shape != scaled.data.shape:
            raise ValueError(f"{name} has shape {tuple(source.shape)}; what was quantised from it has {tuple(scaled.data.shape)}")
    value, exact = out.double(), matmul_exact(a, b)
    kind = "dequantised" if a_source is None else "originals"
    x, y = (a.dequantize(), b.dequantize()) if a_source is None else (a_source, b_source)
    comparisons = [
        _compare("FP64 product of the dequantised", value, exact),
        _compare("FP32 product of the dequantised", value, _fp32_product(a.dequantize(), b.dequantize())),
        _compare(f"BF16 product of the {kind}", value, x.bfloat16() @ y.bfloat16().t()),
    ]
    k_blocks, segment, suspect = _attribute(value - exact, a, b)
    operands = ", ".join(f"{name} {scaled.format.name} {scaled.recipe}" for name, scaled in (("A", a), ("B", b)))
    return ErrorReport((a.rows, b.rows, a.k), operands, str(out.dtype).removeprefix("torch."), int(value.isnan().sum()),
                       int(value.isinf().sum()), comparisons, k_blocks, segment, suspect)  # fmt: skip


def explained_share(residual: torch.Tensor, product: torch.Tensor) -> float:
    """Share of the squared residual that a multiple of ``product`` accounts for: both float64 (elements,)."""
    norm, total = float(product @ product), float(residual @ residual)
    if not (norm > 0 and total > 0):  # zero, or NaN
        return 0.0
    return float(residual @ product) ** 2 / norm / total


def blame(residual: torch.Tensor, partials: Iterable[torch.Tensor]) -> tuple[list[float], int | None]:
    """Share of the residual that each K block's partial product explains, and the one block to blame, or None.

    residual and each partial are float64 (elements,), finite. When the whole product explains the error as well, it is no
    one block's: a wrong factor, say. A single block is never blamed: it is the whole.
    """
    partials = list(partials)
    shares = [explained_share(residual, partial) for partial in partials]
    if len(shares) < 2 or len(residual) < FEWEST_FOR_BLAME:
        return shares, None
    best = max(range(len(shares)), key=shares.__getitem__)
    whole = explained_share(residual, torch.stack(partials).sum(0))
    return shares, best if shares[best] > max(EXPLAINED, whole) else None


def _compare(name: str, value: torch.Tensor, against: torch.Tensor) -> Comparison:
    against = against.double()
    finite = value.isfinite() & against.isfinite()
    value, against = value[finite], against[finite]
    error = (value - against).abs()
    nonzero = against != 0
    return Comparison(name, Statistics.of(error), Statistics.of(error[nonzero] / against[nonzero].abs()), int((~finite).sum()))


def _fp32_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x times y transposed in FP32, whatever the user has allowed torch to do with TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return x @ y.t()
    finally:
        torch.set_float32_matmul_precision(before)


def _segments(x: torch.Tensor) -> torch.Tensor:
    """Sums of x (rows, columns) over 128 columns each: (rows, ceil(columns / 128))."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).reshape(x.shape[0], -1, BLOCK).sum(2)


def _attribute(residual: torch.Tensor, a: ScaledTensor, b: ScaledTensor):
    """(KBlockError of every K block, the worst segment, the K block to blame for it) of a residual float64 (M, N)."""
    usable = residual.isfinite()
    residual = torch.where(usable, residual, 0.0)
    total = float(residual.square().sum())
    if not total > 0:
        return [KBlockError(k_block, 0.0, 0.0) for k_block in range(-(-a.k // BLOCK))], None, None
    # Along a row a scale of A is constant, along a column one of 1x128 of B; a 128x128 scale of B covers either.
    # A view puts the axis that segments run along last. One that is too short for a fit gives way to the other.
    views = {"row": lambda x: x, "column": lambda x: x.t()}
    if min(residual.shape) < FEWEST_FOR_BLAME:
        views.pop("row" if residual.shape[1] < residual.shape[0] else "column")
    energy = {name: _segments(view(residual).square()) for name, view in views.items()}
    magnitude = {name: torch.zeros_like(sums) for name, sums in energy.items()}
    shares = []
    for partial in partial_products(a, b):
        partial = torch.where(usable & partial.isfinite(), partial, 0.0)
        explained = []
        for name, view in views.items():
            norm, dot = _segments(view(partial).square()), _segments(view(partial * residual))
            magnitude[name] += norm
            explained.append(float(torch.where(norm > 0, dot.square() / norm, 0.0).sum()))
        shares.append(max(explained) / total)

    # Times its length: of two segments equally wrong, the longer tells the blocks apart more clearly.
    length = {name: _segments(view(torch.ones_like(residual))) for name, view in views.items()}
    evidence = {name: torch.where(magnitude[name] > 0, length[name] * energy[name] / magnitude[name], 0.0) for name in views}
    name = max(evidence, key=lambda view: float(evidence[view].max()))
    line, block = divmod(int(evidence[name].argmax()), evidence[name].shape[1])
    end = min((block + 1) * BLOCK, views[name](residual).shape[1])
    rows, columns = slice(line, line + 1), slice(block * BLOCK, end)
    if name == "column":
        rows, columns = columns, rows
    mask = usable[rows, columns]
    partials = [torch.nan_to_num(partial[mask], 0.0, 0.0, 0.0) for partial in partial_products(a, b, rows, columns)]
    worst, suspect = blame(residual[rows, columns][mask], partials)
    blocks = [KBlockError(i, *pair) for i, pair in enumerate(zip(shares, worst))]
    return blocks, ((rows.start, rows.stop - 1), (columns.start, columns.stop - 1)), suspect


def _plain(value):
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
