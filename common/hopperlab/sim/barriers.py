"""CTA barriers (PTX ISA 9.7.13.1 bar, barrier)."""

import numpy as np

from .errors import Hazard
from .machine import Wait
from .registry import special


class NamedBarrier:
    """Barrier number of one CTA (or of all CTAs of a lock-step batch): threads arrive, the last one lets all go on."""

    def __init__(self, cluster, cta, number):
        self.cluster, self.cta, self.number = cluster, cta, number
        self.generation, self.expected = 0, None
        self.arrived: list[tuple] = []  # (unit, lanes, instruction) of this generation
        self.clock = None

    def count(self) -> int:
        return sum(len(lanes) for _, lanes, _ in self.arrived)

    def describe(self) -> str:
        block = f" of block {self.cluster.cta_ids[self.cta]}" if not self.cluster.batch else ""
        return f"barrier {self.number}{block}: {self.count()} of {self.expected} threads have arrived"

    def arrive(self, fragment, expected, instruction):
        machine = fragment.unit.machine
        if self.expected not in (None, expected) and self.arrived and self.number:
            raise Hazard(f"{fragment.who()}, {instruction.where()}: barrier {self.number} is used with {expected} threads here"
                         f" and with {self.expected} at {self.arrived[0][2].where()}; both sides must pass the same count.")
        self.expected = expected
        self.arrived.append((fragment.unit, fragment.lane_indices(), instruction))
        if self.cluster.observer is not None:
            self.cluster.observer.release(fragment, self)
        if self.count() > expected:
            raise Hazard(f"{fragment.who()}, {instruction.where()}: barrier {self.number} expects {expected} threads and"
                         f" {self.count()} arrived. The thread count in the instruction must be the number of threads that"
                         " take part, a multiple of 32.")
        if self.count() == expected:
            if machine.check:
                self._check_warps(instruction)
            self.complete()

    def complete(self):
        self.generation += 1
        self.arrived = []
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
                        f"threads of one warp of block {self.cluster.cta_ids[unit.cta_of(int(lanes[0]))]} meet at different"
                        f" barriers: some at {other.where()}, others at {where.where()}. __syncthreads in a branch that not"
                        " all threads of the warp take is undefined; move it out of the branch."
                    )

    def exited_partly(self):
        """Threads of the waiting CTAs that have exited without arriving (a Hazard for a barrier of the whole CTA)."""
        for unit in self.cluster.units:
            if unit.cta == self.cta and unit.exited.any():
                yield unit


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
    return sum(int(u.exited.sum()) for u in unit.cluster.units if u.cta == unit.cta)


@special("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync", batches=True)
def _sync(instruction, program):
    number = program.reader(instruction.operands[0], "u32")
    count = program.reader(instruction.operands[1], "u32") if len(instruction.operands) > 1 else None

    def execute(machine, fragment):
        unit = fragment.unit
        if fragment.token is None:
            barrier = _barrier_of(fragment, fragment.uniform(number(fragment), "the barrier number", machine))
            if barrier.number > 15:
                raise Hazard(f"{fragment.who()}, {instruction.where()}: barrier {barrier.number}; a CTA has barriers 0 to 15")
            total = unit.threads if unit.lane_base is not None else machine.cta_threads
            expected = fragment.uniform(count(fragment), "the thread count", machine) if count else total
            if count and expected % 32:
                raise Hazard(f"{fragment.who()}, {instruction.where()}: barrier count {expected} is not a multiple of 32")
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
            return Wait(ready, lambda: f"at barrier {barrier.number}: {barrier.count()} of {barrier.expected} threads are there", barrier)
        fragment.token = None
        if unit.cluster.observer is not None:
            unit.cluster.observer.acquire(fragment, barrier)

    return execute


def _gone(unit):
    if unit.lane_base is not None:
        return int(unit.exited.sum())
    return sum(int(u.exited.sum()) for u in unit.cluster.units if u.cta == unit.cta)


@special("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def _arrive(instruction, program):
    number, count = program.reader(instruction.operands[0], "u32"), program.reader(instruction.operands[1], "u32")

    def execute(machine, fragment):
        barrier = _barrier_of(fragment, fragment.uniform(number(fragment), "the barrier number", machine))
        barrier.arrive(fragment, fragment.uniform(count(fragment), "the thread count", machine), instruction)

    return execute


@special("bar.red", "barrier.red", "barrier.cta.red", results=(0,))
def _reduce(instruction, program):
    operation = next(p for p in instruction.parts if p in ("popc", "and", "or"))
    write, number = program.writer(instruction.operands[0]), program.reader(instruction.operands[1], "u32")
    text = instruction.operands[-1]
    predicate = program.reader(text, "pred")

    def execute(machine, fragment):
        barrier = _barrier_of(fragment, fragment.uniform(number(fragment), "the barrier number", machine))
        if fragment.token is None:
            fragment.token = barrier, barrier.generation
            votes = barrier.__dict__.setdefault("votes", {}).setdefault(barrier.generation, [])
            votes.extend(fragment.active(predicate(fragment)).tolist())
            barrier.arrive(fragment, machine.cta_threads, instruction)
        barrier, generation = fragment.token
        if barrier.generation == generation:
            return Wait(lambda: barrier.generation != generation, lambda: f"at barrier {barrier.number}", barrier)
        votes = barrier.votes[generation]
        fragment.token = None
        if fragment.unit.cluster.observer is not None:
            fragment.unit.cluster.observer.acquire(fragment, barrier)
        result = {"popc": np.uint32(sum(votes)), "and": np.bool_(all(votes)), "or": np.bool_(any(votes))}[operation]
        write(fragment, result)

    return execute
