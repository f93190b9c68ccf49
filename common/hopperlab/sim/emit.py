"""What each ordinary PTX instruction becomes in NumPy.

Each pattern below is the whole grammar that is modelled for an opcode: an instruction that matches none is refused by
name.  Section numbers refer to chapter 9.7 of the PTX ISA 8.x.
"""

import re

import numpy as np

from . import memory, registry
from .errors import UnknownInstruction
from .parser import split_operands, type_bytes

NUMPY = {
    "pred": "bool_", "b8": "uint8", "u8": "uint8", "s8": "int8", "b16": "uint16", "u16": "uint16", "s16": "int16",
    "f16": "uint16", "bf16": "uint16", "b32": "uint32", "u32": "uint32", "s32": "int32", "f32": "float32",
    "f16x2": "uint32", "bf16x2": "uint32", "b64": "uint64", "u64": "uint64", "s64": "int64", "f64": "float64",
}  # fmt: skip
SIZE_OF = {name: np.dtype(name).itemsize for name in set(NUMPY.values())}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_EMITTERS: list[tuple[re.Pattern, str]] = []


def emits(pattern):
    """Register a method for opcodes that match pattern in full."""

    def register(method):
        _EMITTERS.append((re.compile(pattern), method.__name__))
        return method

    return register


TOGETHER = {
    "fma.rn.f32": "fma_f32",
    "mul.rn.f32": "multiply",
    "mul.f32": "multiply",
    "add.rn.f32": "add",
    "add.f32": "add",
}
_lookup_cache: dict[str, tuple | None] = {}


def _lookup(opcode):
    if opcode not in _lookup_cache:
        found = None
        for pattern, name in _EMITTERS:
            match = pattern.fullmatch(opcode)
            if match:
                found = name, match
                break
        _lookup_cache[opcode] = found
    return _lookup_cache[opcode]


class SegmentWriter:
    """Writes the Python function of one segment."""

    def __init__(self, program, segment, positions):
        self.program, self.segment, self.positions = program, segment, positions
        self.kernel, self.names = program.kernel, program.names
        self.lines, self.loaded, self.written = [], [], {}
        self.cache = {}  # reusable expressions -> (local variable, registers they depend on)
        self.counter = 0
        self.origin = {}  # register -> (format, local variable, byte shift): it holds float16 that came from an FP8 code
        self.guard = None
        self.flush = False  # .ftz: the instruction takes and gives zeros for subnormal float32 numbers
        self.instruction = None

    def text(self) -> str:
        for run in self.runs():
            if len(run) < 4:
                for instruction in run:
                    self.emit(instruction)
            else:
                self.emit_together(run)
        live = self.program.live_out[self.segment.index]
        results = [i for i in sorted(self.written) if live >> i & 1]
        lines = self.useful(self.lines, {f"r{i}" for i in results})
        names = set(re.findall(r"\br\d+\b", "\n".join(lines))) | {f"r{i}" for i in results}
        body = [f"    r{i} = R[{i}]" for i in self.loaded if f"r{i}" in names]
        body += ["    " + line for line in lines]
        body += [f"    R[{i}] = r{i}" for i in results]
        return f"def segment_{self.segment.index}(u, f, R, L):\n" + "\n".join(body or ["    pass"]) + "\n"

    def runs(self):
        """Cut the code into single instructions and runs of unguarded float32 arithmetic."""
        run = []
        for instruction in self.segment.code:
            if instruction.opcode in TOGETHER and not instruction.guard:
                run.append(instruction)
                continue
            if run:
                yield run
                run = []
            yield [instruction]
        if run:
            yield run

    def emit_together(self, run):
        """One NumPy call for independent instructions of the same kind, as in the promotion of 64 accumulators.

        An instruction goes one level below those it depends on; equal opcodes of a level become one call.
        """
        level_of, levels = {}, {}
        for instruction in run:
            target, sources = instruction.operands[0], instruction.operands[1:]
            level = max(
                [level_of.get(("w", s), -1) + 1 for s in sources] + [level_of.get((k, target), -1) + 1 for k in "rw"]
            )
            level_of["w", target] = level
            for source in sources:
                if source != target:
                    level_of["r", source] = max(level, level_of.get(("r", source), -1))
            levels.setdefault(level, {}).setdefault(instruction.opcode, []).append(instruction)
        for level in sorted(levels):
            for opcode, group in levels[level].items():
                if len(group) < 4:
                    for instruction in group:
                        self.emit(instruction)
                    continue
                self.instruction, self.guard, self.flush = group[0], None, False
                columns = [
                    ", ".join(self.read(i.operands[c], "f32") for i in group) for c in range(1, len(group[0].operands))
                ]
                name = f"t{self.counter + 1}"
                self.counter += 1
                self.lines.append(f"{name} = A.together(A.{TOGETHER[opcode]}, {', '.join(f'({c})' for c in columns)})")
                for i, instruction in enumerate(group):
                    self.write(instruction.operands[0], "f32", f"{name}[{i}]")

    @staticmethod
    def useful(lines, needed):
        """Drop assignments that nothing reads; memory accesses stay."""
        kept, needed = [], set(needed)
        for line in reversed(lines):
            name, assigns, expression = line.partition(" = ")
            if assigns and name not in needed and "load(" not in expression and "atomic(" not in expression:
                continue
            needed.discard(name)
            needed.update(re.findall(r"\b[rt]\d+\b", expression if assigns else line))
            kept.append(line)
        return kept[::-1]

    def emit(self, instruction):
        self.instruction = instruction
        parts = instruction.parts
        self.flush = "ftz" in parts and "f32" in parts[-2 if parts[0] == "cvt" else -1 :]
        found = _lookup(instruction.opcode.replace(".ftz", "") if self.flush else instruction.opcode)
        if found is None:
            raise UnknownInstruction(
                f"{instruction.where()}: {instruction.opcode!r} is not modelled by the simulator. Use an instruction"
                " that docs/simulator.md lists, or run this kernel on a GPU."
            )
        self.guard = None
        if instruction.guard:
            predicate = self.read(instruction.guard, "pred")
            self.guard = f"(~{predicate})" if instruction.negated else predicate
        name, match = found
        getattr(self, name)(instruction.operands, match, *[g for g in match.groups()])

    # ---- operands ---------------------------------------------------------------------------------------------------

    def local(self, expression, depends=()):
        """Name of a local variable that holds expression; reused until a register it depends on changes."""
        found = self.cache.get(expression)
        if found:
            return found[0]
        self.counter += 1
        name = f"t{self.counter}"
        self.lines.append(f"{name} = {expression}")
        self.cache[expression] = name, frozenset(depends)
        return name

    def register(self, name):
        index = self.names[name]
        if index not in self.written and index not in self.loaded:
            self.loaded.append(index)
        return f"r{index}"

    def read(self, operand, type_name):
        """Expression for an operand viewed as a PTX type."""
        value = self._read(operand, type_name)
        return self.local(f"A.flush({value})", self.program.registers_of(operand)) if self.flush and type_name == "f32" else value

    def _read(self, operand, type_name):
        operand = operand.strip()
        want = NUMPY[type_name]
        if operand in self.names:
            index = self.names[operand]
            have, value = self.program.storage[index], self.register(operand)
            if have == want:
                return value
            if want == "bool_" or have == "bool_":
                self.refuse(f"operand {operand}")
            same_size = SIZE_OF[have] == SIZE_OF[want]
            if index in self.program.rounded and same_size:
                value = self.local(f"A.canonical_nan({value})", [index])
            return self.local(f"{value}.view({want})" if same_size else f"{value}.astype({want})", [index])
        if operand.startswith("!"):
            return f"(~{self.read(operand[1:], 'pred')})"
        if operand.startswith("%"):
            name = registry.special_register(operand)
            if name is None:
                self.refuse(f"special register {operand}")
            return self.convert(f"u.special[{operand!r}]", name, want)
        value = self.immediate(operand, type_name)
        return self.program.constant(value, want)

    def immediate(self, operand, type_name) -> int:
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            bits = int(operand[2:], 16)
            if type_name == "f64":
                return int(np.uint32(bits).view(np.float32).astype(np.float64).view(np.uint64))
            return bits
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return int(operand[2:], 16)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            value = int(operand.rstrip("U"), 0 if "x" in operand.lower() or operand == "0" else 10)
            if type_name == "f32":
                return int(np.float32(value).view(np.uint32))
            return value
        symbol = self.symbol(operand)
        if symbol is None:
            self.refuse(f"operand {operand!r}")
        return symbol

    def symbol(self, name):
        kernel = self.kernel
        if name in kernel.shared:
            return kernel.shared[name][0]
        if name in kernel.local:
            return kernel.local[name]
        for parameter in kernel.parameters:
            if parameter.name == name:
                return memory.PARAM_WINDOW + parameter.offset
        return None

    def convert(self, expression, have, want):
        if have == want:
            return expression
        return f"{expression}.view({want})" if SIZE_OF[have] == SIZE_OF[want] else f"{expression}.astype({want})"

    def write(self, operand, type_name, expression):
        """Assign expression, of a PTX type's NumPy type, to a register."""
        operand = operand.strip()
        if operand == "_":
            return
        if operand not in self.names:
            self.refuse(f"destination {operand!r}")
        index = self.names[operand]
        if self.flush and type_name == "f32":
            expression = f"A.flush({expression})"
        expression = self.convert_stored(expression, NUMPY[type_name], self.program.storage[index])
        if self.guard:
            expression = f"A.where({self.guard}, {expression}, {self.register(operand)})"
        self.lines.append(f"r{index} = {expression}")
        self.written[index] = True
        self.origin.pop(index, None)
        self.cache = {k: v for k, v in self.cache.items() if index not in v[1]}

    def convert_stored(self, expression, have, want):
        if have == want:
            return expression
        if SIZE_OF[have] == SIZE_OF[want]:
            return f"({expression}).view({want})"
        if have[0] in "iu" and want[0] in "iu":
            return f"({expression}).astype({want})"
        self.refuse(f"a {have} result in a {want} register")

    def refuse(self, what):
        raise UnknownInstruction(f"{self.instruction.where()}: {what} of {self.instruction.opcode!r} is not modelled")

    def simple(self, operands, type_name, template):
        values = [self.read(o, type_name) for o in operands[1:]]
        self.write(operands[0], type_name, template.format(*values))

    # ---- integer arithmetic (9.7.1), logic and shift (9.7.8) ------------------------------------------------------

    @emits(r"(add|sub)\.([us](?:16|32|64))|mul\.lo\.([us](?:16|32|64))")
    def _add(self, operands, match, name, type_name, mul_type):
        type_name = "u" + (type_name or mul_type)[1:]
        self.simple(operands, type_name, "{0} %s {1}" % {"add": "+", "sub": "-", None: "*"}[name])

    @emits(r"(add|sub|mul|mad)c?\.cc\..*|addc\..*|subc\..*|madc\..*")
    def _carry(self, operands, match, *_):
        self.refuse("carry arithmetic")

    @emits(r"(add|sub|min|max)\.sat\.s32")
    def _saturating(self, operands, match, name):
        a, b = (self.read(o, "s32") for o in operands[1:])
        sign = "+" if name == "add" else "-"
        self.write(operands[0], "s32", f"np.clip({a}.astype(int64) {sign} {b}, -2147483648, 2147483647).astype(int32)")

    @emits(r"mul\.wide\.([us])(16|32)")
    def _multiply_wide(self, operands, match, sign, bits):
        a, b = (self.read(o, sign + bits) for o in operands[1:])
        wide = f"{sign}{2 * int(bits)}"
        self.write(operands[0], wide, f"np.multiply({a}, {b}, dtype={NUMPY[wide]})")

    @emits(r"mad\.wide\.([us])(16|32)")
    def _multiply_add_wide(self, operands, match, sign, bits):
        a, b = (self.read(o, sign + bits) for o in operands[1:3])
        wide = f"{sign}{2 * int(bits)}"
        self.write(operands[0], wide, f"np.multiply({a}, {b}, dtype={NUMPY[wide]}) + {self.read(operands[3], wide)}")

    @emits(r"(?:mul|mad)\.hi\.([us](?:16|32|64))")
    def _multiply_high(self, operands, match, type_name):
        values = [self.read(o, type_name) for o in operands[1:]]
        tail = f" + {values[2]}" if len(values) > 2 else ""
        self.write(operands[0], type_name, f"A.multiply_high({values[0]}, {values[1]}){tail}")

    @emits(r"mad\.lo\.[us](16|32|64)")
    def _multiply_add(self, operands, match, bits):
        self.simple(operands, "u" + bits, "{0} * {1} + {2}")

    @emits(r"(?:mul|mad)24\.lo\.([us])32")
    def _multiply_24(self, operands, match, sign):
        values = [self.read(o, sign + "32") for o in operands[1:]]
        cut = [
            f"({v} << {self.program.constant(8, NUMPY[sign + '32'])} >> {self.program.constant(8, NUMPY[sign + '32'])})"
            for v in values[:2]
        ]
        tail = f" + {values[2]}" if len(values) > 2 else ""
        self.write(operands[0], sign + "32", f"{cut[0]} * {cut[1]}{tail}")

    @emits(r"(div|rem)\.([us](?:16|32|64))")
    def _divide(self, operands, match, name, type_name):
        self.simple(operands, type_name, f"A.{'divide' if name == 'div' else 'remainder'}({{0}}, {{1}})")

    @emits(r"(min|max)\.([us](?:16|32|64))")
    def _min_max(self, operands, match, name, type_name):
        self.simple(operands, type_name, f"np.{name}imum({{0}}, {{1}})")

    @emits(r"(abs|neg)\.(s(?:16|32|64))")
    def _absolute(self, operands, match, name, type_name):
        self.simple(operands, type_name, "np.abs({0})" if name == "abs" else "-{0}")

    @emits(r"sad\.([us](?:16|32|64))")
    def _sum_of_differences(self, operands, match, type_name):
        self.simple(operands, type_name, "np.maximum({0}, {1}) - np.minimum({0}, {1}) + {2}")

    @emits(r"(and|or|xor)\.(b16|b32|b64|pred)")
    def _logic(self, operands, match, name, type_name):
        self.simple(operands, type_name, "{0} %s {1}" % {"and": "&", "or": "|", "xor": "^"}[name])

    @emits(r"not\.(b16|b32|b64|pred)")
    def _not(self, operands, match, type_name):
        self.simple(operands, type_name, "~{0}")

    @emits(r"cnot\.(b16|b32|b64)")
    def _logical_not(self, operands, match, type_name):
        self.simple(operands, type_name, f"({{0}} == 0).astype({NUMPY[type_name]})")

    @emits(r"lop3\.b32")
    def _lop3(self, operands, match):
        a, b, c = (self.read(o, "b32") for o in operands[1:4])
        table, terms = int(operands[4], 0), []
        for i in range(8):
            if table >> i & 1:
                terms.append("(" + " & ".join(v if i >> s & 1 else f"~{v}" for v, s in ((a, 2), (b, 1), (c, 0))) + ")")
        self.write(operands[0], "b32", " | ".join(terms) or f"{a} & {self.program.constant(0, 'uint32')}")

    @emits(r"shl\.b(16|32|64)|shr\.([usb](?:16|32|64))")
    def _shift(self, operands, match, left, right):
        type_name = "b" + left if left else right
        if operands[2] in self.names:
            call = "A.shift_left" if left else "A.shift_right"
            self.write(
                operands[0], type_name, f"{call}({self.read(operands[1], type_name)}, {self.read(operands[2], 'u32')})"
            )
            return
        bits = 8 * type_bytes(type_name)
        count = self.immediate(operands[2], "u32") & 0xFFFFFFFF
        kind = NUMPY[type_name]
        value = self.read(operands[1], type_name)
        if count >= bits and (left or kind[0] == "u"):
            self.write(operands[0], type_name, f"{value} & {self.program.constant(0, kind)}")
        else:
            amount = self.program.constant(min(count, bits - 1), kind)
            self.write(operands[0], type_name, f"{value} {'<<' if left else '>>'} {amount}")

    @emits(r"shf\.([lr])\.(wrap|clamp)\.b32")
    def _funnel(self, operands, match, direction, mode):
        a, b, c = (self.read(o, "b32") for o in operands[1:4])
        self.write(operands[0], "b32", f"A.funnel_shift({a}, {b}, {c}, {direction!r}, {mode!r})")

    @emits(r"prmt\.b32(?:\.(f4e|b4e|rc8|ecl|ecr|rc16))?")
    def _permute(self, operands, match, mode):
        a, b, c = (self.read(o, "b32") for o in operands[1:4])
        self.write(operands[0], "b32", f"A.permute({a}, {b}, {c}, {mode!r})")

    @emits(r"popc\.b(32|64)")
    def _population_count(self, operands, match, bits):
        self.write(operands[0], "u32", f"np.bitwise_count({self.read(operands[1], 'b' + bits)}).astype(uint32)")

    @emits(r"clz\.b(32|64)")
    def _leading_zeros(self, operands, match, bits):
        self.write(operands[0], "u32", f"A.count_leading_zeros({self.read(operands[1], 'b' + bits)})")

    @emits(r"bfind(\.shiftamt)?\.([us](?:32|64))")
    def _find_bit(self, operands, match, amount, type_name):
        self.write(operands[0], "u32", f"A.find_leading({self.read(operands[1], type_name)}, {bool(amount)})")

    @emits(r"brev\.(b32|b64)")
    def _reverse(self, operands, match, type_name):
        self.simple(operands, type_name, "A.bit_reverse({0})")

    @emits(r"bfe\.([us](?:32|64))")
    def _extract(self, operands, match, type_name):
        a, position, length = (
            self.read(operands[1], type_name),
            self.read(operands[2], "u32"),
            self.read(operands[3], "u32"),
        )
        self.write(operands[0], type_name, f"A.bit_field_extract({a}, {position}, {length})")

    @emits(r"bfi\.(b32|b64)")
    def _insert(self, operands, match, type_name):
        a, b = self.read(operands[1], type_name), self.read(operands[2], type_name)
        position, length = self.read(operands[3], "u32"), self.read(operands[4], "u32")
        self.write(operands[0], type_name, f"A.bit_field_insert({a}, {b}, {position}, {length})")

    @emits(r"dp4a\.([us])32\.([us])32")
    def _dot(self, operands, match, a_sign, b_sign):
        a, b, c = (self.read(o, "b32") for o in operands[1:4])
        c = self.read(operands[3], ("s" if "s" in (a_sign, b_sign) else "u") + "32")
        self.write(operands[0], "b32", f"A.dot_4_bytes({a}, {b}, {c}, {a_sign == 's'}, {b_sign == 's'})")

    # ---- floating point (9.7.3 to 9.7.5) ----------------------------------------------------------------------------

    @emits(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?(\.sat)?\.(f32|f64)")
    def _float(self, operands, match, name, rounding, saturate, type_name):
        a, b = (self.read(o, type_name) for o in operands[1:])
        if self.flush and name == "mul":
            value = f"A.multiply_flush({a}, {b}, {rounding or 'rn'!r})"
        elif rounding in (None, "rn"):
            value = f"{a} {dict(add='+', sub='-', mul='*')[name]} {b}"
        elif type_name == "f64":
            self.refuse("directed rounding")
        else:
            b = f"(-{b})" if name == "sub" else b
            value = f"A.{'multiply' if name == 'mul' else 'add'}_directed({a}, {b}, {rounding!r})"
        self.write(operands[0], type_name, f"A.saturate({value})" if saturate else value)

    @emits(r"fma\.(rn|rz|rm|rp)(\.sat)?\.(f32|f64)|mad\.(rn)\.(f32|f64)")
    def _fma(self, operands, match, rounding, saturate, type_name, *mad):
        rounding, type_name = rounding or mad[0], type_name or mad[1]
        a, b, c = (self.read(o, type_name) for o in operands[1:4])
        if rounding != "rn" and type_name == "f64":
            self.refuse("directed rounding")
        if self.flush:
            value = f"A.fma_flush({a}, {b}, {c}, {rounding!r})"
        elif rounding == "rn":
            value = f"A.fma_{type_name}({a}, {b}, {c})"
        else:
            value = f"A.fma_directed({a}, {b}, {c}, {rounding!r})"
        self.write(operands[0], type_name, f"A.saturate({value})" if saturate else value)

    @emits(r"div\.approx\.f32")
    def _divide_approximately(self, operands, match):
        self.simple(operands, "f32", "approximations.divide({0}, {1})")

    @emits(r"div\.(?:rn|full)\.(f32)|div\.rn\.(f64)")
    def _float_divide(self, operands, match, single, double):
        self.simple(operands, single or double, "{0} / {1}")

    @emits(r"(rcp|sqrt)\.(?:rn|approx)\.(f32)|(rcp|sqrt)\.rn\.(f64)")
    def _root(self, operands, match, name32, f32, name64, f64):
        type_name, kind = f32 or f64, NUMPY[f32 or f64]
        self.simple(operands, type_name, "np.sqrt({0})" if (name32 or name64) == "sqrt" else f"{kind}(1) / {{0}}")

    @emits(r"(rsqrt|ex2|lg2|sin|cos|tanh)\.approx\.f32")
    def _approximate(self, operands, match, name):
        self.simple(operands, "f32", f"approximations.evaluate({name!r}, {{0}})")

    @emits(r"(min|max)(\.NaN)?\.(f32|f64)")
    def _float_min_max(self, operands, match, name, nan, type_name):
        self.simple(operands, type_name, f"A.{name}imum{'_nan' if nan else ''}({{0}}, {{1}})")

    @emits(r"(abs|neg)\.(f32|f64)")
    def _float_sign(self, operands, match, name, type_name):
        if type_name == "f64":  # a NaN keeps its sign
            x = self.read(operands[1], type_name)
            self.write(operands[0], type_name, f"A.where(np.isnan({x}), {x}, {'np.abs' if name == 'abs' else '-'}({x}))")
        else:
            self.simple(operands, type_name, "np.abs({0})" if name == "abs" else "-{0}")

    @emits(r"copysign\.(f32|f64)")
    def _copy_sign(self, operands, match, type_name):
        self.simple(operands, type_name, "np.copysign({1}, {0})")

    @emits(r"testp\.(finite|infinite|number|notanumber|normal|subnormal)\.(f32|f64)")
    def _test(self, operands, match, what, type_name):
        x = self.read(operands[1], type_name)
        tiny = f"np.finfo({NUMPY[type_name]}).tiny"
        tests = {
            "finite": "np.isfinite({0})", "infinite": "np.isinf({0})", "number": "~np.isnan({0})", "notanumber": "np.isnan({0})",
            "normal": "np.isfinite({0}) & ((np.abs({0}) >= {1}) | ({0} == 0))", "subnormal": "({0} != 0) & (np.abs({0}) < {1})",
        }  # fmt: skip
        self.write(operands[0], "pred", tests[what].format(x, tiny))

    @emits(
        r"(add|sub|mul|fma)(?:\.rn)?(\.relu)?\.(f16|bf16)(x2)?|(min|max)(\.NaN)?\.(f16|bf16)(x2)?|(neg|abs)\.(f16|bf16)(x2)?"
    )
    def _half(self, operands, match, a, relu, kind_a, x2_a, b, nan, kind_b, x2_b, c, kind_c, x2_c):
        name = (a or b or c) + (relu or "") + (nan or "")
        kind, pair = kind_a or kind_b or kind_c, x2_a or x2_b or x2_c
        type_name = "b32" if pair else "b16"
        values = ", ".join(self.read(o, type_name) for o in operands[1:])
        self.write(operands[0], type_name, f"A.half_{'pair' if pair else 'operation'}({name!r}, {kind!r}, {values})")

    # ---- comparison and selection (9.7.6, 9.7.7) --------------------------------------------------------------------

    def comparison(self, a, b, name, type_name):
        if type_name in ("f16", "bf16"):
            widen = f"A.{type_name}_to_f32"
            x, y = f"{widen}({self.read(a, 'b16')})", f"{widen}({self.read(b, 'b16')})"
        else:
            x, y = self.read(a, type_name), self.read(b, type_name)
        if type_name[0] in "fb" and type_name not in ("b16", "b32", "b64"):
            if name in ("num", "nan"):
                return f"{'~' if name == 'num' else ''}(np.isnan({x}) | np.isnan({y}))"
            if name == "ne":
                return f"({x} < {y}) | ({x} > {y})"
            if name == "equ":
                return f"~(({x} < {y}) | ({x} > {y}))"
            if name in _UNORDERED:
                return f"~({x} {_COMPARE[_UNORDERED[name]]} {y})"
        return f"{x} {_COMPARE[name]} {y}"

    _TYPES = r"([usb](?:16|32|64)|f16|bf16|f32|f64)"
    _CONDITIONS = r"(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)"

    @emits(rf"setp\.{_CONDITIONS}(?:\.(and|or|xor))?\.{_TYPES}")
    def _set_predicate(self, operands, match, condition, combine, type_name):
        value = self.comparison(operands[1], operands[2], condition, type_name)
        first, _, second = operands[0].partition("|")
        if combine:
            other = self.read(operands[3], "pred")
            sign = {"and": "&", "or": "|", "xor": "^"}[combine]
            value = f"({value}) {sign} {other}"
        if second:
            value = self.local(value)
            self.cache.popitem()
            inverse = (
                f"~{value}"
                if not combine
                else f"~({self.comparison(operands[1], operands[2], condition, type_name)}) {sign} {other}"
            )
            inverse = self.local(inverse)
            self.cache.popitem()
            self.write(second, "pred", inverse)
        self.write(first, "pred", value)

    @emits(rf"set\.{_CONDITIONS}\.(u32|s32|f32)\.{_TYPES}")
    def _set(self, operands, match, condition, result, type_name):
        value = self.comparison(operands[1], operands[2], condition, type_name)
        one, zero = ((0x3F800000 if result == "f32" else 0xFFFFFFFF), 0)
        constants = [self.program.constant(v, NUMPY[result]) for v in (one, zero)]
        self.write(operands[0], result, f"A.where({value}, {constants[0]}, {constants[1]})")

    @emits(rf"selp\.{_TYPES}")
    def _select(self, operands, match, type_name):
        a, b, p = self.read(operands[1], type_name), self.read(operands[2], type_name), self.read(operands[3], "pred")
        self.write(operands[0], type_name, f"A.where({p}, {a}, {b})")

    @emits(r"slct\.([usbf](?:16|32|64))\.(s32|f32)")
    def _select_sign(self, operands, match, type_name, test):
        a, b, c = self.read(operands[1], type_name), self.read(operands[2], type_name), self.read(operands[3], test)
        self.write(operands[0], type_name, f"A.where({c} >= 0, {a}, {b})")

    # ---- data movement (9.7.9) --------------------------------------------------------------------------------------

    @emits(r"mov\.(pred|[usbf](?:8|16|32|64)|bf16|f16x2|bf16x2)")
    def _move(self, operands, match, type_name):
        to, source = operands
        if source.startswith("{"):
            pieces = split_operands(source.strip("{}"))
            bits = 8 * type_bytes(type_name) // len(pieces)
            kind, total = NUMPY[f"b{8 * type_bytes(type_name)}"], []
            for i, piece in enumerate(pieces):
                value = f"{self.read(piece, f'b{bits}')}.astype({kind})"
                total.append(f"({value} << {self.program.constant(i * bits, kind)})" if i else value)
            self.write(to, f"b{8 * type_bytes(type_name)}", " | ".join(total))
        elif to.startswith("{"):
            pieces = split_operands(to.strip("{}"))
            bits = 8 * type_bytes(type_name) // len(pieces)
            wide = f"b{8 * type_bytes(type_name)}"
            value = self.local(self.read(source, wide))
            self.cache.popitem()
            origin = self.origin.get(self.names.get(source)) if bits == 16 and not self.guard else None
            for i, piece in enumerate(pieces):
                shifted = f"({value} >> {self.program.constant(i * bits, NUMPY[wide])})" if i else value
                self.write(piece, f"b{bits}", f"{shifted}.astype({NUMPY[f'b{bits}']})")
                if origin and piece != "_":
                    self.origin[self.names[piece]] = origin[0], origin[1], 8 * i
        elif source in self.kernel.variables:
            self.write(to, "u64", f"u.machine.variables[{source!r}]")
        else:
            self.write(to, type_name, self.read(source, type_name))

    @emits(r"cvta\.(to\.)?(global|shared|shared::cta|shared::cluster|local|const|param)\.u64")
    def _convert_address(self, operands, match, to, space):
        window = {
            "shared": memory.SHARED_WINDOW,
            "shared::cta": memory.SHARED_WINDOW,
            "shared::cluster": memory.SHARED_WINDOW,
            "local": memory.LOCAL_WINDOW,
        }.get(space, 0)
        if operands[1] in self.kernel.variables:
            value = f"u.machine.variables[{operands[1]!r}]"
        else:
            value = self.read(operands[1], "u64")
        if window:
            value = f"{value} {'-' if to else '+'} {self.program.constant(window, 'uint64')}"
        self.write(operands[0], "u64", value)

    @emits(r"isspacep\.(global|shared|shared::cta|local|const|param)")
    def _is_space(self, operands, match, space):
        window = {"shared": 1, "shared::cta": 1, "local": 2, "param": 3}.get(space, 0)
        self.write(
            operands[0], "pred", f"{self.read(operands[1], 'u64')} >> {self.program.constant(60, 'uint64')} == {window}"
        )

    def address(self, text):
        """(base operand, byte offset) of '[base+offset]'."""
        base, sign, offset = re.fullmatch(r"\[\s*([^+\-\s]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", text).groups()
        return base, (-1 if sign == "-" else 1) * int(offset or 0)

    def span(self, space, base):
        lanes = "L"
        depends = []
        if self.guard:
            depends.append(self.names[self.instruction.guard])
            lanes = self.local(f"u.active(L, {self.guard})", depends)
        if base in self.kernel.variables:
            value = f"u.machine.variables[{base!r}]"
        elif base in self.names:
            value = self.read(base, self.kernel.registers[base].replace("b", "u").replace("s", "u"))
            depends = depends + [self.names[base]]
        else:
            value = self.read(base, "u64")
        kind = {"global": "GlobalSpan", "const": "GlobalSpan", "shared": "SharedSpan", "local": "LocalSpan"}.get(
            space, "generic_span"
        )
        return self.local(f"memory.{kind}(u, f, {value}, {lanes})", depends)

    _SPACE = r"(?:\.(global|shared|shared::cta|shared::cluster|local|const|param|param::entry))?"
    _CACHE = r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+|unified))*"
    _ORDER = r"(?:\.(?:weak|volatile|relaxed|acquire|release|mmio))?(?:\.(?:cta|cluster|gpu|sys))?"
    _MEMORY_TYPE = r"([usbf](?:8|16|32|64)|f16|bf16|f16x2|bf16x2)"

    @emits(rf"ld{_ORDER}{_SPACE}{_CACHE}(?:\.v(2|4))?\.{_MEMORY_TYPE}")
    def _load(self, operands, match, space, vector, type_name):
        kind = NUMPY[type_name]
        results = split_operands(operands[0].strip("{}"))
        base, offset = self.address(operands[1])
        if space in ("param", "param::entry") and base not in self.names:
            start = self.symbol(base)
            if start is None:
                self.refuse(f"parameter {base!r}")
            for i, result in enumerate(results):
                at = start - memory.PARAM_WINDOW + offset + i * SIZE_OF[kind]
                self.write(result, type_name, f"u.machine.parameter({at}, {kind})")
            return
        span = self.span((space or "").split("::")[0], base)
        where = self.positions[id(self.instruction)]
        if len(results) == 1:
            self.write(results[0], type_name, f"{span}.load({offset}, {kind}, {where})")
            return
        values = self.local(f"{span}.load({offset}, {kind}, {where}, {len(results)})")
        self.cache.popitem()
        for i, result in enumerate(results):
            self.write(result, type_name, f"{values}[{i}]")

    @emits(rf"st{_ORDER}{_SPACE}{_CACHE}(?:\.v(2|4))?\.{_MEMORY_TYPE}")
    def _store(self, operands, match, space, vector, type_name):
        base, offset = self.address(operands[0])
        values = [self.read(v, type_name) for v in split_operands(operands[1].strip("{}"))]
        if type_name == "f32":
            rounded = {f"r{i}" for i in self.program.rounded}
            values = [f"A.canonical_nan({v})" if v in rounded else v for v in values]
        span = self.span((space or "").split("::")[0], base)
        where = self.positions[id(self.instruction)]
        self.lines.append(f"{span}.store({offset}, {NUMPY[type_name]}, {where}, {', '.join(values)})")

    @emits(
        rf"(atom|red)(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?{_SPACE}"
        r"\.(add|min|max|and|or|xor|exch|cas|inc|dec)(?:\.noftz)?(?:\.L2::\w+)?"
        r"(?:\.v([24]))?\.([usb](?:32|64)|f32|f64|f16|bf16|f16x2|bf16x2|b16)"
    )
    def _atomic(self, operands, match, form, space, operation, vector, type_name):
        returns = form == "atom"
        operands = operands if returns else ["_"] + operands
        base, offset = self.address(operands[1])
        kind = NUMPY[type_name]
        if vector:
            if returns or operation != "add" or type_name != "f32" or space != "global":
                self.refuse("the vector")
            pieces = split_operands(operands[2].strip("{}"))
            span, where = self.span("global", base), self.positions[id(self.instruction)]
            self.lines.append(f"{span}.check_alignment({offset}, {4 * len(pieces)}, {where})")
            for i, piece in enumerate(pieces):
                value = self.read(piece, "f32")
                self.lines.append(f"{span}.atomic({offset + 4 * i}, float32, {where}, 'add', False, {value})")
            return
        values = [self.read(v, type_name) for v in operands[2:]]
        if type_name in ("f16", "bf16", "f16x2", "bf16x2"):
            operation = f"{operation}.{type_name}"
        span = self.span((space or "").split("::")[0], base)
        where = self.positions[id(self.instruction)]
        call = f"{span}.atomic({offset}, {kind}, {where}, {operation!r}, {returns}, {', '.join(values)})"
        if returns and operands[0] != "_":
            self.write(operands[0], type_name, call)
        else:
            self.lines.append(call)

    @emits(r"(prefetch|prefetchu|applypriority|discard)\..*|pragma.*|nanosleep\.u32|membar\..*")
    def _ignored(self, operands, match, *_):
        """Hints: caches and time are not modelled."""

    # ---- conversion (9.7.9.21) --------------------------------------------------------------------------------------

    @emits(r"cvt(\.sat)?\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))")
    def _convert_integer(self, operands, match, saturate, to, source):
        value, kind = self.read(operands[1], source), NUMPY[to]
        origin = self.origin.get(self.names.get(operands[1]))
        if saturate:
            self.write(operands[0], to, f"A.integer_saturate({value}, {kind})")
        elif SIZE_OF[kind] == SIZE_OF[NUMPY[source]]:
            self.write(operands[0], to, f"{value}.view({kind})")
        else:
            self.write(operands[0], to, f"{value}.astype({kind})")
            if origin and to in ("u16", "b16") and not self.guard:
                self.origin[self.names[operands[0]]] = origin

    @emits(r"cvt\.(rni|rzi|rmi|rpi)(?:\.sat)?\.([us](?:8|16|32|64))\.(f16|bf16|f32|f64)")
    def _float_to_integer(self, operands, match, mode, to, source):
        self.write(operands[0], to, f"A.float_to_integer({self.widened(operands[1], source)}, {mode!r}, {NUMPY[to]})")

    @emits(r"cvt\.(rn|rz|rm|rp)\.(f16|bf16|f32|f64)\.([us](?:8|16|32|64))")
    def _integer_to_float(self, operands, match, mode, to, source):
        value = self.read(operands[1], source)
        if to in ("f32", "f64"):
            if mode == "rn":
                self.write(operands[0], to, f"{value}.astype({NUMPY[to]})")
            else:
                self.write(operands[0], to, f"A.integer_to_float({value}, {mode!r}, {NUMPY[to]})")
        elif mode != "rn" or source[1:] in ("32", "64") and to == "bf16" or source[1:] == "64":
            self.refuse(f"rounding {source} to {to}")
        else:
            self.write(
                operands[0],
                "b16",
                f"A.f32_to_{to}({value}.astype(float64).astype(float32))"
                if source[1:] != "32"
                else f"A.f32_to_f16(({value}).astype(float64))",
            )

    def widened(self, operand, type_name):
        origin = self.origin.get(self.names.get(operand)) if type_name == "f16" else None
        if origin:  # FP8 -> f16 -> f32 in one table look-up; the f16 step then drops out as unused
            kind, code, shift = origin
            return f"A.f8_to_f32({code}, {kind!r}, {shift})"
        if type_name in ("f16", "bf16"):
            return f"A.{type_name}_to_f32({self.read(operand, 'b16')})"
        return self.read(operand, type_name)

    @emits(r"cvt(?:\.(rn|rz|rm|rp|rni|rzi|rmi|rpi))?(\.sat)?\.(f16|bf16|f32|f64)\.(f16|bf16|f32|f64)")
    def _convert_float(self, operands, match, mode, saturate, to, source):
        value = self.widened(operands[1], source)
        if mode and mode.endswith("i"):
            value = f"A.round_float({value}, {mode!r})"
            mode = None
        if saturate:
            value = f"A.saturate({value})"
        if to == "f64":
            value = f"{value}.astype(float64)" if source != "f64" else value
        elif to == "f32":
            value = f"A.round_from_odd({value}, float32, {mode or 'rn'!r})" if source == "f64" else value
        elif source == "f64":
            value = f"A.f64_to_bf16({value})" if to == "bf16" else f"A.f32_to_f16({value})"
        elif mode in (None, "rn"):
            value = f"A.f32_to_{to}({value})"
        elif to == "bf16" and mode == "rz":
            value = f"A.f32_to_bf16({value}, 'rz')"
        elif to == "f16":
            value = f"A.f32_to_f16(A.round_from_odd({value}.astype(float64), np.float16, {mode!r}).astype(float32))"
        else:
            self.refuse(f"rounding mode {mode}")
        self.write(operands[0], to, value)

    @emits(r"cvt\.rn\.relu\.(f16|bf16)\.f32")
    def _convert_relu(self, operands, match, to):
        value = f"A.maximum_nan({self.read(operands[1], 'f32')}, {self.program.constant(0, 'float32')})"
        self.write(operands[0], "b16", f"A.f32_to_{to}({value})")

    @emits(r"cvt\.(rna|rn|rz)(\.relu)?\.tf32\.f32")
    def _convert_tf32(self, operands, match, mode, relu):
        value = self.read(operands[1], "f32")
        if relu:
            value = f"A.maximum_nan({value}, {self.program.constant(0, 'float32')})"
        self.write(operands[0], "b32", f"A.f32_to_tf32({value}, {mode!r})")

    @emits(r"cvt\.(rn|rz)(\.relu)?\.(f16x2|bf16x2)\.f32")
    def _convert_pair(self, operands, match, mode, relu, to):
        high, low = (self.read(o, "f32") for o in operands[1:3])
        if relu:
            zero = self.program.constant(0, "float32")
            high, low = (f"A.maximum_nan({v}, {zero})" for v in (high, low))
        call = f"A.f32_to_{to[:-2]}({{0}}, {mode!r})"
        shift = self.program.constant(16, "uint32")
        self.write(operands[0], "b32", f"{call.format(high)}.astype(uint32) << {shift} | {call.format(low)}")

    @emits(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3|e5m2)x2\.f32")
    def _convert_f8(self, operands, match, relu, to):
        high, low = (self.read(o, "f32") for o in operands[1:3])
        self.write(operands[0], "b16", f"A.f8_pair({high}, {low}, {to!r}, {bool(relu)})")

    @emits(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3|e5m2)x2\.f16x2")
    def _convert_f8_half(self, operands, match, relu, to):
        value = self.read(operands[1], "b32")
        low = f"A.f16_to_f32({value}.astype(uint16))"
        high = f"A.f16_to_f32(({value} >> {self.program.constant(16, 'uint32')}).astype(uint16))"
        self.write(operands[0], "b16", f"A.f8_pair({high}, {low}, {to!r}, {bool(relu)})")

    @emits(r"cvt\.rn(\.relu)?\.f16x2\.(e4m3|e5m2)x2")
    def _convert_from_f8(self, operands, match, relu, source):
        if relu:
            self.refuse("relu")
        code = self.local(self.read(operands[1], "b16"))
        self.cache.popitem()
        self.write(operands[0], "b32", f"A.f8_pair_to_f16({code}, {source!r})")
        if not self.guard:
            self.origin[self.names[operands[0]]] = source, code, 0
