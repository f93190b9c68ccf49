"""Straight-line PTX -> Python source over NumPy (one function per segment), plus control flow and liveness.

A segment ends at a branch, at an exit, or at a special instruction (anything that synchronises, copies asynchronously
or involves several lanes; see registry.py).  Registers are NumPy arrays with one element per thread of the unit, or
scalars while all threads agree; arrays are never changed in place, so that diverged groups can share them.

What an instruction becomes is in emit.py.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from . import approximations, arithmetic, memory, registry
from .emit import NUMPY, SIZE_OF, SegmentWriter
from .parser import Instruction, Kernel, split_operands, type_bytes


@dataclass
class Segment:
    """Code between two scheduling points.

    run(unit, fragment, registers, lanes) executes the straight-line part.  The terminator is None (fall through), a
    branch, an exit or a special instruction; joined holds those that its handler executes with it (see Special.runs).
    live holds the registers that later code may still read on entry.
    """

    index: int
    code: list[Instruction]
    terminator: Instruction | None
    run: object = None
    kind: str = "next"
    target: int = -1
    targets: list[int] = field(default_factory=list)
    guard: int = -1
    handler: object = None
    polls: bool = False
    live: list[int] = field(default_factory=list)
    touched: frozenset = frozenset()  # registers that instructions other than wgmma use
    joined: list[Instruction] = field(default_factory=list)

    @property
    def instructions(self) -> list[Instruction]:
        return self.code + ([self.terminator] if self.terminator else []) + self.joined

    @property
    def following(self) -> int:
        return self.index + 1


_BRANCHES = ("bra", "brx", "ret", "exit", "trap")
_NO_RESULT = ("st", "red", "prefetch", "prefetchu", "applypriority", "discard", "pragma")
_COMMUNICATES = re.compile(r"(atom|ld\.(volatile|relaxed|acquire)|st\.(volatile|relaxed|release)|membar|fence)\b")


class Program:
    """A kernel compiled to segments; independent of arguments and launch shape, so it is cached per PTX and entry."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.names = {name: i for i, name in enumerate(kernel.registers)}
        self.storage = self._storage_types()
        self.rounded = self._rounded_registers()
        self.environment = {"np": np, "A": arithmetic, "approximations": approximations, "memory": memory}
        for name in set(NUMPY.values()):
            self.environment[name] = getattr(np, name)
        self.constants: dict[tuple, str] = {}
        self.variable_symbols: dict[str, str] = {}
        self.instructions = kernel.instructions
        self.segments = self._split()
        self._liveness()
        self.source = self._generate()
        specials = [s.terminator.opcode for s in self.segments if s.kind == "special"]
        opcodes = [i.opcode for i in kernel.instructions]
        named = any(
            i.parts[0] in ("bar", "barrier") and i.parts[1] != "warp" and i.operands != ["0"]
            for i in kernel.instructions
        )
        self.batchable = (
            not named and all(registry.find(o).batches for o in specials) and not any(map(_COMMUNICATES.match, opcodes))
        )
        self.lines = sorted({i.location for i in kernel.instructions if i.location})

    # ---- registers ----------------------------------------------------------------------------------------------

    def _storage_types(self) -> list[str]:
        """NumPy type that a register is kept in: 32-bit registers that hold floats are kept as float32."""
        kinds = dict(self.kernel.registers)
        for instruction in self.kernel.instructions:
            parts = instruction.parts
            type_name = parts[-2] if parts[0] == "cvt" else parts[-1]
            if parts[0] in ("wgmma", "mma") and ".f32." in instruction.opcode:
                type_name = "f32"
            if type_name in ("f32", "f64") and parts[0] not in ("setp", "set", "st", "red") and instruction.operands:
                for name in split_operands(instruction.operands[0].strip("{}")):
                    if kinds.get(name) in ("b32", "b64") and parts[0] not in ("cvt",) or kinds.get(name) == "b32":
                        if type_bytes(kinds[name]) == type_bytes(type_name):
                            kinds[name] = type_name
        return [NUMPY[k] for k in kinds.values()]

    def _rounded_registers(self) -> set[int]:
        """Registers that can hold a result of float arithmetic, whose NaN must become the GPU's when its bits are seen."""
        copies, rounded = {}, set()
        for instruction in self.kernel.instructions:
            opcode = instruction.parts[0]
            if (
                not instruction.operands
                or instruction.parts[-1] != "f32"
                and opcode != "mov"
                and not opcode.startswith("cvt")
            ):
                continue
            targets = self.registers_of(instruction.operands[0])
            if opcode in ("mov", "selp", "slct", "copysign"):
                for source in self.registers_of(" ".join(instruction.operands[1:])):
                    copies.setdefault(source, []).extend(targets)
            elif opcode not in ("ld", "st", "atom", "red", "setp", "set") and not instruction.opcode.endswith(
                (".f32.bf16", ".f32.f64")
            ):
                rounded.update(targets)
        waiting = list(rounded)
        while waiting:
            for target in copies.get(waiting.pop(), []):
                if target not in rounded:
                    rounded.add(target)
                    waiting.append(target)
        return {i for i in rounded if self.storage[i] == "float32"}

    def registers_of(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"[%$A-Za-z_][\w$%@.+]*|\+", text):
            index = self.names.get(word)
            if index is None and "+" in word:
                index = self.names.get(word.split("+")[0])
            if index is not None:
                found.append(index)
        return found

    def reads_writes(self, instruction: Instruction) -> tuple[list[int], list[int]]:
        """Register indices an instruction reads and writes."""
        reads, writes = [], []
        special = registry.find(instruction.opcode)
        if special:
            results = special.results
        else:
            opcode = instruction.parts[0]
            results = () if opcode in _NO_RESULT or opcode in _BRANCHES else (0,)
        for position, operand in enumerate(instruction.operands):
            (writes if position in results else reads).extend(self.registers_of(operand))
            if special and position in special.updates:
                reads.extend(self.registers_of(operand))
                writes.extend(self.registers_of(operand))
        if instruction.guard:
            reads.append(self.names[instruction.guard])
            reads.extend(writes)
        return reads, writes

    def reader(self, operand: str, type_name: str):
        """Function(fragment) -> value of an operand or '[address+offset]', as a full-width array or a scalar."""
        operand = operand.strip()
        want = getattr(np, NUMPY[type_name])
        if operand.startswith("["):
            base, sign, offset = re.fullmatch(r"\[\s*([^+\-\s]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", operand).groups()
            amount = want((-1 if sign == "-" else 1) * int(offset or 0) & ((1 << 8 * np.dtype(want).itemsize) - 1))
            inner = self.reader(base, type_name)
            return (lambda fragment: inner(fragment) + amount) if amount else inner
        if operand.startswith("!"):
            inner = self.reader(operand[1:], type_name)
            return lambda fragment: ~inner(fragment)
        index = self.names.get(operand)
        if index is not None:
            have = getattr(np, self.storage[index])
            if have is want:
                return lambda fragment: fragment.R[index]
            if np.dtype(have).itemsize == np.dtype(want).itemsize:
                if index in self.rounded:
                    return lambda fragment: arithmetic.canonical_nan(fragment.R[index]).view(want)
                return lambda fragment: fragment.R[index].view(want)
            return lambda fragment: fragment.R[index].astype(want)
        if registry.special_register(operand):
            return lambda fragment: fragment.unit.special[operand].astype(want)
        if operand in self.kernel.variables:
            return lambda fragment: fragment.unit.machine.variables[operand]
        writer = SegmentWriter(self, None, None)
        writer.instruction = Instruction("operand", [operand])
        value = self.environment[writer.read(operand, type_name)]
        return lambda fragment: value

    @cached_property
    def definitions(self) -> dict[str, list[Instruction]]:
        """The instructions that write each register."""
        found: dict[str, list[Instruction]] = {}
        for candidate in self.instructions:
            for name in split_operands(candidate.operands[0].strip("{}")) if candidate.operands else []:
                found.setdefault(name, []).append(candidate)
        return found

    def may_swizzle(self, index: int) -> bool:
        """Can the store number index put data in a swizzled order?

        Yes if an XOR goes into its operands, or if it copies what it loaded: that may have been swizzled before.
        """
        store = self.instructions[index]
        waiting = [w for o in store.operands for w in re.findall(r"[%$\w@.]+", o) if w in self.names]
        values = [w for w in re.findall(r"[%$\w@.]+", store.operands[1]) if w in self.names]
        while values:
            for source in self.definitions.get(values.pop(), []):
                if source.parts[0] in ("ld", "ldmatrix") and ".param" not in source.opcode:
                    return True
                if source.parts[0] == "mov":
                    values.extend(w for w in re.findall(r"[%$\w@.]+", source.operands[1]) if w in self.names)
        seen = set(waiting)
        while waiting:
            for source in self.definitions.get(waiting.pop(), []):
                if source.parts[0] == "lop3" or source.parts[0] == "xor" and source.operands[2] not in ("1", "-1"):
                    return True
                if registry.find(source.opcode):
                    continue
                for word in re.findall(r"[%$\w@.]+", " ".join(source.operands[1:])):
                    if word in self.names and word not in seen:
                        seen.add(word)
                        waiting.append(word)
        return False

    def pointer_parameters(self, instruction: Instruction) -> set[int] | None:
        """Parameters that the address of a memory instruction is computed from; None if anything else goes into it."""
        offsets = {p.name: i for i, p in enumerate(self.kernel.parameters)}
        waiting = [w for o in instruction.operands if "[" in o for w in re.findall(r"[%$\w@.]+", o) if w in self.names]
        seen, found = set(waiting), set()
        while waiting:
            for source in self.definitions.get(waiting.pop(), []):
                if source.opcode.startswith("ld.param"):
                    found.update(offsets[w] for w in re.findall(r"[\w$]+", source.operands[1]) if w in offsets)
                    continue
                if source.parts[0] in ("ld", "atom") or registry.find(source.opcode):
                    return None
                for word in re.findall(r"[%$\w@.]+", " ".join(source.operands[1:])):
                    wide = word in self.names and self.kernel.registers[word].endswith("64")
                    if wide and source.parts[0] not in ("cvt", "setp") and word not in seen:
                        seen.add(word)
                        waiting.append(word)
        return found

    def address_reader(self, operand: str):
        """Function(fragment) -> shared-memory address of '[register+offset]' or a register, as int64.

        32-bit and 64-bit registers hold window addresses; a generic address loses its window here.
        """
        base = operand.strip("[] ").split("+")[0].strip()
        wide = base in self.names and self.kernel.registers[base].endswith("64")
        inner = self.reader(operand, "u64" if wide else "u32")
        if not wide:
            return lambda fragment: inner(fragment).astype(np.int64)
        mask = np.uint64((1 << 60) - 1)
        return lambda fragment: (inner(fragment) & mask).astype(np.int64)

    def writer(self, operand: str):
        """Function(fragment, values) that assigns a register, values full width or scalar."""
        operand = operand.strip()
        if operand == "_":
            return lambda fragment, value: None
        index = self.names[operand]
        kind = np.dtype(self.storage[index])

        def write(fragment, value):
            if value.dtype != kind:
                value = (
                    value.view(kind)
                    if value.dtype.itemsize == kind.itemsize and kind.kind != "b"
                    else value.astype(kind)
                )
            fragment.R[index] = value

        return write

    # ---- control flow ---------------------------------------------------------------------------------------------

    def _split(self) -> list[Segment]:
        kernel, segments, code = self.kernel, [], []
        starts = set(kernel.labels.values())
        first = {}
        begin = 0

        def close(terminator):
            nonlocal code
            segments.append(Segment(len(segments), code, terminator))
            code = []

        for i, instruction in enumerate(kernel.instructions):
            if i not in starts and not code and segments and self._joins(segments[-1], instruction):
                segments[-1].joined.append(instruction)
                continue
            if i in starts and i != begin and code:
                close(None)
            if i in starts or not code:
                first.setdefault(i, len(segments))
            begin = i if not code else begin
            opcode = instruction.parts[0]
            if opcode in _BRANCHES:
                close(instruction)
            elif registry.find(instruction.opcode):
                # A segment of its own: a group that parks here, or merges here with a parked one, comes back to it, and
                # code before it (k += 1, say) must not run again.
                if code:
                    close(None)
                close(instruction)
            else:
                code.append(instruction)
        close(Instruction("exit", []))
        end = len(kernel.instructions)
        first.setdefault(end, len(segments) - 1)
        for segment in segments:
            terminator = segment.terminator
            segment.polls = any(_COMMUNICATES.match(i.opcode) for i in segment.code)
            if terminator is None:
                continue
            if terminator.guard:
                segment.guard = self.names[terminator.guard]
            opcode = terminator.parts[0]
            if opcode == "bra":
                segment.kind = "branch"
                segment.target = first[kernel.labels[terminator.operands[0]]]
            elif opcode == "brx":
                segment.kind = "indexed"
                segment.targets = [first[kernel.labels[t]] for t in kernel.branch_targets[terminator.operands[1]]]
            elif opcode in ("ret", "exit", "trap"):
                segment.kind = "exit" if opcode != "trap" else "trap"
            else:
                segment.kind = "special"
                special = registry.find(terminator.opcode)
                segment.handler = special.decode([terminator, *segment.joined] if special.runs else terminator, self)
        return segments

    def _joins(self, segment, instruction) -> bool:
        """May the instruction run together with those that end the segment? Then all read before any of them writes."""
        last = segment.terminator
        if last is None or last.opcode != instruction.opcode or last.guard or instruction.guard:
            return False
        special = registry.find(instruction.opcode)
        if special is None or not special.runs:
            return False
        written = {index for other in [last, *segment.joined] for index in self.reads_writes(other)[1]}
        return written.isdisjoint(self.reads_writes(instruction)[0])

    def _liveness(self) -> None:
        """Backward data flow over bit sets: which registers hold a value that is still read."""
        segments = self.segments
        use, define = [], []
        accumulators = 0
        for segment in segments:
            for instruction in segment.instructions:
                if instruction.opcode.startswith("wgmma.mma"):
                    for index in self.registers_of(instruction.operands[0]):
                        accumulators |= 1 << index
        for segment in segments:
            used = defined = 0
            for instruction in segment.instructions:
                reads, writes = self.reads_writes(instruction)
                for index in reads:
                    if not defined >> index & 1:
                        used |= 1 << index
                for index in writes:
                    defined |= 1 << index
                if instruction.opcode.startswith("wgmma."):  # results arrive later: keep accumulators alive
                    used |= accumulators & ~defined
            touched = set()
            for instruction in segment.instructions:
                if not instruction.opcode.startswith("wgmma"):
                    touched.update(*self.reads_writes(instruction))
            segment.touched = frozenset(touched)
            use.append(used)
            define.append(defined)
        live = list(use)
        changed = True
        while changed:
            changed = False
            for segment in reversed(segments):
                out = 0
                for successor in self._successors(segment):
                    out |= live[successor]
                new = use[segment.index] | out & ~define[segment.index]
                if new != live[segment.index]:
                    live[segment.index] = new
                    changed = True
        self.live_out = []
        for segment in segments:
            out = 0
            for successor in self._successors(segment):
                out |= live[successor]
            if segment.terminator is not None:
                for instruction in [segment.terminator, *segment.joined]:
                    for index in self.reads_writes(instruction)[0]:
                        out |= 1 << index
                if segment.terminator.opcode.startswith("wgmma."):
                    out |= accumulators
            self.live_out.append(out)
            segment.live = [i for i, bit in enumerate(reversed(f"{live[segment.index]:b}")) if bit == "1"]

    def _successors(self, segment) -> list[int]:
        if segment.kind == "exit" or segment.kind == "trap":
            return [segment.following] if segment.guard >= 0 else []
        if segment.kind == "branch":
            return [segment.target] + ([segment.following] if segment.guard >= 0 else [])
        if segment.kind == "indexed":
            return segment.targets
        return [segment.following]

    # ---- source -----------------------------------------------------------------------------------------------------

    def _generate(self) -> str:
        chunks = []
        positions = {id(instruction): i for i, instruction in enumerate(self.kernel.instructions)}
        for segment in self.segments:
            if segment.code:
                chunks.append(SegmentWriter(self, segment, positions).text())
        source = "\n".join(chunks)
        environment = self.environment
        exec(compile(source, f"<segments of {self.kernel.name}>", "exec"), environment)
        for segment in self.segments:
            segment.run = environment.get(f"segment_{segment.index}")
        return source

    def constant(self, value: int, kind: str) -> str:
        """Name of a NumPy scalar with these bits."""
        bits = 8 * SIZE_OF[kind]
        key = (value & ((1 << bits) - 1), kind)
        if key not in self.constants:
            name = self.constants[key] = f"K{len(self.constants)}"
            unsigned = getattr(np, f"uint{bits}")(key[0])
            self.environment[name] = unsigned.view(getattr(np, kind)) if kind != "bool_" else np.bool_(value)
        return self.constants[key]
