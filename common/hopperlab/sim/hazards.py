"""Happens-before checks on shared memory, over ordinary accesses, TMA and wgmma (PTX ISA chapter 8, memory consistency).

Every warp has a vector clock: what it knows of the progress of all warps.  An arrival on a barrier publishes it, a wait
takes it over.  Two accesses to the same bytes, one of them a write, are a race unless the later one's warp knows of the
earlier one.  So a mistake is found in whatever order the simulator happens to run things, not only where data breaks.

Tracked are steps and ordinary accesses of warps, phases of mbarriers (which complete when TMA data has landed), and which
steps and accesses lie before a proxy fence.  TMA and wgmma read through the asynchronous proxy and see only ordinary
writes that a proxy fence covers.

Where some lanes speak for their warp (lane 0 arrives, or issues a copy), they speak for the accesses of the other lanes
only up to the last __syncwarp() or barrier.  So a warp's accesses are those of two: what a leading lane does alone, and
all the rest.  What one lane has waited for, all lanes of its warp know.
"""

from functools import lru_cache

import numpy as np

from . import memory
from .errors import Hazard

_BARRIER_COLUMNS = 64
_ALL = np.uint32(0xFFFFFFFF)  # lanes of a warp
_WRITTEN = 0xFFFFFFFFFFFFFFFF  # eight bytes that something has written


@lru_cache(maxsize=64)
def granule_of(program) -> int:
    """Bytes that accesses are tracked at: the smallest ordinary access to shared memory in the kernel."""
    sizes = [16]
    for instruction in program.instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "st", "atom", "red") and not {"global", "param", "local", "const"} & set(parts):
            bits = "".join(ch for ch in parts[-1].split("x")[0] if ch.isdigit()) or "32"
            sizes.append(max(1, int(bits[-2:]) // 8 if int(bits) > 8 else 1))
    return min(sizes)


def _lane_masks(lanes):
    """Which lanes of each warp these are, a bit each; the warps are those that have any."""
    first = np.flatnonzero(np.diff(lanes >> 5, prepend=-1))
    return np.bitwise_or.reduceat(np.uint32(1) << (lanes & 31).astype(np.uint32), first)


class _AsyncAccess:
    """A copy or a tensor-core operation that touches [low, high) of the cluster's shared memory."""

    __slots__ = (
        "low", "high", "writes", "combines", "what", "where", "barrier", "phase", "done", "box", "group", "place", "owner",
    )  # fmt: skip

    def __init__(self, low, high, writes, what, where):
        self.low, self.high, self.writes, self.what, self.where = low, high, writes, what, where
        self.barrier = self.done = self.box = self.group = self.owner = None
        self.phase = 0
        self.place = low
        self.combines = False


class Observer:
    """Checks of one cluster (or one CTA).  warps index all warps of the cluster."""

    def __init__(self, machine, cluster):
        self.machine, self.cluster = machine, cluster
        self.written = memory.WrittenMap(cluster.shared.size)
        self.granule = granule_of(machine.program)
        self.shift = self.granule.bit_length() - 1
        warps = cluster.warps
        self.warps = warps
        # Columns: steps of every warp | phases of mbarriers | steps, accesses before a proxy fence | accesses. Those are in the
        # order of their owners: w for warp w, warps + w for its leading lane.
        self.fence_from = warps + _BARRIER_COLUMNS * len(cluster.cta_ids)
        self.fenced_from, self.access_from = self.fence_from + warps, self.fence_from + 3 * warps
        self.clock = np.zeros((warps, self.access_from + 2 * warps), np.int64)
        self.steps = np.einsum("ii->i", self.clock[:, :warps])  # views: what each warp knows of itself
        self.stamps = np.einsum("iji->ij", self.clock[:, self.access_from :].reshape(warps, 2, warps))  # of its next accesses, twice
        self.steps[:] = self.stamps[:] = 1
        # Per warp: the last stamp before its lanes met, those that have accessed shared memory since, the leading lane.
        self.met, self.touched, self.leader = np.zeros(warps, np.int64), np.zeros(warps, np.uint32), np.full(warps, -1)
        count = cluster.shared.size >> self.shift
        self.write_owner = np.zeros(count, np.int16)
        self.write_clock = np.zeros(count, np.int32)
        self.write_line = np.full(count, -1, np.int32)
        self.stored_pages = np.zeros((cluster.shared.size >> 10) + 1, bool)  # 1 KB pages with tracked ordinary stores
        self.read_clock = None  # (owners, count), made when something reads
        self.read_pages = np.zeros_like(self.stored_pages)  # those with tracked ordinary reads
        self.read_line = np.full(count, -1, np.int32)
        self.store_event = np.zeros(cluster.shared.size >> 4, np.int32)  # which store wrote a 16-byte piece last
        self.events = [None]
        self.accesses: list[_AsyncAccess] = []
        self.remote: dict[int, dict[int, tuple]] = {}
        self.exit_clock: dict[int, np.ndarray] = {}
        self.exiting: dict[int, np.ndarray] = {}

    # ---- clocks -----------------------------------------------------------------------------------------------------

    def _warps(self, fragment, chosen=None):
        unit = fragment.unit
        if fragment.lanes is None and chosen is None:
            return unit.warps
        lanes = fragment.lane_indices()
        if chosen is not None:
            lanes = lanes[chosen]
        if len(lanes) == 1:
            return np.array([unit.first_warp + (int(lanes[0]) >> 5)])
        return unit.first_warp + np.unique(lanes >> 5)

    def release(self, fragment, barrier, chosen=None):
        """An arrival publishes what its warps know."""
        warps, known, for_all = self._known_to(fragment, chosen)
        known = known.max(0)
        barrier.clock = known if barrier.clock is None else np.maximum(barrier.clock, known)
        self._meet(warps[for_all])
        self.steps[warps] += 1
        self.stamps[warps] += 1

    def warp_sync(self, fragment):
        """Lanes of a warp meet: from here on each of them speaks for all that they have accessed."""
        warps, _, for_all = self._known_to(fragment)
        self._meet(warps[for_all])
        self.stamps[warps] += 1

    def _meet(self, warps):
        self.met[warps], self.touched[warps] = self.stamps[warps, 0], 0

    def _known_to(self, fragment, chosen=None):
        """Its warps, what these lanes of them know, and which warps they speak for: no other lane has accessed anything since they met."""
        warps = self._warps(fragment, chosen)
        known, for_all = self.clock[warps], np.ones(len(warps), bool)
        if (fragment.lanes is not None or chosen is not None) and self.touched[warps].any():
            lanes = fragment.lane_indices() if chosen is None else fragment.lane_indices()[chosen]
            masks = _lane_masks(lanes)
            for_all = self.touched[warps] & ~masks == 0
            for i in np.flatnonzero(~for_all):
                warp = warps[i]
                known[i, self.access_from + warp] = self.met[warp]
                if self.leader[warp] < 0 or not masks[i] >> np.uint32(self.leader[warp]) & 1:
                    known[i, self.access_from + self.warps + warp] = self.met[warp]
        return warps, known, for_all

    def _owners(self, unit, lanes):
        """Whose accesses those of these lanes are: their warps', or the leading lane's, the first that was seen alone."""
        if lanes is None:
            self.touched[unit.warps] = _ALL
            return unit.warps[unit.all_lanes >> 5]
        owners = unit.first_warp + (lanes >> 5)
        warps = owners[np.flatnonzero(np.diff(owners, prepend=-1))]
        self.touched[warps] |= _lane_masks(lanes)
        if len(lanes) == 1:
            warp, lane = int(owners[0]), int(lanes[0]) & 31
            if self.leader[warp] < 0:
                self.leader[warp] = lane
            if self.leader[warp] == lane:
                owners = owners + self.warps
        return owners

    def barrier_complete(self, barrier):
        barrier.released, barrier.clock = barrier.clock, None

    def phase_complete(self, barrier):
        if barrier.clock is None:
            barrier.clock = np.zeros(self.clock.shape[1], np.int64)
        barrier.clock[self.warps + barrier.column] = barrier.phase
        barrier.released = barrier.clock.copy()

    def acquire(self, fragment, barrier):
        if barrier.released is not None:
            warps = self._warps(fragment)
            self.clock[warps] = np.maximum(self.clock[warps], barrier.released)

    def proxy_fence(self, fragment):
        """Writes that these warps know of become visible to TMA and wgmma."""
        warps, known, _ = self._known_to(fragment)
        fenced = slice(self.fence_from, self.access_from)  # steps and accesses
        now = np.concatenate((known[:, : self.warps], known[:, self.access_from :]), 1)
        self.clock[warps, fenced] = np.maximum(known[:, fenced], now)
        self.steps[warps] += 1
        self.stamps[warps] += 1

    # ---- mbarriers --------------------------------------------------------------------------------------------------

    def barrier_init(self, fragment, barrier):
        if barrier.column >= self.fence_from - self.warps:
            raise Hazard(f"more than {self.fence_from - self.warps} mbarriers in one cluster are not modelled")
        warp = int(self._warps(fragment)[0])
        barrier.initialised = warp, int(self.clock[warp, warp])
        barrier.clock = None
        self.written.bytes[barrier.place : barrier.place + 8] = 0xFF

    def barrier_use(self, fragment, barrier, where):
        warp, step = barrier.initialised
        warps = self._warps(fragment)
        if (self.clock[warps, warp] < step).any():
            across = fragment.unit.cta != barrier.place // self.cluster.shared_stride
            fix = (
                "cluster_sync() (a barrier of the whole cluster)"
                if across or self.cluster.size > 1
                else "__syncthreads()"
            )
            raise Hazard(
                f"race on {barrier.name}: {fragment.who()} uses it at {where}, and no barrier orders that after its "
                f"mbarrier.init at {barrier.location}. Put {fix} between the initialisation and the first use."
            )

    def named_barrier_arrive(self, fragment, barrier, instruction):
        """An arrival counts for this use of the barrier only if it cannot come before those that the last use counted."""
        for warp in self._warps(fragment).tolist():
            for other, step, where in barrier.counted_before:
                if self.clock[warp, other] < step:
                    raise Hazard(
                        f"race on barrier {barrier.number} of block {self.cluster.cta_ids[barrier.cta]}: {self._name_warp(warp)} arrives at "
                        f"{instruction.where()}, and nothing orders that after {self._name_warp(other)}'s arrival at {where.where()}, which "
                        "an earlier use of the barrier counted. A barrier counts whichever threads come first, so either use may be "
                        "completed by some of both. Give each group of threads a barrier number of its own, or order the uses."
                    )
            barrier.counted.append((warp, int(self.clock[warp, warp]), instruction))

    def remote_use(self, fragment, place, where):
        """Remember accesses to another CTA, for the check that it has not exited."""
        target = place // self.cluster.shared_stride
        if target == fragment.unit.cta or self.cluster.size == 1:
            return
        self._check_alive(fragment, target, where)
        for warp in self._warps(fragment).tolist():
            # The arrival itself must be known to the target before it exits; release() has advanced the clock by one.
            self.remote.setdefault(target, {})[warp] = int(self.clock[warp, warp]) - 1, fragment.who(), where

    def _check_alive(self, fragment, target, where):
        if target in self.exit_clock:
            raise Hazard(
                f"{fragment.who()}, {where}: reaches into block {self.cluster.cta_ids[target]}, which has exited; its "
                "shared memory belongs to nobody. Keep every CTA of the cluster alive until its peers are done: "
                "cluster_sync() at the end."
            )

    # ---- ordinary accesses ------------------------------------------------------------------------------------------

    def shared_access(self, span, index, shift, size, write, instruction):
        unit = span.unit
        if self.machine.count_banks:
            self._count_banks(span, index, shift, instruction)
        if write:
            self.written.write(index, shift)
        else:
            self.written.read(span, index, shift, instruction)
        lanes = unit.all_lanes if span.lanes is None else span.lanes
        place = np.broadcast_to(index, lanes.shape) if type(index) is int else index
        parts = self.machine.program.instructions[instruction].parts
        if (
            parts[0] in ("atom", "red")
            or "volatile" in parts
            or "relaxed" in parts
            or "acquire" in parts
            or "release" in parts
        ):
            return
        if shift < self.shift:
            raise AssertionError("granule larger than an access")
        self._generic(
            unit,
            lanes >> 5,
            self._owners(unit, span.lanes),
            place << (shift - self.shift),
            1 << (shift - self.shift),
            write,
            instruction,
            place << shift,
        )

    def matrix_access(self, fragment, warps, rows, write, instruction):
        """ldmatrix and stmatrix: 16-byte rows, (warps, matrices, 8) addresses."""
        place, lane_warps = rows.reshape(-1), np.repeat(warps, rows[0].size)
        span = _RowSpan(fragment, warps)
        if write:
            self.written.write(place >> 4 << 1, 3)
            self.written.write((place >> 4 << 1) + 1, 3)
        else:
            self.written.read(span, place >> 4 << 1, 3, instruction)
            self.written.read(span, (place >> 4 << 1) + 1, 3, instruction)
        if self.machine.count_banks:
            entry = self.machine.bank_conflicts.setdefault(instruction, [0, 0])
            for row in rows.reshape(-1, 8):
                banks = (np.unique(row)[:, None] // 4 + np.arange(4)).reshape(-1) % 32
                entry[0] += 1
                entry[1] += int(np.bincount(banks).max())
        self.touched[fragment.unit.first_warp + warps] = _ALL
        self._generic(
            fragment.unit,
            lane_warps,
            fragment.unit.first_warp + lane_warps,
            place >> self.shift,
            16 >> self.shift,
            write,
            instruction,
            place,
        )
        if write:  # warps that run this instruction together must not store into one another's rows
            last = self.write_owner[place >> self.shift]
            lost = last != fragment.unit.first_warp + lane_warps
            if lost.any():
                at = int(np.flatnonzero(lost)[0])
                one, other = (self._name_warp(int(w)) for w in (fragment.unit.first_warp + lane_warps[at], last[at]))
                raise Hazard(
                    f"race on {self.cluster.name_shared(int(place[at]))}: {one} and {other} store into the same row with the "
                    f"stmatrix at {self.machine.where(instruction)}, and one of the two is lost. Every lane must name a row of "
                    "its own warp's part of the tile: does the row depend on the warp?"
                )

    def _generic(self, unit, lane_warps, owners, first, width, write, instruction, place):
        """Accesses of lanes to width granules from first; lane_warps counts within the unit, owners are as in the clock's columns."""
        warps = unit.first_warp + lane_warps
        cells = first if width == 1 else (first[:, None] + np.arange(width)).reshape(-1)
        who, owner = (warps, owners) if width == 1 else (np.repeat(warps, width), np.repeat(owners, width))
        stamps = self.stamps[who, 0]
        before = self.write_owner[cells]
        unknown = self.clock[who, self.access_from + before] < self.write_clock[cells]
        if unknown.any():
            self._race(
                unit,
                int(np.flatnonzero(unknown)[0]) // width,
                lane_warps,
                place,
                instruction,
                write,
                "write",
                self.write_line[cells[unknown][0]],
                before[unknown][0],
            )
        low, high = int(place.min()), int(place.max()) + (width << self.shift)
        if self.accesses:
            self._against_async(unit, warps, place, low, high, width << self.shift, write, instruction)
        if self.cluster.size > 1 and (
            low // self.cluster.shared_stride != unit.cta or (high - 1) // self.cluster.shared_stride != unit.cta
        ):
            self._remote_access(unit, warps, place, instruction)
        if write:
            if self.read_pages[low >> 10 : (high + 1023) >> 10].any():
                reads = self.read_clock[:, cells]
                late = reads > self.clock[who, self.access_from :].T
                if late.any():
                    reader, cell = (int(x[0]) for x in np.nonzero(late))
                    self._race(
                        unit,
                        cell // width,
                        lane_warps,
                        place,
                        instruction,
                        True,
                        "read",
                        self.read_line[cells[cell]],
                        reader,
                    )
            self.write_owner[cells], self.write_clock[cells], self.write_line[cells] = owner, stamps, instruction
            self.stored_pages[place >> 10] = True
            self.events.append((lane_warps, place, instruction))
            self.store_event[place >> 4] = len(self.events) - 1
            if len(self.events) > 20000:
                self.events, self.store_event[:] = [None], 0
        else:
            if self.read_clock is None:
                self.read_clock = np.zeros((2 * self.warps, self.write_owner.size), np.int32)
            self.read_clock[owner, cells] = stamps
            self.read_pages[place >> 10] = True
            self.read_line[cells] = instruction

    def _race(self, unit, lane, lane_warps, place, instruction, write, other, line, warp):
        where = self.machine.where(instruction)
        earlier = self.machine.where(int(line)) if line >= 0 else "an earlier access"
        name = self.cluster.name_shared(int(np.broadcast_to(place, lane_warps.shape)[lane]))
        verb = "writes" if write else "reads"
        raise Hazard(
            f"race on {name}: warp {int(lane_warps[lane]) + unit.first // 32} of block {self.cluster.cta_ids[unit.cta]} "
            f"{verb} it at {where}, and nothing orders that after the {other} at {earlier} by "
            f"{self._name_warp(int(warp))}. Put a barrier (__syncthreads, a named barrier or an mbarrier) between the "
            "two. An arrival of one lane stands for its whole warp only after a __syncwarp()."
        )

    def _name_warp(self, owner):
        warp = owner % self.warps
        for unit in self.cluster.units:
            if warp in unit.warps:
                return f"warp {warp - unit.first_warp + unit.first // 32} of block {self.cluster.cta_ids[unit.cta]}"
        return f"warp {warp}"

    def _against_async(self, unit, warps, place, low, high, size, write, instruction):
        for access in self.accesses:
            if access.low >= high or low >= access.high or not (write or access.writes):
                continue
            hit = (place + size > access.low) & (place < access.high)
            if not hit.any():
                continue
            for warp in np.unique(warps[hit]).tolist():
                if self._known(access, self.clock[warp]):
                    continue
                where = self.machine.where(instruction)
                name = self.cluster.name_shared(int(place[hit][0]))
                if access.writes:
                    verb = "writes" if write else "reads"
                    raise Hazard(
                        f"race on {name}: {self._name_warp(warp)} {verb} it at {where} without having waited for"
                        f" {self._signal(access)}, which signals the copy at {access.where} into it."
                    )
                how = (
                    "the thread that stored must call tma_store_wait_read and then a barrier"
                    if "store" in access.what
                    else "wait for the wgmma group first"
                )
                raise Hazard(
                    f"race on {name}: {self._name_warp(warp)} writes it at {where} while {access.what} at "
                    f"{access.where} may still read it. Before reusing the buffer, {how}."
                )

    def _signal(self, access):
        return access.barrier.name if access.barrier is not None else "its group"

    def _known(self, access, clock) -> bool:
        """Does a warp with this clock know that the asynchronous access is over?"""
        if access.writes:
            return clock[self.warps + access.barrier.column] > access.phase
        return access.done is not None and any(clock[w] >= step for w, step in access.done)

    def _remote_access(self, unit, warps, place, instruction):
        targets = place // self.cluster.shared_stride
        where = self.machine.where(instruction)
        for target in np.unique(targets).tolist():
            if target == unit.cta:
                continue
            fragment = _RowSpan.of(unit)
            self._check_alive(fragment, target, where)
            for warp in np.unique(warps[targets == target]).tolist():
                self.remote.setdefault(target, {})[warp] = int(self.clock[warp, warp]), self._name_warp(warp), where

    # ---- TMA and wgmma ----------------------------------------------------------------------------------------------

    def async_write(self, fragment, low, high, barrier, where, box, combines=False):
        """A copy into shared memory, announced on barrier in its current phase. Reductions (combines) may meet one another."""
        warps, known, _ = self._known_to(fragment)
        warp, clock, name = int(warps[0]), known[0], self.cluster.name_shared
        target = low // self.cluster.shared_stride
        if target != fragment.unit.cta:
            self._check_alive(fragment, target, where)
        init_warp, init_step = barrier.initialised
        if clock[self.fence_from + init_warp] < init_step:
            raise Hazard(
                f"{fragment.who()}, {where}: no fence makes {barrier.name} (initialised at {barrier.location}) visible "
                "to the copy engine. Call fence_mbarrier_init() (fence.mbarrier_init.release.cluster) after "
                "mbarrier.init."
            )
        kept = []
        for access in self.accesses:
            if access.low >= high or low >= access.high:
                kept.append(access)
                continue
            if self._known(access, clock):
                continue
            if combines and access.combines:
                kept.append(access)
                continue
            if access.writes:
                raise Hazard(
                    f"race on {name(low)}: {fragment.who()} issues a second TMA load into it at {where} without knowing "
                    f"that the one at {access.where} has landed. The producer must wait for the slot to be empty, with "
                    "the right parity."
                )
            if access.done is None:
                raise Hazard(
                    f"race on {name(low)}: {fragment.who()} issues a TMA load into it at {where} while {access.what} at "
                    f"{access.where} still reads it. Wait for the wgmma group before the slot is released (wgmma_wait, "
                    "then arrive on empty), and let the producer wait on empty."
                )
            raise Hazard(
                f"race on {name(low)}: the TMA load of {fragment.who()} at {where} is not ordered after {access.what} "
                f"at {access.where}, which reads it. Either the slot is released too early, or the producer does not "
                "wait for empty (or with the wrong parity), or not every reader arrives on this CTA's empty barrier."
            )
        first = low >> self.shift
        cells = slice(first, -(-high // self.granule))
        stored = self.stored_pages[low >> 10 : (high + 1023) >> 10].any()
        writers, steps = self.write_owner[cells], self.write_clock[cells]
        if stored and steps.any():
            late = clock[self.access_from + writers] < steps
            if late.any():
                at = int(np.flatnonzero(late)[0])
                raise Hazard(
                    f"race on {name(low)}: the TMA load of {fragment.who()} at {where} is not ordered after the store "
                    f"at {self.machine.where(int(self.write_line[first + at]))} by {self._name_warp(int(writers[at]))}."
                )
            self.write_clock[cells] = 0
            self.store_event[low >> 4 : -(-high // 16)] = 0
        self.stored_pages[(low + 1023) >> 10 : high >> 10] = False
        if self.read_pages[low >> 10 : (high + 1023) >> 10].any():
            late = self.read_clock[:, cells] > clock[self.access_from :, None]
            if late.any():
                reader, at = (int(x[0]) for x in np.nonzero(late))
                raise Hazard(
                    f"race on {name(low)}: the TMA load of {fragment.who()} at {where} is not ordered after the read at "
                    f"{self.machine.where(int(self.read_line[first + at]))} by {self._name_warp(reader)}. Release the "
                    "slot only after its last read (of all lanes, where one arrives for its warp: __syncwarp()), and let the "
                    "producer wait for that."
                )
            self.read_clock[:, cells] = 0
            self.read_pages[(low + 1023) >> 10 : high >> 10] = False
        access = _AsyncAccess(low, high, True, "the TMA load", where)
        access.barrier, access.phase, access.box, access.owner, access.combines = (
            barrier,
            barrier.phase,
            box,
            warp,
            combines,
        )
        self.accesses = kept + [access]

    def landed(self, chunks):
        self.written.bytes.view(np.uint64).reshape(-1, 2)[chunks] = _WRITTEN

    def async_read(self, fragment, low, high, what, where, chunks=None, warps=None, box=None, low_chunk=0):
        """A copy or wgmma that reads [low, high) from now until read_done."""
        clock = (self._known_to(fragment)[1] if warps is None else self.clock[warps]).min(0)
        name = self.cluster.name_shared
        for access in self.accesses:
            if access.writes and access.low < high and low < access.high and not self._known(access, clock):
                raise Hazard(
                    f"race on {name(low)}: {what} of {fragment.who()} at {where} reads it without having waited for "
                    f"{access.barrier.name} (phase {access.phase}), which signals the TMA load at {access.where} into "
                    "it. Wait on the full barrier of this slot first, with the parity of this round: it flips each "
                    "time the ring comes round."
                )
        words = self.written.bytes.view(np.uint64)
        if box is None and not (words[low >> 3 : high >> 3] == _WRITTEN).all():
            pieces = words.reshape(-1, 2)[np.arange(low >> 4, high >> 4) if chunks is None else chunks]
            if (pieces != _WRITTEN).any():
                raise Hazard(
                    f"{what} of {fragment.who()} at {where} reads {name(low)}, parts of which nothing has written yet. "
                    "Check the tile's address, its size, and the offsets of the descriptor."
                )
        if self.stored_pages[low >> 10 : (high + 1023) >> 10].any():
            if chunks is None:
                cells = np.arange(low >> self.shift, -(-high // self.granule))
            else:
                per = 16 >> self.shift
                cells = (chunks.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
            self._against_stores(fragment, cells, clock, what, where)
        access = _AsyncAccess(low, high, False, what, where)
        self.accesses.append(access)
        if box is not None and box.map.swizzle:
            pieces = box.chunks(low_chunk).reshape(box.rows, -1)
            self._check_stored_layout(fragment, pieces, box.map.swizzle, where, "the tensor map")
        return access

    def _against_stores(self, fragment, cells, clock, what, where):
        """An asynchronous read of cells that ordinary stores may have written: is it ordered after them, past a proxy fence?"""
        writers, steps = self.write_owner[cells], self.write_clock[cells]
        late = clock[self.access_from + writers] < steps
        if late.any():
            at = int(np.flatnonzero(late)[0])
            raise Hazard(
                f"race on {self.cluster.name_shared(int(cells[at]) << self.shift)}: {what} of {fragment.who()} at {where} "
                f"reads it, and no barrier orders that after the store at {self.machine.where(int(self.write_line[cells[at]]))} "
                f"by {self._name_warp(int(writers[at]))}. All writers must pass a barrier with the issuing thread "
                "first (within one warp: __syncwarp())."
            )
        unseen = clock[self.fenced_from + writers] < steps
        if unseen.any():
            at = int(np.flatnonzero(unseen)[0])
            raise Hazard(
                f"{what} of {fragment.who()} at {where} reads {self.cluster.name_shared(int(cells[at]) << self.shift)}, "
                f"written by the ordinary store at {self.machine.where(int(self.write_line[cells[at]]))} with no proxy fence in "
                "between: the asynchronous proxy may see stale bytes. Every writing thread must call "
                "fence_proxy_async_shared() before the barrier."
            )

    def read_done(self, access, fragment, warps=None):
        warps = self._warps(fragment) if warps is None else warps
        access.done = list(zip(warps.tolist(), self.steps[warps].tolist()))

    def wgmma_read(self, fragment, operand, descriptor, chunks, low, high, where, state):
        """An operand tile of a wgmma.  Reads of one group that overlap share a record."""
        from .copy_engine import swizzle
        from .tensor_core import decode_descriptor

        warps = self._warps(fragment)
        _, _, stride, _, span = decode_descriptor(descriptor)
        self._check_descriptor(fragment, operand, span, stride, low, high, where)
        if span and not operand.transposed and self.stored_pages[low >> 10 : (high + 1023) >> 10].any():
            start = low - low % span
            rows, columns = np.arange(operand.rows)[:, None], np.arange(span // 16)[None]
            whole = swizzle(start + rows // 8 * stride + rows % 8 * span + columns * 16, span) >> 4
            if whole.max() < self.store_event.size:
                self._check_stored_layout(fragment, whole, span, where, f"the descriptor of operand {operand.label}")
        what = f"wgmma (operand {operand.label})"
        record = self.async_read(fragment, low, high, what, where, chunks=chunks, warps=warps)
        for operation in state.open:  # the k-steps of one group read side by side: one record for all of them
            for earlier in operation.reads:
                if earlier.what == what and abs(earlier.low - low) < 1024 and earlier.done is None:
                    earlier.low, earlier.high = min(earlier.low, low), max(earlier.high, high)
                    self.accesses.pop()
                    return earlier
        return record

    def _check_descriptor(self, fragment, operand, span, stride, low, high, where):
        """Mistakes of layout raise no race: compare the descriptor with the tensor map that wrote the tile."""
        for access in self.accesses:
            if not access.writes or access.box is None or access.low >= high or low >= access.high:
                continue
            written = access.box.map.swizzle
            if written != span:
                raise Hazard(
                    f"{fragment.who()}, {where}: the descriptor of operand {operand.label} says {_swizzle_name(span)}, "
                    f"but the tile was written with {_swizzle_name(written)} by the TMA load at {access.where}. The "
                    "16-byte pieces of the tile would be read in the wrong order. Use the same swizzle in tensor map "
                    "and descriptor."
                )
            if (
                span
                and not operand.transposed
                and operand.rows > 8
                and access.box.rows > 8
                and stride != 8 * access.box.pitch
            ):
                raise Hazard(
                    f"{fragment.who()}, {where}: the descriptor of operand {operand.label} steps {stride} bytes from "
                    f"one group of 8 rows to the next (stride offset), but the TMA load at {access.where} wrote rows of "
                    f"{access.box.pitch} bytes: it must be 8 x {access.box.pitch} = {8 * access.box.pitch}."
                )

    def _check_stored_layout(self, fragment, pieces, span, where, reader):
        """A tile that ordinary stores wrote without the swizzle that its reader undoes.

        pieces holds the 16-byte places of the tile by row and logical column.  A store instruction writes the same columns
        of several rows.  If those agree between rows where the bytes lie, but not in the reader's order, and the
        instruction neither copies loaded data nor has an XOR in its operands, the writer has forgotten the swizzle.
        """
        checked = self.machine.layouts_checked
        checked[where] = checked.get(where, 0) + 1
        if checked[where] > 4:
            return
        spots = {int(p): (r, c) for (r, c), p in np.ndenumerate(pieces)}
        seen: dict[int, tuple[dict, dict]] = {}
        events = np.unique(self.store_event[pieces])
        for event in events[events > 0][:64].tolist():
            lane_warps, places, instruction = self.events[event]
            physical, logical = seen.setdefault(instruction, ({}, {}))
            for warp in np.unique(lane_warps).tolist():
                columns: dict[int, tuple[list, list]] = {}
                for address in places[lane_warps == warp].tolist():
                    spot = spots.get(address >> 4)
                    if spot is not None:
                        pair = columns.setdefault(spot[0], ([], []))
                        pair[0].append(address % span >> 4)
                        pair[1].append(spot[1])
                for row, (there, meant) in columns.items():
                    physical.setdefault(row, set()).add(tuple(there))
                    logical.setdefault(row, set()).add(tuple(meant))
        for instruction, (physical, logical) in seen.items():
            groups: dict[frozenset, list[int]] = {}  # rows that one instruction fills in the same pattern
            for row, columns in physical.items():
                groups.setdefault(frozenset(columns), []).append(row)
            if any(len({frozenset(logical[row]) for row in rows}) > 1 for rows in groups.values()):
                if self.machine.program.may_swizzle(instruction):
                    continue
                raise Hazard(
                    f"{fragment.who()}, {where}: {reader} undoes {_swizzle_name(span)}, but the store at "
                    f"{self.machine.where(instruction)} wrote the tile row by row without it. XOR the 16-byte column "
                    "with the row (modulo 8 for 128 bytes) when writing, or read it without a swizzle."
                )

    def register_in_flight(self, fragment, segment):
        names = list(self.machine.program.kernel.registers)
        shared = segment.touched & fragment.unit.pending_registers
        for instruction in segment.instructions:
            if instruction.opcode.startswith("wgmma"):
                continue
            reads, writes = self.machine.program.reads_writes(instruction)
            used = [i for i in reads + writes if i in shared]
            if used:
                raise Hazard(
                    f"{fragment.who()}, {instruction.where()}: register {names[used[0]]} still belongs to an "
                    "asynchronous wgmma; no wgmma.wait_group has finished it. Call wgmma_wait<0>() before reading or "
                    "writing accumulators."
                )

    def wgmma_issue(self, fragment, operation, state):
        if not state.fenced:
            raise Hazard(
                f"{fragment.who()}, {operation.where}: no wgmma.fence before the first wgmma: writes of the accumulator "
                "registers are not ordered before it. Call wgmma_fence() first, and again whenever other code has "
                "touched the registers."
            )

    # ---- the end ----------------------------------------------------------------------------------------------------

    def thread_exit(self, fragment):
        unit = fragment.unit
        for lane in fragment.lane_indices().tolist():
            groups = self.cluster.bulk_groups.get((unit.first_warp, lane))
            if groups is None:
                continue
            for operation in groups["open"] + [o for g in groups["groups"] for o in g]:
                if operation.record is None or operation.record.done is None:
                    raise Hazard(
                        f"{unit.name_thread(lane)} exits with the TMA store at {operation.where} in flight: its shared "
                        "memory may be given to another CTA before it is read. Commit and wait: tma_store_commit(); "
                        "tma_store_wait<0>();"
                    )
        warps = self._warps(fragment)
        known = self.clock[warps].max(0)
        cta = unit.cta
        self.exiting[cta] = np.maximum(self.exiting[cta], known) if cta in self.exiting else known.copy()
        if self.cluster.size > 1 and all(u.exited.all() for u in self.cluster.units if u.cta == cta):
            self.exit_clock[cta] = clock = self.exiting[cta]
            for warp, (step, who, where) in self.remote.get(cta, {}).items():
                if clock[warp] < step:
                    self._exited_early(cta, who, where)
            for access in self.accesses:
                if access.writes and access.low // self.cluster.shared_stride == cta and not self._known(access, clock):
                    self._exited_early(cta, self._name_warp(access.owner), access.where)

    def _exited_early(self, cta, who, where):
        raise Hazard(
            f"block {self.cluster.cta_ids[cta]} exits without knowing that the access of {who} at {where} to its shared "
            "memory is over. Its shared memory may be given away while the peer still uses it: end the kernel with "
            "cluster_sync()."
        )

    # ---- bank conflicts ---------------------------------------------------------------------------------------------

    def _count_banks(self, span, index, shift, instruction):
        unit = span.unit
        lanes = unit.all_lanes if span.lanes is None else span.lanes
        place = np.broadcast_to(index, lanes.shape) << shift
        entry = self.machine.bank_conflicts.setdefault(instruction, [0, 0])
        warp = lanes >> 5
        for w in np.unique(warp)[:64].tolist():
            words = np.unique(place[warp == w] >> 2)
            entry[0] += 1
            entry[1] += int(np.bincount(words & 31).max())


class _RowSpan:
    """Stands for a Span where only a name is needed."""

    def __init__(self, fragment, warps):
        self.unit, self.fragment, self.warps = fragment.unit, fragment, warps

    @classmethod
    def of(cls, unit):
        return unit.fragments[0]

    def _who(self, bad, instruction):
        return f"{self.fragment.who()}, {self.unit.machine.where(instruction)}"


class BatchObserver:
    """Checks of many CTAs in lock step, where __syncthreads is the only barrier between warps.

    A race is an access in the same interval between two barriers, by another warp, one of the two a write.
    """

    def __init__(self, machine, cluster):
        self.machine, self.cluster = machine, cluster
        self.written = memory.WrittenMap(cluster.shared.size)
        self.granule = granule_of(machine.program)
        self.shift = self.granule.bit_length() - 1
        count = cluster.shared.size >> self.shift
        # A stamp is 64 * interval + warp + 1; 63 stands for several warps.
        self.write_stamp, self.read_stamp = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.write_line = np.full(count, -1, np.int32)
        self.interval = 1
        unit_warps = np.arange(machine.cta_threads * len(cluster.cta_ids)) % machine.cta_threads >> 5
        self.lane_warp = (unit_warps + 1).astype(np.int32)

    def shared_access(self, span, index, shift, size, write, instruction):
        if write:
            self.written.write(index, shift)
        else:
            self.written.read(span, index, shift, instruction)
        if self.machine.count_banks:
            Observer._count_banks(self, span, index, shift, instruction)
        unit = span.unit
        base = self.interval * 64
        mine = (self.lane_warp if span.lanes is None else self.lane_warp.take(span.lanes)) + base
        width = 1 << (shift - self.shift)
        cells = index
        if width > 1:
            cells = (np.asarray(index).reshape(-1, 1) * width + np.arange(width)).reshape(-1)
            mine = np.repeat(mine, width)
        last = self.write_stamp.take(cells)
        bad = (last >= base) & (last != mine)
        other, line = "write", self.write_line
        if not bad.any() and write:
            read = self.read_stamp.take(cells)
            bad = (read >= base) & (read != mine)
            other, line = "read", None
        if bad.any():
            at = int(np.flatnonzero(bad)[0]) // width
            lanes = unit.all_lanes if span.lanes is None else span.lanes
            place = int(np.atleast_1d(index)[at % np.size(index)]) << shift
            earlier = f" at {self.machine.where(int(line.take(place >> self.shift)))}" if line is not None else ""
            raise Hazard(
                f"race on {self.cluster.name_shared(place)}: {unit.name_thread(int(lanes[at]))} "
                f"{'writes' if write else 'reads'} it at {self.machine.where(instruction)}, and no __syncthreads orders "
                f"that after the {other}{earlier} by another warp."
            )
        if write:
            self.write_stamp[cells] = mine
            self.write_line[cells] = instruction
        else:
            seen = self.read_stamp.take(cells)
            self.read_stamp[cells] = np.where((seen >= base) & (seen != mine), base + 63, mine)
            several = self.read_stamp.take(cells) != mine  # another warp read it, before or in this instruction
            if several.any():
                self.read_stamp[np.broadcast_to(cells, mine.shape)[several]] = base + 63

    def barrier_complete(self, barrier):
        self.interval += 1

    def named_barrier_arrive(self, fragment, barrier, instruction): ...
    def warp_sync(self, fragment): ...
    def release(self, fragment, barrier, chosen=None): ...
    def acquire(self, fragment, barrier): ...
    def thread_exit(self, fragment): ...


def _swizzle_name(span):
    return f"a {span}-byte swizzle" if span else "no swizzle"


def make_observer(machine, cluster):
    return BatchObserver(machine, cluster) if cluster.batch else Observer(machine, cluster)
