"""The list of conformance cases. Inputs come from NumPy's default_rng, seeded by the case's name, so every machine sees the
same bytes. Names are group/what."""

from __future__ import annotations

import itertools

import numpy as np
from suite import Case, Map, Out, labels

U8, U16, U32, U64, F32 = "uint8", "uint16", "uint32", "uint64", "float32"
CASES: list[Case] = []


def add(name, file, entry, arguments, **launch) -> None:
    CASES.append(Case(name, file, entry, arguments, **launch))


def bits(rng, count, dtype=U32) -> np.ndarray:
    """Uniformly random words."""
    return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True)


# ---- elementwise instructions ---------------------------------------------------------------------------------------------

ELEMENTS, ELEMENTWISE_BLOCK = 512, 128

INTEGERS = {
    U32: [0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF],
    U64: [0, 1, 2, 7, 31, 32, 63, 64, 65, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1],
    U16: [0, 1, 2, 7, 15, 16, 17, 31, 32, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
}  # fmt: skip
# Zeros, subnormals, the smallest normals, ones and their neighbours, halves, large and largest, infinities, NaNs.
_F32 = [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x1000000, 0x3EFFFFFF, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x40200000,
        0x4B000000, 0x4B7FFFFF, 0x4EFFFFFF, 0x4F000000, 0x4F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]  # fmt: skip
_F64 = [0, 1, 0xFFFFFFFFFFFFF, 0x10000000000000, 0x3FDFFFFFFFFFFFFF, 0x3FE0000000000000, 0x3FEFFFFFFFFFFFFF, 0x3FF0000000000000,
        0x3FF8000000000000, 0x4004000000000000, 0x41DFFFFFFFE00000, 0x41E0000000000000, 0x43E0000000000000, 0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000, 0x7FF8000000000000, 0x36A0000000000000, 0x3810000000000000, 0x47EFFFFFF0000000]  # fmt: skip
_F16 = [0, 1, 0x3FF, 0x400, 0x37FF, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0x3E00, 0x4100, 0x5BFF, 0x7BFF, 0x7C00, 0x7E00]
_BF16 = [0, 1, 0x7F, 0x80, 0x3EFF, 0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0x3FC0, 0x4020, 0x4B00, 0x7F7F, 0x7F80, 0x7FC0]


def signed(values, width) -> list[int]:
    return values + [v | 1 << (width - 1) for v in values]


FLOATS = {"f32": (signed(_F32, 32), U32), "f64": (signed(_F64, 64), U64), "f16": (signed(_F16, 16), U16), "bf16": (signed(_BF16, 16), U16)}


def operands(rng, corners, dtype, nonzero_second=False) -> list[np.ndarray]:
    """Three operands: pairs of corner values first, then random words, some of them close to one another."""
    a, b, c = (bits(rng, ELEMENTS, dtype) for _ in range(3))
    pairs = list(itertools.product(corners, corners))
    chosen = rng.permutation(len(pairs))[: ELEMENTS // 2]
    a[: len(chosen)] = np.array([pairs[i][0] for i in chosen], dtype)
    b[: len(chosen)] = np.array([pairs[i][1] for i in chosen], dtype)
    c[: ELEMENTS // 4] = rng.choice(np.array(corners, dtype), ELEMENTS // 4)
    c[ELEMENTS // 4 : ELEMENTS // 2] = bits(rng, ELEMENTS // 4, dtype) % 64
    b[-64:] = bits(rng, 64, dtype) % 70  # shift counts, small divisors
    if nonzero_second:
        b[b == 0] = 7
    return [a, b, c]


def float_operands(rng, kind) -> list[np.ndarray]:
    """Corners, then values of like size whose sums and products cancel, then words of any pattern."""
    corners, dtype = FLOATS[kind]
    a, b, c = operands(rng, corners, dtype)
    width, mantissa, one = {"f32": (32, 23, 127), "f64": (64, 52, 1023), "f16": (16, 10, 15), "bf16": (16, 7, 127)}[kind]
    some = slice(ELEMENTS // 2, ELEMENTS * 7 // 8)
    for x in (a, b, c):
        x[some] = near_one(rng, ELEMENTS * 3 // 8, width, mantissa, one, 4)
    c[ELEMENTS // 4 : ELEMENTS // 2] = rng.choice(np.array(corners, dtype), ELEMENTS // 4)
    b[-64:] = bits(rng, 64, dtype)
    return [a, b, c]


def near_one(rng, count, width, mantissa, one, spread) -> np.ndarray:
    """Random sign and mantissa, exponent within spread of that of 1.0; as words of the format."""
    dtype = np.dtype(f"uint{width}")
    exponent = rng.integers(one - spread, one + spread + 1, count).astype(dtype)
    return (exponent << dtype.type(mantissa)) | (bits(rng, count, dtype) & dtype.type((1 << mantissa) - 1)) | (
        rng.integers(0, 2, count).astype(dtype) << dtype.type(width - 1))  # fmt: skip


def elementwise(group, file, entry, make, dtype, out_dtype=None, count=ELEMENTS) -> None:
    names = labels(file, entry)
    add(f"{group}/{entry}", file, entry, lambda rng: [*make(rng), Out((len(names), count), out_dtype or dtype, labels=names), count],
        grid=count // ELEMENTWISE_BLOCK, block=ELEMENTWISE_BLOCK)  # fmt: skip


for entry in ("integer_unary", "integer_binary", "integer_ternary", "integer_24", "integer_rare", "integer_packed", "integer_bits", "integer_carry", "integer_compare"):
    elementwise("integer", "integer.cu", entry, lambda rng: operands(rng, INTEGERS[U32], U32), U32)
elementwise("integer", "integer.cu", "integer_division", lambda rng: operands(rng, INTEGERS[U32], U32, True), U32)
elementwise("integer", "integer.cu", "integer_64", lambda rng: operands(rng, INTEGERS[U64], U64), U64)
elementwise("integer", "integer.cu", "integer_64_division", lambda rng: operands(rng, INTEGERS[U64], U64, True), U64)
elementwise("integer", "integer.cu", "integer_16", lambda rng: operands(rng, INTEGERS[U16], U16), U16)

for entry in ("float_add", "float_multiply", "float_fma", "float_divide", "float_choose", "float_compare",
              "float_choose_sign", "float_divide_directed", "float_flush", "float_compare_flush"):  # fmt: skip
    elementwise("float", "float.cu", entry, lambda rng: float_operands(rng, "f32"), U32)
for entry in ("float_double", "float_double_directed"):
    elementwise("float", "float.cu", entry, lambda rng: float_operands(rng, "f64"), U64)


def packed(kind):
    def make(rng):
        low, high = float_operands(rng, kind), float_operands(rng, kind)
        return [x.astype(U32) | y.astype(U32) << 16 for x, y in zip(low, high)]

    return make


elementwise("float", "float.cu", "float_half2", packed("f16"), U32)
elementwise("float", "float.cu", "float_half2_rare", packed("f16"), U32)
elementwise("float", "float.cu", "float_bfloat2", packed("bf16"), U32)
elementwise("float", "float.cu", "float_16", lambda rng: float_operands(rng, "f16"), U16)


def floats_for_conversion(rng) -> list[np.ndarray]:
    """Corners, ties between FP8, f16, bf16, tf32 and integer neighbours, any pattern."""
    x = bits(rng, ELEMENTS)
    x[:46] = FLOATS["f32"][0]
    ties = near_one(rng, 200, 32, 23, 127, 12)
    for drop, part in ((19, 0), (20, 1), (21, 2), (12, 3), (15, 4)):  # one mantissa bit below the last kept, the rest zero
        ties[part * 40 : part * 40 + 40] &= np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    x[46:246] = ties
    x[246:346] = near_one(rng, 100, 32, 23, 127 + 14, 18)
    return [x]


def doubles_for_conversion(rng) -> list[np.ndarray]:
    x = bits(rng, ELEMENTS, U64)
    x[:38] = FLOATS["f64"][0]
    x[38:300] = near_one(rng, 262, 64, 52, 1023, 40)
    x[300:350] &= np.uint64(0xFFFFFFFFE0000000)
    x[320:350] |= np.uint64(0x10000000)  # ties between two floats
    return [x]


def integers_for_conversion(dtype):
    def make(rng):
        x = bits(rng, ELEMENTS, dtype)
        x[: len(INTEGERS[dtype])] = INTEGERS[dtype]
        x[64:256] >>= rng.integers(0, 8 * x.itemsize, 192).astype(dtype)
        return [x]

    return make


for entry in ("convert_float_to_integer", "convert_float_to_float", "convert_float_to_tf32", "convert_float_rare", "convert_pairs", "convert_pairs_rare"):
    elementwise("convert", "convert.cu", entry, floats_for_conversion, U32, U64)
elementwise("convert", "convert.cu", "convert_from_32", integers_for_conversion(U32), U32, U64)
elementwise("convert", "convert.cu", "convert_from_64", integers_for_conversion(U64), U64)
elementwise("convert", "convert.cu", "convert_from_double", doubles_for_conversion, U64)
elementwise("convert", "convert.cu", "convert_from_16", lambda rng: [np.arange(1 << 16, dtype=U16)], U16, U64, 1 << 16)
for entry in ("convert_halves_to_fp8", "convert_halves_to_fp8_relu"):
    elementwise("convert", "convert.cu", entry,
                lambda rng: [np.arange(1 << 16, dtype=U32) | np.arange(1 << 16, dtype=U32)[::-1] << 16], U32, U64, 1 << 16)  # fmt: skip


def approx_operands(rng) -> list[np.ndarray]:
    a, b, _ = float_operands(rng, "f32")
    a[256:384] = rng.uniform(-20, 20, 128).astype(F32).view(U32)
    return [a, b]


for entry in ("approx_reciprocal", "approx_divide", "approx_exponential", "approx_trigonometry", "approx_flush"):
    elementwise("approx", "approx.cu", entry, approx_operands, U32)
elementwise("approx", "approx.cu", "approx_packed", lambda rng: packed("f16")(rng)[:2], U32)

# ---- warps, control flow, memory ------------------------------------------------------------------------------------------

for entry, rows in (("warp_shuffle", None), ("warp_shuffle_divergent", 2), ("warp_vote", 5), ("warp_match", 5), ("warp_reduce", 10),
                    ("warp_elect", 4), ("warp_registers", None), ("warp_active_mask", 2), ("barrier_reduce", 6)):  # fmt: skip
    names = None if rows else labels("warp.cu", entry)
    add(f"warp/{entry}", "warp.cu", entry,
        lambda rng, names=names, rows=rows: [bits(rng, 128), bits(rng, 128), Out((rows or len(names), 128), labels=names), 128], block=128)  # fmt: skip
add("warp/barrier_named", "warp.cu", "barrier_named", lambda rng: [bits(rng, 128), bits(rng, 128), Out((64,)), 64], block=128)

add("memory/local_array", "memory.cu", "local_array", lambda rng: [bits(rng, 256), Out((256,)), 256], grid=2, block=128)
add("memory/generic_address", "memory.cu", "generic_address", lambda rng: [bits(rng, 128), Out((3, 128)), 128], block=128)
add("memory/widths", "memory.cu", "widths", lambda rng: [bits(rng, 64 * 32, U8), Out((64 * 64,), U8)], block=64)
add("memory/variables", "memory.cu", "variables", lambda rng: [bits(rng, 128), Out((2, 128)), 128], block=128, shared_bytes=512)
add("memory/control_flow", "memory.cu", "control_flow", lambda rng: [bits(rng, 256), Out((2, 256)), 256], grid=2, block=128)
add("memory/early_exit", "memory.cu", "early_exit", lambda rng: [bits(rng, 128), Out((128,))], block=(16, 8))
add("memory/prints", "memory.cu", "prints", lambda rng: [bits(rng, 32), Out((32,))], block=32)
add("memory/register_reallocation", "memory.cu", "register_reallocation", lambda rng: [bits(rng, 128), Out((128,))], block=256)


def atomic_start() -> np.ndarray:
    start = np.zeros(32 + 512, U32)
    start[[1, 5, 13, 15]] = [0xFFFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
    start[[3, 9]] = [0x7FFFFFFF, 17]
    start[[0, 7, 21]] = [5, 0x12345678, 999]
    return start


add("atomic/integer", "atomics.cu", "atomic_integer", lambda rng: [bits(rng, 512), Out((544,), U32, atomic_start())], grid=4, block=128)
add("atomic/wide", "atomics.cu", "atomic_wide",
    lambda rng: [bits(rng, 64, U64), Out((9,), U64, np.array([1, 2**64 - 1, 0, 2**63 - 1, 2**63, 2**64 - 1, 0, 77, 1], U64))],
    grid=2, block=32)  # fmt: skip
add("atomic/float", "atomics.cu", "atomic_float",
    lambda rng: [bits(rng, 256), Out((16 + 256,), U32, np.concatenate([np.zeros(16, U32), float_operands(rng, "f32")[0][:256]]))],
    grid=2, block=128)  # fmt: skip
add("atomic/half", "atomics.cu", "atomic_half", lambda rng: [bits(rng, 256), Out((2,), U32, np.zeros(2))], grid=2, block=128)
add("atomic/vector", "atomics.cu", "atomic_vector",
    lambda rng: [np.concatenate([x[::2] for x in float_operands(rng, "f32") + float_operands(rng, "f32")])[:1024],
                 Out((16 + 1024,), U32, np.concatenate([np.zeros(16, U32), *float_operands(rng, "f32")])[: 16 + 1024])],
    grid=2, block=128)  # fmt: skip
add("atomic/shared", "atomics.cu", "atomic_shared", lambda rng: [bits(rng, 128), Out((32 + 128,))], block=128)
add("atomic/split_k_ticket", "atomics.cu", "split_k_ticket",
    lambda rng: [rng.standard_normal(6 * 64, F32), Out((6 * 64,), F32), Out((1,), U32, np.zeros(1)), Out((64,), F32)], grid=6, block=64)  # fmt: skip
add("atomic/split_k_turns", "atomics.cu", "split_k_turns",
    lambda rng: [rng.standard_normal(6 * 64, F32), Out((1,), U32, np.zeros(1)), Out((64,), F32)], grid=6, block=64)  # fmt: skip
add("atomic/spin_lock", "atomics.cu", "spin_lock",
    lambda rng: [bits(rng, 8), Out((1,), U32, np.zeros(1)), Out((1,), U32, np.zeros(1))], grid=8, block=32)  # fmt: skip

# ---- asynchronous copies and barriers ---------------------------------------------------------------------------------------

add("cp_async/sizes", "cp_async.cu", "cp_async_sizes", lambda rng: [bits(rng, 1024, U8), Out((7 * 256,))], block=64)
add("cp_async/groups", "cp_async.cu", "cp_async_groups", lambda rng: [bits(rng, 384), Out((64,))], block=64)
add("cp_async/mbarrier", "cp_async.cu", "cp_async_mbarrier", lambda rng: [bits(rng, 64), Out((64,))], block=64)
add("cp_async/mbarrier_noinc", "cp_async.cu", "cp_async_mbarrier_noinc", lambda rng: [bits(rng, 64), Out((64,))], block=64)

add("mbarrier/arrivals", "mbarrier.cu", "mbarrier_arrivals", lambda rng: [Out((32,))], block=1)
add("mbarrier/drop", "mbarrier.cu", "mbarrier_drop", lambda rng: [Out((32,))], block=1)
add("mbarrier/bytes", "mbarrier.cu", "mbarrier_bytes", lambda rng: [Out((32,))], block=1)
add("mbarrier/pending", "mbarrier.cu", "mbarrier_pending", lambda rng: [Out((8,))], block=1)
add("mbarrier/ring", "mbarrier.cu", "mbarrier_ring", lambda rng: [bits(rng, 32), Out((32,))], block=64)
add("mbarrier/state", "mbarrier.cu", "mbarrier_state", lambda rng: [bits(rng, 128), Out((128,))], block=128)

add("bulk/from_global", "bulk.cu", "bulk_from_global", lambda rng: [bits(rng, 1024, U8), Out((256,))], block=64)
add("bulk/to_global", "bulk.cu", "bulk_to_global", lambda rng: [bits(rng, 192), Out((816,), U8)], block=64)
for size in (2, 4):
    add(f"bulk/to_peer_{size}", "bulk.cu", "bulk_to_peer", lambda rng, size=size: [bits(rng, 64 * size), Out((64 * size,))],
        grid=size, cluster=size, block=64)  # fmt: skip
add("bulk/multicast", "bulk.cu", "bulk_multicast", lambda rng: [bits(rng, 128, U8), Out((256,)), 0b1101], grid=4, cluster=4, block=64)  # fmt: skip
add("bulk/reduce_to_peer", "bulk.cu", "bulk_reduce_to_peer", lambda rng: [bits(rng, 256), Out((256,))], grid=4, cluster=4, block=64)  # fmt: skip
for operation in ("add.u32", "add.s32", "add.u64", "min.u32", "min.s32", "max.u32", "max.s32", "min.s64", "max.u64", "inc.u32", "dec.u32",
                  "and.b32", "or.b32", "xor.b64", "add.f32", "add.f64", "add.noftz.f16", "add.noftz.bf16", "min.f16", "max.bf16"):  # fmt: skip

    def reduce_arguments(rng, operation=operation):
        kind = operation.split(".")[-1]
        if kind in FLOATS:
            a, b, _ = float_operands(rng, kind)
            a, b = a.view(U32)[:128].copy(), b.view(U32)[:128].copy()
        else:
            a, b = bits(rng, 128), bits(rng, 128)
            a[::5], b[::3] = 7, 6
        return [a, Out((128,), U32, b)]

    add(f"bulk/reduce_{operation}", "bulk.cu", "bulk_reduce_" + operation.replace(".", "_"), reduce_arguments, block=128)

for shape, size in (((2, 1), 2), ((4, 1), 4), ((2, 2), 4)):
    add(f"cluster/registers_{shape[0]}x{shape[1]}", "cluster.cu", "cluster_registers", lambda rng: [Out((8, 16))], grid=(4, 2), cluster=shape,
        block=32)  # fmt: skip
for size in (2, 4):
    launch = {"grid": size, "cluster": size, "block": 64}
    add(f"cluster/memory_{size}", "cluster.cu", "cluster_memory", lambda rng, n=64 * size: [bits(rng, n), Out((n, 4))], **launch)
    add(f"cluster/generic_{size}", "cluster.cu", "cluster_generic", lambda rng, n=64 * size: [bits(rng, n), Out((n, 2))], **launch)
    add(f"cluster/barrier_{size}", "cluster.cu", "cluster_barrier", lambda rng, n=64 * size: [bits(rng, n), Out((n,))], **launch)
    add(f"cluster/barrier_unaligned_{size}", "cluster.cu", "cluster_barrier_unaligned", lambda rng, n=64 * size: [bits(rng, n), Out((n,))],
        **launch)  # fmt: skip
    add(f"cluster/remote_arrive_{size}", "cluster.cu", "cluster_remote_arrive", lambda rng, n=32 * size: [bits(rng, n), Out((n,))], **launch)
    add(f"cluster/remote_bytes_{size}", "cluster.cu", "cluster_remote_bytes", lambda rng, n=size: [Out((n,))], **launch)
    add(f"cluster/store_async_{size}", "cluster.cu", "cluster_store_async", lambda rng, n=size: [bits(rng, 32 * n), Out((n, 128))], **launch)

# ---- TMA ----------------------------------------------------------------------------------------------------------------------


def box_bytes(box, itemsize, element_strides=None) -> int:
    return itemsize * int(np.prod([-(-b // s) for b, s in zip(box, element_strides or (1,) * len(box))]))


def tma_launch(rank, window, **constants) -> dict:
    """1024 bytes more than the window, so that it can start at a multiple of 1024."""
    return dict(block=128, shared_bytes=1024 + window, constants={"RANK": rank, **constants})


def tma_load(name, shape, dtype, box, at, offset=0, **options) -> None:
    """shape: of the tensor, outermost first. box, at: elements, innermost first. options: those of Map."""
    itemsize = np.dtype(dtype).itemsize
    size = box_bytes(box, itemsize, options.get("element_strides"))
    # A row narrower than the swizzle span still takes the whole span in shared memory.
    occupied = size // (box[0] * itemsize) * max(box[0] * itemsize, options.get("swizzle", 0))
    window = (offset + occupied + 255) // 128 * 128  # the box and at least 128 bytes after it
    at = tuple(at) + (0,) * (5 - len(at))
    add(f"tma_load/{name}", "tma.cu", "tma_load",
        lambda rng: [Map(bits(rng, shape, dtype), box, **options), Out((window // 4,)), size, window, offset, *at],
        **tma_launch(len(box), window))  # fmt: skip


for itemsize, dtype in ((1, U8), (2, U16), (4, U32), (8, U64)):
    tma_load(f"bytes_{itemsize}", (24, 128 // itemsize), dtype, (64 // itemsize, 10), (16 // itemsize, 3))
for swizzle in (32, 64, 128):
    tma_load(f"swizzle_{swizzle}", (40, 256), U8, (swizzle, 20), (32, 4), swizzle=swizzle)
    tma_load(f"swizzle_{swizzle}_16bit", (40, 128), U16, (swizzle // 2, 12), (16, 4), swizzle=swizzle)
    tma_load(f"swizzle_{swizzle}_edge", (40, 240), U8, (swizzle, 20), ((232 - swizzle // 2) // 16 * 16, 30), swizzle=swizzle,
             window=(slice(0, 40), slice(0, 232)))  # fmt: skip
tma_load("swizzle_128_offset_128", (40, 256), U8, (128, 20), (0, 0), offset=128, swizzle=128)
tma_load("swizzle_128_offset_640", (40, 256), U8, (128, 9), (0, 0), offset=640, swizzle=128)
tma_load("swizzle_64_offset_384", (40, 256), U8, (64, 9), (0, 0), offset=384, swizzle=64)
tma_load("swizzle_32_offset_128", (40, 256), U8, (32, 9), (0, 0), offset=128, swizzle=32)

# The innermost coordinate must be a multiple of 16 bytes. Rows end inside a 16-byte piece all the same: the map covers 75 of 80.
RAGGED = (slice(0, 24), slice(0, 75))
for side, at in {"left": (-16, 4), "right": (64, 4), "top": (16, -3), "bottom": (16, 18), "top_left": (-16, -7), "top_right": (64, -7),
                 "bottom_left": (-16, 23), "bottom_right": (64, 23), "outside_left": (-32, 0), "outside_right": (80, 0),
                 "outside_top": (0, -8), "outside_bottom": (0, 24), "far_outside": (-2000000000, 2000000000)}.items():  # fmt: skip
    tma_load(f"bounds_{side}", (24, 80), U8, (32, 8), at, window=RAGGED)
tma_load("bounds_all_sides", (6, 16), U16, (32, 10), (-8, -2))
tma_load("fill_nan_f16", (24, 64), U16, (32, 8), (48, 20), fill_nan=True, view="float16")
tma_load("fill_nan_bf16", (24, 64), U16, (32, 8), (-16, 20), fill_nan=True, view="bfloat16")
tma_load("fill_nan_f32", (24, 64), U32, (16, 8), (56, -4), fill_nan=True, view="float32")
tma_load("fill_nan_f64", (24, 64), U64, (8, 8), (60, -4), fill_nan=True, view="float64")

tma_load("rank_1", (500,), U8, (64,), (96,))
tma_load("rank_1_edge", (501,), U32, (128,), (448,))
tma_load("rank_2_window", (30, 96), U8, (48, 6), (32, 22), window=(slice(2, 28), slice(16, 84)))
tma_load("rank_3", (5, 7, 32), U16, (16, 4, 3), (8, 2, 1))
tma_load("rank_3_bounds", (5, 7, 32), U16, (16, 4, 3), (24, -1, 3))
tma_load("rank_3_swizzle_128", (5, 11, 256), U8, (128, 6, 3), (64, 2, 1), swizzle=128)
tma_load("rank_4", (3, 4, 5, 32), U8, (16, 3, 2, 2), (16, 1, 1, 1))
tma_load("rank_4_bounds", (3, 4, 5, 32), U8, (16, 3, 2, 2), (16, 3, -1, 2), window=(..., slice(0, 27)))
tma_load("rank_5", (3, 2, 4, 5, 32), U8, (16, 3, 2, 2, 2), (16, 1, 1, 0, 1))
tma_load("rank_5_bounds", (3, 2, 4, 5, 32), U32, (8, 3, 2, 2, 2), (-4, 3, 3, -1, 2), swizzle=32)
tma_load("element_strides", (32, 128), U8, (64, 16), (16, 3), element_strides=(1, 2))
tma_load("element_strides_3", (20, 14, 32), U16, (32, 9, 8), (0, 1, 2), element_strides=(1, 4, 3))
tma_load("element_strides_bounds", (32, 128), U8, (64, 16), (16, 25), element_strides=(1, 3))


def tma_store(name, shape, dtype, box, at, offset=0, **options) -> None:
    size = box_bytes(box, np.dtype(dtype).itemsize)
    at = tuple(at) + (0,) * (5 - len(at))
    add(f"tma_store/{name}", "tma.cu", "tma_store",
        lambda rng: [Map(Out(shape, dtype), box, **options), bits(rng, size // 4), size, offset, *at],
        **tma_launch(len(box), offset + size))  # fmt: skip


for swizzle in (0, 32, 64, 128):
    tma_store(f"swizzle_{swizzle}", (24, 160), U8, (swizzle or 48, 12), (16, 5), swizzle=swizzle)
# Negative coordinates are for loads only; test_conformance.py tests that stores with them are refused.
for side, at in {"right": (64, 4), "bottom": (16, 18), "bottom_right": (64, 23), "outside": (80, 3)}.items():
    tma_store(f"bounds_{side}", (24, 80), U8, (32, 8), at, window=RAGGED)
tma_store("bytes_2", (24, 64), U16, (32, 8), (40, 4))
tma_store("bytes_8", (24, 16), U64, (8, 8), (10, 18), swizzle=64)
tma_store("window_right", (24, 96), U8, (48, 6), (32, 20), window=(slice(1, 23), slice(16, 84)))
tma_store("rank_1", (300,), U8, (64,), (240,))
tma_store("swizzle_128_offset_384", (24, 160), U8, (128, 9), (0, 0), offset=384, swizzle=128)


def tma_reduce(operation, dtype, view=None, kind=None) -> None:
    # The box reaches 16 bytes and one element out of the tensor.
    piece = 16 // np.dtype(dtype).itemsize
    box, shape = (4 * piece, 6), (12, 16 * piece)

    def arguments(rng):
        count = int(np.prod(shape))
        if kind:
            x, y = float_operands(rng, kind)[0], float_operands(rng, kind)[1]
            initial, a = np.resize(x, count).reshape(shape), np.resize(y, int(np.prod(box)))
        else:
            initial, a = bits(rng, shape, dtype), bits(rng, int(np.prod(box)), dtype)
            initial[:, ::3], a[::2] = 6, 7
        inside = (slice(0, 12), slice(0, shape[1] - 1))
        return [Map(Out(shape, dtype, initial), box, view=view, swizzle=64, window=inside), a.view(U32), 384, 13 * piece, 4]

    add(f"tma_reduce/{operation}_{view or dtype}", "tma.cu", "tma_reduce", arguments, **tma_launch(2, 384, OPERATION=operation))


for operation in ("add", "min", "max", "inc", "dec", "and", "or", "xor"):
    tma_reduce(operation, U32)
for operation in ("add", "min", "max"):
    tma_reduce(operation, "int32")
for operation in ("min", "max"):
    tma_reduce(operation, "int64")
for operation in ("add", "min", "and", "xor"):
    tma_reduce(operation, U64)
tma_reduce("add", U32, "float32", "f32")
for operation in ("add", "min", "max"):
    tma_reduce(operation, U16, "float16", "f16")
    tma_reduce(operation, U16, "bfloat16", "bf16")

for size, masks in ((2, 0x33), (2, 0x12), (2, 0x21), (4, 0xFFFF), (4, 0x1248), (4, 0x6C30), (4, 0xF009)):
    add(f"tma_multicast/{size}_{masks:04x}", "tma.cu", "tma_multicast",
        lambda rng, size=size, masks=masks: [Map(bits(rng, (28, 64), U8), (64, 8), swizzle=64), Out((size, size * 128)), 512, masks],
        grid=size, cluster=size, **tma_launch(2, 512 * size))  # fmt: skip
add("tma_load/pipeline", "tma.cu", "tma_pipeline", lambda rng: [Map(bits(rng, (48, 64), U8), (64, 8)), Out((128,)), 512],
    **tma_launch(2, 1024))  # fmt: skip
add("tma_load/predicated", "tma.cu", "tma_predicated", lambda rng: [Map(bits(rng, (48, 64), U8), (64, 8)), Out((128,)), 512],
    **tma_launch(2, 512))  # fmt: skip

# ---- matrices in registers ------------------------------------------------------------------------------------------------------

FORMATS = {"e4m3": (8, 3, 7), "e5m2": (8, 2, 15), "f16": (16, 10, 15), "bf16": (16, 7, 127), "tf32": (32, 23, 127)}


def operand_bytes(rng, fmt, count, family) -> np.ndarray:
    """count bytes of finite values: "normal" near one, "spread" over wide exponents, "any" pattern (for FP8 NaN too)."""
    if fmt in ("s8", "u8", "b1"):
        return bits(rng, count, U8)
    width, mantissa, one = FORMATS[fmt]
    spread = {"normal": 2, "spread": {"e4m3": 6, "e5m2": 12, "f16": 12, "bf16": 30, "tf32": 30}[fmt], "any": 0}[family]
    if family == "any":
        return bits(rng, count, U8)
    return near_one(rng, count * 8 // width, width, mantissa, one, spread).view(U8)


def warp_mma(fmt_a, fmt_b, shape, d, registers, family="normal", steps=3, suffix="") -> None:
    a_words, b_words, d_words = registers
    instruction = f"{shape}.row.col{suffix}.{d}.{fmt_a}.{fmt_b}.{d}"

    def arguments(rng):
        a = operand_bytes(rng, fmt_a, 128 * a_words * steps, family).view(U32)
        b = operand_bytes(rng, fmt_b, 128 * b_words * steps, family).view(U32)
        if d == "f32":
            c = near_one(rng, 32 * d_words, 32, 23, 127, 6)
        elif d == "f16":
            c = near_one(rng, 64 * d_words, 16, 10, 15, 4).view(U32)
        else:
            c = bits(rng, 32 * d_words)
        return [a, b, c, Out((d_words, 32)), steps]

    name = f"mma_sync/{shape}_{d}_{fmt_a}_{fmt_b}" + ("" if family == "normal" else f"_{family}") + suffix.replace(".", "_")
    add(name, "matrix.cu", "multiply", arguments, constants={"INSTRUCTION": instruction, "A_REGISTERS": a_words, "B_REGISTERS": b_words,
        "D_REGISTERS": d_words, "FLOAT_D": d == "f32"})  # fmt: skip


for pair in itertools.product(("e4m3", "e5m2"), repeat=2):
    warp_mma(*pair, "m16n8k32", "f32", (4, 2, 4))
    warp_mma(*pair, "m16n8k32", "f32", (4, 2, 4), "spread")
warp_mma("e4m3", "e4m3", "m16n8k32", "f32", (4, 2, 4), "any")
warp_mma("e5m2", "e5m2", "m16n8k32", "f32", (4, 2, 4), "any")
for fmt in ("f16", "bf16"):
    for family in ("normal", "spread", "any"):
        warp_mma(fmt, fmt, "m16n8k16", "f32", (4, 2, 4), family)
    warp_mma(fmt, fmt, "m16n8k8", "f32", (2, 1, 4))
for family in ("normal", "any"):
    warp_mma("f16", "f16", "m16n8k16", "f16", (4, 2, 2), family)
warp_mma("f16", "f16", "m16n8k8", "f16", (2, 1, 2))
for family in ("normal", "spread", "any"):
    warp_mma("tf32", "tf32", "m16n8k8", "f32", (4, 2, 4), family)
warp_mma("tf32", "tf32", "m16n8k4", "f32", (2, 1, 4))
warp_mma("s8", "s8", "m16n8k32", "s32", (4, 2, 4))
warp_mma("u8", "s8", "m16n8k32", "s32", (4, 2, 4), suffix=".satfinite")
warp_mma("s8", "u8", "m16n8k16", "s32", (2, 1, 4))

add("matrix/load", "matrix.cu", "load_matrix", lambda rng: [bits(rng, 256), Out((24, 32))])
add("matrix/store", "matrix.cu", "store_matrix", lambda rng: [bits(rng, 256), Out((24, 32))])
add("matrix/move", "matrix.cu", "move_matrix", lambda rng: [bits(rng, 32), Out((32,))])

# ---- wgmma --------------------------------------------------------------------------------------------------------------------

IMAGE = 32 * 1024
B_AT = 16 * 1024  # where B starts in the image
SHARED = 1024 + 2 * IMAGE
SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # bits 62-63 of a descriptor


def descriptor(swizzle=128, stride=None, leading=16, base=0) -> int:
    """A matrix descriptor without its address. stride, leading: bytes. base: the base offset, bits 49-51."""
    stride = 8 * swizzle if stride is None else stride
    value = leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | SWIZZLE_CODE[swizzle] << 62
    return value - (1 << 64) if value >> 63 else value


def wgmma(name, n, fmt_a, fmt_b, d="f32", *, a=None, b=None, starts=(0, B_AT), advance=(32, 32), steps=4, tail="1, 1", family="normal",
          registers=False, scale_first=1, large_c=False, in_flight=False, suffix="") -> None:  # fmt: skip
    k = {"e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "f16": 16, "bf16": 16, "tf32": 8}[fmt_a]
    words = n // (4 if d == "f16" else 2)
    a, b = descriptor() if a is None else a, descriptor() if b is None else b
    inputs = ", ".join(f"%{words + j}" for j in range(4)) if registers else f"%{words}"
    after_a = words + (4 if registers else 1)
    constants = {
        "INSTRUCTION": f"m64n{n}k{k}.{d}.{fmt_a}.{fmt_b}{suffix}", "TAIL": f", {tail}" if tail else "", "D_WORDS": words, "WIDTH": 2 * words,
        "A_AT": inputs, "B_AT": f"%{after_a}", "SCALE_AT": f"%{after_a + 1}", "A_IN_REGISTERS": registers, "INTEGER_D": d != "f32",
        "IN_FLIGHT": in_flight,
    }  # fmt: skip

    def arguments(rng):
        image = np.concatenate([operand_bytes(rng, fmt_a, B_AT, family), operand_bytes(rng, fmt_b, IMAGE - B_AT, family)]).view(U32)
        if in_flight:
            return [image, IMAGE, a, starts[0], advance[0], b, starts[1], advance[1], Out((2 * words, 128))]
        a_words = operand_bytes(rng, fmt_a, 512 * 4 * steps, family).view(U32)
        if d == "f32":
            c = near_one(rng, 128 * words, 32, 23, 127 + (20 if large_c else 0), 6)
        elif d == "f16":
            c = near_one(rng, 256 * words, 16, 10, 15, 4).view(U32)
        else:
            c = bits(rng, 128 * words)
        return [image, IMAGE, a_words, a, starts[0], advance[0], b, starts[1], advance[1], steps, scale_first, c, Out((words, 128))]

    add(f"wgmma/{name}", "wgmma.cu", "wgmma_in_flight" if in_flight else "wgmma_image", arguments, block=128, shared_bytes=SHARED,
        constants=constants)  # fmt: skip


# Tiles of 128-byte rows; B has at most 128 rows in the image, so wider shapes read B from the start of the image.
for n in range(8, 257, 8):
    wgmma(f"n{n}", n, "e4m3", "e4m3", starts=(0, B_AT if n <= 128 else 0), steps=2, family=("normal", "spread")[n // 8 % 2])
for pair in itertools.product(("e4m3", "e5m2"), repeat=2):
    for family in ("normal", "spread"):
        wgmma(f"{pair[0]}_{pair[1]}_{family}", 16, *pair, family=family)
    wgmma(f"{pair[0]}_{pair[1]}_any", 16, *pair, family="any", steps=1)
    wgmma(f"{pair[0]}_{pair[1]}_f16", 16, *pair, d="f16")
wgmma("e4m3_e4m3_f16_spread", 32, "e4m3", "e4m3", d="f16", family="spread")
wgmma("large_c", 16, "e4m3", "e4m3", large_c=True)
wgmma("scale_d_false", 16, "e4m3", "e4m3", scale_first=0)
wgmma("in_flight", 32, "e4m3", "e4m3", in_flight=True)
wgmma("a_registers_e4m3", 16, "e4m3", "e4m3", registers=True)
wgmma("a_registers_e5m2", 24, "e5m2", "e4m3", registers=True)
wgmma("negate_fp8_a", 16, "e4m3", "e4m3", tail="-1, 1")
wgmma("negate_fp8_b", 16, "e4m3", "e4m3", tail="1, -1")

# Layouts, all K-major: 8-row groups `stride` apart.
wgmma("swizzle_64", 16, "e4m3", "e4m3", a=descriptor(64), b=descriptor(64), steps=2)
wgmma("swizzle_32", 16, "e4m3", "e4m3", a=descriptor(32), b=descriptor(32), steps=1)
wgmma("swizzle_mixed", 16, "e4m3", "e4m3", a=descriptor(128), b=descriptor(64), steps=2)
wgmma("stride_wide", 16, "e4m3", "e4m3", a=descriptor(128, 1536), b=descriptor(128, 3072))
wgmma("stride_64_wide", 16, "e4m3", "e4m3", a=descriptor(64, 1024), b=descriptor(64, 1536), steps=2)
wgmma("leading_ignored", 16, "e4m3", "e4m3", a=descriptor(128, leading=512), b=descriptor(128, leading=0))
# Without swizzle: core matrices of 8 rows of 16 bytes. Two conventions of which offset runs along K.
wgmma("no_swizzle", 16, "e4m3", "e4m3", a=descriptor(0, 256, 128), b=descriptor(0, 256, 128), steps=1)
wgmma("no_swizzle_swapped", 16, "e4m3", "e4m3", a=descriptor(0, 128, 1024), b=descriptor(0, 128, 256), steps=1)
wgmma("no_swizzle_wide", 32, "e4m3", "e4m3", a=descriptor(0, 512, 2048), b=descriptor(0, 1024, 128), advance=(16, 16), steps=2)
# A tile that does not start at a multiple of the pattern's period, with and without the base offset that says so.
for shift in (128, 384, 896):
    wgmma(f"base_offset_{shift}", 16, "e4m3", "e4m3", a=descriptor(base=shift // 128), b=descriptor(base=shift // 128),
          starts=(shift, B_AT + shift))  # fmt: skip
wgmma("base_offset_missing", 16, "e4m3", "e4m3", starts=(256, B_AT + 256))
wgmma("base_offset_64", 16, "e4m3", "e4m3", a=descriptor(64, base=1), b=descriptor(64, base=1), starts=(128, B_AT + 128), steps=2)
wgmma("start_in_atom", 16, "e4m3", "e4m3", starts=(64, B_AT + 32), advance=(16, 48), steps=2)

# 16-bit operands: both majors, negation, A from registers.
for fmt in ("f16", "bf16"):
    for family in ("normal", "spread", "any"):
        wgmma(f"{fmt}_{family}", 16, fmt, fmt, tail="1, 1, 0, 0", family=family, steps=1 if family == "any" else 4)
    wgmma(f"{fmt}_negate_a", 16, fmt, fmt, tail="-1, 1, 0, 0")
    wgmma(f"{fmt}_negate_b", 16, fmt, fmt, tail="1, -1, 0, 0")
    wgmma(f"{fmt}_negate_both", 16, fmt, fmt, tail="-1, -1, 0, 0", scale_first=0)
    wgmma(f"{fmt}_a_registers", 16, fmt, fmt, tail="1, 1, 0", registers=True)
    wgmma(f"{fmt}_a_registers_b_transposed", 16, fmt, fmt, b=descriptor(32, 256, 512), advance=(0, 512), tail="-1, 1, 1", registers=True, steps=2)
wgmma("f16_f16", 16, "f16", "f16", d="f16", tail="1, 1, 0, 0")
wgmma("f16_f16_spread", 16, "f16", "f16", d="f16", tail="1, 1, 0, 0", family="spread")
wgmma("f16_f16_negate_a", 16, "f16", "f16", d="f16", tail="-1, 1, 0, 0", scale_first=0)
for pair in (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("f16", "f16")):
    wgmma(f"{pair[0]}_{pair[1]}_f16_any", 16, *pair, d="f16", tail="1, 1, 0, 0" if pair[0] == "f16" else "1, 1", family="any", steps=1)
# MN-major: 64, 32 or 16 values of M or N in a swizzled row, one row per k.
wgmma("transposed_a_128", 16, "bf16", "bf16", a=descriptor(128, 1024, 4096), advance=(2048, 32), tail="1, 1, 1, 0", steps=3)
wgmma("transposed_b_128", 64, "bf16", "bf16", b=descriptor(128, 1024, 4096), advance=(32, 2048), tail="1, 1, 0, 1", steps=3)
wgmma("transposed_b_128_n128", 128, "f16", "f16", b=descriptor(128, 1024, 4096), advance=(32, 2048), tail="1, 1, 0, 1", steps=2)
wgmma("transposed_b_128_n128_swapped", 128, "f16", "f16", b=descriptor(128, 4096, 1024), advance=(32, 1024), tail="1, 1, 0, 1", steps=2)
wgmma("transposed_both_64", 32, "f16", "f16", a=descriptor(64, 512, 2048), b=descriptor(64, 512, 2048), advance=(1024, 1024),
      tail="1, 1, 1, 1", steps=2)  # fmt: skip
wgmma("transposed_both_64_n64", 64, "f16", "f16", a=descriptor(64, 512, 2048), b=descriptor(64, 2048, 512), advance=(1024, 1024),
      tail="1, 1, 1, 1", steps=2)  # fmt: skip
wgmma("transposed_both_32", 32, "bf16", "bf16", a=descriptor(32, 256, 1024), b=descriptor(32, 256, 1024), advance=(512, 512),
      tail="1, 1, 1, 1", steps=2)  # fmt: skip
wgmma("transposed_no_swizzle", 16, "bf16", "bf16", a=descriptor(0, 128, 256), b=descriptor(0, 128, 256), advance=(0, 0), tail="1, 1, 1, 1",
      steps=1)  # fmt: skip
wgmma("transposed_no_swizzle_swapped", 16, "bf16", "bf16", a=descriptor(0, 1024, 128), b=descriptor(0, 256, 512), advance=(0, 0),
      tail="1, 1, 1, 1", steps=1)  # fmt: skip

for family in ("normal", "spread", "any"):
    wgmma(f"tf32_{family}", 16, "tf32", "tf32", family=family, steps=1 if family == "any" else 4)
wgmma("tf32_negate_b", 16, "tf32", "tf32", tail="1, -1")
wgmma("tf32_a_registers", 16, "tf32", "tf32", registers=True)
wgmma("s8", 16, "s8", "s8", d="s32", tail="", steps=2)
wgmma("u8_s8", 16, "u8", "s8", d="s32", tail="", steps=2)
wgmma("s8_satfinite", 16, "s8", "u8", d="s32", tail="", steps=2, suffix=".satfinite")

# Boxes narrower than the span of their swizzle. Last, since a wrong count of bytes would hang them.
for swizzle in (32, 64, 128):
    tma_load(f"swizzle_{swizzle}_narrow", (40, 256), U8, (swizzle // 2, 20), (32, 4), swizzle=swizzle)

# ---- what the simulator does not model ------------------------------------------------------------------------------------

# It refuses these by the instruction's name. Their records stay, so that a name can leave this list as soon as it is modelled.
REFUSED = frozenset("""
    integer/integer_rare integer/integer_packed integer/integer_carry float/float_choose_sign
    float/float_divide_directed float/float_double_directed float/float_half2_rare approx/approx_packed
""".split())
