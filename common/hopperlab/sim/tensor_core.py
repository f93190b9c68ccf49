"""Tensor cores: wgmma (PTX ISA 9.7.15), mma.sync, ldmatrix and stmatrix (9.7.14.5), and their arithmetic bit for bit.

wgmma: one k-step adds all products and the accumulator as integers on a common scale, truncating what lies below 13
fraction bits of the largest exponent, and truncates the sum again (FP8).  For f16, bf16 and tf32 operands 25 fraction
bits are kept.  A float16 accumulator takes the same sum, rounded to nearest even.  mma.sync on FP8 operands runs as two
half-precision steps, and adds the accumulator with an ordinary addition.  The models are those of Xie et al. (MMA-Sim),
compared with an H200 bit by bit.
"""

import re
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from .arithmetic import f32_to_f16
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
    return tuple(table[codes] for table in _TABLES[fmt])


def accumulate(a_codes, b_codes, c, a_format, b_format, d_format="f32"):
    """D = A B^T + C for one k-step of wgmma: a (m, k) and b (n, k) codes, c (m, n) values of d_format.

    c and the result are float32 arrays for f32 and f16 (which holds float16 values), int32 for s32.
    """
    if d_format.startswith("s32"):
        return _accumulate_integers(a_codes, b_codes, c, a_format, b_format, d_format)
    a, a_exponent = _decode(a_codes, a_format)
    b, b_exponent = _decode(b_codes, b_format)
    rule = _RULES["f8" if a_format in ("e4m3", "e5m2") else "wide", d_format]
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _accumulate_special(a, b, c, a_exponent, b_exponent, rule)
    return _fused_sum(a, b, c, a_exponent, b_exponent, rule)


def _accumulate_integers(a_codes, b_codes, c, a_format, b_format, d_format):
    """s32 wraps; s32.satfinite clamps the result of every instruction."""
    a, b = (x.view(np.int8 if f == "s8" else U8).astype(np.int64) for x, f in ((a_codes, a_format), (b_codes, b_format)))
    total = a @ b.T + c
    if d_format == "s32.satfinite":
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


def _fused_sum(a, b, c, a_exponent, b_exponent, rule):
    fraction = rule.fraction
    # k comes first, so that every NumPy pass runs over long contiguous rows.
    a, b, a_exponent, b_exponent = (np.ascontiguousarray(x.T) for x in (a, b, a_exponent, b_exponent))
    exponent = (a_exponent[:, :, None] + b_exponent[:, None, :]).max(0).astype(np.int32)
    if a_exponent.dtype == np.int8:
        exponent[exponent < -44] = ZERO_EXPONENT  # all products are zero
    c_exponent = np.maximum((c.view(np.int32) >> 23 & 255) - 127, rule.subnormal)
    c_exponent[c == 0] = ZERO_EXPONENT
    exponent = np.maximum(np.maximum(exponent, c_exponent), rule.lowest)
    low, high = int(exponent.min()), int(exponent.max())
    # FP8 products have few bits: with F = 13, float32 holds every step exactly.
    kind = F32 if fraction <= 13 and low > -100 and high < 120 else np.float64
    scale = ((fraction - exponent + 127) << 23).view(F32) if kind is F32 else np.ldexp(kind(1), fraction - exponent)
    a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
    total = np.trunc(c.astype(kind, copy=False) * scale)
    step = 8  # products of 8 k at a time stay in the cache
    products = np.empty((min(step, len(a)), *total.shape), kind)
    for k in range(0, len(a), step):
        np.einsum("ki,kj->kij", a[k : k + step], b[k : k + step], out=products[: len(a) - k])
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
    with np.errstate(all="ignore"):
        # Any finite stand-in keeps the classes: inf, nan and the sign of infinities survive a float64 product.
        ieee = a.astype(np.float64) @ b.T.astype(np.float64) + c
        infinite_or_nan = ~np.isfinite(ieee)
        positive = _infinities(a, b, c, 1)
        negative = _infinities(a, b, c, -1)
    nan = np.isnan(ieee) | (positive & negative)
    result = np.where(infinite_or_nan, np.where(positive, F32(np.inf), F32(-np.inf)), result)
    return np.where(nan, U32(0x7FFFFFFF).view(F32), result)


def _infinities(a, b, c, sign):
    products = a.astype(np.float64)[:, None, :] * b[None, :, :]
    return ((products == sign * np.inf).any(2)) | (c == sign * np.inf)


# ---- wgmma -----------------------------------------------------------------------------------------------------------

_SWIZZLE_OF = {0: 0, 1: 128, 2: 64, 3: 32}
_layouts, _tiles = {}, {}


def accumulator_layout(n):
    """(row, column) of register r of thread t of a 64 x n result: arrays (n / 2, 128). PTX ISA 9.7.15.5.2."""
    if n not in _layouts:
        r, t = np.arange(n // 2)[:, None], np.arange(128)[None]
        row = t // 32 * 16 + t % 32 // 4 + 8 * (r // 2 % 2)
        _layouts[n] = row, r // 4 * 8 + t % 4 * 2 + r % 2
    return _layouts[n]


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
    key = descriptor, rows, transposed
    found = _tiles.get(key)
    if found is not None:
        return found
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
    found = swizzle(address - (base << 7), span) + (base << 7) if span else address
    if len(_tiles) > 4096:
        _tiles.clear()
    _tiles[key] = found
    return found


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
            chunks = tile_chunks(value, self.rows, self.k * self.bits // 8, self.transposed)
            data = unit.cluster.shared_view(CHUNK)[(chunks + unit.shared_base) >> 4]
            if self.transposed:
                codes = data.view(U16).reshape(self.k, self.rows).T
            else:
                codes = data.view(_CODES[self.bits]).reshape(self.rows, self.k)
        if self.negated:
            codes = codes ^ codes.dtype.type(1 << (self.bits - 1))
        return codes

    def bounds(self, unit, value):
        chunks = tile_chunks(value, self.rows, self.k * self.bits // 8, self.transposed)
        return int(chunks.min()) + unit.shared_base, int(chunks.max()) + 16 + unit.shared_base, chunks


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
                low, high, chunks = operand.bounds(unit, value)
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
    words = np.stack([np.broadcast_to(fragment.R[i], (128,)).view(U32) for i in operation.results])
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


@special("mma.sync", results=(0,))
def _mma(instruction, program):
    match = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.(f32|f16|s32)",
        instruction.opcode,
    )
    where = instruction.where()
    if (
        not match
        or match[3] != match[6]
        or (match[4], match[5], match[3], int(match[1])) not in _mma_shapes()
        or (match[2] and match[3] != "s32")
    ):
        raise UnknownInstruction(
            f"{where}: {instruction.opcode!r} is not modelled (m16n8k32 of FP8, k8 and k16 of f16 and bf16, k4 and k8 of tf32,"
            " k16 and k32 of s8 and u8)"
        )
    k, a_type, b_type, d_type = int(match[1]), match[4], match[5], match[3] + (match[2] or "")
    lists = [[r.strip() for r in o.strip("{}").split(",")] for o in instruction.operands]
    writes = [program.writer(r) for r in lists[0]]
    a_reads, b_reads = [program.reader(r, "b32") for r in lists[1]], [program.reader(r, "b32") for r in lists[2]]
    c_reads = [program.reader(r, "b32") for r in lists[3]]
    bits = BITS[a_type]
    per = 32 // bits
    dtype = _CODES[bits]
    lane = np.arange(32)

    def matrix(reads, fragment, rows, is_a):
        """(warps, rows, k) codes from fragments."""
        warps = -(-fragment.unit.threads // 32)
        codes = np.zeros((warps, rows, k), dtype)
        for r, read in enumerate(reads):
            value = np.broadcast_to(read(fragment), (fragment.unit.threads,)).reshape(warps, 32)
            elements = np.ascontiguousarray(value).view(dtype).reshape(warps, 32, per)
            row = lane // 4 + (8 * (r % 2) if is_a else 0)
            column = lane % 4 * per + (r // 2 if is_a else r) * 4 * per
            for e in range(per):
                codes[:, row, column + e] = elements[:, :, e]
        return codes

    def execute(machine, fragment):
        unit = fragment.unit
        if (
            fragment.n % 32
            or fragment.n != unit.threads
            and len(np.unique(fragment.lane_indices() >> 5)) * 32 != fragment.n
        ):
            return Rendezvous(unit, where)
        a, b = matrix(a_reads, fragment, 16, True), matrix(b_reads, fragment, 8, False)
        warps = a.shape[0]
        words = [np.broadcast_to(read(fragment), (unit.threads,)) for read in c_reads]
        if d_type == "f16":
            halves = [(w >> U32(shift)).astype(U16).view(np.float16).astype(F32) for w in words for shift in (0, 16)]
            values = np.stack(halves)
        else:
            values = np.stack(words).view(F32 if d_type == "f32" else np.int32)
        c = np.empty((warps, 16, 8), values.dtype)
        spots = [(lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2) for r in range(4)]
        for (row, column), value in zip(spots, values):
            c[:, row, column] = value.reshape(warps, 32)
        d = np.stack([mma_arithmetic(a[w], b[w], c[w], a_type, b_type, d_type) for w in range(warps)])
        results = [np.ascontiguousarray(d[:, row, column]).reshape(-1) for row, column in spots]
        if d_type == "f16":
            results = [pack_f16(low, high) for low, high in zip(results[::2], results[1::2])]
        for result, write in zip(results, writes):
            write(fragment, result)

    return execute


@cache
def _mma_shapes():
    """(format of A, of B, of C and D, k) that are modelled."""
    shapes = {(a, b, "f32", 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")}
    shapes |= {(a, a, "f32", k) for a in ("f16", "bf16") for k in (8, 16)} | {("f16", "f16", "f16", k) for k in (8, 16)}
    shapes |= {("tf32", "tf32", "f32", k) for k in (4, 8)}
    return shapes | {(a, b, "s32", k) for a in ("s8", "u8") for b in ("s8", "u8") for k in (16, 32)}


def mma_arithmetic(a, b, c, a_type, b_type, d_type="f32"):
    """mma.sync on Hopper: FP8 runs as two f16 steps from zero, then one float32 addition of c."""
    if a_type not in ("e4m3", "e5m2"):
        return accumulate(a, b, c, a_type, b_type, d_type)
    values = [(_TABLES[t][0][x]).astype(np.float16).view(U16) for t, x in ((a_type, a), (b_type, b))]
    k = np.arange(a.shape[1])
    total = np.zeros_like(c)
    for half in (k % 4 < 2, k % 4 >= 2):
        total = accumulate(values[0][:, half], values[1][:, half], total, "f16", "f16")
    return total + c


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
                cluster.observer.matrix_access(fragment, warps, rows[:, i], True, index)

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
        for i, write in enumerate(writes):
            if cluster.observer is not None:
                cluster.observer.matrix_access(fragment, warps, rows[:, i], False, index)
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
