"""Was the answer right, and if not, where: which tile, which row, which K block.

The reference is the FP64 GEMM of the *dequantised* operands, what the kernel was given. Every element is compared.
Where the kernel's arithmetic is modelled (``expected``), bits must be equal; otherwise each element has its own error
bound, derived in :func:`hopperlab.reference.error_bound`. No metric of the whole matrix decides: one wrong tile of
128 x 128 in a 4096 x 4096 output leaves DeepGEMM's calc_diff at 5e-4, under its usual threshold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hopperlab import reference
from hopperlab.error_report import FEWEST_FOR_BLAME, blame, error_report
from hopperlab.quantize import BLOCK, ScaledTensor, quantize

# A NaN that arithmetic never makes (its payload is not the canonical one), so an element that still holds it was never
# written. One pattern per output format, as the integer type of the same width.
POISON = {
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
}
GUARD_BYTES = 4096  # poisoned on both sides of an output, to notice writes outside it

__all__ = ["Verdict", "compare", "digest", "error_report", "poisoned", "problem", "run"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check. ``str()`` is a sentence that names the first wrong tile, row and K block."""

    ok: bool
    message: str
    modelled: bool  # whether equal bits were demanded
    wrong: int  # number of wrong elements
    max_abs_error: float  # max |D - exact|
    max_rel_error: float  # max |D - exact| / max |exact|
    diff: float  # calc_diff against the exact product, DeepGEMM's metric
    first: tuple[int, int] | None = None  # (m, n) of the first wrong element
    tile: tuple[int, int] | None = None  # its tile's coordinates
    k_block: int | None = None  # the K block that explains the first wrong row, if one does
    digest: str = ""  # of the output's bits; see :func:`digest`

    def __str__(self):
        return self.message


def problem(m: int, n: int, k: int, *, recipes=("tensor", "tensor"), formats=("e4m3", "e4m3"), seed: int = 0,
            device="cpu", outliers: bool = False) -> tuple[ScaledTensor, ScaledTensor]:  # fmt: skip
    """Quantised operands A (m, k) and B (n, k): random normal, different in every position and for every seed.

    NumPy's generator gives the same values on every machine, so outputs of two machines can be compared bit by bit.
    ``outliers`` multiplies one column in 64 by 50, as activations of language models have.
    """
    generator = np.random.default_rng([seed, m, n, k])
    operands = []
    for rows, recipe, fmt in ((m, recipes[0], formats[0]), (n, recipes[1], formats[1])):
        x = torch.from_numpy(generator.standard_normal((rows, k), dtype=np.float32))
        if outliers:
            x[:, generator.integers(0, 64) :: 64] *= 50
        operands.append(quantize(x.to(device), recipe, fmt))
    return operands[0], operands[1]


def digest(out: torch.Tensor) -> str:
    """SHA-256 of the output's bits, 16 hex digits: equal on two machines exactly when every bit is."""
    integers = out.detach().contiguous().cpu().view(_poison("out.dtype", out.dtype)[0])
    return hashlib.sha256(integers.numpy().tobytes()).hexdigest()[:16]


def poisoned(m: int, n: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """An (m, n) output filled with poison, and the buffer around it with GUARD_BYTES of poison on both sides."""
    integer, pattern = _poison("dtype", dtype)
    guard = GUARD_BYTES // dtype.itemsize
    buffer = torch.full((m * n + 2 * guard,), pattern, dtype=integer, device=device)
    return buffer[guard : guard + m * n].view(dtype).view(m, n), buffer


def _poison(name: str, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """(integer type of the same width, poison) of an output's type. Raises TypeError for one that is not checked."""
    if dtype not in POISON:
        raise TypeError(f"{name} is {dtype}; allowed are {', '.join(map(str, POISON))}: let the kernel write one of them")
    return POISON[dtype]


def run(gemm: Callable, a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype = torch.bfloat16, *,
        expected: Callable | None = None, bound: Callable | None = None, tile=(BLOCK, BLOCK)) -> Verdict:  # fmt: skip
    """Run ``gemm(a, b, out)`` into a poisoned output and check it, its surroundings and its inputs.

    expected  (a, b, out_dtype) -> the output, bit for bit; or None
    bound     (a, b, out_dtype) -> error bound per element, used when expected is None
    tile      (block_m, block_n) of the kernel, to name tiles
    """
    out, buffer = poisoned(a.rows, b.rows, out_dtype, a.device)
    before = [x.flatten().view(torch.uint8).clone() for x in (a.data, a.scale, b.data, b.scale)]
    gemm(a, b, out)
    if out.is_cuda:
        torch.cuda.synchronize()
    guard = GUARD_BYTES // out_dtype.itemsize
    around = torch.cat([buffer[:guard], buffer[len(buffer) - guard :]]) != POISON[out_dtype][1]
    verdict = compare(out, a, b, tile=tile, expected=expected and expected(a, b, out_dtype),
                      bound=bound and bound(a, b, out_dtype))  # fmt: skip
    if around.any():
        position = int(around.nonzero()[0])
        where = f"{guard - position} elements before" if position < guard else f"{position - guard} elements after the end of"
        return _failed(verdict, f"WRONG: the kernel wrote {int(around.sum())} elements outside its output, "
                                f"the first {where} D. Is a store guarded against a ragged last row and column?")  # fmt: skip
    for name, x, old in zip(("A's data", "A's scale", "B's data", "B's scale"), (a.data, a.scale, b.data, b.scale), before):
        if not torch.equal(x.flatten().view(torch.uint8), old):
            return _failed(verdict, f"WRONG: the kernel changed {name}, which is an input")
    return verdict


def compare(out: torch.Tensor, a: ScaledTensor, b: ScaledTensor, *, expected: torch.Tensor | None = None,
            bound: torch.Tensor | None = None, tile=(BLOCK, BLOCK)) -> Verdict:  # fmt: skip
    """Compare an output (M, N) with the exact product of A (M, K) and B (N, K), every element.

    With ``expected`` (the model's output, same dtype) bits must be equal; a NaN equals any NaN except the poison.
    Otherwise |D - exact| <= bound, and D is NaN or infinite exactly where the exact product is. Raises TypeError or ValueError.
    """
    if out.shape != (a.rows, b.rows):
        raise ValueError(f"out has shape {tuple(out.shape)}; A {a.rows} x K and B {b.rows} x K give ({a.rows}, {b.rows})")
    if (expected is None) == (bound is None):
        raise ValueError("give expected (the model's output, for equal bits) or bound (error allowed per element), one of them")
    integer, pattern = _poison("out.dtype", out.dtype)
    if expected is not None and (expected.shape, expected.dtype) != (out.shape, out.dtype):
        raise ValueError(f"expected has shape {tuple(expected.shape)} and dtype {expected.dtype}, and out {tuple(out.shape)} and "
                         f"{out.dtype}; they must be equal: compute expected in out's type")  # fmt: skip
    if isinstance(bound, torch.Tensor) and bound.shape != out.shape:
        raise ValueError(f"bound has shape {tuple(bound.shape)}, and out {tuple(out.shape)}; they must be equal")
    bits = out.contiguous().view(integer)
    unwritten = bits == pattern
    exact = reference.matmul_exact(a, b)
    value = out.double()
    if expected is not None:
        bad = (bits != expected.contiguous().view(integer)) & ~(value.isnan() & expected.isnan()) | unwritten
    else:
        finite = exact.isfinite()
        beyond = ~((value - exact).abs() <= bound)  # NaN compares false: a NaN here is bad
        same = (value == exact) | (value.isnan() & exact.isnan())
        bad = torch.where(finite, beyond, ~same) | unwritten

    error = (value - exact).abs()
    error = error[error.isfinite()]
    finite_exact = exact[exact.isfinite()].abs()
    max_abs = float(error.max()) if error.numel() else 0.0
    scale = float(finite_exact.max()) if finite_exact.numel() else 0.0
    figures = {
        "modelled": expected is not None,
        "wrong": int(bad.sum()),
        "max_abs_error": max_abs,
        "max_rel_error": max_abs / scale if scale else max_abs,
        "diff": reference.calc_diff(torch.nan_to_num(value), torch.nan_to_num(exact)) if out.numel() else 0.0,
        "digest": digest(out),
    }
    if not figures["wrong"]:
        how = "every bit equals the model's" if expected is not None else "every element is within its bound"
        return Verdict(True, f"correct: {how}; largest relative error {figures['max_rel_error']:.1e}", **figures)

    m, n = (int(i) for i in bad.nonzero()[0])
    k_block = _blame_k_block(value, exact, bad, a, b, m)
    shown = {"first": (m, n), "tile": (m // tile[0], n // tile[1]), "k_block": k_block}
    return Verdict(False, _describe(out, expected, exact, bad, unwritten, a, b, tile, m, n, k_block), **figures, **shown)


def _failed(verdict: Verdict, message: str) -> Verdict:
    return Verdict(**{**vars(verdict), "ok": False, "message": message})


def _describe(out, expected, exact, bad, unwritten, a, b, tile, m, n, k_block) -> str:
    tile_m, tile_n = m // tile[0], n // tile[1]
    in_tile = bad[tile_m * tile[0] : (tile_m + 1) * tile[0], tile_n * tile[1] : (tile_n + 1) * tile[1]]
    want = expected[m, n] if expected is not None else exact[m, n]
    sentences = [
        f"WRONG: {int(bad.sum())} of {bad.numel()} elements. The first is D[{m}][{n}] = {float(out[m, n]):.7g}, "
        f"expected {float(want):.7g}: row {m}, tile ({tile_m}, {tile_n}) of {tile[0]}x{tile[1]}, "
        f"where {int(in_tile.sum())} of {in_tile.numel()} elements are wrong."
    ]
    if unwritten.any():
        sentences.append(f"{int(unwritten.sum())} elements were never written.")
    if k_block is not None:
        low, high = k_block * BLOCK, min((k_block + 1) * BLOCK, a.k)
        sentences.append(f"K block {k_block} (k {low} to {high - 1}) explains the error of row {m}: "
                         "look at its data, its scale and its place in the sum.")  # fmt: skip
    elif not unwritten[m].any():
        sentences += _resembles(out, exact, bad, m)
    return " ".join(sentences)


def _resembles(out, exact, bad, m) -> list[str]:
    """Name the plain mistakes a wrong row can show: zeros, another row's values, a constant factor."""
    columns = bad[m]
    row, want = out[m].double()[columns], exact[m][columns]
    if not bool(torch.isfinite(row).all() & torch.isfinite(want).all()):
        nan = int(out[m].isnan().sum())
        return [f"Row {m} holds {nan} NaN."] if nan else []
    if not row.any():
        return [f"The wrong elements of row {m} are all zero."]
    if len(row) < FEWEST_FOR_BLAME:
        return []
    others = exact[:, columns]
    distance = (torch.nan_to_num(others, nan=torch.inf) - row).norm(dim=1)
    nearest = int(distance.argmin())
    if nearest != m and float(distance[nearest]) < 0.02 * float(row.norm()):
        return [f"Row {m} holds the values of row {nearest}."]
    factor = float(row @ want / (want @ want))
    if float((row - factor * want).norm()) < 0.02 * float(row.norm()):
        if abs(factor - 1) < 1e-3:
            return [f"Row {m} is right but for rounding: the order of its additions, or where it rounds, is not the model's."]
        return [f"Row {m} is {factor:.4g} times what it should be: look at the scales."]
    return []


def _blame_k_block(value, exact, bad, a, b, m) -> int | None:
    """The K block a multiple of whose partial product best explains the error of row m, or None."""
    columns = bad[m] & value[m].isfinite() & exact[m].isfinite()
    if a.k <= BLOCK or int(columns.sum()) < FEWEST_FOR_BLAME:
        return None
    partials = reference.partial_products(a, b, slice(m, m + 1))
    return blame((value[m] - exact[m])[columns], (partial[0][columns] for partial in partials))[1]
