"""Memory of one launch: global, shared, local and parameter windows, and generic addresses (PTX ISA section 5).

Global memory is the caller's own tensors.  Each is a Region, the exact bytes of the view that was passed, so that a
write past a view is caught even where the storage goes on.  An access goes through a Span: one base address register
and the active lanes, checked once and then used for every offset that straight-line code adds to it.
"""

import bisect
import ctypes

import numpy as np

from . import arithmetic
from .errors import Hazard, MemoryFault

# Windows of the generic address space.  Real pointers stay below 2**57.
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 60, 2 << 60, 3 << 60
# shared::cluster addresses (PTX ISA 5.1.7): bits 24 and up hold rank + 1; 0 means the executing CTA itself.
CLUSTER_SHIFT = 24
_WINDOW_NAMES = {1: "shared", 2: "local", 3: "parameter"}


class Region:
    """A named range of global memory over the bytes of a tensor."""

    def __init__(self, name: str, start: int, size: int, owner, writable: bool = True):
        self.name, self.start, self.end, self.owner, self.writable = name, start, start + size, owner, writable
        self.bytes = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)) if size else np.zeros(0, np.uint8)
        )
        self._views = {}

    def view(self, dtype):
        """(first aligned address, array of dtype over the aligned part)"""
        found = self._views.get(dtype)
        if found is None:
            size = np.dtype(dtype).itemsize
            first = -(-self.start // size) * size
            count = max(0, (self.end - first) // size)
            found = first, self.bytes[first - self.start : first - self.start + count * size].view(dtype)
            self._views[dtype] = found
        return found


class GlobalMemory:
    def __init__(self):
        self.regions: list[Region] = []
        self.starts: list[int] = []

    def add(self, region: Region) -> None:
        if region.start == region.end:
            return
        at = bisect.bisect(self.starts, region.start)
        self.regions.insert(at, region)
        self.starts.insert(at, region.start)

    def add_array(self, name: str, array: np.ndarray, writable: bool = True) -> int:
        address = array.ctypes.data
        self.add(Region(name, address, array.nbytes, array, writable))
        return address

    def find(self, address: int, size: int = 1) -> Region | None:
        """The region that holds size bytes at address; views may overlap, so earlier starts are tried too."""
        for at in range(bisect.bisect(self.starts, address) - 1, -1, -1):
            if address + size <= self.regions[at].end:
                return self.regions[at]
            if at < bisect.bisect(self.starts, address) - 8:
                break
        return None

    def describe(self, address: int, size: int, origin: "Region | None" = None) -> str:
        """Where a bad address lies, in terms of the tensor it was computed from (origin) or the nearest one."""
        if address >> 60:
            return f"address {address:#x}, which lies in the {_WINDOW_NAMES.get(address >> 60, 'unknown')} window"
        if not self.regions:
            return f"address {address:#x}; the kernel was given no tensor"
        best = origin or min(self.regions, key=lambda r: min(abs(address - r.start), abs(address + size - r.end)))
        total = best.end - best.start
        if address >= best.start:
            beyond = address + size - best.end
            place = (
                f"{beyond} bytes past the end" if address < best.end else f"{address - best.end} bytes after the end"
            )
        else:
            place = f"{best.start - address} bytes before the start"
        if abs(address - best.start) > 1 << 40:
            return f"address {address:#x}, far from every tensor (a null or uninitialised pointer?)"
        return f"{place} of {best.name} ({total} bytes)"


def _first(values, bad):
    return int(np.flatnonzero(bad)[0]) if np.ndim(bad) else 0


class Span:
    """Lanes of a fragment with one address each (or one for all), in one space."""

    __slots__ = ("unit", "fragment", "lanes", "address", "low", "high", "bits", "count", "_index")
    space = "global"

    def __init__(self, unit, fragment, address, lanes):
        self.unit, self.fragment, self.lanes, self._index = unit, fragment, lanes, {}
        if address.ndim == 0:
            self.address = address
            self.low = self.high = int(address)
            self.count = 1 if lanes is None or lanes.size else 0
            self.bits = self.low
        else:
            self.address = address = address if lanes is None else address.take(lanes)
            self.count = address.size
            if address.size:
                self.low, self.high = int(address.min()), int(address.max())
                self.bits = None

    # Subclasses say which bytes back the span: (view, index array or int) for elements of dtype at offset.
    def _resolve(self, offset, dtype, size, instruction, write):
        raise NotImplementedError

    def check_alignment(self, offset, size, instruction):
        if self.bits is None:
            self.bits = int(np.bitwise_or.reduce(self.address))
        if (self.bits | offset) & (size - 1):
            bad = (self.address.astype(np.int64) + offset) & (size - 1) != 0
            if bad.any():
                at = int(np.atleast_1d(self.address)[_first(self.address, bad)]) + offset
                raise MemoryFault(
                    f"{self._who(bad, instruction)}: misaligned {self.space} access of {size} bytes at {at:#x}; the "
                    f"address must be a multiple of {size}. Look at the index arithmetic, or at a cast to a wider "
                    "vector type."
                )

    def _who(self, bad, instruction):
        lane = _first(self.address, bad)
        if self.lanes is not None and self.lanes.size:
            lane = int(self.lanes[lane]) if np.ndim(bad) else int(self.lanes[0])
        return self.unit.name_thread(lane) + ", " + self.unit.machine.where(instruction)

    def load(self, offset, dtype, instruction, vector=1):
        size = np.dtype(dtype).itemsize
        if not self.count:
            return dtype(0) if vector == 1 else [dtype(0)] * vector
        self.check_alignment(offset, size * vector, instruction)
        values = [self._load(offset + i * size, dtype, size, instruction) for i in range(vector)]
        return values[0] if vector == 1 else values

    def _load(self, offset, dtype, size, instruction):
        view, index = self._resolve(offset, dtype, size, instruction, False)
        if type(index) is int:
            return view[index]
        if self.lanes is None:
            return view.take(index)
        result = np.zeros(self.unit.threads, dtype)
        result[self.lanes] = view.take(index)
        return result

    def _active(self, values):
        """Values of the active lanes; one value if all share it."""
        return values if values.ndim == 0 or self.lanes is None else values.take(self.lanes)

    def store(self, offset, dtype, instruction, *values):
        if not self.count:
            return
        size = np.dtype(dtype).itemsize
        self.check_alignment(offset, size * len(values), instruction)
        for i, value in enumerate(values):
            view, index = self._resolve(offset + i * size, dtype, size, instruction, True)
            value = self._active(value)
            if type(index) is int and value.ndim:
                value = value[-1]
            view[index] = value

    def atomic(self, offset, dtype, instruction, operation, returns, *operands):
        """atom and red (PTX ISA 9.7.13.5): lanes take their turns in lane order."""
        kind = np.dtype(dtype)
        if not self.count:
            return dtype(0)
        self.check_alignment(offset, kind.itemsize, instruction)
        view, index = self._resolve(offset, dtype, kind.itemsize, instruction, True)
        lanes = np.arange(self.unit.threads) if self.lanes is None else self.lanes
        index = np.full(lanes.size, index) if type(index) is int else index
        values = [np.broadcast_to(self._active(v), lanes.shape) for v in operands]
        flush = operation == "add" and dtype is np.float32 and self.space == "global"
        if not returns and operation in _UFUNCS and not flush:
            _UFUNCS[operation].at(view, index, values[0])
            return None
        step, old = ATOMICS.get(operation) or _half_atomic(operation), np.zeros(lanes.size, dtype)
        with np.errstate(all="ignore"):
            for i, at in enumerate(index.tolist()):
                old[i] = view[at]
                if flush:  # atom.add.f32 on global memory takes and gives zeros for subnormal numbers
                    view[at] = _flushed(_flushed(old[i]) + _flushed(values[0][i]))
                else:
                    view[at] = step(old[i], *[v[i] for v in values])
        if self.lanes is None:
            return old
        result = np.zeros(self.unit.threads, dtype)
        result[self.lanes] = old
        return result


class GlobalSpan(Span):
    __slots__ = ("region",)

    def __init__(self, unit, fragment, address, lanes):
        super().__init__(unit, fragment, address, lanes)
        self.region = None

    def _resolve(self, offset, dtype, size, instruction, write):
        region = self.region
        if region is None or self.low + offset < region.start or self.high + offset + size > region.end:
            # An address computed from one tensor must stay inside it, also where another tensor happens to lie beyond.
            region = self.unit.machine.origin(instruction)
            if region is None:
                region = self.unit.machine.memory.find(self.low + offset, size)
            if region is None or self.low + offset < region.start or self.high + offset + size > region.end:
                return self._scattered(offset, dtype, size, instruction, write)
            self.region = region
            self._index.clear()
        if write and not region.writable:
            raise MemoryFault(f"{self._who(True, instruction)}: store to {region.name}, which is constant")
        first, view = region.view(dtype)
        shift = size.bit_length() - 1
        if type(self.bits) is int and self.low == self.high and self.address.ndim == 0:
            return view, (self.low + offset - first) >> shift
        index = self._index.get(size)
        if index is None or offset & (size - 1):
            base = offset & (size - 1)
            index = (self.address - np.uint64(first - base) if first >= base else self.address).view(np.int64)
            if shift:
                index = index >> shift
            if not base:
                self._index[size] = index
        step = offset >> shift
        return (view[step:], index) if step > 0 else (view, index + step if step else index)

    def _scattered(self, offset, dtype, size, instruction, write):
        """Lanes in several tensors: find the offender, or copy through a gathered view."""
        memory, origin = self.unit.machine.memory, self.unit.machine.origin(instruction)
        addresses = (np.atleast_1d(self.address).astype(np.int64) + offset).tolist()
        if origin is not None:
            regions = [origin if origin.start <= a and a + size <= origin.end else None for a in addresses]
        else:
            regions = [memory.find(a, size) for a in addresses]
        for i, region in enumerate(regions):
            if region is None:
                bad = np.arange(len(addresses)) == i
                verb = "writes" if write else "reads"
                raise MemoryFault(
                    f"{self._who(bad if self.address.ndim else True, instruction)}: {verb} {size} bytes at "
                    f"{memory.describe(addresses[i], size, origin)}. No tensor of this "
                    "launch holds that address: look at the bounds check of the row and column, and at the leading "
                    "dimension."
                )
        return _Scattered(regions, addresses, dtype), np.arange(len(addresses))


class _Scattered:
    """An array-like over elements that lie in different regions."""

    def __init__(self, regions, addresses, dtype):
        self.places = [
            (r.view(dtype)[1], (a - r.view(dtype)[0]) // np.dtype(dtype).itemsize) for r, a in zip(regions, addresses)
        ]
        self.dtype = dtype

    def take(self, index):
        return np.array([self.places[i][0][self.places[i][1]] for i in index.tolist()], self.dtype)

    def __getitem__(self, i):
        return self.places[i][0][self.places[i][1]]

    def __setitem__(self, index, values):
        index = np.atleast_1d(index)
        for i, value in zip(index.tolist(), np.broadcast_to(values, index.shape)):
            view, at = self.places[i]
            view[at] = value


class SharedSpan(Span):
    """Shared memory of the executing CTA, or of any CTA of the cluster where bits 24 and up of the address say so."""

    __slots__ = ("offsets",)
    space = "shared"

    def __init__(self, unit, fragment, address, lanes):
        super().__init__(unit, fragment, address, lanes)
        self.offsets = None

    def _resolve(self, offset, dtype, size, instruction, write):
        unit, shift = self.unit, size.bit_length() - 1
        cluster = unit.cluster
        if self.high + offset >= 1 << CLUSTER_SHIFT:
            return self._remote(offset, dtype, size, instruction, write)
        if self.low + offset < cluster.shared_base or self.high + offset + size > cluster.shared_end:
            self._out_of_bounds(self.address.astype(np.int64) + offset, size, instruction, write)
        view = cluster.shared_view(dtype)
        if self.address.ndim == 0 and unit.lane_base is None:
            index = (unit.shared_base + self.low + offset) >> shift
        else:
            key = self._index.get(size)
            if key is None or offset & (size - 1):
                base = (
                    unit.shared_base
                    if unit.lane_base is None
                    else (unit.lane_base if self.lanes is None else unit.lane_base.take(self.lanes))
                )
                key = self.address.astype(np.int64) + (base + (offset & (size - 1)))
                if shift:
                    key = key >> shift
                if not offset & (size - 1):
                    self._index[size] = key
            step = offset >> shift
            index = key + step if step else key
        if cluster.observer is not None:
            cluster.observer.shared_access(self, index, shift, size, write, instruction)
        return view, index

    def _remote(self, offset, dtype, size, instruction, write):
        cluster = self.unit.cluster
        address = np.atleast_1d(self.address).astype(np.int64) + offset
        rank, local = (address >> CLUSTER_SHIFT) - 1, address & ((1 << CLUSTER_SHIFT) - 1)
        if (rank >= cluster.size).any():
            raise MemoryFault(
                f"{self._who(True, instruction)}: CTA rank {int(rank.max())} in a cluster of {cluster.size}"
            )
        self._out_of_bounds(local, size, instruction, write)
        base = np.where(rank < 0, self.unit.shared_base, rank * cluster.shared_stride)
        index = (base + local) >> (size.bit_length() - 1)
        if self.address.ndim == 0:
            index = int(index[0])
        if cluster.observer is not None:
            cluster.observer.shared_access(self, index, size.bit_length() - 1, size, write, instruction)
        return cluster.shared_view(dtype), index

    def _out_of_bounds(self, address, size, instruction, write):
        cluster = self.unit.cluster
        bad = (address < cluster.shared_base) | (address + size > cluster.shared_end)
        if bad.any():
            at = int(np.atleast_1d(address)[_first(address, bad)])
            verb = "writes" if write else "reads"
            raise MemoryFault(
                f"{self._who(bad if self.address.ndim else True, instruction)}: {verb} {size} bytes at shared address "
                f"{at:#x}; the CTA owns {cluster.shared_base:#x} to {cluster.shared_end:#x} "
                f"({cluster.shared_end - cluster.shared_base} bytes). Look at the index, or at the dynamic shared "
                "memory size of the launch."
            )


class LocalSpan(Span):
    """Local memory: private to a thread, so that one address means another byte for each lane."""

    __slots__ = ()
    space = "local"

    def _resolve(self, offset, dtype, size, instruction, write):
        unit = self.unit
        if self.low + offset < 0 or self.high + offset + size > unit.local_bytes:
            raise MemoryFault(
                f"{self._who(True, instruction)}: local access at {self.low + offset} to {self.high + offset + size} "
                f"outside the {unit.local_bytes} bytes of the thread's stack. Look at the index of the local array."
            )
        lanes = np.arange(unit.threads) if self.lanes is None else self.lanes
        index = (lanes * unit.local_bytes + self.address.astype(np.int64) + offset) >> (size.bit_length() - 1)
        return unit.local_view(dtype), index


class ParamSpan(Span):
    """The kernel's parameters, through a generic address."""

    __slots__ = ()
    space = "parameter"

    def _resolve(self, offset, dtype, size, instruction, write):
        data = self.unit.machine.parameter_bytes
        if write or self.low + offset < 0 or self.high + offset + size > data.size:
            raise MemoryFault(f"{self._who(True, instruction)}: bad access to the kernel's {data.size} parameter bytes")
        index = (self.address.astype(np.int64) + offset) >> (size.bit_length() - 1)
        usable = data.size // size * size
        return data[:usable].view(dtype), int(index) if self.address.ndim == 0 else index


_WINDOWS = {0: GlobalSpan, 1: SharedSpan, 2: LocalSpan, 3: ParamSpan}


def generic_span(unit, fragment, address, lanes):
    """A generic address: the top bits say which window it lies in (PTX ISA 5.1.1 'cvta', 6.4.1.1)."""
    windows = address >> np.uint64(60)
    active = windows if lanes is None or windows.ndim == 0 else windows.take(lanes)
    low, high = (
        (int(active), int(active))
        if active.ndim == 0
        else (int(active.min()), int(active.max()))
        if active.size
        else (0, 0)
    )
    if low != high:
        return _MixedSpan(unit, fragment, address, lanes, windows)
    return _WINDOWS[low](unit, fragment, address & np.uint64((1 << 60) - 1) if low else address, lanes)


class _MixedSpan:
    """Lanes of one instruction in different windows: each window takes its lanes."""

    def __init__(self, unit, fragment, address, lanes, windows):
        active = np.arange(unit.threads) if lanes is None else lanes
        self.unit = unit
        self.pieces = []
        for window in np.unique(windows[active]).tolist():
            chosen = active[windows[active] == window]
            self.pieces.append((chosen, _WINDOWS[window](unit, fragment, address & np.uint64((1 << 60) - 1), chosen)))

    def load(self, offset, dtype, instruction, vector=1):
        results = [np.zeros(self.unit.threads, dtype) for _ in range(vector)]
        for chosen, span in self.pieces:
            values = span.load(offset, dtype, instruction, vector)
            for result, value in zip(results, [values] if vector == 1 else values):
                result[chosen] = np.broadcast_to(value, result.shape)[chosen]
        return results[0] if vector == 1 else results

    def store(self, offset, dtype, instruction, *values):
        for _, span in self.pieces:
            span.store(offset, dtype, instruction, *values)

    def atomic(self, offset, dtype, instruction, operation, returns, *operands):
        result = np.zeros(self.unit.threads, dtype)
        for chosen, span in self.pieces:
            old = span.atomic(offset, dtype, instruction, operation, True, *operands)
            result[chosen] = np.broadcast_to(old, result.shape)[chosen]
        return result


_UFUNCS = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


ATOMICS = {
    "add": lambda old, x: old + x,
    "min": lambda old, x: min(old, x),
    "max": lambda old, x: max(old, x),
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
    "cas": lambda old, compare, x: x if old == compare else old,
}


def _flushed(x):
    return np.copysign(np.float32(0), x) if abs(x) < np.float32(2**-126) else arithmetic.canonical_nan(x)


def _half_atomic(name):
    """add.f16x2, min.bf16 and so on, on the bits of one element."""
    operation, kind = name.split(".")
    if kind.endswith("x2"):
        return lambda old, x: arithmetic.half_pair(operation, kind[:-2], old, x)
    return lambda old, x: arithmetic.half_operation(operation, kind, old, x)


class WrittenMap:
    """Which bytes of shared memory something has written: reads of the others are reported (mistake 31)."""

    def __init__(self, size: int):
        self.bytes = np.zeros(size, np.uint8)

    def write(self, index, shift):
        self.bytes.view(f"u{1 << shift}")[index] = (1 << (8 << shift)) - 1

    def read(self, span, index, shift, instruction):
        full = (1 << (8 << shift)) - 1
        got = self.bytes.view(f"u{1 << shift}")[index]
        bad = got != full
        if bad.any():
            lane = _first(got, bad)
            place = int(np.atleast_1d(index)[lane]) << shift
            raise Hazard(
                f"{span._who(bad, instruction)}: reads {span.unit.cluster.name_shared(place)}, which nothing has "
                "written yet. Shared memory starts with whatever the last kernel left there: write it first, or wait "
                "for the copy that does."
            )
