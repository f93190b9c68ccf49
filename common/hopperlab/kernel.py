"""A CUDA kernel that runs where its tensors are: the cubin on the GPU, the PTX of the same source on the simulator.

    kernel = Kernel("stages/NN_name/kernel.cu", "gemm", {"BLOCK_M": 128, ...})
    kernel[grid, block](a, b, out, m, n, k)                         # sizes as ints or tuples of up to three
    kernel[grid, block, cluster, shared_bytes](a, b, out, m, n, k)

The grid counts CTAs, as in CUDA's ``<<<grid, block>>>``. Launches on a GPU are asynchronous, on the current stream of torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hopperlab import compile as compiler
from hopperlab.tensormap import ALIGNMENT, TensorMap, encoded_at

# Limits of compute capability 9.0 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MAX_THREADS_PER_CTA = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER = 8  # the portable limit
MAX_SHARED_BYTES = 227 * 1024

_SCALAR_TYPES = {
    "f32": ctypes.c_float, "f64": ctypes.c_double,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "s8": ctypes.c_int8, "s16": ctypes.c_int16, "s32": ctypes.c_int32, "s64": ctypes.c_int64,
    "b8": ctypes.c_uint8, "b16": ctypes.c_uint16, "b32": ctypes.c_uint32, "b64": ctypes.c_uint64,
}  # fmt: skip
# Of integers: PTX declares int as u32, so signed and unsigned values are right.
_RANGES = {name: (-(2 ** (8 * ctypes.sizeof(kind) - 1)), 2 ** (8 * ctypes.sizeof(kind))) for name, kind in _SCALAR_TYPES.items()
           if kind not in (ctypes.c_float, ctypes.c_double)}  # fmt: skip


_SIMULATION = contextvars.ContextVar("simulation", default=({}, None))


@contextlib.contextmanager
def simulation(**options):
    """Options of the simulator for every launch inside the block, whoever makes it; gives the list of their reports.

        with simulation(trace=True, order="eager", seed=3) as reports:
            step.gemm(a, b, out)        # on CPU tensors
    """
    reports = []
    token = _SIMULATION.set((options, reports))
    try:
        yield reports
    finally:
        _SIMULATION.reset(token)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as the PTX declares it."""

    name: str
    type: str  # "u32", "f32", "u64" (also every pointer), "b8" for a struct
    bytes: int
    alignment: int


class Kernel:
    """One entry of one ``.cu`` file, compiled with one set of constants.

    path: the source file. entry: the name of its ``extern "C" __global__`` function.
    constants: macros, see :func:`hopperlab.compile.compile_source`. The file is compiled at the first use.
    dense_ffma: change scheduling hints of the cubin, see :func:`hopperlab.sass.dense_ffma`.
    """

    def __init__(self, path: str | Path, entry: str, constants: dict[str, object] | None = None, dense_ffma: bool = False):
        self.path, self.entry, self.constants, self.dense_ffma = Path(path), entry, dict(constants or {}), dense_ffma
        self._compiled = None

    def __repr__(self):
        return f"Kernel({self.path.name}, {self.entry}, {self.constants})"

    @property
    def compiled(self) -> compiler.Compiled:
        # Not a cached_property: before Python 3.12 that holds one lock for all kernels, and two could not be compiled at a time.
        if self._compiled is None:
            self._compiled = compiler.compile_file(self.path, self.constants, self.dense_ffma)
        return self._compiled

    @property
    def resources(self) -> compiler.Resources:
        """Registers, shared memory and spills, as ptxas reported them."""
        return self.compiled.resources[self.entry]

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """The kernel's parameters in order, read from its PTX."""
        match = re.search(rf"\.entry\s+{re.escape(self.entry)}\s*\((.*?)\)", self.compiled.ptx, re.S)
        if match is None:
            entries = re.findall(r"\.entry\s+(\w+)", self.compiled.ptx)
            raise ValueError(f'entry: {self.path.name} has no kernel "{self.entry}"; it has {entries}. '
                             'Is the function declared extern "C" __global__?')  # fmt: skip
        found = []
        for item in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", match[1]):
            element = int(re.sub(r"\D", "", item[2])) // 8
            found.append(Parameter(item[3], item[2], element * int(item[4] or 1), int(item[1] or element)))
        return found

    @functools.cached_property
    def packing(self) -> Packing:
        return Packing(self.parameters)

    def __getitem__(self, launch) -> functools.partial:
        if not isinstance(launch, tuple) or not 2 <= len(launch) <= 4:
            raise TypeError(f"kernel[grid, block], kernel[grid, block, cluster] or "
                            f"kernel[grid, block, cluster, shared_bytes]; got kernel[{launch!r}]")  # fmt: skip
        return functools.partial(self.launch, **_launch_options(tuple(tuple(x) if isinstance(x, list) else x for x in launch)))

    def launch(self, *arguments, grid, block, cluster=(1, 1, 1), shared_bytes=0, **simulator_options):
        """Launch on the device of the tensors among ``arguments``.

        Tensors are passed as pointers; ints, floats and bools by the type the kernel declares; ``TensorMap`` by value.
        ``simulator_options`` (order, seed, trace, …) go to :func:`hopperlab.sim.launch`; on a GPU they are refused.
        Returns the simulator's report, or None on a GPU.
        """
        device = self._device(arguments)
        if len(arguments) != len(self.parameters):
            raise TypeError(f"{self.entry} takes {len(self.parameters)} arguments "
                            f"({', '.join(p.type for p in self.parameters)}), {len(arguments)} were given")  # fmt: skip
        if device.type == "cpu":
            from hopperlab import sim

            around, reports = _SIMULATION.get()
            report = sim.launch(
                self.compiled.ptx, self.entry, list(arguments), grid=grid, block=block, cluster=cluster, shared_bytes=shared_bytes,
                registers=self.resources.registers, source=self.path, **{"constants": self.constants, **around, **simulator_options},
            )  # fmt: skip
            if reports is not None:
                reports.append(report)
            return report
        if simulator_options:
            raise TypeError(f"{sorted(simulator_options)} are options of the simulator; "
                            "move the tensors to the CPU to use them")  # fmt: skip
        self._launch_on_gpu(device, arguments, grid, block, cluster, shared_bytes)
        return None

    def _device(self, arguments) -> torch.device:
        devices = []
        for argument in arguments:
            tensor = argument.tensor if isinstance(argument, TensorMap) else argument
            if isinstance(tensor, torch.Tensor) and tensor.device not in devices:
                devices.append(tensor.device)
        if len(devices) != 1:
            raise ValueError(f"arguments of {self.entry}: tensors of one device are needed to choose the machine, "
                             f"got {sorted(map(str, devices)) or 'no tensor'}")  # fmt: skip
        return devices[0]

    def _launch_on_gpu(self, device, arguments, grid, block, cluster, shared_bytes):
        values = [self.value(argument, parameter) for argument, parameter in zip(arguments, self.parameters)]
        self.prepare(device.index, grid, block, cluster, shared_bytes)(Arguments(self.packing, values))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - kernels live as long as the process
    def prepare(self, device_index: int, grid, block, cluster=(1, 1, 1), shared_bytes: int = 0, early: bool = False) -> GpuLaunch:
        """This kernel, loaded, with one launch configuration on one GPU: for callers that launch it again and again.

        early: it may start while the kernel before it in the stream ends, because it waits for that one by griddepcontrol.wait
        (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
        """
        return GpuLaunch(self, device_index, early=early, **_launch_options((grid, block, cluster, shared_bytes)))

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def _loaded(self, device_index: int, shared_bytes: int):
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        major, minor = torch.cuda.get_device_capability(device_index)
        if (major, minor) != (9, 0):
            raise RuntimeError(f"{self.entry} is built for {compiler.ARCHITECTURE}, {torch.cuda.get_device_name(device_index)} "
                               f"is sm_{major}{minor}; move the tensors to the CPU to run on the simulator")  # fmt: skip
        with torch.cuda.device(device_index):
            Device(device_index).set_current()  # the primary context, which torch uses too
            kernel = self._object_code(ObjectCode).get_kernel(self.entry)
            if shared_bytes > 48 * 1024:  # beyond the default limit a kernel must opt in
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device_index), f"shared_bytes={shared_bytes}")
            return _checked(driver.cuKernelGetFunction(kernel.handle), f"loading {self.entry}")

    @functools.cache  # noqa: B019 - one module for all devices; unloading it would unload the kernel
    def _object_code(self, object_code_class):
        return object_code_class.from_cubin(self.compiled.cubin)

    @staticmethod
    def value(argument, parameter: Parameter) -> int | float | bytes:
        """One argument as Arguments takes it, for a GPU. Raises TypeError or OverflowError if the parameter cannot hold it."""
        if isinstance(argument, torch.Tensor):
            if parameter.type not in ("u64", "b64"):
                raise TypeError(f"{parameter.name} is {parameter.type}, not a pointer; a tensor was given")
            return argument.data_ptr()
        if isinstance(argument, TensorMap):
            return encoded_at(argument.layout, argument.address)
        if isinstance(argument, (bool, int, float)):
            if parameter.type in ("f32", "f64"):
                return float(argument)
            if not isinstance(argument, int):
                raise TypeError(f"{parameter.name} is {parameter.type}; got the float {argument}, an integer is needed")
            low, end = _RANGES[parameter.type]
            if not low <= argument < end:
                raise OverflowError(f"{parameter.name} is {parameter.type}; {argument} does not fit in {end.bit_length() - 1} bits")
            return argument % end
        raise TypeError(f"{parameter.name}: got {type(argument).__name__}, allowed are tensors, TensorMap, int, float, bool")


class Packing:
    """Where each parameter of a kernel lies in one block of memory, aligned as the kernel declares it, and the format (of
    :mod:`struct`) of the whole: the parameters, then the array of their addresses that the driver reads."""

    def __init__(self, parameters: Sequence[Parameter]):
        self.offsets, parts, end = [], ["<"], 0
        for parameter in parameters:
            padding = -end % parameter.alignment
            parts.append(f"{padding}x{_code(parameter)}")
            self.offsets.append(end + padding)
            end += padding + parameter.bytes
        self.table = end + -end % 8
        parts.append(f"{self.table - end}x{len(parameters)}Q")
        self.format = struct.Struct("".join(parts))


def _code(parameter: Parameter) -> str:
    if parameter.type in _SCALAR_TYPES and parameter.bytes == ctypes.sizeof(_SCALAR_TYPES[parameter.type]):
        floats = {"f32": "f", "f64": "d"}  # integers unsigned, as Kernel.value gives them
        return floats.get(parameter.type) or {1: "B", 2: "H", 4: "I", 8: "Q"}[parameter.bytes]
    return f"{parameter.bytes}s"


class Arguments:
    """The arguments of a launch, packed for the driver. Never changed afterwards: while one thread is inside the launch, which
    gives up Python's lock, others may launch with the same. The driver has copied them when the launch returns."""

    __slots__ = ("address", "memory")

    def __init__(self, packing: Packing, values: Sequence[int | float | bytes]):
        self.memory = ctypes.create_string_buffer(packing.format.size + ALIGNMENT)
        start = ctypes.addressof(self.memory)
        first = start + -start % ALIGNMENT
        packing.format.pack_into(self.memory, first - start, *values, *[first + offset for offset in packing.offsets])
        self.address = first + packing.table


class GpuLaunch:
    """A loaded kernel with its launch configuration on one GPU. Calling it with Arguments launches on torch's current stream."""

    __slots__ = ("configs", "device_index", "entry", "function", "shape", "start", "success")

    def __init__(self, kernel: Kernel, device_index: int, grid, block, cluster, shared_bytes: int, early: bool):
        from cuda.bindings import driver

        self.device_index, self.entry, self.shape = device_index, kernel.entry, (grid, block, cluster, shared_bytes, early)
        self.function = kernel._loaded(device_index, shared_bytes)
        self.configs = {}  # one per stream: a shared one, with the stream written into it, would be a race between threads
        self.start, self.success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS

    def __call__(self, arguments: Arguments) -> None:
        if torch.cuda.current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self(arguments)
        stream = raw_stream(self.device_index)
        config = self.configs.get(stream)
        if config is None:
            config = self.configs[stream] = _launch_config(*self.shape, stream)
        # Not cuda.core.launch: it takes no tensor map made by cuTensorMapEncodeTiled.
        status = self.start(config, self.function, arguments.address, 0)
        if status[0] != self.success:
            self._after_failure(status, config, arguments)

    def _after_failure(self, status, config, arguments) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        if status[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the first thing that this thread does with CUDA
            Device(self.device_index).set_current()
            status = self.start(config, self.function, arguments.address, 0)
        _checked(status, f"launching {self.entry}")


def raw_stream(device_index: int) -> int:
    """The handle of torch's current stream. torch.cuda.current_stream makes an object around it, which takes 7 µs."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def _checked(result, doing: str):
    """The value a driver call returned. Raises RuntimeError that says what failed and how."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"{doing} failed: {status.name}")
    return values[0] if values else None


@functools.lru_cache(maxsize=4096)
def _launch_options(launch: tuple) -> dict:
    """Keywords of Kernel.launch for (grid, block), (grid, block, cluster) or (grid, block, cluster, shared_bytes)."""
    grid, block, cluster, shared_bytes = launch + (1, 0)[len(launch) - 2 :]
    grid, block, cluster = _dim3("grid", grid), _dim3("block", block), _dim3("cluster", cluster)
    _check_launch(grid, block, cluster, shared_bytes)
    return {"grid": grid, "block": block, "cluster": cluster, "shared_bytes": shared_bytes}


def _dim3(name: str, value) -> tuple[int, int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"{name}: got {value!r}, allowed are one to three integers of at least 1")
    return sizes + (1,) * (3 - len(sizes))


def _check_launch(grid, block, cluster, shared_bytes):
    if math.prod(block) > MAX_THREADS_PER_CTA:
        raise ValueError(f"block: got {block}, {math.prod(block)} threads; allowed are {MAX_THREADS_PER_CTA}")
    for size, limit, axis in zip(grid, MAX_GRID, "xyz"):
        if size > limit:
            raise ValueError(f"grid.{axis}: got {size}, allowed is at most {limit}")
    if math.prod(cluster) > MAX_CLUSTER:
        raise ValueError(f"cluster: got {cluster}, {math.prod(cluster)} CTAs; allowed are {MAX_CLUSTER}")
    if any(g % c for g, c in zip(grid, cluster)):
        raise ValueError(f"grid: {grid} is not a multiple of the cluster {cluster}; round the grid up")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise ValueError(f"shared_bytes: got {shared_bytes}, allowed are 0 to {MAX_SHARED_BYTES} per CTA")


def _launch_config(grid, block, cluster, shared_bytes, early, stream):
    from cuda.bindings import driver

    config, attributes = driver.CUlaunchConfig(), []
    config.hStream = driver.CUstream(stream)
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    if math.prod(cluster) > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
        attributes.append(attribute)
    if early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config
