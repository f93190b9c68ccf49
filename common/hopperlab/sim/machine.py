"""The machine: CTAs, groups of threads that share a program counter, and the scheduler (PTX ISA chapter 3).

A Unit is up to 128 consecutive threads of a CTA, one warpgroup.  It starts as one Fragment; a branch that its threads
decide differently splits it, and fragments that meet at the same place merge again.  Inside a unit the fragment with the
lowest program counter runs first, so that groups wait for one another where control flow joins.

Kernels that neither copy asynchronously nor talk between CTAs run many CTAs in lock step as one wide unit.
"""

import random
from collections import Counter

import numpy as np

from . import layout, memory
from .errors import Deadlock, Hazard, SimulatorError
from .parser import SHARED_BASE

BATCH_THREADS = 32768
POLL_LIMIT = 2000
STEP_LIMIT = 5_000_000  # pieces of code that one group of threads may run without synchronising
SM_COUNT = 132


class Wait:
    """Why a fragment is parked: ready() says whether it may go on, why() completes 'thread 0 waits ...'."""

    __slots__ = ("ready", "why", "barrier")

    def __init__(self, ready, why, barrier=None):
        self.ready, self.why, self.barrier = ready, why, barrier


class Rendezvous(Wait):
    """Parked until the other threads of the warp or warpgroup arrive at the same instruction (or exit: then it is wrong)."""

    __slots__ = ()

    def __init__(self, unit, what):
        gone = unit.gone
        super().__init__(
            lambda: unit.gone != gone, lambda: f"for the other threads at {what}: they have diverged from it"
        )


class Fragment:
    """Threads of a unit that share a program counter; lanes is None for all threads, or their sorted indices."""

    __slots__ = ("unit", "pc", "lanes", "n", "R", "wait", "token", "polled", "now")

    def __init__(self, unit, pc, lanes, n, registers):
        self.unit, self.pc, self.lanes, self.n, self.R = unit, pc, lanes, n, registers
        self.wait = self.token = None
        self.polled, self.now = False, 0  # now: the logical clock of a trace

    def lane_indices(self) -> np.ndarray:
        return self.unit.all_lanes if self.lanes is None else self.lanes

    def active(self, value):
        """Values of the active lanes as an array of n elements."""
        if value.ndim == 0:
            return np.full(self.n, value)
        return value if self.lanes is None else value.take(self.lanes)

    def expand(self, values):
        """Full-width array from values of the active lanes."""
        if self.lanes is None:
            return values
        result = np.zeros(self.unit.threads, values.dtype)
        result[self.lanes] = values
        return result

    def uniform(self, value, what, machine):
        """The one value of all active lanes; a Hazard if they differ."""
        if value.ndim == 0:
            return int(value)
        values = self.active(value)
        if (values != values[0]).any():
            raise Hazard(
                f"{self.who()}, {machine.where_pc(self.pc)}: {what} differs between the threads of one collective"
                " instruction; all of them must pass the same value."
            )
        return int(values[0])

    def who(self) -> str:
        return self.unit.name_lanes(self.lane_indices())


class Unit:
    def __init__(self, machine, cluster, cta, first, threads, batch=None):
        """Threads first .. first+threads of CTA number cta of the cluster; batch gives the CTA of every lane."""
        self.machine, self.cluster, self.cta, self.first, self.threads = machine, cluster, cta, first, threads
        self.all_lanes = np.arange(threads)
        block, grid, size = machine.block, machine.grid, machine.cluster_shape
        per_cta = machine.cta_threads
        thread = (
            np.arange(first, first + threads, dtype=np.uint32)
            if batch is None
            else np.arange(threads, dtype=np.uint32) % np.uint32(per_cta)
        )
        self.thread_ids = thread
        ids = cluster.cta_ids
        special = self.special = {}
        x, y = np.uint32(block[0]), np.uint32(block[1])
        special["%tid.x"] = thread % x if block[1] * block[2] > 1 else thread
        special["%tid.y"] = thread // x % y if block[1] > 1 else np.uint32(0)
        special["%tid.z"] = thread // (x * y) if block[2] > 1 else np.uint32(0)
        lane = thread & np.uint32(31)
        special["%laneid"] = lane
        special["%warpid"] = thread >> np.uint32(5)
        special["%nwarpid"] = np.uint32(-(-per_cta // 32))
        one = np.uint32(1)
        special["%lanemask_eq"] = one << lane
        special["%lanemask_lt"] = (one << lane) - one
        special["%lanemask_le"] = special["%lanemask_lt"] | special["%lanemask_eq"]
        special["%lanemask_gt"] = ~special["%lanemask_le"]
        special["%lanemask_ge"] = ~special["%lanemask_lt"]
        for axis, name in enumerate("xyz"):
            special[f"%ntid.{name}"] = np.uint32(block[axis])
            special[f"%nctaid.{name}"] = np.uint32(grid[axis])
            special[f"%cluster_nctaid.{name}"] = np.uint32(size[axis])
            special[f"%nclusterid.{name}"] = np.uint32(grid[axis] // size[axis])
            if batch is None:
                value = np.uint32(ids[cta][axis])
            else:
                value = np.repeat(np.array([i[axis] for i in ids], np.uint32), per_cta)
                value = value[0] if grid[axis] == 1 else value
            special[f"%ctaid.{name}"] = value
            special[f"%clusterid.{name}"] = value // np.uint32(size[axis])
            special[f"%cluster_ctaid.{name}"] = value % np.uint32(size[axis])
        special["%cluster_ctarank"] = np.uint32(cta if batch is None else 0)
        special["%cluster_nctarank"] = np.uint32(machine.cluster_size)
        special["%smid"] = np.uint32(cluster.number % SM_COUNT)
        special["%nsmid"] = np.uint32(SM_COUNT)
        special["%dynamic_smem_size"] = np.uint32(machine.dynamic_shared)
        special["%total_smem_size"] = np.uint32(machine.shared_end - SHARED_BASE)
        for name in ("%clock", "%globaltimer_lo"):
            special[name] = np.uint32(0)
        for name in ("%clock64", "%globaltimer", "%gridid"):
            special[name] = np.uint64(0)
        self.shared_base = cta * cluster.shared_stride
        self.lane_base = np.repeat(np.arange(len(ids)) * cluster.shared_stride, per_cta) if batch is not None else None
        self.local_bytes = machine.program.kernel.local_bytes
        self._local = np.zeros(self.local_bytes * threads, np.uint8)
        zero = {kind: getattr(np, kind)(0) for kind in set(machine.program.storage)}
        registers = [zero[kind] for kind in machine.program.storage]
        self.fragments = [Fragment(self, 0, None, threads, registers)]
        self.exited, self.gone = np.zeros(threads, bool), 0  # gone: how many have exited
        self.first_warp = cluster.warps
        cluster.warps += -(-threads // 32)
        self.warps = np.arange(self.first_warp, cluster.warps)  # their numbers in the cluster
        self.pending_registers = frozenset()  # still owned by asynchronous wgmma
        self.wgmma = None
        self.cluster_token = None

    def local_view(self, dtype):
        return self._local.view(dtype)

    def active(self, lanes, predicate):
        """Active lanes among lanes (None: all) for which predicate holds."""
        if predicate.ndim == 0:
            return lanes if predicate else self.all_lanes[:0]
        return np.flatnonzero(predicate) if lanes is None else lanes[predicate.take(lanes)]

    def cta_of(self, lane: int) -> int:
        return self.cta if self.lane_base is None else lane // self.machine.cta_threads

    def name_thread(self, lane: int) -> str:
        return self.name_lanes(np.array([lane]))

    def name_lanes(self, lanes) -> str:
        """'threads 128..255 of block (3, 0, 0)'"""
        cta = self.cta_of(int(lanes[0]))
        threads = [int(self.thread_ids[i]) for i in lanes[:1].tolist() + lanes[-1:].tolist()]
        block = self.machine.block
        if len(lanes) == 1:
            t, shape = threads[0], ""
            if block[1] * block[2] > 1:
                shape = f" ({t % block[0]}, {t // block[0] % block[1]}, {t // (block[0] * block[1])})"
            text = f"thread {t}{shape}"
        else:
            dense = threads[1] - threads[0] + 1 == len(lanes)
            text = f"threads {threads[0]}..{threads[1]}" + ("" if dense else f" ({len(lanes)} of them)")
        return f"{text} of block {self.cluster.cta_ids[cta]}"


class Cluster:
    """CTAs that share distributed shared memory; in lock-step mode, the CTAs of a batch (each on its own)."""

    def __init__(self, machine, number, cta_ids, batch):
        self.machine, self.number, self.cta_ids, self.size = machine, number, cta_ids, 1 if batch else len(cta_ids)
        self.shared_base, self.shared_end = SHARED_BASE, machine.shared_end
        self.shared_stride = -(-machine.shared_end // 1024) * 1024
        self.shared = np.zeros(self.shared_stride * len(cta_ids), np.uint8)
        self._views = {}
        self.warps = 0
        self.batch = batch
        self.observer = None
        self.barriers, self.named_barriers, self.async_queue = {}, {}, []
        self.bulk_groups, self.copy_groups, self.cluster_barrier, self.register_pools = {}, {}, None, {}
        threads = machine.cta_threads
        if batch:
            self.units = [Unit(machine, self, 0, 0, threads * len(cta_ids), batch=True)]
        else:
            self.units = [
                Unit(machine, self, cta, first, min(128, threads - first))
                for cta in range(len(cta_ids))
                for first in range(0, threads, 128)
            ]
        self.live = list(self.units)
        self.turn = 0
        if machine.check:
            self.observer = machine.make_observer(self)

    def shared_view(self, dtype):
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.shared.view(dtype)
        return view

    def name_shared(self, place: int) -> str:
        """'tile[3] + 64 (shared 0x440)' for a byte of the cluster's buffer."""
        cta, offset = divmod(int(place), self.shared_stride)
        text = self.machine.name_shared_offset(offset)
        return f"{text} of block {self.cta_ids[cta]}" if self.size > 1 else text


class Machine:
    def __init__(
        self, program, memory_table, parameter_bytes, grid, block, cluster_shape, shared_end, dynamic_shared, options
    ):
        self.program, self.memory, self.parameter_bytes = program, memory_table, parameter_bytes
        self.grid, self.block, self.cluster_shape = grid, block, cluster_shape
        self.cta_threads = block[0] * block[1] * block[2]
        self.cluster_size = cluster_shape[0] * cluster_shape[1] * cluster_shape[2]
        self.shared_end, self.dynamic_shared = shared_end, dynamic_shared
        self.order, self.math, self.check = options["order"], options["math"], options["check"]
        self.registers = options.get("registers")
        self.random = random.Random(options["seed"]) if options.get("seed") is not None else None
        self.trace, self.progress_callback = options.get("trace"), options.get("progress")
        self.tensor_maps, self.boxes = options.get("tensor_maps", []), {}
        self.variables: dict[str, np.uint64] = {}
        self.argument_regions: dict[int, memory.Region] = {}
        self.layouts_checked: dict[str, int] = {}  # how often an instruction's tile was compared with its swizzle
        self.segment_runs = np.zeros(len(program.segments), np.int64)
        self.segment_threads = np.zeros(len(program.segments), np.int64)
        self.counters, self.printed, self.progress = Counter(), [], 0
        self.bank_conflicts: dict[int, list[int]] = {}
        self.count_banks = options.get("bank_conflicts", False)
        self._parameters, self._origins = {}, {}
        self.source, self.constants, self._members = options.get("source") or "", options.get("constants"), None
        self.resident: list[Cluster] = []

    # ---- for generated code and special instructions --------------------------------------------------------------

    def parameter(self, offset, dtype):
        key = offset, dtype
        value = self._parameters.get(key)
        if value is None:
            size = np.dtype(dtype).itemsize
            value = self._parameters[key] = np.frombuffer(
                self.parameter_bytes[offset : offset + size].tobytes(), dtype
            )[0]
        return value

    def where(self, index: int) -> str:
        return self.program.instructions[index].where()

    def origin(self, index: int):
        """The tensor that the address of instruction number index is computed from, if there is only one."""
        if index not in self._origins:
            parameters = self.program.pointer_parameters(self.program.instructions[index]) or ()
            regions = [self.argument_regions[i] for i in parameters if i in self.argument_regions]
            self._origins[index] = regions[0] if len(regions) == 1 else None
        return self._origins[index]

    def where_pc(self, pc: int) -> str:
        segment = self.program.segments[pc]
        instruction = segment.terminator or (segment.code[-1] if segment.code else None)
        return instruction.where() if instruction else "the end of the kernel"

    def name_shared_offset(self, offset: int) -> str:
        """'tile + 64 (shared 0x440)', or 'a[1] + 64' where the source lays a struct with that member over the bytes."""
        for name, (start, size) in self.program.kernel.shared.items():
            end = start + size if size else self.shared_end
            if start <= offset < end:
                found = self.shared_member(offset)
                if found is None:
                    return f"{readable_symbol(name)} + {offset - start} (shared {offset:#x})"
                member, rest = found
                return f"{member} + {rest}" if rest else member
        return f"shared {offset:#x}"

    def shared_member(self, offset: int):
        """(name, bytes from its start) of the struct's member at this shared address, or None where the source does not tell."""
        for name, (start, size) in self.program.kernel.shared.items():
            if not size and start <= offset < self.shared_end:
                if self._members is None:
                    self._members = layout.shared_members(self.source, self.program.kernel.name, name, self.constants)
                return layout.find(self._members, offset - start)
        return None

    def make_observer(self, cluster):
        from .hazards import make_observer

        return make_observer(self, cluster)

    # ---- running a grid ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        x, y, z = self.grid
        cx, cy, cz = self.cluster_shape
        ids = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        batch = self.program.batchable and self.cluster_size == 1 and self.random is None
        if batch:
            group = max(1, BATCH_THREADS // self.cta_threads)
            if self.cta_threads % 32:
                batch, group = False, 1
        elif self.cluster_size > 1:
            ids.sort(key=lambda c: (c[2] // cz, c[1] // cy, c[0] // cx, c[2] % cz, c[1] % cy, c[0] % cx))
            group = self.cluster_size
        else:
            group = 1
        groups = [ids[i : i + group] for i in range(0, len(ids), group)]
        with np.errstate(all="ignore"):
            self._run_groups(groups, batch)

    def _residency(self) -> int:
        """Clusters that fit on the chip at once."""
        by_shared = max(1, 233472 // max(1024, self.shared_end))
        by_threads = max(1, 2048 // self.cta_threads)
        by_registers = max(1, 65536 // (self.registers * self.cta_threads)) if self.registers else 32
        return max(1, SM_COUNT * min(32, by_shared, by_threads, by_registers) // self.cluster_size)

    def _run_groups(self, groups, batch):
        started, idle, polls = 0, 0, 0
        limit = self._residency()
        resident = self.resident
        while started < len(groups) or resident:
            room = started < len(groups) and len(resident) < limit
            if not resident or room and (idle >= len(resident) or self.random and self.random.random() < 0.2):
                resident.append(Cluster(self, started, groups[started], batch))
                started += 1
                idle = 0
                resident.insert(0, resident.pop())
            before = self.progress
            cluster = resident[0] if self.random is None else self.random.choice(resident)
            state = self._run_cluster(cluster)
            if state == "done":
                resident.remove(cluster)
                idle = polls = 0
                if self.progress_callback:
                    self.progress_callback(started - len(resident), len(groups))
                continue
            resident.append(resident.pop(resident.index(cluster)))
            idle = 0 if self.progress != before else idle + 1
            polls = 0 if self.progress != before else polls + 1
            if idle >= (len(resident) if self.random is None else 20 * len(resident)) and (
                started == len(groups) or len(resident) >= limit
            ):
                if self._flush_any(resident):
                    idle = 0
                elif not any(f.polled for c in resident for u in c.live for f in u.fragments) or polls > POLL_LIMIT:
                    raise Deadlock(self.explain())

    def _flush_any(self, resident) -> bool:
        for cluster in resident:
            if cluster.async_queue:
                self.complete_one(cluster)
                return True
        return False

    def complete_one(self, cluster):
        """Finish one asynchronous operation: the oldest, or any under a seed."""
        queue = cluster.async_queue
        queue.pop(0 if self.random is None else self.random.randrange(len(queue)))()
        self.progress += 1

    def _run_cluster(self, cluster) -> str:
        """Run until the cluster is done, waits, or only polls."""
        for unit in cluster.live:
            for fragment in unit.fragments:
                fragment.polled = False
        rng, slices = self.random, 0
        while cluster.live:
            if rng is not None:
                slices += 1
                if slices > 8:
                    return "yielded"
                if cluster.async_queue and rng.random() < 0.3:
                    self.complete_one(cluster)
            fragment = self._choose(cluster)
            if fragment is None:
                if cluster.async_queue:
                    self.complete_one(cluster)
                    continue
                if any(f.polled for u in cluster.live for f in u.fragments):
                    return "polling"
                return "waiting"
            self._run_fragment(cluster, fragment)
        while cluster.async_queue:
            self.complete_one(cluster)
        return "done"

    def _choose(self, cluster):
        live, count = cluster.live, len(cluster.live)
        start = cluster.turn if self.random is None else self.random.randrange(count)
        for step in range(count):
            at = (start + step) % count
            fragment = self._pick(live[at])
            if fragment is not None:
                cluster.turn = at
                return fragment
        return None

    def _pick(self, unit):
        """The runnable fragment of lowest program counter, merged with those at the same place."""
        best, fragments = None, unit.fragments
        for fragment in fragments:
            wait = fragment.wait
            if wait is not None:
                if not wait.ready():
                    continue
                fragment.wait = None
            if not fragment.polled and (best is None or fragment.pc < best.pc):
                best = fragment
        if best is not None and len(fragments) > 1:
            for other in [o for o in fragments if o is not best and o.pc == best.pc]:
                if (
                    (other.wait is None or type(other.wait) is Rendezvous)
                    and other.token is None
                    and best.token is None
                ):
                    self._merge(best, other)
        return best

    def _merge(self, best, other):
        unit = best.unit
        taken = np.zeros(unit.threads, bool)
        taken[other.lane_indices()] = True
        registers, theirs = best.R, other.R
        for i in self.program.segments[best.pc].live:
            a, b = registers[i], theirs[i]
            if a is b or (a.ndim == 0 and b.ndim == 0 and a == b):
                continue
            registers[i] = np.where(taken, b, a)
        taken[best.lane_indices()] = True
        best.n += other.n
        best.now = max(best.now, other.now)
        best.lanes = None if best.n == unit.threads else np.flatnonzero(taken)
        unit.fragments.remove(other)

    def split(self, fragment, keep):
        """Keep the lanes in keep (indices); return a new fragment with the others, at the same place."""
        unit = fragment.unit
        rest = np.zeros(unit.threads, bool)
        rest[fragment.lane_indices()] = True
        rest[keep] = False
        other = Fragment(unit, fragment.pc, np.flatnonzero(rest), fragment.n - len(keep), list(fragment.R))
        other.now = fragment.now
        fragment.lanes, fragment.n = keep, len(keep)
        unit.fragments.append(other)
        return other

    def keep_equal(self, fragment, *values) -> list[int]:
        """The values that the first lane passes; lanes that pass others go on in a fragment of their own."""
        found = []
        for value in values:
            if value.ndim:
                active = fragment.active(value)
                same = active == active[0]
                if not same.all():
                    self.split(fragment, fragment.lane_indices()[same])
                found.append(int(active[0]))
            else:
                found.append(int(value))
        return found

    def _divide_by(self, fragment, predicate):
        """Split at a predicate: (lanes where it holds, count)."""
        if predicate.ndim == 0:
            return None, fragment.n if predicate else 0
        values = predicate if fragment.lanes is None else predicate.take(fragment.lanes)
        count = int(np.count_nonzero(values))
        if count in (0, fragment.n):
            return None, count
        return fragment.lane_indices()[values], count

    def _run_fragment(self, cluster, fragment):
        """Run until the fragment parks, exits, diverges, or should let others run."""
        segments, unit = self.program.segments, fragment.unit
        runs, threads = self.segment_runs, self.segment_threads
        registers = fragment.R
        steps = 0
        while True:
            pc = fragment.pc
            steps += 1
            if steps > STEP_LIMIT:
                raise Deadlock(
                    f"{fragment.who()} ran {STEP_LIMIT} steps without synchronising and is at {self.where_pc(pc)}: an endless"
                    " loop? Look at the loop's condition and at what changes in its body."
                )
            segment = segments[pc]
            runs[pc] += 1
            threads[pc] += fragment.n
            if unit.pending_registers and segment.touched & unit.pending_registers:
                cluster.observer and cluster.observer.register_in_flight(fragment, segment)
            if segment.run is not None:
                segment.run(unit, fragment, registers, fragment.lanes)
            kind = segment.kind
            if kind == "next":
                fragment.pc = pc + 1
            elif kind == "branch":
                target, following = segment.target, pc + 1
                if segment.guard < 0:
                    fragment.pc = target
                else:
                    predicate = registers[segment.guard]
                    lanes, count = self._divide_by(fragment, ~predicate if segment.terminator.negated else predicate)
                    if lanes is None:
                        fragment.pc = target if count else following
                    else:
                        other = self.split(fragment, lanes)
                        fragment.pc, other.pc = target, following
                        self.progress += 1
                        return
                if target <= pc and fragment.pc == target and segment.polls | segments[target].polls:
                    fragment.polled = True
                    return
            elif kind == "special":
                if segment.guard >= 0:
                    predicate = registers[segment.guard]
                    lanes, count = self._divide_by(fragment, ~predicate if segment.terminator.negated else predicate)
                    if lanes is not None:
                        self.split(fragment, lanes).pc = pc + 1
                    elif not count:
                        fragment.pc = pc + 1
                        continue
                wait = segment.handler(self, fragment)
                if wait is not None:
                    fragment.wait = wait
                    return
                fragment.pc = pc + 1
                self.progress += 1
                if self.random is not None and self.random.random() < 0.5:
                    return
            elif kind == "exit":
                lanes, count = None, fragment.n
                if segment.guard >= 0:
                    predicate = registers[segment.guard]
                    lanes, count = self._divide_by(fragment, ~predicate if segment.terminator.negated else predicate)
                self.progress += 1
                if count == 0:
                    fragment.pc = pc + 1
                    continue
                if lanes is not None:
                    self.split(fragment, lanes).pc = pc + 1
                unit.exited[fragment.lane_indices()] = True
                unit.gone += fragment.n
                if cluster.observer is not None:
                    cluster.observer.thread_exit(fragment)
                unit.fragments.remove(fragment)
                if not unit.fragments:
                    cluster.live.remove(unit)
                return
            elif kind == "indexed":
                index = registers[self.program.names[segment.terminator.operands[0]]]
                values = fragment.active(index)
                for value in np.unique(values)[1:].tolist():
                    lanes = fragment.lane_indices()
                    other = self.split(fragment, lanes[fragment.active(index) != value])
                    other.pc = segment.targets[value]
                fragment.pc = segment.targets[int(values.min())]
            else:
                raise SimulatorError(f"{fragment.who()}: trap at {segment.terminator.where()}")
            if len(unit.fragments) > 1:
                here = fragment.pc
                for other in unit.fragments:
                    if other.pc <= here and other is not fragment:
                        return

    # ---- deadlock ---------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        lines = ["deadlock: every live thread waits and no asynchronous copy is in flight."]
        barriers = []
        for cluster in self.resident:
            for unit in cluster.live:
                for fragment in unit.fragments:
                    where = self.where_pc(fragment.pc)
                    ending = "s" if fragment.n == 1 else ""
                    if fragment.wait is not None:
                        lines.append(f"  {fragment.who()} at {where} wait{ending} {fragment.wait.why()}")
                        if fragment.wait.barrier is not None and fragment.wait.barrier not in barriers:
                            barriers.append(fragment.wait.barrier)
                    else:
                        lines.append(
                            f"  {fragment.who()} at {where} spin{ending} on memory that nothing changes any more"
                        )
        lines += [f"  {barrier.describe()}" for barrier in barriers]
        lines += [
            f"  {barrier.stale}" for cluster in self.resident for barrier in cluster.barriers.values() if barrier.stale
        ]
        if len(lines) > 40:
            lines = lines[:40] + [f"  ... and {len(lines) - 40} more"]
        return "\n".join(lines)


def readable_symbol(name: str) -> str:
    """Name of a shared variable without the mangling of function-local variables (_ZZ6kernelE4tile -> tile)."""
    if name.startswith("_ZZ"):
        rest, found = name[3:], ""
        position = rest.find("E")
        while 0 <= position < len(rest):
            digits = ""
            at = position + 1
            while at < len(rest) and rest[at].isdigit():
                digits += rest[at]
                at += 1
            if digits and len(rest) >= at + int(digits):
                found = rest[at : at + int(digits)]
            position = rest.find("E", position + 1)
        return found or name
    return name
