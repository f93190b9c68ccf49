"""Asynchronous copies: TMA tensor copies, bulk copies, their groups, and cp.async (PTX ISA 9.7.9.25 to 9.7.9.27).

A copy is issued by a thread and completes later: as late as something waits for it ("lazy"), at once ("eager"), or at a
random moment (under a seed).  Loads add to the byte count of an mbarrier, stores belong to a bulk group of their thread.
"""

import itertools
import math
import re
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..tensormap import simulated_index
from .barriers import barrier_at, shared_place
from .errors import Hazard, MemoryFault, UnknownInstruction
from .memory import PARAM_WINDOW, Region
from .parser import split_operands
from .reductions import OPERATIONS, combination, tensor_combination
from .registry import special

CHUNK = np.dtype("V16")
_SWIZZLE_MASK = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}


def swizzle(address, span: int):
    """Exchange 16-byte pieces: bits 4 to 6 of the shared address are XORed with bits 7 to 9 (fewer for 64 and 32)."""
    return address ^ (address >> 3 & _SWIZZLE_MASK[span])


class Box:
    """Geometry of one tensor map: which bytes a box covers in global memory and in shared memory."""

    def __init__(self, tensor_map):
        self.map = tensor_map
        self.counts = [-(-b // s) for b, s in zip(tensor_map.box, tensor_map.element_strides)]
        self.inner = self.counts[0] * tensor_map.element_bytes
        self.rows = math.prod(self.counts[1:])
        self.bytes = self.inner * self.rows
        # A tile narrower than its swizzle still takes the full width of the pattern per row.
        self.pitch = max(self.inner, tensor_map.swizzle)
        self.extent = self.pitch * (self.rows - 1) + self.inner
        self._chunks = {}

    def chunks(self, place: int) -> np.ndarray:
        """Indices of the box's 16-byte pieces in the cluster's buffer, row by row, for a tile that starts at place."""
        key = place & 1023
        found = self._chunks.get(key)
        if found is None:
            row = np.arange(self.rows)[:, None] * self.pitch + np.arange(0, self.inner, 16)[None]
            found = self._chunks[key] = (swizzle(row + key, self.map.swizzle) - key).reshape(-1)
        return (found + place) >> 4

    def valid(self, coordinates):
        """Per dimension, the range of box indices that lie inside the tensor."""
        ranges = []
        for c, count, stride, extent in zip(coordinates, self.counts, self.map.element_strides, self.map.dims):
            first = max(0, -(c // stride)) if c < 0 else 0
            last = min(count, -(-(extent - c) // stride))
            if last <= first:
                return None
            ranges.append((first, last))
        return ranges

    def global_view(self, machine, coordinates, ranges):
        """Writable byte view of the valid part of the box, outermost dimension first."""
        steps = [self.map.element_bytes, *self.map.strides]
        start = self.map.address
        for c, (first, _), stride, step in zip(coordinates, ranges, self.map.element_strides, steps):
            start += (c + first * stride) * step
        counts = [last - first for first, last in ranges]
        region = machine.memory.find(self.map.address)
        shape = [*reversed(counts[1:]), counts[0] * self.map.element_bytes]
        strides = [s * e for s, e in zip(reversed(steps[1:]), reversed(self.map.element_strides[1:]))] + [1]
        last = start + sum((n - 1) * s for n, s in zip(shape, strides))
        if start < region.start or last >= region.end:
            raise MemoryFault(f"a TMA box at {coordinates} reaches {last - region.end + 1} bytes past {region.name}")
        return as_strided(region.bytes[start - region.start :], shape, strides)

    def spill(self, coordinates, ranges, data):
        """What a store writes after the ends of rows: (bytes of global memory, bytes of the box) per row.

        A store clips a row to whole 16-byte pieces, not to elements (seen on an H200). The rest of the last piece lands
        in the tensor's padding, or in its neighbour where the tensor is a part of a wider one. What lies after the end
        of the storage belongs to no tensor and is dropped.
        """
        size, end = self.map.element_bytes, ranges[0][1] * self.map.element_bytes
        count = -self.map.dims[0] * size % 16
        if not count or coordinates[0] + ranges[0][1] != self.map.dims[0]:
            return []
        found, storage = [], self._storage
        start = self.map.address - storage.start + self.map.dims[0] * size
        for index in itertools.product(*(range(*r) for r in reversed(ranges[1:]))):
            positions = [c + i * e for c, i, e in zip(coordinates[1:], reversed(index), self.map.element_strides[1:])]
            at = start + sum(p * step for p, step in zip(positions, self.map.strides))
            target = storage.bytes[at : at + count]
            target = target[: len(target) // size * size]
            found.append((target, data[index][end : end + len(target)]))
        return found

    @cached_property
    def _storage(self) -> Region:
        """All memory of the tensor that the mapped one is a view of."""
        storage = self.map.tensor.untyped_storage()
        return Region("storage", storage.data_ptr(), storage.nbytes(), storage)

    def slices(self, ranges):
        size = self.map.element_bytes
        return tuple(slice(a, b) for a, b in reversed(ranges[1:])) + (slice(ranges[0][0] * size, ranges[0][1] * size),)

    def empty(self):
        """A box of fill values, as bytes."""
        shape = [*reversed(self.counts[1:]), self.inner]
        if self.map.fill_nan:
            # Every element type is filled with the same 16-bit pattern (seen on an H200).
            return np.full(math.prod(shape) // 2, 0x7FF7, np.uint16).view(np.uint8).reshape(shape)
        return np.zeros(shape, np.uint8)


def _box(machine, fragment, address, where) -> Box:
    """The tensor map that a generic or parameter address points to."""
    if address >= PARAM_WINDOW:
        data = machine.parameter_bytes[address - PARAM_WINDOW :][:16].tobytes()
    else:
        region = machine.memory.find(address, 128)
        data = region.bytes[address - region.start :][:16].tobytes() if region else b""
    index = simulated_index(data) if len(data) == 16 else None
    if index is None:
        raise Hazard(
            f"{fragment.who()}, {where}: the address {address:#x} holds no tensor map. Pass a "
            "hopperlab.tensormap.TensorMap for a `const __grid_constant__ TensorMap` parameter, and use the "
            "parameter's own address."
        )
    if index not in machine.boxes:
        machine.boxes[index] = Box(machine.tensor_maps[index])
    return machine.boxes[index]


class _Copy:
    """What tensor copies have in common: map, coordinates and shared address per issuing lane."""

    def __init__(self, instruction, program, map_operand, shared_operand):
        text = map_operand.strip("[]")
        name, coordinates = split_operands(text)[0], split_operands(split_operands(text)[1].strip("{}"))
        self.instruction, self.where = instruction, instruction.where()
        self.map = program.reader(name, "u64")
        self.coordinates = [program.reader(c, "u32") for c in coordinates]
        self.shared = program.address_reader(shared_operand)
        unknown = {"im2col", "im2col_no_offs", "gather4", "scatter4", "tile::gather4", "tile::scatter4"} & set(
            instruction.parts
        )
        if unknown:
            raise UnknownInstruction(f"{self.where}: {instruction.opcode!r}: {unknown.pop()} is not modelled")

    def lanes(self, machine, fragment, kind):
        """One (lane, box, coordinates, place) per issuing thread; the same copy from several threads is a mistake."""
        address = fragment.uniform(self.map(fragment), "the tensor map", machine)
        box = _box(machine, fragment, address, self.where)
        columns = [fragment.active(c(fragment)).view(np.int32).tolist() for c in self.coordinates]
        if len(columns) != box.map.rank:
            raise Hazard(
                f"{fragment.who()}, {self.where}: {len(columns)} coordinates for a tensor map of {box.map.rank} "
                "dimensions"
            )
        for coordinate in columns[0]:
            at = coordinate * box.map.element_bytes
            if at % 16:
                raise Hazard(
                    f"{fragment.who()}, {self.where}: the innermost coordinate of the TMA {kind} is {coordinate}, which "
                    f"is {at} bytes from the start of the row ({box.map.element_bytes} bytes per element). It must be a "
                    "multiple of 16 bytes, also where the box leaves the tensor: a GPU stops here with 'illegal "
                    f"instruction'. Step by multiples of {16 // box.map.element_bytes} elements; the other coordinates "
                    "are free."
                )
        if kind == "store":  # reductions included: none with a negative coordinate was tried on an H200
            for name, column in zip("xyzwv", columns):
                if min(column) < 0:
                    raise Hazard(
                        f"{fragment.who()}, {self.where}: coordinate {name} of the TMA store is {min(column)}. The "
                        "coordinates of a store must not be negative: a GPU stops here with 'illegal instruction'. Only "
                        "loads may begin before the tensor; a store may reach past its far end, which clips it. Start the "
                        "box at 0 or later: stage a smaller tile, or move the tensor map's address."
                    )
        places = fragment.active(shared_place(fragment, self.shared(fragment))).tolist()
        rows = list(zip(places, zip(*columns)))
        if fragment.n > 1 and len(set(rows)) < len(rows) and machine.check:
            raise Hazard(
                f"{fragment.who()}, {self.where}: {fragment.n} threads issue the same TMA {kind}; it is one instruction "
                "of one thread and runs once per thread. Elect one: if (elect_one()) or if (threadIdx.x == 0)."
            )
        for place, _ in rows:
            if place % 128:
                raise Hazard(
                    f"{fragment.who()}, {self.where}: the shared address of the TMA {kind},"
                    f" {fragment.unit.cluster.name_shared(place)}, is not 128-byte aligned. Declare the tile"
                    " __align__(1024) and keep every stage a multiple of 1024 bytes."
                )
            self._inside(fragment, place, box)
        return [(int(lane), box, c, place) for lane, (place, c) in zip(fragment.lane_indices(), rows)]

    def _inside(self, fragment, place, box):
        cluster = fragment.unit.cluster
        offset = place % cluster.shared_stride
        if offset < cluster.shared_base or offset + box.extent > cluster.shared_end:
            raise MemoryFault(
                f"{fragment.who()}, {self.where}: a box of {box.extent} bytes at {cluster.name_shared(place)} runs past "
                f"the end of shared memory ({cluster.shared_end:#x}). Look at the dynamic shared memory size and the "
                "number of stages."
            )


def _schedule(machine, cluster, complete):
    """Run now, or leave it to the scheduler."""
    if machine.order == "eager" and machine.random is None:
        complete()
    else:
        cluster.async_queue.append(complete)


# ---- loads -----------------------------------------------------------------------------------------------------------


@special("cp.async.bulk.tensor")
def _tensor_copy(instruction, program):
    if ".global.shared::cta" in instruction.opcode:
        return _tensor_store(instruction, program, None)
    operands = list(instruction.operands)
    copy = _Copy(instruction, program, operands[1], operands[0])
    barrier_address = program.address_reader(operands[2])
    multicast = program.reader(operands[3], "u16") if "multicast::cluster" in instruction.parts else None
    where = instruction.where()

    def execute(machine, fragment):
        cluster, stride = fragment.unit.cluster, fragment.unit.cluster.shared_stride
        bars = fragment.active(shared_place(fragment, barrier_address(fragment))).tolist()
        masks = fragment.active(multicast(fragment)).tolist() if multicast else None
        for i, (_, box, coordinates, place) in enumerate(copy.lanes(machine, fragment, "load")):
            targets = [place // stride]
            if masks:
                targets = [c for c in range(16) if masks[i] >> c & 1]
                if not targets or targets[-1] >= cluster.size:
                    raise Hazard(
                        f"{fragment.who()}, {where}: multicast mask {masks[i]:#x} in a cluster of {cluster.size} CTAs"
                    )
            elif bars[i] // stride != place // stride:
                raise Hazard(f"{fragment.who()}, {where}: destination and mbarrier of a TMA load lie in different CTAs")
            for target in targets:
                at, bar = target * stride + place % stride, target * stride + bars[i] % stride
                barrier = barrier_at(fragment, bar, where)
                _load(machine, cluster, fragment, box, coordinates, at, barrier, where)

    return execute


def _load(machine, cluster, fragment, box, coordinates, place, barrier, where):
    barrier.in_flight += 1
    if cluster.observer is not None:
        cluster.observer.async_write(fragment, place, place + box.extent, barrier, where, box)
    if machine.trace is not None:
        machine.trace.load(fragment, barrier, box.bytes, coordinates, place // cluster.shared_stride)
    machine.counters["TMA bytes loaded"] += box.bytes

    def complete():
        ranges = box.valid(coordinates)
        if ranges is not None and all(last - first == count for (first, last), count in zip(ranges, box.counts)):
            data = box.global_view(machine, coordinates, ranges)
        else:
            data = box.empty()
            if ranges is not None:
                data[box.slices(ranges)] = box.global_view(machine, coordinates, ranges)
        chunks = box.chunks(place)
        cluster.shared_view(CHUNK)[chunks] = np.ascontiguousarray(data).reshape(-1).view(CHUNK)
        if cluster.observer is not None:
            cluster.observer.landed(chunks)
        barrier.complete_bytes(box.bytes, where)

    _schedule(machine, cluster, complete)


@special("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk_copy(instruction, program):
    """Copies and reductions of plain bytes: global to shared, shared to global, shared to the shared memory of another CTA."""
    parts, operands, where = instruction.parts, instruction.operands, instruction.where()
    if "prefetch" in parts:
        return lambda machine, fragment: None
    spaces = [p for p in parts if p in ("global", "shared::cta", "shared::cluster")]
    if not {"mbarrier::complete_tx::bytes", "bulk_group"} & set(parts) or len(spaces) != 2:
        raise UnknownInstruction(f"{where}: {instruction.opcode!r} is not modelled")
    size = program.reader(operands[2], "u32")
    to_global, from_global = spaces[0] == "global", spaces[1] == "global"
    destination = program.reader(operands[0], "u64") if to_global else program.address_reader(operands[0])
    source = program.reader(operands[1], "u64") if from_global else program.address_reader(operands[1])
    barrier_address = None if to_global else program.address_reader(operands[3])
    multicast = program.reader(operands[4], "u16") if "multicast::cluster" in parts else None
    combine = None
    if parts[1] == "reduce":
        operation, type_name = [p for p in parts if p not in ("noftz", "L2::cache_hint")][-2:]
        if from_global or not to_global and type_name in ("f16", "bf16", "f32", "f64", "b64"):
            raise UnknownInstruction(f"{where}: {instruction.opcode!r} is not an instruction that PTX has")
        combine = combination(operation, type_name, where)

    def execute(machine, fragment):
        cluster = fragment.unit.cluster
        sizes = fragment.active(size(fragment)).tolist()
        to = fragment.active(
            destination(fragment) if to_global else shared_place(fragment, destination(fragment))
        ).tolist()
        frm = fragment.active(source(fragment) if from_global else shared_place(fragment, source(fragment))).tolist()
        masks = fragment.active(multicast(fragment)).tolist() if multicast else None
        if fragment.n > 1 and len(set(to)) < fragment.n and machine.check:
            raise Hazard(f"{fragment.who()}, {where}: {fragment.n} threads issue the same bulk copy; elect one.")
        bars = None if to_global else fragment.active(shared_place(fragment, barrier_address(fragment))).tolist()
        for i, lane in enumerate(fragment.lane_indices().tolist()):
            count = sizes[i]
            if (to[i] | frm[i] | count) % 16:
                raise Hazard(
                    f"{fragment.who()}, {where}: addresses and size of a bulk copy must be multiples of 16 bytes; it "
                    f"copies {count} bytes from {frm[i]:#x} to {to[i]:#x}"
                )
            if to_global:
                view = _global_bytes(machine, fragment, to[i], count, where, True)
                operation = _StoreOperation(machine, fragment, lane, frm[i], frm[i] + count, None, where)
                operation.bind(
                    lambda f=frm[i], n=count: cluster.shared[f : f + n].copy(),
                    lambda data, v=view: v.__setitem__(slice(None), combine(v, data) if combine else data),
                )
                operation.issue()
                continue
            targets = [c for c in range(16) if masks[i] >> c & 1] if masks else [to[i] // cluster.shared_stride]
            for target in targets:
                place = target * cluster.shared_stride + to[i] % cluster.shared_stride
                barrier = barrier_at(fragment, target * cluster.shared_stride + bars[i] % cluster.shared_stride, where)
                barrier.in_flight += 1
                view = (
                    _global_bytes(machine, fragment, frm[i], count, where, False)
                    if from_global
                    else cluster.shared[frm[i] : frm[i] + count]
                )
                if cluster.observer is not None:
                    cluster.observer.async_write(
                        fragment, place, place + count, barrier, where, None, combine is not None
                    )

                def complete(place=place, view=view, barrier=barrier, count=count):
                    target = cluster.shared[place : place + count]
                    target[...] = combine(target, view) if combine else view
                    if cluster.observer is not None:
                        cluster.observer.landed(np.arange(place >> 4, (place + count) >> 4))
                    barrier.complete_bytes(count, where)

                _schedule(machine, cluster, complete)

    return execute


@special("st.async", "red.async")
def _store_async(instruction, program):
    """Values from registers to the shared memory of a CTA of the cluster, which count as bytes on a barrier of that CTA.

    PTX ISA 9.7.9.12 and 9.7.13.8.
    """
    where = instruction.where()
    match = re.fullmatch(
        r"(?:st\.async(?:\.weak)?(?:\.shared::cluster)?\.mbarrier::complete_tx::bytes(?:\.v([24]))?"
        r"|red\.async\.relaxed\.cluster(?:\.shared::cluster)?\.mbarrier::complete_tx::bytes\.(add|min|max|inc|dec|and|or|xor))"
        r"\.([busf](?:32|64))",
        instruction.opcode,
    )
    if not match:
        raise UnknownInstruction(f"{where}: {instruction.opcode!r} is not modelled")
    vector, operation, type_name = int(match[1] or 1), match[2], match[3]
    combine = combination(operation, type_name, where) if operation else None
    address, barrier_address = (
        program.address_reader(instruction.operands[0]),
        program.address_reader(instruction.operands[2]),
    )
    values = [program.reader(v, "b" + type_name[1:]) for v in split_operands(instruction.operands[1].strip("{}"))]
    size = vector * int(type_name[1:]) // 8

    def execute(machine, fragment):
        cluster, stride = fragment.unit.cluster, fragment.unit.cluster.shared_stride
        places = fragment.active(shared_place(fragment, address(fragment))).tolist()
        bars = fragment.active(shared_place(fragment, barrier_address(fragment))).tolist()
        rows = np.stack([fragment.active(v(fragment)) for v in values], 1).view(np.uint8).reshape(fragment.n, size)
        for place, bar, row in zip(places, bars, rows):
            if place % size:
                raise MemoryFault(
                    f"{fragment.who()}, {where}: misaligned store of {size} bytes to {cluster.name_shared(place)}"
                )
            if place // stride != bar // stride:
                raise Hazard(
                    f"{fragment.who()}, {where}: destination and mbarrier lie in different CTAs; map both to the same "
                    "rank"
                )
            barrier = barrier_at(fragment, bar, where)
            barrier.in_flight += 1
            if cluster.observer is not None:
                cluster.observer.async_write(fragment, place, place + size, barrier, where, None, combine is not None)

            def complete(place=place, barrier=barrier, row=row):
                target = cluster.shared[place : place + size]
                target[...] = combine(target, row) if combine else row
                if cluster.observer is not None:
                    cluster.observer.written.bytes[place : place + size] = 0xFF
                barrier.complete_bytes(size, where)

            _schedule(machine, cluster, complete)

    return execute


def _global_bytes(machine, fragment, address, count, where, write):
    region = machine.memory.find(address, count)
    if region is None:
        verb = "writes" if write else "reads"
        raise MemoryFault(
            f"{fragment.who()}, {where}: a bulk copy {verb} {count} bytes at {machine.memory.describe(address, count)}"
        )
    return region.bytes[address - region.start :][:count]


# ---- stores and bulk groups ------------------------------------------------------------------------------------------


class _StoreOperation:
    """A copy out of shared memory: first it reads the tile, later the result is in global memory."""

    def __init__(self, machine, fragment, lane, low, high, box, where):
        self.machine, self.cluster, self.fragment, self.lane, self.where = machine, fragment.unit.cluster, fragment, lane, where
        self.record = None
        if self.cluster.observer is not None:
            self.record = self.cluster.observer.async_read(
                fragment, low, high, "the TMA store", where, warps=_warp_of(fragment, lane), box=box, low_chunk=low
            )
        self.data = None
        self.did_read = self.did_write = False

    def bind(self, read, write):
        self._read, self._write = read, write

    def read(self):
        if not self.did_read:
            self.did_read = True
            self.data = self._read()

    def write(self):
        self.read()
        if not self.did_write:
            self.did_write = True
            self._write(self.data)
            self.data = None

    def issue(self):
        groups = _groups_of(self.fragment.unit, self.lane)
        groups["open"].append(self)
        _schedule(self.machine, self.cluster, self.write)


def _warp_of(fragment, lane) -> np.ndarray:
    """The warp of one thread that issues a copy: others of the fragment may belong to other warps and know other things."""
    return np.array([fragment.unit.first_warp + (lane >> 5)])


def _groups_of(unit, lane):
    return unit.cluster.bulk_groups.setdefault((unit.first_warp, lane), {"open": [], "groups": []})


@special("cp.reduce.async.bulk.tensor")
def _tensor_reduce(instruction, program):
    return _tensor_store(instruction, program, next(p for p in instruction.parts if p in OPERATIONS))


def _tensor_store(instruction, program, reduction):
    copy = _Copy(instruction, program, instruction.operands[0], instruction.operands[1])
    where = instruction.where()

    def execute(machine, fragment):
        cluster = fragment.unit.cluster
        for lane, box, coordinates, place in copy.lanes(machine, fragment, "store"):
            operation = _StoreOperation(machine, fragment, lane, place, place + box.extent, box, where)
            if machine.trace is not None:
                machine.trace.store(fragment, box.bytes, coordinates)
            machine.counters["TMA bytes stored"] += box.bytes

            def read(box=box, place=place):
                chunks = cluster.shared_view(CHUNK)[box.chunks(place)]
                return chunks.view(np.uint8).reshape([*reversed(box.counts[1:]), box.inner])

            def write(data, box=box, coordinates=coordinates):
                ranges = box.valid(coordinates)
                if ranges is None:
                    return
                inside = box.global_view(machine, coordinates, ranges), data[box.slices(ranges)]
                for target, part in [inside, *box.spill(coordinates, ranges, data)]:
                    if reduction is not None:
                        part = tensor_combination(reduction, box.map.element_type, where)(target, part)
                    target[...] = part

            operation.bind(read, write)
            operation.issue()

    return execute


@special("cp.async.bulk.commit_group")
def _bulk_commit(instruction, program):
    def execute(machine, fragment):
        for lane in fragment.lane_indices().tolist():
            groups = _groups_of(fragment.unit, lane)
            groups["groups"].append(groups["open"])
            groups["open"] = []

    return execute


@special("cp.async.bulk.wait_group")
def _bulk_wait(instruction, program):
    keep, only_read = int(instruction.operands[0], 0), "read" in instruction.parts

    def execute(machine, fragment):
        unit = fragment.unit
        for lane in fragment.lane_indices().tolist():
            groups = unit.cluster.bulk_groups.get((unit.first_warp, lane))
            if groups is None:
                continue
            finished = groups["groups"][: max(0, len(groups["groups"]) - keep)]
            for group in finished:
                for operation in group:
                    operation.read() if only_read else operation.write()
                    if operation.record is not None:
                        unit.cluster.observer.read_done(operation.record, fragment, _warp_of(fragment, lane))
            if not only_read:
                del groups["groups"][: len(finished)]

    return execute


# ---- cp.async (9.7.9.25): per thread, 4, 8 or 16 bytes ---------------------------------------------------------------


@special("cp.async.ca", "cp.async.cg")
def _async_copy(instruction, program):
    operands, where = instruction.operands, instruction.where()
    destination, source = program.address_reader(operands[0]), program.reader(operands[1], "u64")
    size = int(operands[2], 0)
    extra = operands[3] if len(operands) > 3 else None
    ignores = extra is not None and program.kernel.registers.get(extra.lstrip("!")) == "pred"
    source_size = program.reader(extra, "pred" if ignores else "u32") if extra else None
    index = program.instructions.index(instruction)

    def execute(machine, fragment):
        from .memory import GlobalSpan, SharedSpan

        unit = fragment.unit
        lanes = fragment.lane_indices()
        take = np.full(unit.threads, size, np.uint32)  # bytes to read; the rest becomes zero
        if source_size is not None:
            take = np.broadcast_to(source_size(fragment), (unit.threads,))
            take = np.where(take, np.uint32(0), np.uint32(size)) if ignores else take
        address = source(fragment)
        if (fragment.active(address) % np.uint64(size)).any():
            raise MemoryFault(
                f"{fragment.who()}, {where}: the source of a {size}-byte cp.async must be {size}-byte aligned"
            )
        step, kind = (1, np.uint8) if (take[lanes] % 4).any() else (4, np.uint32)
        data = np.zeros((unit.threads, size // step), kind)
        for at in range(0, size, step):
            live = lanes[take[lanes] > at]
            span = GlobalSpan(unit, fragment, np.broadcast_to(address, (unit.threads,)), live)
            data[live, at // step] = np.broadcast_to(span.load(at, kind, index), (unit.threads,))[live]
        values = data.view(np.uint32).T
        target = np.broadcast_to(destination(fragment), (unit.threads,))

        def complete(active):
            SharedSpan(unit, fragment, target, active).store(0, np.uint32, index, *values)

        state = _async_state(unit)
        state["pending"].append([lanes, state["group"][lanes].copy(), complete])
        if machine.order == "eager" and machine.random is None:
            _finish(state, lambda active, group: active)

    return execute


def _async_state(unit):
    return unit.cluster.copy_groups.setdefault(
        unit.first_warp, {"group": np.zeros(unit.threads, np.int64), "pending": []}
    )


def _finish(state, choose):
    """Complete the lanes of each pending copy that choose(lanes, groups) picks."""
    left = []
    for lanes, group, complete in state["pending"]:
        done = choose(lanes, group)
        if len(done):
            complete(done)
        rest = ~np.isin(lanes, done)
        if rest.any():
            left.append([lanes[rest], group[rest], complete])
    state["pending"] = left


@special("cp.async.commit_group")
def _async_commit(instruction, program):
    def execute(machine, fragment):
        _async_state(fragment.unit)["group"][fragment.lane_indices()] += 1

    return execute


@special("cp.async.wait_group", "cp.async.wait_all", "cp.async.mbarrier.arrive")
def _async_wait(instruction, program):
    every = instruction.parts[2] != "wait_group"
    keep = 0 if every else int(instruction.operands[0], 0)
    arrives = instruction.parts[2] == "mbarrier"
    address = program.address_reader(instruction.operands[0]) if arrives else None
    increments = arrives and "noinc" not in instruction.parts

    def execute(machine, fragment):
        state = _async_state(fragment.unit)
        here = np.zeros(fragment.unit.threads, bool)
        here[fragment.lane_indices()] = True
        count = state["group"]
        _finish(state, lambda lanes, group: lanes[here[lanes] & (every | (group < count[lanes] - keep))])
        if arrives:
            place = fragment.uniform(shared_place(fragment, address(fragment)), "the mbarrier", machine)
            barrier = barrier_at(fragment, place, instruction.where())
            if fragment.unit.cluster.observer is not None:
                fragment.unit.cluster.observer.release(fragment, barrier)
            if (
                increments
            ):  # one more arrival for this phase, which the copies then make: threads still arrive themselves
                barrier.pending += fragment.n
            barrier.arrive(fragment.n, fragment.who(), instruction.where())

    return execute
