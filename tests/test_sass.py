"""Scheduling hints of FFMAs: nothing but hints changes, and those that would be wrong are not given."""

import struct
from pathlib import Path

import pytest

from hopperlab import sass
from hopperlab.compile import compile_file

STAGES = Path(__file__).parents[1] / "stages"
PROMOTION = STAGES / "05_block_scaled" / "kernel.cu"
CONSTANTS = {"BLOCK_N": 128, "NUM_STAGES": 4, "ROUNDS": 2, "GROUP_M": 8, "STORE_BY_TMA": 1, "OUTPUT": "bf16", "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}


def ffma(target, a, b, c, stall=1, stay=False, reuse=0) -> bytes:
    low = sass.FFMA | 0x7000 | target << 16 | a << 24 | b << 32
    return struct.pack("<QQ", low, c | stall << sass.STALL_SHIFT | stay * sass.STAY | reuse << 58)


def changed(code: bytes, run: list[int]) -> list[sass.Hints]:
    out = bytearray(code)
    sass._change(code, out, run, sass.STALLS)
    mask = (1 << 64) - 1 & ~sass.HINTS
    for (low, high), (new_low, new_high) in zip(struct.iter_unpack("<QQ", code), struct.iter_unpack("<QQ", bytes(out))):
        assert low == new_low and high & mask == new_high & mask
    return [sass.hints(bytes(out), at) for at in range(0, len(out), 16)]


def test_only_hints_of_promotion_change_in_a_kernel():
    plain, dense = (compile_file(PROMOTION, CONSTANTS, dense_ffma=dense).cubin for dense in (False, True))
    assert len(plain) == len(dense) and plain != dense
    sections = sass._sections(plain)
    assert sections == sass._sections(dense) and len(sections) == 1
    (first, end), different = sections[0], 0
    assert plain[:first] == dense[:first] and plain[end:] == dense[end:]
    for at in range(first, end, 16):
        (low, high), (new_low, new_high) = (struct.unpack_from("<QQ", code, at) for code in (plain, dense))
        assert low == new_low and high & ~sass.HINTS == new_high & ~sass.HINTS
        if high != new_high:
            different += 1
            assert low & sass.OPCODE_BITS == sass.FFMA
            assert new_high >> sass.STALL_SHIFT & sass.STALL_BITS >= high >> sass.STALL_SHIFT & sass.STALL_BITS
    assert [len(run) for run in sass.runs(plain)] == [64] * 4
    assert different > 64 * 4 / 2  # ptxas lets every second one yield


def test_operands_are_kept_for_the_next_instruction_and_nothing_yields():
    code = b"".join(ffma(100 + i, 24 + i, 7, 100 + i) for i in range(20))
    got = changed(code, [16 * i for i in range(20)])
    assert got == [(sass.STALLS[i % 5], True, "b") for i in range(19)] + [(1, False, "")]  # the last one: what follows is not known


@pytest.mark.parametrize("slot", ["a", "b"])
def test_the_slot_that_is_the_same(slot):
    code = b"".join(ffma(100 + i, *((7, 24 + i) if slot == "a" else (24 + i, 7)), 100 + i) for i in range(16))
    assert {each.kept for each in changed(code, [16 * i for i in range(16)])[:-1]} == {slot}


def test_no_operand_is_kept_that_changes_or_is_not_wanted_next():
    registers = [7] * 20
    registers[5] = 8  # another scale: neither the one before nor this one is kept
    code = b"".join(ffma(7 if i == 10 else 100 + i, 24 + i, registers[i], 100 + i) for i in range(20))  # the tenth overwrites it
    got = changed(code, [16 * i for i in range(20)])
    assert [i for i, each in enumerate(got) if not each.kept] == [4, 5, 10, 19]


def test_nothing_is_kept_across_another_instruction():
    other = struct.pack("<QQ", 0x7202, 1 << sass.STALL_SHIFT)  # a move
    code = b"".join(ffma(100 + i, 24 + i, 7, 100 + i) for i in range(10)) + other + b"".join(ffma(120 + i, 40 + i, 7, 120 + i) for i in range(10))
    got = changed(code, [16 * i for i in range(21) if i != 10])
    assert [i for i, each in enumerate(got) if not each.kept] == [9, 10, 20]
    assert got[10] == (1, False, "")


def test_a_wait_for_a_result_is_not_shortened():
    code = b"".join(ffma(100 + i, 24 + i, 7, 100 + i, stall=5 if i == 3 else 1) for i in range(16))
    assert changed(code, [16 * i for i in range(16)])[3].stall == 5


def test_what_is_not_understood_is_left_alone():
    code = b"".join(ffma(100 + i, 24 + i, 7, 100 + i, stall=12 if i == 3 else 1) for i in range(16))
    assert changed(code, [16 * i for i in range(16)])[3] == (12, False, "")


GRADIENT = {"BLOCK_N": 128, "NUM_STAGES": 4, "ROUNDS": 2, "GROUP_M": 4, "STORE_BY_TMA": 1, "ACCUMULATE": 1, "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}


def test_two_of_three_stay_where_each_ffma_has_an_fmul():
    plain, dense = (compile_file(PROMOTION.with_name("wgrad.cu"), GRADIENT, dense_ffma=dense).cubin for dense in (False, True))
    different = [at for first, end in sass._sections(plain) for at in range(first, end, 16) if plain[at : at + 16] != dense[at : at + 16]]
    mixed = [at for run in sass.runs(plain, (sass.FFMA, sass.FMUL)) for at in run]
    assert set(different) <= set(mixed) and len(different) > len(mixed) / 4
    for at in different:
        (low, high), (new_low, new_high) = (struct.unpack_from("<QQ", code, at) for code in (plain, dense))
        assert low == new_low and high & ~sass.HINTS == new_high & ~sass.HINTS
        assert sass.hints(dense, at).stay and sass.hints(dense, at).stall == max(1, sass.hints(plain, at).stall)
    left = [i % 3 for run in sass.runs(plain, (sass.FFMA, sass.FMUL)) for i, at in enumerate(run[:-1]) if not sass.hints(dense, at).stay]
    assert left and set(left) == {0}  # ptxas lets some of the others yield, none of those that this rule is for


def test_fmuls_alone_are_no_mix():
    cubin = compile_file(STAGES / "05_block_scaled" / "promoted.cu", {**CONSTANTS, "NUM_STAGES": 4, "INTERVAL": 0, "THRESHOLD": "0.0f"}).cubin
    runs = sass.runs(cubin, (sass.FFMA, sass.FMUL))
    scaling = [run for run in runs if all(struct.unpack_from("<Q", cubin, at)[0] & sass.OPCODE_BITS == sass.FMUL for at in run)]
    assert scaling and all(sass.dense_ffma(cubin)[run[0] : run[-1]] == cubin[run[0] : run[-1]] for run in scaling)


def test_a_kernel_without_such_runs_stays_as_it_is():
    cubin = compile_file(STAGES / "02_tma" / "kernel.cu", {"OUTPUT": "bf16", "A_FORMAT": "e4m3", "B_FORMAT": "e4m3"}).cubin
    assert sass.runs(cubin) == [] and sass.dense_ffma(cubin) == cubin


def test_other_bytes_are_refused():
    with pytest.raises(ValueError, match="cubin: it begins with b'nothi'; a 64-bit ELF file"):
        sass.dense_ffma(b"nothing of the kind")
