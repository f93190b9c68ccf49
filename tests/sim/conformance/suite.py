"""What a conformance case is, and how to run one: the same code on a Hopper GPU and on the simulator."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hopperlab.kernel import Kernel
from hopperlab.sim.approximations import BOUNDS
from hopperlab.tensormap import TensorMap

FOLDER = Path(__file__).parent
RECORD = FOLDER / "recorded.json"
COMMAND = "PYTHONPATH=common python tests/sim/conformance/record.py"
POISON = 0xA5  # every byte of an output before the launch, unless it has initial values
WORDS_SHOWN = 16  # words of each result kept beside its hash


@dataclass(frozen=True, eq=False)
class Out:
    """An output. shape and dtype as in NumPy; initial: its values before the launch (poison without).

    labels: one name per row, for outputs whose rows are separate results: each row is hashed by itself.
    """

    shape: tuple[int, ...]
    dtype: str = "uint32"
    initial: np.ndarray | None = None
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Map:
    """A tensor map argument. window: indices of the part that the map covers. view: its torch dtype, if NumPy has no such.

    The other fields are those of :meth:`hopperlab.tensormap.TensorMap.tiled`.
    """

    array: np.ndarray | Out
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] | None = None
    fill_nan: bool = False
    view: str | None = None
    window: tuple = ()


@dataclass(frozen=True)
class Case:
    """One kernel, one launch. arguments(rng) makes the kernel's arguments in order: arrays, Out, Map, int, float."""

    name: str
    file: str
    entry: str
    arguments: Callable[[np.random.Generator], list]
    block: int | tuple[int, ...] = 32
    grid: int | tuple[int, ...] = 1
    cluster: int | tuple[int, ...] = 1
    shared_bytes: int = 0
    constants: dict[str, object] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    def inputs(self) -> list:
        """The arguments, the same on every machine."""
        return self.arguments(np.random.default_rng(zlib.crc32(self.name.encode())))

    def kernel(self) -> Kernel:
        return Kernel(FOLDER / self.file, self.entry, self.constants)


@dataclass(frozen=True)
class Result:
    """The bits of one result."""

    data: np.ndarray  # uint8

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data.tobytes()).hexdigest()

    @property
    def first(self) -> str:
        """The first words, in hexadecimal."""
        data = self.data[: 4 * WORDS_SHOWN]
        words = np.pad(data, (0, -len(data) % 4)).view("<u4")
        return " ".join(f"{word:08x}" for word in words)


def bound(label: str) -> tuple[int, float] | None:
    """How far a result of this instruction may be from the hardware's: units in the last place, absolute. None: not at all."""
    return BOUNDS.get(".".join(label.split(".")[:2])) if label.endswith(".f32") else None


def recorded(label: str, result: Result) -> dict[str, str]:
    """What recorded.json holds of a result. Approximations are compared word by word, so all of their words."""
    entry = {"sha256": result.sha256, "first": result.first}
    return entry | {"bytes": result.data.tobytes().hex()} if bound(label) else entry


def agrees(label: str, result: Result, entry: dict[str, str]) -> bool:
    """Does a result equal the record, or lie within its bound? NaN, signs of zero and infinity must be equal in any case."""
    if result.sha256 == entry["sha256"] or bound(label) is None:
        return result.sha256 == entry["sha256"]
    ulps, absolute = bound(label)
    words, expected = result.data.view("<i4"), np.frombuffer(bytes.fromhex(entry["bytes"]), "<i4")
    if words.size != expected.size:
        return False
    a, b = words.view("<f4").astype("f8"), expected.view("<f4").astype("f8")
    close = (words >> 31 == expected >> 31) & (np.abs((words & 0x7FFFFFFF) - (expected & 0x7FFFFFFF)) <= ulps)
    finite = np.isfinite(a) & np.isfinite(b)
    close[finite] |= np.abs(a[finite] - b[finite]) <= absolute
    return bool((close & finite & ((a != 0) | (b != 0)) | (words == expected)).all())


def run(case: Case, device="cpu", **simulator_options) -> dict[str, Result]:
    """Launch the case on the device. Returns label -> result."""
    outputs: list[tuple[Out, torch.Tensor]] = []
    inputs: dict[int, torch.Tensor] = {}  # one tensor per array, also where two arguments share it

    def tensor(value) -> torch.Tensor:
        if id(value) not in inputs:
            if isinstance(value, Out):
                initial = value.initial
                if initial is None:
                    initial = np.full(value.shape, POISON, "uint8").repeat(np.dtype(value.dtype).itemsize, -1).view(value.dtype)
                inputs[id(value)] = torch.from_numpy(np.array(initial, value.dtype)).to(device)
                outputs.append((value, inputs[id(value)]))
            else:
                inputs[id(value)] = torch.from_numpy(value.copy()).to(device)
        return inputs[id(value)]

    def argument(value):
        if isinstance(value, Map):
            mapped = tensor(value.array)
            if value.view:
                mapped = mapped.view(getattr(torch, value.view))
            return TensorMap.tiled(mapped[value.window], box=value.box, swizzle=value.swizzle,
                                   element_strides=value.element_strides, fill_nan=value.fill_nan)  # fmt: skip
        return tensor(value) if isinstance(value, (np.ndarray, Out)) else value

    arguments = [argument(value) for value in case.inputs()]
    case.kernel()[case.grid, case.block, case.cluster, case.shared_bytes](*arguments, **simulator_options)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    results: dict[str, Result] = {}
    for number, (out, memory) in enumerate(outputs):
        data = memory.cpu().numpy().view("uint8")
        rows = data.reshape(len(out.labels), -1) if out.labels else data.reshape(1, -1)
        for label, row in zip(out.labels or (f"out{number}",), rows):
            results[label] = Result(row.copy())
    return results


_ROWS_PER_LABEL = {"SHUFFLE": ("", " predicate"), "CARRY": (" low", " middle", " high")}


def labels(file: str, entry: str) -> tuple[str, ...]:
    """The instructions of one kernel in the order of its output rows, read from its source.

    Each row is written by a macro whose first argument is the instruction: ``BINARY("add.u32")``.
    """
    source = (FOLDER / file).read_text()
    body = re.split(rf"\b{entry}\b", source, maxsplit=1)[1]
    body = re.split(r"^\}", body, maxsplit=1, flags=re.M)[0]
    found: list[str] = []
    seen: dict[str, int] = {}
    for macro, text in re.findall(r'\b([A-Z][A-Z_0-9]*)\("([^"]+)"', body):
        seen[text] = seen.get(text, 0) + 1
        name = text if seen[text] == 1 else f"{text} #{seen[text]}"
        found += [name + suffix for suffix in _ROWS_PER_LABEL.get(macro, ("",))]
    return tuple(found)
