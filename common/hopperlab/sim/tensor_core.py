"""Tensor cores: wgmma (PTX ISA 9.7.15), mma.sync, ldmatrix and stmatrix (9.7.14.5), and their arithmetic bit for bit.

wgmma: one k-step adds all products and the accumulator as integers on a common scale, truncating what lies below 13
fraction bits of the largest exponent, and truncates the sum again (FP8).  For f16, bf16 and tf32 operands 25 fraction
bits are kept.  A float16 accumulator takes the same sum, rounded to nearest even.  mma.sync on FP8 operands runs as two
half-precision steps, and adds the accumulator with an ordinary addition.  The models are those of Xie et al. (MMA-Sim),
compared with an H200 bit by bit.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache

import ml_dtypes
import numpy as np

from .arithmetic import canonical_nan, f32_to_f16
from .copy_engine import CHUNK, swizzle
from .errors import Hazard, MemoryFault, UnknownInstruction
from .machine import Rendezvous
from .registry import special

F32, U32, U16, U8 = np.float32, np.uint32, np.uint16, np.uint8


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _decode_tables():
    tables = {}
    for name, dtype, lowest in (("e4m3", ml_dtypes.float8_e4m3fn, -6), ("e5m2", ml_dtypes.float8_e5m2, -14)):
        tables[name] = _value_and_exponent(np.arange(256, dtype=U8).view(dtype).astype(F32), lowest)
    tables["f16"] = _value_and_exponent(np.arange(65536, dtype=U16).view(np.float16).astype(F32), -14)
    tables["bf16"] = _value_and_exponent((np.arange(65536, dtype=U32) << U32(16)).view(F32), -126)
    return tables


def _value_and_exponent(values, lowest):
    """Values, and exponents as the tensor core sees them: subnormals at the lowest one, zeros far below everything."""
    with np.errstate(all="ignore"):
        exponents = np.maximum(np.frexp(values)[1] - 1, lowest)
    exponents = np.where(np.isfinite(values), exponents, 0)
    # A product with a zero must fall below every other: half the distance each, in the smallest type that holds it.
    zero = (-60, np.int8) if lowest > -20 else (ZERO_EXPONENT // 2, np.int16)
    return values, np.where(values == 0, zero[0], exponents).astype(zero[1])


ZERO_EXPONENT = -2000
_TABLES = _decode_tables()
BITS = {"e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f16": 16, "bf16": 16, "tf32": 32}  # of an element of A or B
_CODES = {8: U8, 16: U16, 32: U32}


@dataclass(frozen=True)
class _Rule:
    """fraction: bits kept when products are aligned.  result: fraction bits of a float32 result, None for all of them, or
    "f16".  lowest: exponent of a sum of zeros.  subnormal: exponent of the accumulator's subnormal numbers."""

    fraction: int
    result: object
    lowest: int = -133
    subnormal: int = -126


_RULES = {
    ("f8", "f32"): _Rule(13, 13), ("f8", "f16"): _Rule(13, "f16", -21, -14),
    ("wide", "f32"): _Rule(25, None), ("wide", "f16"): _Rule(25, "f16", -21, -14),
}  # fmt: skip


def _decode(codes, fmt):
    if fmt == "tf32":  # the low 13 bits of the float32 are ignored
        return _value_and_exponent((codes & U32(0xFFFFE000)).view(F32), -126)
    return tuple(table.take(codes) for table in _TABLES[fmt])


def accumulate(a_codes, b_codes, c, a_format, b_format, d_format="f32"):
    """D = A B^T + C for one k-step of wgmma: a (m, k) and b (n, k) codes, c (m, n) values of d_format, or batches of them.

    c and the result are float32 arrays for f32 and f16 (which holds float16 values), int32 for s32.
    """
    if d_format.startswith("s32"):
        return _accumulate_integers(a_codes, b_codes, c, a_format, b_format, d_format)
    a, a_exponent = _decode(_k_first(a_codes), a_format)
    b, b_exponent = _decode(_k_first(b_codes), b_format)
    rule = _RULES["f8" if a_format in ("e4m3", "e5m2") else "wide", d_format]
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _accumulate_special(a, b, c, a_exponent, b_exponent, rule)
    return _fused_sum(a, b, c, a_exponent, b_exponent, rule)


def _k_first(codes):
    """(..., rows, k) -> (k, ..., rows), so that every NumPy pass over products runs over long contiguous rows."""
    return np.ascontiguousarray(codes.transpose(-1, *range(codes.ndim - 1)))


def _accumulate_integers(a_codes, b_codes, c, a_format, b_format, d_format):
    """s32 wraps; s32.satfinite clamps the result of every instruction."""
    a, b = (x.view(np.int8 if f == "s8" else U8).astype(np.int64) for x, f in ((a_codes, a_format), (b_codes, b_format)))
    total = a @ b.swapaxes(-1, -2) + c
    if d_format == "s32.satfinite":
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


def _fused_sum(a, b, c, a_exponent, b_exponent, rule):
    """The sum of c and all products: a and b, and their exponents, have k first."""
    fraction = rule.fraction
    exponent = np.maximum.reduce(a_exponent[..., :, None] + b_exponent[..., None, :], axis=0).astype(np.int32)
    if a_exponent.dtype == np.int8:
        np.putmask(exponent, exponent < -44, ZERO_EXPONENT)  # all products are zero
    c_exponent = np.maximum((c.view(np.int32) >> 23 & 255) - 127, rule.subnormal)
    np.putmask(c_exponent, c == 0, ZERO_EXPONENT)
    exponent = np.maximum(np.maximum(exponent, c_exponent), rule.lowest)
    low, high = int(exponent.min()), int(exponent.max())
    # FP8 products have few bits: with F = 13, float32 holds every step exactly.
    kind = F32 if fraction <= 13 and low > -100 and high < 120 else np.float64
    scale = ((fraction - exponent + 127) << 23).view(F32) if kind is F32 else np.ldexp(kind(1), fraction - exponent)
    a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
    total = np.trunc(c.astype(kind, copy=False) * scale)
    step = 16  # products of 16 k at a time stay in the cache
    products = np.empty((min(step, len(a)), *total.shape), kind)
    for k in range(0, len(a), step):
        np.einsum("k...i,k...j->k...ij", a[k : k + step], b[k : k + step], out=products[: len(a) - k])
        np.multiply(products, scale, out=products)
        np.trunc(products, out=products)
        total += np.add.reduce(products, axis=0)
    total = total * ((exponent - fraction + 127) << 23).view(F32) if kind is F32 else np.ldexp(total, exponent - fraction)
    if rule.result == "f16":
        return total.astype(np.float16).astype(F32) + F32(0)
    if kind is not F32:
        total = _toward_zero(total)
    return total if rule.result is None else _truncate(total, rule.result)


def _truncate(x, fraction):
    """Keep fraction bits of a float32 below its leading one; a zero is +0."""
    mask = U32(0xFFFFFFFF << (23 - fraction) & 0xFFFFFFFF)
    return (np.asarray(x, F32).view(U32) & mask).view(F32) + F32(0)


def _toward_zero(x):
    """float64 -> float32, truncating."""
    y = x.astype(F32)
    over = (np.abs(y.astype(np.float64)) > np.abs(x)) & np.isfinite(y)
    return np.where(over, np.nextafter(y, F32(0)), y) + F32(0)


def _accumulate_special(a, b, c, a_exponent, b_exponent, rule):
    """NaN and infinity as in IEEE arithmetic, every NaN 0x7fffffff; the other outputs as usual."""
    clean = [np.where(np.isfinite(x), x, F32(0)) for x in (a, b, c)]
    exponents = [
        np.where(np.isfinite(x), e, e.dtype.type(-60 if e.dtype == np.int8 else ZERO_EXPONENT // 2))
        for x, e in ((a, a_exponent), (b, b_exponent))
    ]
    result = _fused_sum(*clean, *exponents, rule)
    a, b = np.moveaxis(a, 0, -1), np.moveaxis(b, 0, -1)
    with np.errstate(all="ignore"):
        # Any finite stand-in keeps the classes: inf, nan and the sign of infinities survive a float64 product.
        ieee = a.astype(np.float64) @ b.swapaxes(-1, -2).astype(np.float64) + c
        infinite_or_nan = ~np.isfinite(ieee)
        positive = _infinities(a, b, c, 1)
        negative = _infinities(a, b, c, -1)
    nan = np.isnan(ieee) | (positive & negative)
    result = np.where(infinite_or_nan, np.where(positive, F32(np.inf), F32(-np.inf)), result)
    return np.where(nan, U32(0x7FFFFFFF).view(F32), result)


def _infinities(a, b, c, sign):
    products = a.astype(np.float64)[..., :, None, :] * b[..., None, :, :]
    return (products == sign * np.inf).any(-1) | (c == sign * np.inf)


# ---- wgmma -----------------------------------------------------------------------------------------------------------

_SWIZZLE_OF = {0: 0, 1: 128, 2: 64, 3: 32}


@cache
def accumulator_layout(n):
    """(row, column) of register r of thread t of a 64 x n result: arrays (n / 2, 128). PTX ISA 9.7.15.5.2."""
    r, t = np.arange(n // 2)[:, None], np.arange(128)[None]
    row = t // 32 * 16 + t % 32 // 4 + 8 * (r // 2 % 2)
    return row, r // 4 * 8 + t % 4 * 2 + r % 2


def a_fragment_layout(bits):
    """(row, first k) of the 32-bit registers of A held by a warpgroup: 4 registers, arrays (4, 128). PTX ISA 9.7.15.5.1."""
    r, t = np.arange(4)[:, None], np.arange(128)[None]
    row = t // 32 * 16 + t % 32 // 4 + 8 * (r % 2)
    per_register = 32 // bits
    return row, t % 4 * per_register + r // 2 * 4 * per_register


def decode_descriptor(descriptor):
    """(address, leading offset, stride offset, base offset, swizzle span), in bytes. PTX ISA 9.7.15.5.1.2.2."""
    return ((descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4,
            descriptor >> 49 & 7, _SWIZZLE_OF[descriptor >> 62 & 3])  # fmt: skip


def tile_chunks(descriptor, rows, k_bytes, transposed=False):
    """Shared addresses of the 16-byte pieces of a tile.

    K-major: array (rows, k_bytes / 16).  Transposed (MN-major, 16-bit types): array (k, rows / 8), pieces run along rows.
    """
    start, leading, stride, base, span = decode_descriptor(descriptor)
    if transposed:
        k, m = np.arange(k_bytes // 2)[:, None], np.arange(rows // 8)[None]  # k counts elements, m 8-element pieces
        if span:
            per_row = span // 16
            # Atoms of span bytes along m by 8 along k; leading steps along m, stride along k.
            address = start + m // per_row * leading + m % per_row * 16 + k // 8 * stride + k % 8 * span
        else:
            address = start + m * stride + k // 8 * leading + k % 8 * 16
    else:
        r, c = np.arange(rows)[:, None], np.arange(k_bytes // 16)[None]
        if span:
            address = start + r // 8 * stride + r % 8 * span + c * 16
        else:
            address = start + r // 8 * stride + r % 8 * 16 + c * leading
    # The pattern is anchored to the address bits. The base offset is the phase at which the tile starts and is taken off
    # first: an H200 computes with the address minus base * 128 (ISA 9.7.15.5.1.2.2 defines base as bits 7 to 9 of it).
    return swizzle(address - (base << 7), span) + (base << 7) if span else address


@lru_cache(maxsize=4096)
def _placed_tile(descriptor, rows, k_bytes, transposed, shared_base):
    """(first byte, end, 16-byte pieces) of a tile in the cluster's buffer, where the CTA's memory starts at shared_base."""
    address = tile_chunks(descriptor, rows, k_bytes, transposed) + shared_base
    return int(address.min()), int(address.max()) + 16, address >> 4


class WgmmaState:
    """Asynchronous wgmma of one warpgroup: open holds those not yet committed, groups the committed ones."""

    def __init__(self):
        self.open, self.groups, self.ends = [], [], []  # ends: logical times of a trace
        self.fenced = False

    def registers(self):
        return frozenset(i for group in [*self.groups, self.open] for o in group for i in o.registers)


def _state(unit) -> WgmmaState:
    if unit.wgmma is None:
        unit.wgmma = WgmmaState()
    return unit.wgmma


class _Operand:
    """A or B of a wgmma: a descriptor, or four registers (A only)."""

    def __init__(self, program, text, type_name, rows, transposed, negated, label):
        self.type, self.rows, self.transposed, self.negated, self.label = type_name, rows, transposed, negated, label
        self.bits = BITS[type_name]
        self.k = 256 // self.bits
        self.registers = (
            [program.names[r.strip()] for r in text.strip("{}").split(",")] if text.startswith("{") else None
        )
        self.read = program.reader(text, "u64") if self.registers is None else None

    def capture(self, machine, fragment):
        """The descriptor, or the register values (registers are read when the instruction is issued)."""
        if self.registers is None:
            return fragment.uniform(self.read(fragment), f"the descriptor of {self.label}", machine)
        return [np.broadcast_to(fragment.R[i], (128,)).view(U32) for i in self.registers]

    def codes(self, unit, value):
        """(rows, k) element codes."""
        if self.registers is not None:
            codes = np.empty((64, self.k), _CODES[self.bits])
            row, first = a_fragment_layout(self.bits)
            for register in range(4):
                elements = value[register].view(codes.dtype).reshape(128, -1)
                for e in range(elements.shape[1]):
                    codes[row[register], first[register] + e] = elements[:, e]
        else:
            data = unit.cluster.shared_view(CHUNK)[self.tile(unit, value)[2]]
            if self.transposed:
                codes = data.view(U16).reshape(self.k, self.rows).T
            else:
                codes = data.view(_CODES[self.bits]).reshape(self.rows, self.k)
        if self.negated:
            codes = codes ^ codes.dtype.type(1 << (self.bits - 1))
        return codes

    def tile(self, unit, descriptor):
        return _placed_tile(descriptor, self.rows, self.k * self.bits // 8, self.transposed, unit.shared_base)


@special("wgmma.mma_async", updates=(0,))
def _wgmma(instruction, program):
    match = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16|s32)\.(\w+)\.(\w+)(\.satfinite)?",
                         instruction.opcode)  # fmt: skip
    where = instruction.where()
    if (
        not match
        or match[4] not in BITS
        or match[5] not in BITS
        or int(match[1]) % 8
        or not 8 <= int(match[1]) <= 256
        or int(match[2]) != 256 // BITS[match[4]]
        or not _compatible(match[3], match[4], match[5])
    ):
        raise UnknownInstruction(
            f"{where}: {instruction.opcode!r} is not modelled (f32 or f16 from e4m3, e5m2 and f16, f32 from bf16 and tf32, s32"
            " from s8 and u8)"
        )
    n, a_type, b_type = int(match[1]), match[4], match[5]
    d_type = match[3] + (match[6] or "")
    operands = instruction.operands
    names = [name.strip() for name in operands[0].strip("{}").split(",")]
    registers = [program.names[name] for name in names]
    immediates = [int(o, 0) for o in operands[4:]]
    negate_a, negate_b = (immediates + [1, 1])[0] < 0, (immediates + [1, 1])[1] < 0
    transposes = immediates[2:] if not operands[1].startswith("{") else [0] + immediates[2:]
    transpose_a, transpose_b = (transposes + [0, 0])[:2]
    a = _Operand(program, operands[1], a_type, 64, bool(transpose_a), negate_a, "A")
    b = _Operand(program, operands[2], b_type, n, bool(transpose_b), negate_b, "B")
    scale = (
        program.reader(operands[3], "pred")
        if not re.fullmatch(r"-?\d+", operands[3])
        else (lambda f, v=np.bool_(int(operands[3])): v)
    )
    row, column = accumulator_layout(n)
    owned = frozenset(registers) | frozenset(a.registers or ())
    storage = [getattr(np, program.storage[i]) for i in registers]

    def execute(machine, fragment):
        unit = fragment.unit
        if unit.threads != 128:
            raise Hazard(
                f"{fragment.who()}, {where}: wgmma needs a warpgroup of 128 threads that starts at a multiple of 128"
            )
        if fragment.n != 128:
            return _whole(machine, fragment, where)
        state = _state(unit)
        operation = _Operation()
        operation.registers, operation.results, operation.layout, operation.n = owned, registers, (row, column), n
        operation.d, operation.storage = d_type, storage
        operation.a, operation.b = (a, a.capture(machine, fragment)), (b, b.capture(machine, fragment))
        operation.scale = bool(fragment.uniform(scale(fragment), "scale-d", machine))
        operation.where, operation.done = where, False
        observer = unit.cluster.observer
        operation.reads = []
        for operand, value in (operation.a, operation.b):
            if operand.registers is None:
                low, high, chunks = operand.tile(unit, value)
                if (
                    low - unit.shared_base < unit.cluster.shared_base
                    or high - unit.shared_base > unit.cluster.shared_end
                ):
                    raise MemoryFault(
                        f"{fragment.who()}, {where}: the descriptor of {operand.label} reaches from "
                        f"{unit.cluster.name_shared(low)} to shared {high - unit.shared_base:#x}, outside of shared "
                        "memory"
                    )
                if observer is not None:
                    operation.reads.append(
                        observer.wgmma_read(fragment, operand, value, chunks, low, high, where, state)
                    )
        if observer is not None:
            observer.wgmma_issue(fragment, operation, state)
        state.open.append(operation)
        unit.pending_registers = unit.pending_registers | operation.registers
        machine.counters["wgmma"] += 1
        machine.counters["tensor core operations"] += 2 * 64 * n * a.k
        if machine.order == "eager" and machine.random is None:
            _perform(machine, fragment, [operation])
        return None

    return execute


def _whole(machine, fragment, where):
    unit = fragment.unit
    if unit.exited.any() and machine.check:
        raise Hazard(
            f"{unit.name_lanes(np.flatnonzero(unit.exited))} exited, but {where} needs all 128 threads of the "
            "warpgroup. A collective must not stand behind an early return or in a branch that single threads skip."
        )
    return Rendezvous(unit, where)


class _Operation:
    __slots__ = ("registers", "results", "storage", "d", "layout", "n", "a", "b", "scale", "where", "done", "reads")


def _perform(machine, fragment, operations):
    """Compute operations in order; a chain on the same registers keeps its accumulator as a matrix in between."""
    c = previous = None
    for operation in operations:
        if operation.done:
            continue
        if previous is not None and previous.results != operation.results:
            _put(fragment, previous, c)
            c = None
        if not operation.scale:
            c = np.zeros((64, operation.n), np.int32 if operation.d.startswith("s32") else F32)
        elif c is None:
            c = _get(fragment, operation)
        (a, a_value), (b, b_value) = operation.a, operation.b
        a_codes, b_codes = a.codes(fragment.unit, a_value), b.codes(fragment.unit, b_value)
        if machine.math == "fast" and operation.d == "f32":
            c = c + _decode(a_codes, a.type)[0] @ _decode(b_codes, b.type)[0].T
        else:
            c = accumulate(a_codes, b_codes, c, a.type, b.type, operation.d)
        operation.done = True
        previous = operation
    if previous is not None and c is not None:
        _put(fragment, previous, c)


def _get(fragment, operation):
    """The accumulator's registers as a (64, n) matrix. Registers of float16 hold two neighbours of a row."""
    words = np.empty((len(operation.results), 128), U32)
    for row, i in zip(words, operation.results):
        row[...] = fragment.R[i].view(U32)
    if operation.d == "f16":
        values = np.stack([words.astype(U16), (words >> U32(16)).astype(U16)], 1).view(np.float16).reshape(-1, 128).astype(F32)
    else:
        values = words.view(F32 if operation.d == "f32" else np.int32)
    c = np.empty((64, operation.n), values.dtype)
    c[operation.layout] = values
    return c


def _put(fragment, operation, c):
    values = c[operation.layout]
    if operation.d == "f16":
        values = pack_f16(values[::2], values[1::2])
    for i, kind, value in zip(operation.results, operation.storage, values):
        fragment.R[i] = value.view(kind)


def pack_f16(low, high):
    """Pairs of float16 values, held as float32, in 32-bit words."""
    low, high = (f32_to_f16(x).astype(U32) for x in (low, high))
    return low | high << U32(16)


def _compatible(d, a, b):
    """Which accumulators the formats of A and B have (PTX ISA 9.7.15.5)."""
    if {a, b} <= {"e4m3", "e5m2"}:
        return d in ("f32", "f16")
    if {a, b} <= {"s8", "u8"}:
        return d == "s32"
    return a == b and d in (("f32", "f16") if a == "f16" else ("f32",))


@special("wgmma.fence")
def _wgmma_fence(instruction, program):
    def execute(machine, fragment):
        if fragment.n != fragment.unit.threads:
            return _whole(machine, fragment, instruction.where())
        _state(fragment.unit).fenced = True

    return execute


@special("wgmma.commit_group")
def _wgmma_commit(instruction, program):
    def execute(machine, fragment):
        if fragment.n != fragment.unit.threads:
            return _whole(machine, fragment, instruction.where())
        state = _state(fragment.unit)
        state.groups.append(state.open)
        state.open = []
        if machine.trace is not None:
            state.ends.append(machine.trace.wgmma_group(fragment, state.groups[-1]))

    return execute


@special("wgmma.wait_group")
def _wgmma_wait(instruction, program):
    keep = int(instruction.operands[0], 0)

    def execute(machine, fragment):
        unit = fragment.unit
        if fragment.n != unit.threads:
            return _whole(machine, fragment, instruction.where())
        state = _state(unit)
        while len(state.groups) > keep:
            group = state.groups.pop(0)
            _perform(machine, fragment, group)
            for operation in group:
                for record in operation.reads:
                    unit.cluster.observer.read_done(record, fragment)
            if machine.trace is not None:
                machine.trace.wgmma_wait(fragment, state.ends.pop(0))
        unit.pending_registers = state.registers()

    return execute


# ---- mma.sync (9.7.14.5) ---------------------------------------------------------------------------------------------


@special("mma.sync", results=(0,), runs=True)
def _mma(instructions, program):
    """A run of independent mma.sync of one kind: one batch of matrices, (instructions, warps, rows, columns)."""
    opcode, where = instructions[0].opcode, instructions[0].where()
    match = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.(f32|f16|s32)", opcode
    )
    if (
        not match
        or match[3] != match[6]
        or (match[4], match[5], match[3], int(match[1])) not in _mma_shapes()
        or (match[2] and match[3] != "s32")
    ):
        raise UnknownInstruction(
            f"{where}: {opcode!r} is not modelled (m16n8k32 of FP8, k8 and k16 of f16 and bf16, k4 and k8 of tf32,"
            " k16 and k32 of s8 and u8)"
        )
    a_type, b_type, d_type = match[4], match[5], match[3] + (match[2] or "")
    lists = [[tuple(r.strip() for r in o.strip("{}").split(",")) for o in i.operands] for i in instructions]
    d_names, a_names, b_names, c_names = zip(*lists)
    # Instructions that share a fragment of A or B: each is unpacked once.
    a_unique, b_unique = list(dict.fromkeys(a_names)), list(dict.fromkeys(b_names))
    a_of, b_of = [a_unique.index(names) for names in a_names], [b_unique.index(names) for names in b_names]
    a_reads, b_reads = _readers(program, a_unique, "b32"), _readers(program, b_unique, "b32")
    c_reads = _readers(program, c_names, "f32" if d_type == "f32" else "b32")
    writes = [program.writer(name) for names in d_names for name in names]
    dtype = _CODES[BITS[a_type]]
    per = 32 // BITS[a_type]

    def execute(machine, fragment):
        unit = fragment.unit
        if fragment.n % 32 or not _full_warps(fragment):
            return Rendezvous(unit, where)
        a = _words(fragment, a_reads, U32).view(dtype).reshape(len(a_unique), -1, 2, unit.threads // 32, 8, 4, per)
        # Lane = 4 * group + quad. (list, half of k, half of the rows, warp, group, quad, element), A's registers in this order
        a = a.transpose(0, 3, 2, 4, 1, 5, 6).reshape(len(a_unique), unit.threads // 32, 16, -1)
        b = _words(fragment, b_reads, U32).view(dtype).reshape(len(b_unique), -1, unit.threads // 32, 8, 4, per)
        b = b.transpose(0, 2, 3, 1, 4, 5).reshape(len(b_unique), unit.threads // 32, 8, -1)
        c = _accumulators(_words(fragment, c_reads, F32 if d_type == "f32" else U32), d_type)
        d = mma_arithmetic(a, b, c, a_type, b_type, d_type, a_of, b_of)
        for write, values in zip(writes, _accumulator_words(d, d_type)):
            write(fragment, values)

    return execute


def _readers(program, lists, kind):
    return [[program.reader(name, kind) for name in names] for names in lists]


def _words(fragment, lists, dtype):
    """(lists, registers, threads) values of lists of registers."""
    words = np.empty((len(lists), len(lists[0]), fragment.unit.threads), dtype)
    for row, reads in zip(words, lists):
        for place, read in zip(row, reads):
            place[...] = read(fragment)
    return words


def _accumulators(words, d_type):
    """Registers of C (instructions, registers, threads) as matrices (instructions, warps, 16, 8)."""
    count, _, threads = words.shape
    if d_type == "f16":  # a register holds two neighbours of a row
        values = words.view(np.float16).reshape(count, 2, threads // 32, 8, 4, 2).astype(F32).transpose(0, 2, 1, 3, 4, 5)
    else:
        values = canonical_nan(words) if d_type == "f32" else words.view(np.int32)
        values = values.reshape(count, 2, 2, threads // 32, 8, 4).transpose(0, 3, 1, 4, 5, 2)
    return values.reshape(count, threads // 32, 16, 8)


def _accumulator_words(d, d_type):
    """The reverse: one array of words per register, those of the first instruction first."""
    count, warps = d.shape[:2]
    values = d.reshape(count, warps, 2, 8, 4, 2).transpose(0, 2, 5, 1, 3, 4).reshape(count, 4, warps * 32)
    if d_type == "f16":
        values = pack_f16(values[:, ::2], values[:, 1::2])
    return values.reshape(-1, warps * 32)


@cache
def _mma_shapes():
    """(format of A, of B, of C and D, k) that are modelled."""
    shapes = {(a, b, "f32", 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")}
    shapes |= {(a, a, "f32", k) for a in ("f16", "bf16") for k in (8, 16)} | {("f16", "f16", "f16", k) for k in (8, 16)}
    shapes |= {("tf32", "tf32", "f32", k) for k in (4, 8)}
    return shapes | {(a, b, "s32", k) for a in ("s8", "u8") for b in ("s8", "u8") for k in (16, 32)}


def mma_arithmetic(a, b, c, a_type, b_type, d_type="f32", a_of=slice(None), b_of=slice(None)):
    """mma.sync on Hopper: FP8 runs as two f16 steps from zero, then one float32 addition of c.

    a (lists, ..., 16, k) and b (lists, ..., 8, k) codes; a_of and b_of choose one of each per matrix of c (n, ..., 16, 8).
    """
    if a_type not in ("e4m3", "e5m2"):
        return accumulate(a[a_of], b[b_of], c, a_type, b_type, d_type)
    total = np.zeros_like(c)
    k = np.arange(a.shape[-1])
    for half in (k % 4 < 2, k % 4 >= 2):
        total = _half_step(a[..., half], b[..., half], total, a_type, b_type, a_of, b_of)
    return total + c


def _half_step(a, b, c, a_type, b_type, a_of, b_of):
    """accumulate() on FP8 values held in f16, which the tensor core does with 25 fraction bits.

    Products of FP8 values rarely lose bits at that width. Where bounds on their exponents show that none does, the sum is
    a matrix product in float64, which is exact too, truncated to float32; the other outputs are computed one by one.
    """
    (a_value, a_high, a_low), (b_value, b_high, b_low) = ([t[x] for t in _f8_tables(f)] for f, x in ((a_type, a), (b_type, b)))
    # The largest exponent of a product of this row and this column, at most; the place of the last bit of one, at least.
    high = a_high.max(-1)[a_of][..., :, None] + b_high.max(-1)[b_of][..., None, :]
    low = a_low.min(-1)[a_of][..., :, None] + b_low.min(-1)[b_of][..., None, :]
    rule = _RULES["wide", "f32"]
    high = np.maximum(high, np.where(c == 0, ZERO_EXPONENT, np.frexp(c)[1]))
    scaled = np.ldexp(c.astype(np.float64), rule.fraction - high)
    exact = (low >= high - rule.fraction) & (scaled == np.trunc(scaled)) & np.isfinite(c)
    finite_a, finite_b = np.isfinite(a_value), np.isfinite(b_value)
    if not (finite_a.all() and finite_b.all()):
        exact &= finite_a.all(-1)[a_of][..., :, None] & finite_b.all(-1)[b_of][..., None, :]
    total = _toward_zero(a_value[a_of] @ b_value[b_of].swapaxes(-1, -2) + c)
    if not exact.all():
        at = np.nonzero(~exact)
        halves = [t[x].astype(np.float16).view(U16) for t, x in ((_TABLES[a_type][0], a), (_TABLES[b_type][0], b))]
        rows, columns = halves[0][a_of][*at[:-1]][:, None], halves[1][b_of][*at[:-2], at[-1]][:, None]
        total[at] = accumulate(rows, columns, c[at][:, None, None], "f16", "f16")[:, 0, 0]
    return total


@cache
def _f8_tables(fmt):
    """Of every FP8 code: float64 value, exponent as in f16, place of its last bit that is one. Zeros: nothing to bound."""
    values = _TABLES[fmt][0]
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0))
    whole = np.abs(mantissa * 16).astype(np.int32)  # at most 4 significant bits
    last = np.log2(np.maximum(whole & -whole, 1)).astype(np.int32) + exponent - 4
    zero = values == 0
    high = _TABLES["f16"][1][values.astype(np.float16).view(U16)].astype(np.int32)
    return values.astype(np.float64), np.where(zero, ZERO_EXPONENT // 2, high), np.where(zero, -ZERO_EXPONENT // 2, last)


# ---- ldmatrix, stmatrix (9.7.14.5.15, .16) ---------------------------------------------------------------------------


def _matrix_rows(fragment, machine, address, count, where):
    """Row addresses (warps, count, 8) as places in the cluster's buffer."""
    from .barriers import shared_place

    places = np.broadcast_to(shared_place(fragment, address), (fragment.unit.threads,))
    warps = np.unique(fragment.lane_indices() >> 5)
    rows = places.reshape(-1, 32)[warps][:, : 8 * count].reshape(len(warps), count, 8)
    cluster = fragment.unit.cluster
    if (rows % 16).any():
        raise MemoryFault(f"{fragment.who()}, {where}: a matrix row address is not 16-byte aligned")
    offset = rows % cluster.shared_stride
    if (offset < cluster.shared_base).any() or (offset + 16 > cluster.shared_end).any():
        raise MemoryFault(f"{fragment.who()}, {where}: a matrix row lies outside of the CTA's shared memory")
    return warps, rows


def _matrix_shape(instruction):
    match = re.fullmatch(
        r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", instruction.opcode
    )
    if not match:
        raise UnknownInstruction(f"{instruction.where()}: {instruction.opcode!r} is not modelled")
    return int(match[1]), bool(match[2])


def _full_warps(fragment):
    lanes = fragment.lane_indices()
    return fragment.n == fragment.unit.threads or len(np.unique(lanes >> 5)) * 32 == fragment.n


@special("stmatrix")
def _store_matrix(instruction, program):
    count, transposed = _matrix_shape(instruction)
    address, where = program.address_reader(instruction.operands[0]), instruction.where()
    reads = [program.reader(r.strip(), "b32") for r in instruction.operands[1].strip("{}").split(",")]
    index = program.instructions.index(instruction)

    def execute(machine, fragment):
        if not _full_warps(fragment):
            return Rendezvous(fragment.unit, where)
        cluster = fragment.unit.cluster
        warps, rows = _matrix_rows(fragment, machine, address(fragment), count, where)
        for i, read in enumerate(reads):
            values = np.broadcast_to(read(fragment), (fragment.unit.threads,)).reshape(-1, 32)[warps]
            matrix = np.ascontiguousarray(values).view(U16).reshape(len(warps), 8, 8)
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            cluster.shared_view(CHUNK)[rows[:, i] >> 4] = np.ascontiguousarray(matrix).view(CHUNK)[..., 0]
        if cluster.observer is not None:
            cluster.observer.matrix_access(fragment, warps, rows, True, index)

    return execute


@special("ldmatrix", results=(0,))
def _load_matrix(instruction, program):
    count, transposed = _matrix_shape(instruction)
    address, where = program.address_reader(instruction.operands[1]), instruction.where()
    writes = [program.writer(r.strip()) for r in instruction.operands[0].strip("{}").split(",")]
    index = program.instructions.index(instruction)

    def execute(machine, fragment):
        if not _full_warps(fragment):
            return Rendezvous(fragment.unit, where)
        cluster = fragment.unit.cluster
        warps, rows = _matrix_rows(fragment, machine, address(fragment), count, where)
        if cluster.observer is not None:
            cluster.observer.matrix_access(fragment, warps, rows, False, index)
        for i, write in enumerate(writes):
            matrix = cluster.shared_view(CHUNK)[rows[:, i] >> 4].view(U16).reshape(len(warps), 8, 8)
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            full = np.zeros((-(-fragment.unit.threads // 32), 32), U32)
            full[warps] = np.ascontiguousarray(matrix).view(U32).reshape(len(warps), 32)
            write(fragment, full.reshape(-1)[: fragment.unit.threads])

    return execute


@special("movmatrix", results=(0,))
def _move_matrix(instruction, program):
    """An 8 x 8 matrix of 16-bit elements, one row per four lanes, transposed in registers (9.7.14.5.17)."""
    where = instruction.where()
    if instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise UnknownInstruction(f"{where}: {instruction.opcode!r} is not modelled")
    write, read = program.writer(instruction.operands[0]), program.reader(instruction.operands[1], "b32")

    def execute(machine, fragment):
        if not _full_warps(fragment):
            return Rendezvous(fragment.unit, where)
        words = np.ascontiguousarray(np.broadcast_to(read(fragment), (fragment.unit.threads,)))
        matrix = words.view(U16).reshape(-1, 8, 8).transpose(0, 2, 1)
        write(fragment, np.ascontiguousarray(matrix).view(U32).reshape(-1))

    return execute
