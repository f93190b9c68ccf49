"""From Python arguments to a running machine: limits of a launch, parameters, tensors as memory (PTX ISA 7.2)."""

import re
import struct
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from . import barriers, collectives, copy_engine, tensor_core  # noqa: F401  (they register their instructions)
from .codegen import Program
from .errors import LaunchRefused
from .machine import Machine
from .memory import GlobalMemory, Region
from .parser import SHARED_BASE, parse
from .report import Report, make_report
from .trace import Trace, save

MAX_SHARED_PER_BLOCK = 227 * 1024
REGISTERS_PER_SM = 65536


@lru_cache(maxsize=64)
def _program(ptx: str, entry: str) -> Program:
    try:
        kernel = parse(ptx, entry)
    except KeyError as error:
        raise LaunchRefused(error.args[0]) from None
    return Program(kernel)


def launch(
    ptx: str,
    entry: str,
    args: list,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared_bytes: int = 0,
    memory=(),
    order: str = "lazy",
    seed: int | None = None,
    check: bool = True,
    math: str = "exact",
    trace=None,
    progress=None,
    registers: int | None = None,
    source: str | Path | None = None,
    constants: dict | None = None,
) -> Report:
    """Run a kernel on the simulated machine, in place on the tensors given.

    args: one per parameter: a CPU tensor or NumPy array (passed as pointer), a number, a TensorMap, or bytes.
    memory: further tensors that the kernel may reach through pointers.
    shared_bytes: dynamic shared memory per block.  registers: per thread, as ptxas reports, for the limits.
    order: "lazy" completes asynchronous work as late as allowed, "eager" at once; a seed makes every order random.
    check: look for races and protocol mistakes.  math: "exact" tensor-core arithmetic, or "fast" float32.
    trace: True to record report.trace and bank conflicts, or a path for a Chrome trace too.  progress: called with (done, total).
    source: the kernel's .cu file, so that messages can name parameters; without it the file that the PTX names is tried.
    constants: the macros it was compiled with, so that messages can name members of a struct in dynamic shared memory.

    Raises LaunchRefused, UnknownInstruction, MemoryFault, Hazard or Deadlock, all of them SimulatorError.
    """
    program = _program(ptx, entry)
    grid, block, cluster = (_three(v, name) for v, name in ((grid, "grid"), (block, "block"), (cluster, "cluster")))
    if order not in ("lazy", "eager"):
        raise LaunchRefused(f"order={order!r}: it is 'lazy' or 'eager'")
    if math not in ("exact", "fast"):
        raise LaunchRefused(f"math={math!r}: it is 'exact' or 'fast'")
    cluster = _check_shape(program.kernel, grid, block, cluster, shared_bytes, registers)
    table = GlobalMemory()
    text = _source_text(program.kernel, source)
    names = _parameter_names(program.kernel, text)
    tensor_maps: list = []
    parameters = _pack_parameters(program.kernel, args, names, table, tensor_maps)
    for i, tensor in enumerate(memory):
        _register(table, tensor, f"memory[{i}]")
    keep = {}
    for name, variable in program.kernel.variables.items():
        keep[name] = storage = np.zeros(max(variable.size, 1) + variable.align, np.uint8)
        skip = -storage.ctypes.data % variable.align
        storage = storage[skip : skip + max(variable.size, 1)]
        storage[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        keep[name] = storage
        table.add_array(f"variable {name}", storage)

    static = program.kernel.shared_static
    dynamic_at = max(
        [start for start, size in program.kernel.shared.values() if not size], default=SHARED_BASE + static
    )
    recorder = Trace() if trace else None
    machine = Machine(
        program, table, parameters, grid, block, cluster, dynamic_at + shared_bytes, shared_bytes,
        dict(order=order, seed=seed, check=check, math=math, registers=registers, progress=progress, trace=recorder,
             tensor_maps=tensor_maps, bank_conflicts=bool(trace), source=text, constants=constants),
    )  # fmt: skip
    by_name = {region.name: region for region in table.regions}
    machine.argument_regions = {i: by_name[name] for i, name in enumerate(names) if name in by_name}
    machine.variables = {name: np.uint64(storage.ctypes.data) for name, storage in keep.items()}
    start = time.perf_counter()
    machine.run()
    report = make_report(machine, time.perf_counter() - start)
    if isinstance(trace, (str, Path)):
        save(report.trace, trace)
    return report


def _three(value, name):
    values = tuple(int(v) for v in (value if isinstance(value, (tuple, list)) else (value,)))
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise LaunchRefused(f"{name}={value}: one to three dimensions of at least 1 are allowed")
    return values + (1,) * (3 - len(values))


def _check_shape(kernel, grid, block, cluster, shared_bytes, registers):
    threads = block[0] * block[1] * block[2]
    if threads > 1024 or block[2] > 64:
        raise LaunchRefused(f"block={block} has {threads} threads; at most 1024 are allowed, and 64 in z")
    if grid[0] >= 1 << 31 or grid[1] > 65535 or grid[2] > 65535:
        raise LaunchRefused(f"grid={grid}: at most (2147483647, 65535, 65535) blocks are allowed")
    limit = kernel.directives.get("maxntid")
    if limit and threads > np.prod(limit):
        raise LaunchRefused(
            f"block={block} has {threads} threads, but the kernel is compiled with __launch_bounds__({np.prod(limit)})"
        )
    required = kernel.directives.get("reqnctapercluster")
    if required:
        required = (required + (1, 1))[:3]
        if cluster not in ((1, 1, 1), required):
            raise LaunchRefused(f"cluster={cluster}, but the kernel is compiled with __cluster_dims__{required}")
        cluster = required
    size = cluster[0] * cluster[1] * cluster[2]
    if size > 16:
        raise LaunchRefused(f"cluster={cluster} has {size} blocks; 8 are portable and 16 the limit of Hopper")
    if any(g % c for g, c in zip(grid, cluster)):
        raise LaunchRefused(f"grid={grid} is not a multiple of cluster={cluster} in every dimension; round the grid up")
    if kernel.shared_static > 48 * 1024:
        raise LaunchRefused(
            f"{kernel.shared_static} bytes of static shared memory; at most 49152 are allowed, use extern (dynamic) "
            "shared memory"
        )
    dynamic_at = max(
        [start for start, extent in kernel.shared.values() if not extent], default=SHARED_BASE + kernel.shared_static
    )
    total = dynamic_at - SHARED_BASE + shared_bytes
    if total > MAX_SHARED_PER_BLOCK:
        raise LaunchRefused(
            f"{total} bytes of shared memory per block (static {kernel.shared_static} + dynamic {shared_bytes}); Hopper "
            f"allows {MAX_SHARED_PER_BLOCK}. Use fewer pipeline stages or a smaller tile."
        )
    if registers:
        per_warp = -(-registers * 32 // 256) * 256
        needed = per_warp * -(-threads // 32)
        if needed > REGISTERS_PER_SM:
            raise LaunchRefused(
                f"{registers} registers x {threads} threads need {needed} registers; an SM has {REGISTERS_PER_SM}. Use"
                " __launch_bounds__, or fewer threads."
            )
    return cluster


def _source_text(kernel, source) -> str:
    """The file that defines the kernel, where it can be read."""
    for file in [source] if source is not None else kernel.files:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if re.search(rf"\b{re.escape(kernel.name)}\s*\(", text):
            return text
    return ""


def _parameter_names(kernel, text) -> list[str]:
    """Names of the parameters as the source spells them, where that is clear; the PTX knows only numbers."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    match = re.search(rf"\b{re.escape(kernel.name)}\s*\(([^{{;]*?)\)\s*\{{", text, re.S)
    if match:
        names = [re.search(r"(\w+)\s*(?:\[[^\]]*\])?$", p.strip()) for p in match[1].split(",") if p.strip()]
        if len(names) == len(kernel.parameters) and all(names):
            return [f"'{n[1]}' (argument {i})" for i, n in enumerate(names)]
    return [f"argument {i} ({parameter.name})" for i, parameter in enumerate(kernel.parameters)]


def _extent(tensor) -> tuple[int, int]:
    """(address, bytes from the first to the last element) of a torch tensor or NumPy array."""
    if isinstance(tensor, np.ndarray):
        address, strides, item = tensor.ctypes.data, tensor.strides, tensor.itemsize
    else:
        address, item = tensor.data_ptr(), tensor.element_size()
        strides = [s * item for s in tensor.stride()]
    if 0 in tuple(tensor.shape):
        return address, 0
    if any(s < 0 for s in strides):
        raise LaunchRefused("a NumPy array with negative strides cannot be passed as a pointer; copy it first")
    return address, sum((n - 1) * s for n, s in zip(tensor.shape, strides)) + item


def _is_tensor(value) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def _register(table, tensor, name) -> int:
    if hasattr(tensor, "data_ptr") and tensor.device.type != "cpu":
        raise LaunchRefused(f"{name} lives on {tensor.device}; the simulator runs on CPU tensors, call .cpu() first")
    address, size = _extent(tensor)
    writable = tensor.flags.writeable if isinstance(tensor, np.ndarray) else True
    table.add(Region(name, address, size, tensor, writable))
    return address


_INTEGER = re.compile(r"[usb](8|16|32|64)")


def _pack_parameters(kernel, args, names, table, tensor_maps) -> np.ndarray:
    if len(args) != len(kernel.parameters):
        raise LaunchRefused(
            f"kernel {kernel.name} has {len(kernel.parameters)} parameters, {len(args)} arguments were given"
        )
    packed = bytearray(-(-kernel.parameter_bytes // 64) * 64 + 64)
    for parameter, argument, name in zip(kernel.parameters, args, names):
        data = _pack(parameter, argument, name, table, tensor_maps)
        packed[parameter.offset : parameter.offset + parameter.size] = data
    return np.frombuffer(bytes(packed), np.uint8)


def _pack(parameter, argument, name, table, tensor_maps) -> bytes:
    size = parameter.size
    if hasattr(argument, "simulator_bytes"):
        if size != 128:
            raise LaunchRefused(
                f"{name}: a TensorMap needs a 128-byte __grid_constant__ parameter, this one has {size} bytes"
            )
        tensor_maps.append(argument)
        _register(table, argument.tensor, f"the tensor of {name}")
        return argument.simulator_bytes(len(tensor_maps) - 1)
    if _is_tensor(argument):
        if size != 8 or parameter.is_array:
            raise LaunchRefused(
                f"{name}: a tensor was given, but the parameter is {size} bytes of {parameter.type}, not a pointer"
            )
        return struct.pack("<Q", _register(table, argument, name))
    if isinstance(argument, (bytes, bytearray)):
        if len(argument) != size:
            raise LaunchRefused(f"{name}: {len(argument)} bytes were given, the parameter has {size}")
        return bytes(argument)
    if parameter.is_array:
        raise LaunchRefused(
            f"{name}: a struct of {size} bytes is passed as bytes or as a TensorMap, not {type(argument).__name__}"
        )
    if argument is None and size == 8:
        return bytes(8)
    if isinstance(argument, np.generic):
        argument = argument.item()
    if parameter.type in ("f32", "f64"):
        if not isinstance(argument, (int, float)):
            raise LaunchRefused(f"{name}: a number is needed, not {type(argument).__name__}")
        return struct.pack("<f" if size == 4 else "<d", argument)
    if isinstance(argument, float) or not isinstance(argument, (int, bool)):
        raise LaunchRefused(
            f"{name}: the parameter is an integer of {size} bytes, {argument!r} ({type(argument).__name__}) was given"
        )
    bits = 8 * size
    if not -(1 << (bits - 1)) <= argument < 1 << bits:
        raise LaunchRefused(f"{name}: {argument} does not fit {bits} bits")
    return (argument & ((1 << bits) - 1)).to_bytes(size, "little")
