"""Scheduling hints in a cubin: promotion's FFMAs, issued as densely as they can be beside wgmma.

Each 128-bit instruction of Hopper carries hints that ptxas chose (Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking", 2018, found them; Hopper has kept them): how many cycles until the warp's next instruction, whether another warp
should go first, and which operands stay at hand for the next instruction. In a long row of FFMAs ptxas lets the warp yield at every
second one, and an operand is never kept across a yield. So every second FFMA reads its scale from the register file again, whose
ports wgmma needs for its accumulators. DeepGEMM's authors were the first to describe changing these bits.

Where each FFMA has a factor of its own, which an FMUL makes, there is less to keep, and two of three that stay are the best mix.

``dense_ffma`` changes nothing but hints: no instruction, no register, no order, so no bit of a result. What it gains is in
docs/notes/performance.md.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import NamedTuple

FFMA, FMUL, OPCODE_BITS = 0x223, 0x220, 0xFFF  # registers only; the opcode is in the low 12 bits
SHORTEST_RUN, LONGEST_GAP = 16, 6  # FFMAs that count as a run; other instructions that may stand between two of them
# In the upper 64 bits of an instruction.
STALL_SHIFT, STALL_BITS = 41, 0xF  # cycles until the warp issues again
LONGEST_STALL = 11  # more, together with the yield bit, mean something else, which nobody outside of the vendor has described
STAY = 1 << 45  # set: do not let another warp go first
REUSE_A, REUSE_B, REUSE = 1 << 58, 1 << 59, 0xF << 58  # operands kept for the warp's next instruction
# From one FFMA to the next, again and again. Found by trying: with 1 only, wgmma waits for registers; with 2 the promotion lasts too long.
STALLS = (1, 1, 1, 1, 2)
# The same where each FFMA has a factor of its own, which an FMUL made, from one of both to the next. None: as ptxas has it.
STALLS_OF_MIX = (None, 1, 1)
MIXED = 0.25  # of such a mix at least so much are FMULs, and at least so much FFMAs
HINTS = STALL_BITS << STALL_SHIFT | STAY | REUSE

ELF = b"\x7fELF\x02"  # how 64-bit ELF files begin
RULES = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of this file: cubins that were changed otherwise are not these


class Hints(NamedTuple):
    """What an instruction says about when to go on, beside what it does."""

    stall: int  # cycles until the warp may issue again
    stay: bool  # no other warp goes first
    kept: str  # which of its operands a and b stay at hand for the warp's next instruction: "", "a", "b" or "ab"


def dense_ffma(cubin: bytes) -> bytes:
    """The cubin with denser hints in each run of FFMAs, or of FFMAs and FMULs; the same bytes where there is no such run.

    Raises ValueError if the bytes are not a 64-bit ELF file.
    """
    changed = bytearray(cubin)
    mixes = [run for run in runs(cubin, (FFMA, FMUL)) if _is_mix(cubin, run)]
    in_mixes = {at for run in mixes for at in run}
    for run in mixes:
        _change(cubin, changed, run, STALLS_OF_MIX)
    for run in runs(cubin):
        if run[0] not in in_mixes:
            _change(cubin, changed, run, STALLS)
    return bytes(changed)


def runs(cubin: bytes, opcodes: tuple[int, ...] = (FFMA,)) -> list[list[int]]:
    """Where the instructions of each run stand, in bytes from the beginning of the cubin."""
    found: list[list[int]] = []
    for first, end in _sections(cubin):
        last = None
        for at in range(first, end, 16):
            if struct.unpack_from("<Q", cubin, at)[0] & OPCODE_BITS not in opcodes:
                continue
            if last is None or at - last > 16 * (LONGEST_GAP + 1):
                found.append([])
            found[-1].append(last := at)
    return [run for run in found if len(run) >= SHORTEST_RUN]


def hints(cubin: bytes, at: int) -> Hints:
    """The hints of the instruction at this place."""
    high = struct.unpack_from("<Q", cubin, at + 8)[0]
    return Hints(high >> STALL_SHIFT & STALL_BITS, bool(high & STAY), "a" * bool(high & REUSE_A) + "b" * bool(high & REUSE_B))


def _sections(cubin: bytes) -> list[tuple[int, int]]:
    """Where the code of each kernel begins and ends: the sections named .text.something."""
    if cubin[:5] != ELF:
        raise ValueError(f"cubin: it begins with {cubin[:5]!r}; a 64-bit ELF file, as NVRTC makes them, begins with {ELF!r}")
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]  # name, type, flags, address, offset, size
    text = lambda name: cubin[sections[names][4] + name :].startswith(b".text.")  # noqa: E731
    return [(offset, offset + size) for name, _, _, _, offset, size in sections if text(name)]


def _is_mix(cubin: bytes, run: list[int]) -> bool:
    opcodes = [struct.unpack_from("<Q", cubin, at)[0] & OPCODE_BITS for at in run]
    return min(opcodes.count(FMUL), opcodes.count(FFMA)) >= MIXED * len(run)


def _change(cubin: bytes, changed: bytearray, run: list[int], stalls: tuple[int | None, ...]) -> None:
    """No other warp goes first, and operands that the next instruction has in the same place are kept."""
    for i, (at, following) in enumerate(zip(run, run[1:])):
        if (least := stalls[i % len(stalls)]) is None:
            continue
        low, high = struct.unpack_from("<QQ", cubin, at)
        stall = max(high >> STALL_SHIFT & STALL_BITS, least)  # never shorter: something may wait for the result
        if stall > LONGEST_STALL:
            continue
        high = high & ~HINTS | stall << STALL_SHIFT | STAY
        if following == at + 16:
            next_low = struct.unpack_from("<Q", cubin, following)[0]
            target = low >> 16 & 0xFF
            for shift, reuse in ((24, REUSE_A), (32, REUSE_B)):
                operand = low >> shift & 0xFF
                if operand == next_low >> shift & 0xFF and operand != target:
                    high |= reuse
        struct.pack_into("<Q", changed, at + 8, high)
