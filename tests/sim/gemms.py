"""The two right kernels that tests run, break, and time: launch them with NumPy-made inputs, on CPU tensors or CUDA tensors."""

from pathlib import Path

import numpy as np
import torch
from hopperlab.compile import compile_source
from hopperlab.tensormap import TensorMap

KERNELS = Path(__file__).parent / "kernels"
STAGES = 4


def inputs(m, n, k, seed=0):
    """(A, B, scales of A, scales of B): e4m3 bytes and float32, as CPU tensors."""
    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(rng.normal(size=(rows, k)).astype(np.float32)).to(torch.float8_e4m3fn) for rows in (m, n))
    sa, sb = (torch.from_numpy(rng.uniform(0.5, 2, (rows, k // 128)).astype(np.float32)) for rows in (m, -(-n // 128)))
    return a, b, sa, sb


def expected(a, b, sa, sb):
    """The result in float64."""
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for k in range(a.shape[1] // 128):
        part = a[:, k * 128 : k * 128 + 128].double() @ b[:, k * 128 : k * 128 + 128].double().T
        out += part * sa[:, k : k + 1] * sb[:, k].repeat_interleave(128)[: b.shape[0]]
    return out


def arguments(which, a, b, sa, sb, out):
    m, k = a.shape
    n = b.shape[0]
    map_a = TensorMap.tiled(a, box=(128, 128), swizzle=128)
    if which == "pipelined":
        return [map_a, TensorMap.tiled(b, box=(128, 128), swizzle=128), sa, sb, out, m, n, k]
    return [
        map_a,
        TensorMap.tiled(b, box=(128, 64), swizzle=128),
        TensorMap.tiled(out, box=(64, 64), swizzle=128),
        sa,
        sb,
        m,
        n,
        k,
    ]


def launch_options(which, m, n):
    """grid, block and dynamic shared memory of a launch with one tile per CTA, at most 16 CTAs."""
    tiles = m // 128 * (n // 128)
    if which == "pipelined":
        return dict(grid=min(16, tiles), block=384, shared_bytes=STAGES * 32768, registers=168)
    return dict(grid=min(16, tiles), block=288, shared_bytes=STAGES * 32768 + 2 * 16384, registers=168)


def compile_variant(which, *replacements):
    """PTX of a kernel after text replacements, each of which must apply."""
    text = (KERNELS / f"{which}.cu").read_text()
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return compile_source(text, f"{which}.cu", {"NUM_STAGES": STAGES}).ptx
