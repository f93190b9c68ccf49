"""Compile the library's Triton kernel for the architectures it is for, with no GPU.

    python tests/library/triton_compiles.py [quick]

quick: one kind of GEMM for each architecture. A program of its own, because Triton reads TRITON_INTERPRET when a kernel is
decorated. Prints the shared memory it takes; exits with 1 if a variant does not compile or does not fit.
"""

import sys
from itertools import product

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fp8_gemm.triton_backend import BLOCK_K, BLOCK_M, BLOCK_N, FEWER_ROWS, GROUP_M, KINDS, _stages, gemm_kernel
from hopperlab.triton_ops import INTERPRETED

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
POINTERS = {"D": "*bf16", "begins": "*i32", "ends": "*i32"}


def shared_bytes(architecture: int, kind: str, block_m: int, promote: bool, b_shared: bool) -> int:
    constants = {
        "KIND": KINDS[kind].value, "PROMOTE": promote, "B_SHARED": b_shared, "BIAS": kind == "dense",
        "ACCUMULATE": kind == "k_grouped", "GROUPS": 8, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K,
        "GROUP_M": GROUP_M,
    }  # fmt: skip
    maps = {"a_map": f"tensordesc<fp8e4nv[{block_m}, {BLOCK_K}]>", "b_map": f"tensordesc<fp8e5[{BLOCK_N}, {BLOCK_K}]>"}
    types = POINTERS | maps | dict.fromkeys(("scale_a", "scale_b", "bias"), "*fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in gemm_kernel.arg_names}
    # What the launcher would find out by itself: addresses and pitches are multiples of 16.
    aligned = ("D", "scale_a", "scale_b", "bias", "pitch_d", "K")
    attributes = {(gemm_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=gemm_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "num_stages": _stages(block_m)}
    binary = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return binary.metadata.shared


def main() -> int:
    if INTERPRETED.value:
        sys.exit("TRITON_INTERPRET is set; unset it to compile for GPUs")
    wrong = 0
    for architecture, kind in zip(SHARED_BYTES, KINDS) if sys.argv[1:] == ["quick"] else product(SHARED_BYTES, KINDS):
        used = [shared_bytes(architecture, kind, *variant) for variant in ((BLOCK_M, True, True), (FEWER_ROWS[0], False, False))]
        fits = max(used) <= SHARED_BYTES[architecture]
        wrong += not fits
        print(f"sm_{architecture} {kind}: {max(used) // 1024} KB of shared memory" + ("" if fits else ", too much"))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
