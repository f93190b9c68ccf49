"""Instructions that combine the lanes of a warp, CTA barriers in lock step, printf and assert.

PTX ISA: shfl.sync 9.7.9.6, vote.sync, match.sync, activemask, redux.sync, elect.sync 9.7.13, bar 9.7.13.1.
"""

import re

import numpy as np

from .errors import Hazard, SimulatorError
from .machine import Rendezvous
from .registry import special

_WARP = np.arange(32)


def _members(machine, fragment, mask):
    """Check that every live lane named in a member mask is here: None, or a reason to wait."""
    unit = fragment.unit
    if fragment.n == unit.threads:
        return None
    here = np.zeros(-(-unit.threads // 32) * 32, bool)
    here[fragment.lane_indices()] = True
    masks = np.broadcast_to(mask, (unit.threads,)) if mask.ndim == 0 else mask
    warps = np.unique(fragment.lane_indices() >> 5)
    first = np.array([fragment.lane_indices()[np.searchsorted(fragment.lane_indices(), w * 32)] for w in warps])
    named = (masks[first][:, None].astype(np.int64) >> _WARP & 1).astype(bool)
    lanes = warps[:, None] * 32 + _WARP
    named &= lanes < unit.threads
    missing = named & ~here[lanes]
    if missing.any():
        absent = lanes[missing]
        where = machine.where_pc(fragment.pc)
        if unit.exited[absent].any() and machine.check:
            gone = absent[unit.exited[absent]]
            raise Hazard(
                f"{unit.name_lanes(gone)} exited before {where}, but the member mask of that warp collective names"
                " them. Keep all threads of the warp alive until after it, or pass a mask without them."
            )
        return Rendezvous(unit, where)
    own = fragment.lane_indices()
    if machine.check and not (masks[own].astype(np.int64) >> (own & 31) & 1).all():
        raise Hazard(
            f"{fragment.who()}, {machine.where_pc(fragment.pc)}: a thread executes a warp collective whose member"
            " mask does not name it; the result is undefined."
        )
    return None


@special("shfl.sync", results=(0,), batches=True)
def _shuffle(instruction, program):
    mode = instruction.parts[2]
    result, _, in_range = instruction.operands[0].partition("|")
    write = program.writer(result)
    write_ok = program.writer(in_range) if in_range else None
    value, b, c, mask = (program.reader(o, "b32") for o in instruction.operands[1:5])

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if wait:
            return wait
        unit = fragment.unit
        lane = unit.all_lanes & 31
        x = np.broadcast_to(value(fragment), (unit.threads,))
        offset, control = np.asarray(b(fragment)).astype(np.int64), np.asarray(c(fragment)).astype(np.int64)
        segment, clamp = control >> 8 & 31, control & 31
        limit = lane & segment | clamp & ~segment & 31
        offset = offset & 31
        source = {
            "bfly": lane ^ offset,
            "down": lane + offset,
            "up": lane - offset,
            "idx": lane & segment | offset & ~segment,
        }[mode]
        ok = source >= limit if mode == "up" else source <= limit
        origin = np.minimum((unit.all_lanes & ~31) + np.where(ok, source, lane), unit.threads - 1)
        write(fragment, x[origin])
        if write_ok:
            write_ok(fragment, np.broadcast_to(ok, (unit.threads,)))

    return execute


def _warp_matrix(fragment, values, fill):
    """values of the active lanes as rows of 32, with fill elsewhere."""
    full = np.full(-(-fragment.unit.threads // 32) * 32, fill)
    full[fragment.lane_indices()] = values
    return full.reshape(-1, 32)


def _to_lanes(fragment, per_warp):
    return np.repeat(per_warp, 32)[: fragment.unit.threads]


def _bits(matrix):
    return (matrix.astype(np.uint64) << _WARP.astype(np.uint64)).sum(1).astype(np.uint32)


@special("vote.sync", results=(0,), batches=True)
def _vote(instruction, program):
    mode = instruction.parts[2]
    write = program.writer(instruction.operands[0])
    predicate, mask = program.reader(instruction.operands[1], "pred"), program.reader(instruction.operands[2], "b32")

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if wait:
            return wait
        values = fragment.active(predicate(fragment))
        yes, no = _warp_matrix(fragment, values, False), _warp_matrix(fragment, ~values, False)
        result = {
            "ballot": lambda: _bits(yes), "any": lambda: yes.any(1), "all": lambda: ~no.any(1),
            "uni": lambda: ~(yes.any(1) & no.any(1)),
        }[mode]()  # fmt: skip
        write(fragment, _to_lanes(fragment, result))

    return execute


@special("match.any.sync", "match.all.sync", results=(0,), batches=True)
def _match(instruction, program):
    every = instruction.parts[1] == "all"
    result, _, predicate = instruction.operands[0].partition("|")
    write, write_predicate = program.writer(result), program.writer(predicate) if predicate else None
    value, mask = (
        program.reader(instruction.operands[1], instruction.parts[-1]),
        program.reader(instruction.operands[2], "b32"),
    )

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if wait:
            return wait
        values = _warp_matrix(fragment, fragment.active(value(fragment)).astype(np.uint64), np.uint64(0))
        alive = _warp_matrix(fragment, np.ones(fragment.n, bool), False)
        same = (values[:, :, None] == values[:, None, :]) & alive[:, :, None] & alive[:, None, :]
        bits = (same.astype(np.uint64) << _WARP.astype(np.uint64)).sum(2).astype(np.uint32)
        if every:
            agree = (bits == _bits(alive)[:, None]) | ~alive
            agree = np.repeat(agree.all(1)[:, None], 32, 1)
            bits = np.where(agree, bits, np.uint32(0))
            if write_predicate:
                write_predicate(fragment, agree.reshape(-1)[: fragment.unit.threads])
        write(fragment, bits.reshape(-1)[: fragment.unit.threads])

    return execute


@special("redux.sync", results=(0,), batches=True)
def _reduce(instruction, program):
    operation, type_name = instruction.parts[2], instruction.parts[-1]
    write = program.writer(instruction.operands[0])
    value, mask = program.reader(instruction.operands[1], type_name), program.reader(instruction.operands[2], "b32")
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if wait:
            return wait
        values = fragment.active(value(fragment))
        identity = {
            "add": 0,
            "min": np.iinfo(values.dtype).max,
            "max": np.iinfo(values.dtype).min,
            "and": -1,
            "or": 0,
            "xor": 0,
        }[operation]
        fill = np.int64(identity).astype(values.dtype) if operation != "min" else values.dtype.type(identity)
        result = function.reduce(_warp_matrix(fragment, values, fill), axis=1, dtype=values.dtype)
        write(fragment, _to_lanes(fragment, result))

    return execute


@special("activemask", results=(0,), batches=True)
def _active_mask(instruction, program):
    write = program.writer(instruction.operands[0])

    def execute(machine, fragment):
        write(fragment, _to_lanes(fragment, _bits(_warp_matrix(fragment, np.ones(fragment.n, bool), False))))

    return execute


@special("elect.sync", results=(0,), batches=True)
def _elect(instruction, program):
    leader, _, predicate = instruction.operands[0].partition("|")
    write_leader = program.writer(leader) if leader != "_" else None
    write, mask = program.writer(predicate), program.reader(instruction.operands[1], "b32")

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if wait:
            return wait
        lanes = fragment.lane_indices()
        _, first = np.unique(lanes >> 5, return_index=True)
        chosen = np.zeros(fragment.unit.threads, bool)
        chosen[lanes[first]] = True
        write(fragment, chosen)
        if write_leader:
            leaders = np.zeros(-(-fragment.unit.threads // 32), np.uint32)
            leaders[lanes[first] >> 5] = lanes[first] & 31
            write_leader(fragment, _to_lanes(fragment, leaders))

    return execute


@special("bar.warp.sync", batches=True)
def _warp_sync(instruction, program):
    mask = program.reader(instruction.operands[0], "b32")

    def execute(machine, fragment):
        wait = _members(machine, fragment, mask(fragment))
        if not wait and fragment.unit.cluster.observer is not None:
            fragment.unit.cluster.observer.warp_sync(fragment)
        return wait

    return execute


# ---- printf, assert --------------------------------------------------------------------------------------------------


def _c_string(machine, address):
    region = machine.memory.find(address)
    text = region.bytes[address - region.start :].tobytes()
    return text.split(b"\0")[0].decode(errors="replace")


_FORMAT = re.compile(r"%[-+ #0]*(?:\d+|\*)?(?:\.\d+)?(?:hh|h|ll|l|z|j)?([diouxXeEfFgGaAcspn%])")


@special("call.vprintf", batches=True)
def _printf(instruction, program):
    text = program.reader(instruction.operands[0], "u64")
    data = program.reader(instruction.operands[1], "u64")

    def execute(machine, fragment):
        from .memory import generic_span

        template = _c_string(machine, fragment.uniform(text(fragment), "the format of printf", machine))
        span = generic_span(fragment.unit, fragment, data(fragment), fragment.lanes)
        where = program.instructions.index(instruction)
        columns, offset = [], 0
        for match in _FORMAT.finditer(template):
            kind = match[1]
            if kind == "%":
                continue
            wide = kind in "eEfFgGaAsp" or "l" in match[0] or "z" in match[0] or "j" in match[0]
            size = 8 if wide else 4
            offset = -(-offset // size) * size
            dtype = (
                np.float64
                if kind in "eEfFgGaA"
                else (np.int64 if wide else np.int32)
                if kind in "dic"
                else (np.uint64 if wide else np.uint32)
            )
            columns.append((kind, fragment.active(np.asarray(span.load(offset, dtype, where)))))
            offset += size
        for row in range(fragment.n):
            values = iter([(kind, column[row].item()) for kind, column in columns])

            def one(match):
                if match[1] == "%":
                    return "%"
                kind, value = next(values)
                spec = re.sub(r"hh|h|ll|l|z|j", "", match[0])
                if kind == "s":
                    value = _c_string(machine, value) if value else "(null)"
                elif kind == "p":
                    return f"{value:#x}"
                elif kind == "u":
                    spec = spec[:-1] + "d"
                return spec % value

            line = _FORMAT.sub(one, template)
            machine.printed.append(line)
            print(line, end="")

    return execute


@special("call.__assertfail", batches=True)
def _assert(instruction, program):
    message = program.reader(instruction.operands[0], "u64")

    def execute(machine, fragment):
        text = _c_string(machine, int(fragment.active(message(fragment))[0]))
        raise SimulatorError(f"{fragment.who()}: assertion `{text}` failed at {instruction.where()}")

    return execute
