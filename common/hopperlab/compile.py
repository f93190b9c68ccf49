"""CUDA C++ source and constants -> PTX and cubin, through NVRTC, cached on disk.

One call to NVRTC with ``--gpu-architecture=sm_90a`` runs the whole compiler, ptxas included, and yields both outputs:
the cubin for a Hopper GPU and the PTX for the simulator. It needs the NVRTC wheel and nothing else: no CUDA toolkit,
no host compiler, no driver, no GPU. (``cuda.core.Program`` loads the driver even to compile, so it is not used here.)

Kernels are compiled with ``--fmad=false``. A multiply and an add stay two roundings unless the source says ``fmaf``,
so what is written is what is computed, on the GPU and on the simulator.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path

from hopperlab import sass

ARCHITECTURE = "sm_90a"
INCLUDE_DIRECTORY = Path(__file__).parent / "include"
OPTIONS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--std=c++17",
    "-lineinfo",  # source lines for the simulator's messages and for Nsight Compute
    "--fmad=false",
    "--ptxas-options=-v",  # registers, shared memory and spills, read back from the log
    "--no-cache",  # where there is a driver NVRTC keeps a cache of its own, and a hit comes without the log
)
# NVRTC completes a relative file name with the working directory, and adds the file's date where it finds one there. Both would be in
# the cubin, which one process makes and many read from the cache. Under an absolute name that is no file, a cubin depends on the text.
PLACE = "/hopperlab/"
# ptxas warnings that mean a finished kernel does not do what its source says.
PTXAS_PROBLEMS = {
    "C7508": "setmaxnreg was ignored (it needs __launch_bounds__ and one role per warpgroup)",
    "C7517": "a wgmma wait was injected (accumulator registers are touched while a wgmma is in flight)",
    "C7510": "wgmma was serialised (its operands or accumulators cross a function call or a branch)",
}


class CompileError(RuntimeError):
    """The source does not compile; the message holds NVRTC's errors, each with its source line."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reported for one kernel."""

    registers: int  # per thread
    shared_bytes: int  # static, per CTA
    spill_bytes: int  # stores plus loads, per thread
    stack_bytes: int  # local memory frame, per thread


@dataclass(frozen=True)
class Compiled:
    """The outputs of one compilation."""

    ptx: str
    cubin: bytes
    log: str

    @functools.cached_property
    def resources(self) -> dict[str, Resources]:
        """Entry name -> resources, parsed from the log of ``ptxas -v``."""
        found = {}
        for part in re.split(r"Compiling entry function '", self.log)[1:]:
            name = part.split("'", 1)[0]
            number = lambda pattern: int((re.search(pattern, part) or [0, 0])[1])  # noqa: E731
            found[name] = Resources(
                registers=number(r"Used (\d+) registers"),
                shared_bytes=number(r"(\d+) bytes smem"),
                spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
            )
        return found

    @property
    def problems(self) -> list[str]:
        """What must not happen in a finished kernel: ignored setmaxnreg, injected waits, spills, arrays in local memory."""
        found = [f"{code}: {meaning}" for code, meaning in PTXAS_PROBLEMS.items() if code in self.log]
        for name, use in self.resources.items():
            if use.spill_bytes:
                found.append(f"{name} spills {use.spill_bytes} bytes of registers per thread to local memory")
            if use.stack_bytes:
                found.append(f"{name} keeps {use.stack_bytes} bytes per thread in local memory: is an array indexed by a variable?")
        return found


def compile_source(source: str, name: str, constants: dict[str, object] | None = None, dense_ffma: bool = False) -> Compiled:
    """Compile CUDA C++ text for sm_90a.

    ``name`` is the file name shown in errors and line information. ``constants`` become macros (``-DNAME=value``).
    ``dense_ffma``: change the cubin's scheduling hints, see :func:`hopperlab.sass.dense_ffma`.
    The result comes from the disk cache when the same source, headers, constants and compiler were seen before.
    Raises CompileError with the offending source lines.
    """
    headers = {path.name: f'#line 1 "{PLACE}{path.name}"\n{path.read_text()}' for path in sorted(INCLUDE_DIRECTORY.glob("*.cuh"))}
    defines = tuple(f"-D{key}={_macro(key, value)}" for key, value in sorted((constants or {}).items()))
    identity = repr((source, name, sorted(headers.items()), OPTIONS, defines, sass.RULES if dense_ffma else None, nvrtc_version()))
    key = hashlib.sha256(identity.encode()).hexdigest()
    cached = _load(key)
    if cached is not None:
        return cached
    compiled = _nvrtc(source, name, headers, OPTIONS + defines, dense_ffma)
    _store(key, compiled)
    return compiled


def compile_file(path: str | os.PathLike, constants: dict[str, object] | None = None, dense_ffma: bool = False) -> Compiled:
    """Compile a ``.cu`` file; see :func:`compile_source`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: there is no kernel source at {path}")
    return compile_source(path.read_text(), path.name, constants, dense_ffma)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library that will compile. Raises RuntimeError with the fix when it is missing."""
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.bindings raises plain RuntimeError or DynamicLibNotFoundError by version
        raise RuntimeError(f"the NVRTC library cannot be loaded ({error}); run: pip install nvidia-cuda-nvrtc") from error
    if major < 13:
        raise RuntimeError(
            f"NVRTC {major}.{minor} was found, 13.0 or later is needed (a mixed CUDA install?); "
            "run: pip install 'nvidia-cuda-nvrtc>=13.0'"
        )
    return major, minor


def _macro(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (int, str)):
        return str(value)
    raise TypeError(f"constants[{key!r}]: got {type(value).__name__}, allowed are int, bool and str (pasted as written)")


def _nvrtc(source: str, name: str, headers: dict[str, str], options: tuple[str, ...], dense_ffma: bool) -> Compiled:
    from cuda.bindings import nvrtc

    def call(function, *arguments):
        status, *values = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function.__name__} failed: {status.name}")
        return values[0] if values else None

    def text(size_function, function) -> bytes:
        buffer = bytes(call(size_function, program))
        call(function, program, buffer)
        return buffer

    program = call(
        nvrtc.nvrtcCreateProgram,
        source.encode(),
        f"{PLACE}{name}".encode(),
        len(headers),
        [body.encode() for body in headers.values()],
        [header.encode() for header in headers],
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # NVRTC quotes the source line under each of its messages.
            raise CompileError(f"{name} does not compile for {ARCHITECTURE}:\n{log.replace(PLACE, '')}")
        ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0")
        cubin = text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if dense_ffma:
        cubin = sass.dense_ffma(cubin)
    log = re.sub(r"\n?ptxas info\s*: Compile time.*", "", log)  # the one line that differs from run to run
    return Compiled(ptx.replace(f'"{PLACE}', '"'), cubin, log.replace(PLACE, ""))


# ---- the disk cache -------------------------------------------------------------------------------------------------
# cuda.core's FileStreamProgramCache gives atomic writes that many processes can share. It checks no payload, so each
# entry here starts with its SHA-256: a truncated or damaged file is a miss, not a crash. A cache that cannot be written
# (read-only, full) costs a compilation per process and a warning, nothing more.

_CACHE_BYTES = 512 << 20  # least recently read entries go first beyond this


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$HOPPERLAB_CACHE``, else ``$XDG_CACHE_HOME/hopperlab``, else ``~/.cache/hopperlab``."""
    if "HOPPERLAB_CACHE" in os.environ:
        return Path(os.environ["HOPPERLAB_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hopperlab"


@functools.cache
def _cache(directory: Path):
    from cuda.core.utils import FileStreamProgramCache

    try:
        return FileStreamProgramCache(directory, max_size_bytes=_CACHE_BYTES)
    except OSError as error:
        warnings.warn(f"the compile cache {directory} cannot be used ({error}); kernels are compiled anew in each process. "
                      "Set HOPPERLAB_CACHE to a directory that can be written.", stacklevel=4)
        return None


def _load(key: str) -> Compiled | None:
    cache = _cache(cache_directory())
    if cache is None:
        return None
    try:
        entry = cache.get(key)
    except OSError:
        return None
    if entry is None or hashlib.sha256(entry[32:]).digest() != entry[:32]:
        return None
    ptx_bytes, cubin_bytes = struct.unpack("<QQ", entry[32:48])
    ptx, cubin, log = entry[48 : 48 + ptx_bytes], entry[48 + ptx_bytes :][:cubin_bytes], entry[48 + ptx_bytes + cubin_bytes :]
    return Compiled(ptx.decode(), cubin, log.decode())


def _store(key: str, compiled: Compiled) -> None:
    cache = _cache(cache_directory())
    if cache is None:
        return
    ptx = compiled.ptx.encode()
    body = struct.pack("<QQ", len(ptx), len(compiled.cubin)) + ptx + compiled.cubin + compiled.log.encode()
    try:
        cache[key] = hashlib.sha256(body).digest() + body
    except OSError as error:
        warnings.warn(f"a compiled kernel could not be stored in {cache_directory()} ({error})", stacklevel=4)
