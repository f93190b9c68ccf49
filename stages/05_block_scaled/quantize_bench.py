"""Times the quantisation kernels: GB/s of every recipe and input type, in CUDA, in Triton and in plain torch.

    python stages/05_block_scaled/quantize_bench.py RECORD.json

Needs a Hopper GPU. Bytes are those that must move: input, FP8 data and scales once each, and the input a second time for the
recipe "tensor", whose scale is known when everything was seen. Bits are compared with the reference before anything is timed.
"""

import sys
from pathlib import Path

import torch

from fp8_gemm.kernels import quantize as cuda
from hopperlab import bench, capability, quantize, report, telemetry
from hopperlab.stage import load_module

FOLDER = Path(__file__).resolve().parent
SHAPES = ((8192, 7168), (128, 7168))
DTYPES = (torch.bfloat16, torch.float32)  # float16 moves as many bytes as bfloat16
M_MAJOR = "1x128, M-major"
SWIGLU = "SwiGLU, then 1x128"
RECIPES = (*quantize.RECIPES, M_MAJOR)


def kernels() -> dict:
    """name -> quantize function."""
    triton = load_module(FOLDER / "quantize_triton.py", "stage_05_block_scaled_quantize_triton")
    return {"cuda": cuda.quantize, "triton": triton.quantize, "torch": _torch}


def _torch(x, recipe, m_major=False):
    scaled = quantize.quantize(x, recipe)
    if not m_major:
        return scaled
    return quantize.ScaledTensor(scaled.data, quantize.scale_to_m_major(scaled.scale)[:, : scaled.rows].t(), recipe)


def inputs(rows: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Enough random normal tensors that none is still in L2 when its turn comes again."""
    each = rows * k * (dtype.itemsize + 1)
    count = max(2, min(bench.MAX_SETS, -(-int(bench.ROTATION_BYTES) // each)))
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(rows, k, generator=generator, device="cuda").to(dtype) for _ in range(count)]


def moved_bytes(x: torch.Tensor, recipe: str) -> int:
    """Bytes that quantising x must read and write."""
    rows, k = x.shape
    if recipe == SWIGLU:
        k //= 2
    scales = torch.Size(quantize.scale_shape(recipe_of(recipe), rows, k)).numel()
    return x.numel() * x.element_size() * (2 if recipe == "tensor" else 1) + rows * k + 4 * scales


def recipe_of(name: str) -> str:
    return "1x128" if name in (M_MAJOR, SWIGLU) else name


def checked_calls(name, function, tensors: list[torch.Tensor], recipe: str, wanted: quantize.ScaledTensor) -> list:
    """One call per tensor, after the first one's bits were found right."""
    options = {"recipe": wanted.recipe} | ({"m_major": True} if recipe == M_MAJOR else {})
    got = function(tensors[0], **options)
    if not torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8)) or not torch.equal(got.scale, wanted.scale):
        raise AssertionError(f"{name}, {recipe}, {tuple(tensors[0].shape)}: bits differ from hopperlab.quantize.quantize")
    return [lambda x=x: function(x, **options) for x in tensors]


def swiglu_calls(tensors: list[torch.Tensor]) -> dict[str, list]:
    """The fused kernel, and torch's product with the plain kernel after it. Their roundings differ; the tests check the bits."""

    def in_two_steps(x):
        gate, up = x.chunk(2, dim=1)
        return cuda.quantize(torch.nn.functional.silu(gate) * up, "1x128")

    return {"cuda": [lambda x=x: cuda.swiglu_quantize(x) for x in tensors],
            "two steps": [lambda x=x: in_two_steps(x) for x in tensors]}  # fmt: skip


def timed(calls: dict[str, list], tensors: list[torch.Tensor], recipe: str) -> list[dict]:
    """One entry of the record per candidate."""
    x, found = tensors[0], []
    for name, timing in bench.measure(calls, rounds=3).items():
        rate = moved_bytes(x, recipe) / timing.seconds
        found.append({"rows": x.shape[0], "k": x.shape[1], "dtype": str(x.dtype).removeprefix("torch."), "recipe": recipe,
                      "kernel": name, "microseconds": timing.seconds * 1e6, "spread": timing.spread,
                      "gbytes_per_s": rate / 1e9, "percent_of_read_ceiling": 100 * rate / bench.READ_BYTES_PER_S})  # fmt: skip
        print("{rows}x{k} {dtype:9} {recipe:19} {kernel:9} {microseconds:9.1f} µs {gbytes_per_s:6.0f} GB/s "
              "{percent_of_read_ceiling:5.1f} %".format(**found[-1]))  # fmt: skip
    return found


def main(path: str) -> None:
    capability.require_hopper()
    functions, rows = kernels(), []
    with telemetry.Recorder() as recorder:
        for shape in SHAPES:
            for dtype in DTYPES:
                tensors = inputs(*shape, dtype)
                for recipe in RECIPES:
                    wanted = quantize.quantize(tensors[0], recipe_of(recipe))
                    calls = {name: checked_calls(name, f, tensors, recipe, wanted) for name, f in functions.items()}
                    rows += timed(calls, tensors, recipe)
                rows += timed(swiglu_calls(tensors), tensors, SWIGLU)
                del tensors, calls
                torch.cuda.empty_cache()
    record = {"kind": "sweep", **report.environment(), "telemetry": recorder.summary(), "quantize": rows}
    print(report.save(record, Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
