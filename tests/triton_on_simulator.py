"""What Triton compiles for Hopper, run on the simulator: the kernel of quantize_triton.py without Triton's interpreter.

    python tests/triton_on_simulator.py

A program of its own, because Triton reads TRITON_INTERPRET when a kernel is decorated. Prints how many bytes differ; exits with 1
if any do.
"""

import sys

import torch
import triton
from hard_inputs import hard
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hopperlab import quantize, sim, stage
from hopperlab.triton_ops import INTERPRETED

TRITON_TYPE = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
FP8_TYPE = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
ROWS, K, TILE_ROWS, WARPS = 48, 256, 16, 4


def compiled(kernel, dtype: torch.dtype, format: str, m_major: bool):
    """blocks_kernel for 1x128 blocks, for sm_90."""
    constants = {"ROWS": TILE_ROWS, "BLOCK": 128, "WHOLE_TILE": False, "M_MAJOR": m_major, "POWER_OF_TWO": False}
    types = {"X": TRITON_TYPE[dtype], "Q": FP8_TYPE[format], "S": "*fp32", "largest": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})


def differences(kernel, dtype: torch.dtype, format: str, m_major: bool) -> int:
    """Bytes of data and scales that are not those of hopperlab.quantize.quantize."""
    x = hard(ROWS, K, dtype)
    want = quantize.quantize(x, "1x128", format)
    want_scale = quantize.scale_to_m_major(want.scale) if m_major else want.scale
    data, scale = torch.empty_like(want.data), torch.empty_like(want_scale)
    binary = compiled(kernel, dtype, format, m_major)
    arguments = [x, data, scale, ROWS, K, K, K // 128, ROWS, want.format.max]
    declared = binary.asm["ptx"].split(".entry")[1].split("{")[0].count(".param")
    arguments += [torch.zeros(16)] * (declared - len(arguments))  # scratch memory that Triton adds and this kernel does not use
    grid, block = (ROWS // TILE_ROWS * (K // 128), 1, 1), (32 * WARPS, 1, 1)
    sim.launch(binary.asm["ptx"], "blocks_kernel", arguments, grid=grid, block=block, shared_bytes=binary.metadata.shared)
    pairs = [(data, want.data), (scale, want_scale)]
    return sum(int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum()) for got, wanted in pairs)


def main() -> int:
    if INTERPRETED.value:
        sys.exit("TRITON_INTERPRET is set; unset it to compile for the GPU")
    path = stage.root() / "stages" / "05_block_scaled" / "quantize_triton.py"
    kernel = stage.load_module(path, "quantize_triton_compiled").blocks_kernel
    cases = [(dtype, format, m_major) for dtype in TRITON_TYPE for format in FP8_TYPE for m_major in (False, True)]
    wrong = {f"{dtype} {format}{', M-major' * m_major}": differences(kernel, dtype, format, m_major) for dtype, format, m_major in cases}
    print(wrong)
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
