"""Barriers of CTAs and clusters, mbarriers, fences and register reallocation (PTX ISA 9.7.13, 9.7.19.5)."""

from functools import cached_property

import numpy as np

from .errors import Hazard
from .machine import Rendezvous, Wait, readable_symbol
from .memory import CLUSTER_SHIFT, SHARED_WINDOW
from .registry import special

# ---- CTA barriers: bar, barrier (9.7.13.1) ---------------------------------------------------------------------------


class NamedBarrier:
    """Barrier number of one CTA (or of all CTAs of a lock-step batch): threads arrive, the last one lets all go on."""

    def __init__(self, cluster, cta, number):
        self.cluster, self.cta, self.number = cluster, cta, number
        self.generation, self.expected = 0, None
        self.arrived: list[tuple] = []  # (unit, lanes, instruction) of this generation
        self.clock = self.released = None
        self.counted: list[tuple] = []  # (warp, its step, instruction) of each arrival in this generation, and in the last one
        self.counted_before: list[tuple] = []
        self.votes: dict[int, list[bool]] = {}  # of bar.red, per generation

    def count(self) -> int:
        return sum(len(lanes) for _, lanes, _ in self.arrived)

    def describe(self) -> str:
        block = f" of block {self.cluster.cta_ids[self.cta]}" if not self.cluster.batch else ""
        return f"barrier {self.number}{block}: {self.count()} of {self.expected} threads have arrived"

    def arrive(self, fragment, expected, instruction):
        machine = fragment.unit.machine
        if self.expected not in (None, expected) and self.arrived and self.number:
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: barrier {self.number} is used with {expected} threads here"
                f" and with {self.expected} at {self.arrived[0][2].where()}; both sides must pass the same count."
            )
        self.expected = expected
        self.arrived.append((fragment.unit, fragment.lane_indices(), instruction))
        if self.cluster.observer is not None:
            self.cluster.observer.named_barrier_arrive(fragment, self, instruction)
            self.cluster.observer.release(fragment, self)
        if self.count() > expected:
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: barrier {self.number} expects {expected} threads and"
                f" {self.count()} arrived. The thread count in the instruction must be the number of threads that"
                " take part, a multiple of 32."
            )
        if self.count() == expected:
            if machine.check:
                self._check_warps(instruction)
            self.complete()

    def complete(self):
        self.generation += 1
        self.arrived = []
        self.counted, self.counted_before = [], self.counted
        if self.cluster.observer is not None:
            self.cluster.observer.barrier_complete(self)

    def _check_warps(self, instruction):
        """Threads of one warp must arrive at the same instruction."""
        if len(self.arrived) == 1:
            return
        seen = {}
        for unit, lanes, where in self.arrived:
            for warp in np.unique(lanes >> 5).tolist():
                other = seen.setdefault((id(unit), warp), where)
                if other is not where:
                    raise Hazard(
                        f"threads of one warp of block {self.cluster.cta_ids[unit.cta_of(int(lanes[0]))]} meet at "
                        f"different barriers: some at {other.where()}, others at {where.where()}. __syncthreads in a "
                        "branch that not all threads of the warp take is undefined; move it out of the branch."
                    )


def _barrier_of(fragment, number):
    unit = fragment.unit
    key = unit.cta, number
    barriers = unit.cluster.named_barriers
    if key not in barriers:
        barriers[key] = NamedBarrier(unit.cluster, unit.cta, number)
    return barriers[key]


def _check_exited(fragment, barrier, instruction):
    """A barrier of all threads never completes properly once some of them are gone."""
    unit = fragment.unit
    machine = unit.machine
    if unit.lane_base is not None:
        gone = unit.exited.reshape(-1, machine.cta_threads)
        partly = gone.any(1) & ~gone.all(1)
        if not partly.any():
            return int(gone.sum())
        cta = int(np.flatnonzero(partly)[0])
        lanes = np.flatnonzero(gone[cta]) + cta * machine.cta_threads
        names = unit.name_lanes(lanes)
    else:
        lanes = [u for u in unit.cluster.units if u.cta == unit.cta and u.exited.any()]
        if not lanes:
            return 0
        names = lanes[0].name_lanes(np.flatnonzero(lanes[0].exited))
    if machine.check:
        raise Hazard(
            f"__syncthreads at {instruction.where()} waits for every thread of the block, but {names} exited without"
            " reaching it. An early return (a bounds check, say) or a branch keeps them away: let all threads reach the"
            " barrier and guard only the work."
        )
    return _gone(unit)


@special("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync", batches=True)
def _sync(instruction, program):
    number = program.reader(instruction.operands[0], "u32")
    count = program.reader(instruction.operands[1], "u32") if len(instruction.operands) > 1 else None

    def execute(machine, fragment):
        unit = fragment.unit
        if fragment.token is None:
            chosen, *counts = machine.keep_equal(fragment, number(fragment), *([count(fragment)] if count else []))
            barrier = _barrier_of(fragment, chosen)
            if barrier.number > 15:
                raise Hazard(
                    f"{fragment.who()}, {instruction.where()}: barrier {barrier.number}; a CTA has barriers 0 to 15"
                )
            total = unit.threads if unit.lane_base is not None else machine.cta_threads
            expected = counts[0] if count else total
            if count and expected % 32:
                raise Hazard(
                    f"{fragment.who()}, {instruction.where()}: barrier count {expected} is not a multiple of 32"
                )
            fragment.token = barrier, barrier.generation
            barrier.arrive(fragment, expected, instruction)
        barrier, generation = fragment.token

        def ready():
            if barrier.generation != generation:
                return True
            if count is None and unit.machine is machine:
                gone = _gone(unit)
                if gone and barrier.count() + gone >= barrier.expected:
                    _check_exited(fragment, barrier, instruction)
                    barrier.complete()
                    return True
            return False

        if not ready():
            return Wait(
                ready,
                lambda: f"at barrier {barrier.number}: {barrier.count()} of {barrier.expected} threads are there",
                barrier,
            )
        fragment.token = None
        if unit.cluster.observer is not None:
            unit.cluster.observer.acquire(fragment, barrier)

    return execute


def _gone(unit):
    if unit.lane_base is not None:
        return unit.gone
    return sum(u.gone for u in unit.cluster.units if u.cta == unit.cta)


@special("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _arrive(instruction, program):
    number, count = program.reader(instruction.operands[0], "u32"), program.reader(instruction.operands[1], "u32")

    def execute(machine, fragment):
        chosen, expected = machine.keep_equal(fragment, number(fragment), count(fragment))
        _barrier_of(fragment, chosen).arrive(fragment, expected, instruction)

    return execute


@special("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red", results=(0,))
def _reduce(instruction, program):
    operation = next(p for p in instruction.parts if p in ("popc", "and", "or"))
    write, number = program.writer(instruction.operands[0]), program.reader(instruction.operands[1], "u32")
    count = program.reader(instruction.operands[2], "u32") if len(instruction.operands) > 3 else None
    predicate = program.reader(instruction.operands[-1], "pred")

    def execute(machine, fragment):
        if fragment.token is None:
            chosen, *counts = machine.keep_equal(fragment, number(fragment), *([count(fragment)] if count else []))
            barrier = _barrier_of(fragment, chosen)
            fragment.token = barrier, barrier.generation
            barrier.votes.setdefault(barrier.generation, []).extend(fragment.active(predicate(fragment)).tolist())
            barrier.arrive(fragment, counts[0] if counts else machine.cta_threads, instruction)
        barrier, generation = fragment.token
        if barrier.generation == generation:
            return Wait(lambda: barrier.generation != generation, lambda: f"at barrier {barrier.number}", barrier)
        votes = barrier.votes[generation]
        fragment.token = None
        if fragment.unit.cluster.observer is not None:
            fragment.unit.cluster.observer.acquire(fragment, barrier)
        write(
            fragment,
            {"popc": np.uint32(sum(votes)), "and": np.bool_(all(votes)), "or": np.bool_(any(votes))}[operation],
        )

    return execute


# ---- mbarrier (9.7.13.15) --------------------------------------------------------------------------------------------


# The state that arrive returns is opaque. Here: the phase, and in the upper bits the arrivals that it lacked.
_PENDING_SHIFT = 40


class MBarrier:
    """A 64-bit barrier in shared memory that counts arrivals and bytes.

    phase counts completed phases; pending arrivals and tx bytes are what the current one still lacks.  The phase ends
    when both are zero (PTX ISA 9.7.13.15.4).
    """

    def __init__(self, cluster, place, count, location):
        self.cluster, self.place, self.count, self.location = cluster, place, count, location
        self.pending, self.tx, self.phase = count, 0, 0
        self.expected = self.landed = 0  # bytes announced and delivered in this phase
        self.in_flight = 0  # copies that were issued for this barrier and have not landed
        self.column = len(cluster.barriers)  # of the vector clocks
        self.clock = self.released = self.initialised = None
        self.passed: dict[tuple, int] = {}  # wait instruction and first thread -> phase it last passed on
        self.stale = ""
        self.latest = self.completed_at = 0  # logical times of a trace

    @cached_property
    def label(self) -> str:
        """'full[2]', without the block."""
        offset = self.place % self.cluster.shared_stride
        for symbol, (start, size) in self.cluster.machine.program.kernel.shared.items():
            if size and start <= offset < start + size:
                return readable_symbol(symbol) + (f"[{(offset - start) // 8}]" if size > 8 else "")
        member, rest = self.cluster.machine.shared_member(offset) or ("", 0)
        return member if member and not rest else f"the mbarrier at shared {offset:#x}"

    @property
    def name(self) -> str:
        text = self.label
        if self.cluster.size > 1:
            text += f" of block {self.cluster.cta_ids[self.place // self.cluster.shared_stride]}"
        return text

    def describe(self) -> str:
        text = f"{self.name} (initialised at {self.location}): phase {self.phase} lacks {self.pending} of {self.count} arrivals"
        if self.tx > 0:
            text += (f" and {self.tx} of {self.expected} expected bytes, while no copy is in flight: expect_tx announces more"
                     " than the copies deliver, or a copy was not issued or went to another CTA")  # fmt: skip
        elif self.tx < 0:
            text += f" and got {-self.tx} bytes that nothing expected: expect_tx announces less than the copies deliver"
        return text

    def arrive(self, count, who, where):
        if self.pending == 0:
            raise Hazard(
                f"{who}, {where}: arrives on {self.name} again while its phase {self.phase} still waits for {self.tx} "
                f"of {self.expected} expected bytes: the next round starts before this one has landed. The producer "
                "must wait on the slot's empty barrier, with the right parity, before it reuses the slot."
            )
        if count > self.pending:
            raise Hazard(
                f"{who}, {where}: {count} arrivals on {self.name}, but its phase {self.phase} lacks only {self.pending} "
                f"(it was initialised with a count of {self.count} at {self.location}). Phases end too early. Let one "
                "thread arrive, or initialise it with the number of threads that do."
            )
        self.pending -= count
        self.check()

    def expect(self, count):
        self.tx += count
        self.expected += count

    def complete_bytes(self, count, where):
        self.tx -= count
        self.landed += count
        self.in_flight -= 1
        if self.tx < 0 and self.pending == 0 and self.cluster.machine.check:
            raise Hazard(
                f"{where}: the copies of phase {self.phase} deliver {self.landed} bytes to {self.name}, but expect_tx "
                f"announced {self.expected}. The byte counts never meet, or the phase ends before all data is there. "
                "Expect the sum of all boxes, in bytes."
            )
        self.check()

    def check(self):
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.expected = self.landed = 0
            if self.cluster.observer is not None:
                self.cluster.observer.phase_complete(self)
            if self.cluster.machine.trace is not None:
                self.cluster.machine.trace.phase_complete(self)


def shared_place(fragment, address):
    """Window addresses (of this CTA, or of the cluster) -> offsets in the cluster's buffer."""
    cluster = fragment.unit.cluster
    if address.ndim == 0 and address < 1 << CLUSTER_SHIFT:
        return address + fragment.unit.shared_base
    rank, local = address >> CLUSTER_SHIFT, address & ((1 << CLUSTER_SHIFT) - 1)
    highest = int(fragment.active(rank).max())
    if highest > cluster.size:
        raise Hazard(f"{fragment.who()}: CTA rank {highest - 1} in a cluster of {cluster.size}")
    return np.where(rank > 0, (rank - 1) * cluster.shared_stride, fragment.unit.shared_base) + local


def barrier_at(fragment, place, where) -> MBarrier:
    cluster = fragment.unit.cluster
    barrier = cluster.barriers.get(int(place))
    if barrier is None:
        raise Hazard(
            f"{fragment.who()}, {where}: no mbarrier was initialised at {cluster.name_shared(int(place))}. One thread "
            "must call mbarrier.init on every barrier, before a barrier of all threads that will use it."
        )
    if cluster.observer is not None:
        cluster.observer.barrier_use(fragment, barrier, where)
    return barrier


def _groups(fragment, places):
    """Distinct barriers among the active lanes: (place, lanes that use it)."""
    if places.ndim == 0:
        return [(int(places), fragment.n)]
    active = fragment.active(places)
    values, counts = np.unique(active, return_counts=True)
    return list(zip(values.tolist(), counts.tolist()))


@special("mbarrier.init")
def _init(instruction, program):
    address, count = program.address_reader(instruction.operands[0]), program.reader(instruction.operands[1], "u32")

    def execute(machine, fragment):
        cluster = fragment.unit.cluster
        number = fragment.uniform(count(fragment), "the arrival count", machine)
        if not 1 <= number < 1 << 20:
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: mbarrier count {number}; 1 to 2**20 - 1 are allowed"
            )
        for place, _ in _groups(fragment, shared_place(fragment, address(fragment))):
            if place % 8:
                raise Hazard(
                    f"{fragment.who()}, {instruction.where()}: an mbarrier at {cluster.name_shared(place)} is not "
                    "8-byte aligned"
                )
            barrier = cluster.barriers[place] = MBarrier(cluster, place, number, instruction.where())
            if cluster.observer is not None:
                cluster.observer.barrier_init(fragment, barrier)

    return execute


@special("mbarrier.inval")
def _invalidate(instruction, program):
    address = program.address_reader(instruction.operands[0])

    def execute(machine, fragment):
        for place, _ in _groups(fragment, shared_place(fragment, address(fragment))):
            barrier_at(fragment, place, instruction.where())
            del fragment.unit.cluster.barriers[place]

    return execute


@special("mbarrier.arrive", "mbarrier.arrive_drop", results=(0,))
def _mbarrier_arrive(instruction, program):
    operands = list(instruction.operands)
    state = program.writer(operands.pop(0)) if not operands[0].startswith("[") else None
    address = program.address_reader(operands[0])
    expects, drops = "expect_tx" in instruction.parts, instruction.parts[1] == "arrive_drop"
    amount = program.reader(operands[1], "u32") if len(operands) > 1 else None
    where = instruction.where()

    def execute(machine, fragment):
        cluster = fragment.unit.cluster
        places = shared_place(fragment, address(fragment))
        amounts = fragment.active(amount(fragment)) if amount else None
        groups = _groups(fragment, places)
        active = fragment.active(places) if len(groups) > 1 and amount else None
        for place, lanes in groups:
            barrier = barrier_at(fragment, place, where)
            if state:
                state(fragment, np.uint64(barrier.phase | barrier.pending << _PENDING_SHIFT))
            if cluster.observer is not None:
                cluster.observer.release(
                    fragment, barrier, None if len(groups) == 1 else place == fragment.active(places)
                )
                cluster.observer.remote_use(fragment, place, where)
            if amount:
                total = int((amounts if active is None else amounts[active == place]).sum())
                if expects:
                    barrier.expect(total)
                else:
                    lanes = total
            if machine.trace is not None:
                machine.trace.arrive(fragment, barrier, total if expects else 0)
            if drops:
                barrier.count -= lanes  # from the next phase on
            barrier.arrive(lanes, fragment.who() if lanes > barrier.pending else "", where)

    return execute


@special("mbarrier.expect_tx", "mbarrier.complete_tx")
def _mbarrier_bytes(instruction, program):
    address, amount = program.address_reader(instruction.operands[0]), program.reader(instruction.operands[1], "u32")

    def execute(machine, fragment):
        for place, lanes in _groups(fragment, shared_place(fragment, address(fragment))):
            barrier = barrier_at(fragment, place, instruction.where())
            total = lanes * fragment.uniform(amount(fragment), "the byte count", machine)
            if instruction.parts[1] == "expect_tx":
                barrier.expect(total)
            else:
                barrier.in_flight += 1
                barrier.complete_bytes(total, instruction.where())

    return execute


@special("mbarrier.try_wait", "mbarrier.test_wait", results=(0,))
def _mbarrier_wait(instruction, program):
    write = program.writer(instruction.operands[0].split("|")[0])
    address = program.address_reader(instruction.operands[1])
    by_parity, waits = "parity" in instruction.parts, instruction.parts[1] == "try_wait"
    value = program.reader(instruction.operands[2], "u32" if by_parity else "u64")
    where = instruction.where()
    significant = 1 if by_parity else (1 << _PENDING_SHIFT) - 1

    def execute(machine, fragment):
        places, wanted = shared_place(fragment, address(fragment)), value(fragment)
        if places.ndim or wanted.ndim:
            key = fragment.active(places) * 2 + fragment.active(wanted).astype(np.int64) % 2
            different = key != key[0]
            if different.any():  # lanes that wait for other barriers go on their own
                machine.split(fragment, fragment.lane_indices()[~different])
        place = int(places) if places.ndim == 0 else int(fragment.active(places)[0])
        want = int(wanted) if wanted.ndim == 0 else int(fragment.active(wanted)[0])
        barrier = barrier_at(fragment, place, where)
        observer = fragment.unit.cluster.observer
        want &= significant

        def ready():
            return (barrier.phase & 1) != want if by_parity else barrier.phase > want

        if ready():
            if machine.random is not None and waits and machine.random.random() < 0.05:
                write(fragment, np.bool_(False))  # the hardware may give up after its time limit
                return None
            if observer is not None:
                observer.acquire(fragment, barrier)
            write(fragment, np.bool_(True))
            key = where, fragment.unit.first_warp, 0 if fragment.lanes is None else int(fragment.lanes[0])
            if barrier.passed.get(key) == barrier.phase:
                barrier.stale = (
                    f"{fragment.who()} passed the wait on {barrier.name} at {where} twice in its phase {barrier.phase}:"
                    " does the phase bit flip each time the ring comes round?"
                )
            barrier.passed[key] = barrier.phase
            if machine.trace is not None:
                machine.trace.wait_passed(fragment, barrier)
            return None
        if not waits:
            write(fragment, np.bool_(False))
            fragment.polled = True
            return None
        what = f"parity {want}" if by_parity else f"phase {want}"
        key = where, fragment.unit.first_warp, 0 if fragment.lanes is None else int(fragment.lanes[0])

        def why():
            text = f"for {what} of {barrier.name}, which is in phase {barrier.phase}"
            if not barrier.passed.keys() & {key} and want == barrier.phase == 0 and barrier.pending == barrier.count:
                text += (
                    "; nobody has arrived yet. If this is a producer's first wait for an empty slot, it must use "
                    "parity 1: a fresh barrier counts as having completed the phase before"
                )
            if barrier.passed.get(key, barrier.phase) < barrier.phase:
                text += (
                    f"; phase {barrier.phase - 1} completed and was not waited for here: does the phase bit flip each "
                    "time the ring comes round?"
                )
            return text

        return Wait(ready, why, barrier)

    return execute


@special("mbarrier.pending_count", results=(0,))
def _pending(instruction, program):
    """How many arrivals the phase still lacked before the arrival that returned this state."""
    write, state = program.writer(instruction.operands[0]), program.reader(instruction.operands[1], "u64")

    def execute(machine, fragment):
        write(fragment, (state(fragment) >> np.uint64(_PENDING_SHIFT)).astype(np.uint32))

    return execute


# ---- clusters: barrier.cluster (9.7.13.3), mapa and getctarank (9.7.9.24) --------------------------------------------


class ClusterBarrier:
    def __init__(self, cluster):
        self.cluster, self.generation, self.arrived = cluster, 0, 0
        self.clock = self.released = None

    def total(self):
        """Threads to wait for: those that have not exited, and those that arrived before they did."""
        total = 0
        for unit in self.cluster.units:
            total += unit.threads - unit.gone
            if unit.gone and unit.cluster_token is not None:
                total += int((unit.exited & (unit.cluster_token == self.generation)).sum())
        return total

    def describe(self):
        return f"the cluster barrier: {self.arrived} of {self.total()} threads have arrived"


def _cluster_barrier(fragment):
    cluster = fragment.unit.cluster
    if cluster.cluster_barrier is None:
        cluster.cluster_barrier = ClusterBarrier(cluster)
    return cluster.cluster_barrier


@special("barrier.cluster.arrive")
def _cluster_arrive(instruction, program):
    def execute(machine, fragment):
        barrier = _cluster_barrier(fragment)
        unit, observer = fragment.unit, fragment.unit.cluster.observer
        tokens = unit.cluster_token = (
            unit.cluster_token if unit.cluster_token is not None else np.full(unit.threads, -1)
        )
        lanes = fragment.lane_indices()
        if (tokens[lanes] >= barrier.generation).any():
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: arrives at the cluster barrier twice without waiting"
            )
        tokens[lanes] = barrier.generation
        barrier.arrived += fragment.n
        if observer is not None and "relaxed" not in instruction.parts:
            observer.release(fragment, barrier)
        if barrier.arrived == barrier.total():
            barrier.generation += 1
            barrier.arrived = 0
            if observer is not None:
                observer.barrier_complete(barrier)

    return execute


@special("barrier.cluster.wait")
def _cluster_wait(instruction, program):
    def execute(machine, fragment):
        barrier = _cluster_barrier(fragment)
        tokens = fragment.unit.cluster_token
        lanes = fragment.lane_indices()
        if tokens is None or (tokens[lanes] < 0).any():
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: waits at the cluster barrier without having arrived"
            )
        token = int(tokens[lanes].max())

        def ready():
            if barrier.generation == token and barrier.arrived >= barrier.total() > 0:
                barrier.generation += 1  # the threads that were missing have exited
                barrier.arrived = 0
                if fragment.unit.cluster.observer is not None:
                    fragment.unit.cluster.observer.barrier_complete(barrier)
            return barrier.generation != token

        if not ready():
            return Wait(
                ready,
                lambda: f"at the cluster barrier: {barrier.arrived} of {barrier.total()} threads are there",
                barrier,
            )
        if fragment.unit.cluster.observer is not None:
            fragment.unit.cluster.observer.acquire(fragment, barrier)

    return execute


@special("mapa", results=(0,))
def _map_address(instruction, program):
    write, address = program.writer(instruction.operands[0]), program.address_reader(instruction.operands[1])
    rank = program.reader(instruction.operands[2], "u32")
    wide = instruction.parts[-1] == "u64"
    window = 0 if any(p.startswith("shared") for p in instruction.parts) else SHARED_WINDOW

    def execute(machine, fragment):
        ranks = np.asarray(rank(fragment)).astype(np.int64)
        if np.any(fragment.active(ranks) >= fragment.unit.cluster.size):
            raise Hazard(
                f"{fragment.who()}, {instruction.where()}: mapa to CTA rank {int(fragment.active(ranks).max())} of a "
                f"cluster of {fragment.unit.cluster.size}"
            )
        mapped = (address(fragment) & ((1 << CLUSTER_SHIFT) - 1)) | ranks + 1 << CLUSTER_SHIFT
        write(fragment, (mapped + window).astype(np.uint64) if wide else mapped.astype(np.uint32))

    return execute


@special("getctarank", results=(0,))
def _rank_of(instruction, program):
    write, address = program.writer(instruction.operands[0]), program.address_reader(instruction.operands[1])

    def execute(machine, fragment):
        rank = address(fragment) >> CLUSTER_SHIFT
        write(fragment, np.where(rank > 0, rank - 1, fragment.unit.cta).astype(np.uint32))

    return execute


# ---- fences, registers, hints ----------------------------------------------------------------------------------------


@special("fence.proxy.async", "fence.mbarrier_init", "fence.proxy.async::generic")
def _proxy_fence(instruction, program):
    def execute(machine, fragment):
        if fragment.unit.cluster.observer is not None:
            fragment.unit.cluster.observer.proxy_fence(fragment)

    return execute


@special("fence.proxy.tensormap", "griddepcontrol", "fence.acq_rel", "fence.sc", "fence.acquire", "fence.release")
def _no_effect(instruction, program):
    """Order between threads through global memory is kept by the interleaving itself."""
    return lambda machine, fragment: None


@special("setmaxnreg")
def _set_registers(instruction, program):
    """9.7.19.5: warpgroups return registers to the CTA's pool or take them from it."""
    wanted, grows = int(instruction.operands[0], 0), "inc" in instruction.parts
    where = instruction.where()

    def execute(machine, fragment):
        if not 24 <= wanted <= 256 or wanted % 8:
            raise Hazard(f"{fragment.who()}, {where}: setmaxnreg {wanted}; a multiple of 8 from 24 to 256 is allowed")
        if machine.registers is None:
            return None
        unit = fragment.unit
        if fragment.n != unit.threads:
            return Rendezvous(unit, where)
        launched = -(-machine.registers // 8) * 8
        # The pool is what the launch allocated and warpgroups have given back.
        pool = unit.cluster.register_pools.setdefault(unit.cta, {"free": 0, "held": {}})
        held = pool["held"].get(unit.first, launched)
        if grows == (wanted < held):
            verb = "grow" if grows else "shrink"
            raise Hazard(
                f"{fragment.who()}, {where}: setmaxnreg.{'inc' if grows else 'dec'} to {wanted} does not {verb}: the "
                f"threads hold {held} registers"
            )
        change = (wanted - held) * unit.threads
        if grows and pool["free"] < change:
            others = [u for u in unit.cluster.units if u.cta == unit.cta]
            everything = launched * machine.cta_threads
            return Wait(
                lambda: pool["free"] >= change,
                lambda: (f"for {change} registers (setmaxnreg.inc to {wanted}); the block was launched with {launched} x"
                         f" {machine.cta_threads} = {everything} and {pool['free']} are free. The sum over its "
                         f"{len(others)} warpgroups must fit that budget: decrease the producer further, or raise "
                         "less"),
            )  # fmt: skip
        pool["free"] -= change
        pool["held"][unit.first] = wanted

    return execute
