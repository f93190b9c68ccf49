"""PTX text -> Kernel: basic syntax of the PTX ISA (sections 4 "Syntax", 5 "State Spaces" and 7 "Abstracting the ABI").

The parser knows no opcode.  It resolves scopes ({ ... } blocks of inline assembly give registers and labels a private
name), lays out shared and local memory, remembers source lines from .loc, and inlines calls of device functions, so
that what follows sees one flat list of instructions per kernel.
"""

import re
from dataclasses import dataclass, field, replace

from .errors import UnknownInstruction


@dataclass(slots=True)
class Instruction:
    """One PTX instruction; operands are kept as written ('%r1', '[%rd2+8]', '{%r1, %r2}', '0f3F800000', '!%p1')."""

    opcode: str
    operands: list[str]
    guard: str | None = None
    negated: bool = False
    ptx_line: int = 0
    location: tuple[str, int] | None = None
    inside: tuple[str, int] | None = None  # where in an inlined function, when location is its call

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def where(self) -> str:
        """'line 12 of kernel.cu (PTX line 345)'"""
        if self.location is None:
            return f"PTX line {self.ptx_line}"
        file, line = self.location
        inside = f", in {self.inside[0].rsplit('/', 1)[-1]}:{self.inside[1]}" if self.inside else ""
        return f"line {line} of {file.rsplit('/', 1)[-1]} (PTX line {self.ptx_line}{inside})"


@dataclass(slots=True)
class Parameter:
    name: str
    offset: int
    size: int
    type: str
    is_array: bool


@dataclass(slots=True)
class Variable:
    """A module or function variable in .shared, .global, .const or .local space."""

    name: str
    size: int
    align: int
    data: bytes = b""
    offset: int = 0


@dataclass(slots=True)
class Function:
    name: str
    parameters: list[Parameter]
    returns: list[str]
    registers: dict[str, str]
    shared: list[Variable]
    local: list[Variable]
    body: list  # str for a label, Instruction, or a ("targets", name, [labels]) tuple
    directives: dict[str, tuple[int, ...]]


@dataclass(slots=True)
class Kernel:
    """A kernel with its calls inlined.

    shared maps a symbol to (offset, size); the size of an extern array is 0.  shared_base is where static variables
    start: the first 1024 bytes of the window belong to the system, as on the hardware.
    """

    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    registers: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]
    branch_targets: dict[str, list[str]]
    shared: dict[str, tuple[int, int]]
    shared_static: int
    local: dict[str, int]
    local_bytes: int
    variables: dict[str, Variable]
    directives: dict[str, tuple[int, ...]]
    files: list[str] = field(default_factory=list)


SHARED_BASE = 1024
_TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_NAME = re.compile(r"[%$A-Za-z_][\w$%]*")
_STATEMENT = re.compile(
    r"\s*(?:(?P<label>[$\w%]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})|(?P<loc>\.loc\s+[^\n]*)"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))",
    re.S,
)
_VARIABLE = re.compile(
    r"(?P<extern>\.extern\s+)?(?:\.visible\s+|\.weak\s+)?\.(?P<space>shared|global|const|local)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)\s*(?P<array>\[(?P<count>\d*)\])?"
    r"\s*(?:=\s*(?P<init>\{[^}]*\}|[^;]+))?$",
    re.S,
)


def type_bytes(type_name: str) -> int:
    """Bytes of a PTX type: 4 for 'u32', 'f32', 'b32'."""
    return _TYPE_BYTES[re.sub(r"^[a-z]+", "", type_name)]


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    return parts


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def parse(text: str, entry: str) -> Kernel:
    """Parse a PTX module and return the kernel named entry; KeyError if the module has no such kernel."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
    text = re.sub(r"^\s*\.section[^{]*\{[^}]*\}", lambda m: "\n" * m[0].count("\n"), text, flags=re.M)

    functions, entries, spans = {}, {}, []
    header = re.compile(
        r"\.(?P<kind>entry|func)\s+(?:\((?P<ret>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?(?P<tail>[^{;]*)\{"
    )
    for match in header.finditer(text):
        if any(start <= match.start() < end for start, end in spans):
            continue
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        spans.append((match.start(), end))
        first_line = text.count("\n", 0, match.end()) + 1
        function = _function(match, text[match.end() : end - 1], first_line, files)
        (entries if match["kind"] == "entry" else functions)[function.name] = function
    if entry not in entries:
        raise KeyError(f"the PTX holds the kernels {sorted(entries)}, not {entry!r}")

    outside, position = "", 0
    for start, end in spans:
        outside += text[position:start] + ";"
        position = end
    variables, shared_module = {}, []
    for statement in (outside + text[position:]).split(";"):
        match = _VARIABLE.search(statement.strip())
        if match:
            variable = _variable(match)
            if match["space"] == "shared":
                shared_module.append((variable, bool(match["extern"])))
            else:
                variables[variable.name] = variable
    return _link(entries[entry], functions, variables, shared_module, list(files.values()))


def _variable(match) -> Variable:
    element = type_bytes(match["type"])
    count = int(match["count"] or 0) if match["array"] else 1
    data = b""
    if match["init"]:
        for item in match["init"].strip("{} \n").split(","):
            item = item.strip()
            if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", item):
                data += int(item[2:], 16).to_bytes(element, "little")
            elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", item):
                data += (int(item.rstrip("U"), 0) & ((1 << (8 * element)) - 1)).to_bytes(element, "little")
            else:
                raise UnknownInstruction(f"initialiser {item!r} of variable {match['name']}: only numbers are modelled")
    return Variable(match["name"], element * count, int(match["align"] or element), data)


def _parameters(text: str) -> list[Parameter]:
    parameters, offset = [], 0
    pattern = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[\w. ]*?)?([\w$]+)\s*(?:\[(\d+)\])?\s*(?:,|$)"
    for align, type_name, name, count in re.findall(pattern, text.strip()):
        size = type_bytes(type_name)
        offset = _align_up(offset, int(align or size))
        parameters.append(Parameter(name, offset, size * int(count or 1), type_name, bool(count)))
        offset += size * int(count or 1)
    return parameters


def _function(header, body: str, first_line: int, files: dict) -> Function:
    directives = {
        name: tuple(int(v) for v in values.replace(" ", "").split(","))
        for name, values in re.findall(
            r"\.(maxntid|reqntid|reqnctapercluster|minnctapersm|maxnreg|maxclusterrank)\s+(\d[\d, ]*\d|\d)",
            header["tail"],
        )
    }
    function = Function(
        header["name"],
        _parameters(header["params"] or ""),
        [p.name for p in _parameters(header["ret"] or "")],
        {},
        [],
        [],
        [],
        directives,
    )
    # Pass 1: cut into statements, note the scope of each, and collect the labels that are private to a scope.
    statements, position, line = [], 0, first_line
    scope_stack, scopes, private = [0], 0, {}
    while body[position:].strip():
        match = _STATEMENT.match(body, position)
        if not match:
            raise UnknownInstruction(f"PTX line {line}: cannot parse {body[position : position + 60].strip()!r}")
        token = match[0]
        start = line + token[: len(token) - len(token.lstrip())].count("\n")
        kind, content = match.lastgroup, match[match.lastgroup].strip()
        if kind == "open":
            scopes += 1
            scope_stack.append(scopes)
            private[scopes] = {}
        if kind == "label" and scope_stack[-1]:
            private[scope_stack[-1]][content] = f"{content}@{scope_stack[-1]}"
        statements.append((kind, content, start, tuple(scope_stack)))
        if kind == "close":
            scope_stack.pop()
        line += token.count("\n")
        position = match.end()
    # Pass 2: declarations and instructions, with names resolved innermost scope first.
    location = inside = None
    callers = {}  # position of inlined code -> position of the call, as far as .loc tells
    for kind, content, line, stack in statements:

        def resolve(text: str, stack=stack) -> str:
            def name(match):
                for scope in reversed(stack[1:]):
                    if match[0] in private[scope]:
                        return private[scope][match[0]]
                return match[0]

            return _NAME.sub(name, text) if len(stack) > 1 else text

        if kind == "loc":
            fields = content.replace(",", " ").split()
            here = tuple(fields[1:4])
            if "inlined_at" in fields:
                at = fields.index("inlined_at")
                callers[here] = tuple(fields[at + 1 : at + 4])
            else:
                callers.pop(here, None)
            if here[1] != "0":
                outer, depth = here, 0
                while outer in callers and depth < 20:
                    outer, depth = callers[outer], depth + 1
                location, inside = ((files.get(f, f"file {f}"), int(n)) for f, n, _ in (outer, here))
                inside = inside if outer != here else None
        elif kind == "label":
            function.body.append(resolve(content))
        elif kind == "statement":
            content = content.rstrip(";").strip()
            if content.startswith(".reg"):
                _declare_registers(content, function.registers, stack[-1], private)
            elif content.startswith(".param"):
                if stack[-1]:
                    name = re.search(r"([\w$]+)\s*(?:\[\d+\])?$", content)[1]
                    private[stack[-1]][name] = f"{name}@{stack[-1]}"
            elif content.startswith(".branchtargets"):
                labels = [resolve(label) for label in split_operands(content.split(None, 1)[1])]
                function.body.append(("targets", function.body.pop(), labels))
            elif content.startswith((".shared", ".local")):
                match = _VARIABLE.search(content)
                (function.shared if match["space"] == "shared" else function.local).append(_variable(match))
            elif content and not content.startswith("."):
                function.body.append(_instruction(content, resolve, line, location, inside))
    return function


def _declare_registers(statement: str, registers: dict, scope: int, private: dict) -> None:
    _, type_name, names = statement.split(None, 2)
    for name in names.split(","):
        name = name.strip()
        ranged = re.fullmatch(r"(.*)<(\d+)>", name)
        for single in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
            unique = f"{single}@{scope}" if scope else single
            if scope:
                private[scope][single] = unique
            registers[unique] = type_name[1:]


def _instruction(text: str, resolve, line: int, location, inside) -> Instruction:
    guard = re.match(r"@\s*(!?)\s*([%$\w]+)\s+", text)
    if guard:
        text = text[guard.end() :]
    opcode, *rest = re.split(r"\s+", text, maxsplit=1)
    operands = [resolve(operand) for operand in split_operands(rest[0] if rest else "")]
    return Instruction(
        opcode, operands, resolve(guard[2]) if guard else None, bool(guard and guard[1]), line, location, inside
    )


# ---- linking: memory layout and inlining -----------------------------------------------------------------------------

RUNTIME_CALLS = ("vprintf", "__assertfail")


def _link(entry: Function, functions, variables, shared_module, files) -> Kernel:
    registers, body = dict(entry.registers), []
    local, shared = list(entry.local), list(entry.shared)
    _inline(entry, functions, registers, body, local, shared, "", {}, (entry.name,))

    offset, shared_map = SHARED_BASE, {}
    for variable in [v for v, extern in shared_module if not extern] + shared:
        offset = _align_up(offset, variable.align)
        shared_map[variable.name] = (offset, variable.size)
        offset += variable.size
    for variable in [v for v, extern in shared_module if extern]:
        shared_map[variable.name] = (_align_up(offset, variable.align), 0)
    local_bytes, local_map = 0, {}
    for variable in local:
        local_bytes = _align_up(local_bytes, variable.align)
        local_map[variable.name] = local_bytes
        local_bytes += variable.size

    instructions, labels, targets = [], {}, {}
    for item in body:
        if isinstance(item, str):
            labels[item] = len(instructions)
        elif isinstance(item, tuple):
            targets[item[1]] = item[2]
        else:
            instructions.append(item)
    last = entry.parameters[-1] if entry.parameters else None
    return Kernel(
        entry.name,
        entry.parameters,
        last.offset + last.size if last else 0,
        registers,
        instructions,
        labels,
        targets,
        shared_map,
        offset - SHARED_BASE,
        local_map,
        _align_up(local_bytes, 16),
        variables,
        entry.directives,
        files,
    )


def _inline(function, functions, registers, out, local, shared, prefix, aliases, stack) -> None:
    """Append function's body to out; prefix makes names unique, aliases bind its parameters to the caller's."""

    def rename(text: str) -> str:
        def name(match):
            word = match[0]
            if word in aliases:
                return aliases[word]
            return prefix + word if word in own else word

        return re.sub(r"[%$A-Za-z_][\w$%@.]*", name, text) if prefix or aliases else text

    own = set(function.registers) | {i for i in function.body if isinstance(i, str)} | {v.name for v in function.local}
    own |= {i[1] for i in function.body if isinstance(i, tuple)}
    own |= {
        m for i in function.body if isinstance(i, Instruction) for o in i.operands for m in re.findall(r"\w+@\d+", o)
    }
    if prefix:
        registers.update({prefix + name: kind for name, kind in function.registers.items()})
        local.extend(replace(v, name=prefix + v.name) for v in function.local)
        shared.extend(function.shared)
    end = f"{prefix}return"
    for item in function.body:
        if isinstance(item, str):
            out.append(rename(item))
        elif isinstance(item, tuple):
            out.append(("targets", rename(item[1]), [rename(label) for label in item[2]]))
        elif item.opcode.startswith("call"):
            _call(item, rename, functions, registers, out, local, shared, stack)
        elif prefix and item.opcode.split(".")[0] == "ret":
            out.append(replace(item, opcode="bra", operands=[end], guard=item.guard and rename(item.guard)))
        else:
            moved = replace(item, operands=[rename(o) for o in item.operands], guard=item.guard and rename(item.guard))
            out.extend(_parameter_moves(moved, registers, function if not prefix else None))
    if prefix:
        out.append(end)


def _parameter_moves(item: Instruction, registers: dict, entry: Function | None) -> list[Instruction]:
    """st.param / ld.param of a call become moves through a pseudo register named after parameter and offset."""
    if not re.match(r"(ld|st)\.param", item.opcode):
        return [item]
    memory, value = item.operands if item.opcode.startswith("st") else item.operands[::-1]
    name, _, offset = memory.strip("[] ").partition("+")
    if entry is not None and any(p.name == name for p in entry.parameters):
        return [item]
    type_name, moves = item.parts[-1], []
    for index, single in enumerate(split_operands(value.strip("{}"))):
        pseudo = f"{name}+{int(offset or 0) + index * type_bytes(type_name)}"
        registers.setdefault(pseudo, f"b{max(16, 8 * type_bytes(type_name))}")
        pair = [pseudo, single] if item.opcode.startswith("st") else [single, pseudo]
        moves.append(replace(item, opcode=f"mov.{type_name}", operands=pair))
    return moves


def _call(item, rename, functions, registers, out, local, shared, stack) -> None:
    operands = [rename(o) for o in item.operands]
    returns = split_operands(operands.pop(0).strip("()")) if operands[0].startswith("(") else []
    name, arguments = operands[0], split_operands(operands[1].strip("()")) if len(operands) > 1 else []
    if name in RUNTIME_CALLS:
        pseudos = [f"{argument}+0" for argument in arguments]
        out.append(replace(item, opcode=f"call.{name}", operands=pseudos))
        for result in returns:
            registers.setdefault(f"{result}+0", "b32")
            out.append(
                Instruction("mov.b32", [f"{result}+0", "0"], item.guard, item.negated, item.ptx_line, item.location)
            )
        return
    if name not in functions:
        raise UnknownInstruction(
            f"{item.where()}: call of {name!r}, which this PTX does not define; the simulator models printf and assert"
            " and functions of the same file. Define the function in the kernel's file."
        )
    if name in stack:
        raise UnknownInstruction(f"{item.where()}: {name!r} calls itself; recursion is not modelled, use a loop")
    callee = functions[name]
    aliases = dict(zip([p.name for p in callee.parameters] + callee.returns, arguments + returns))
    prefix = f"{name}.{len(out)}."
    skip = f"{prefix}skip"
    if item.guard:
        out.append(Instruction("bra", [skip], rename(item.guard), not item.negated, item.ptx_line, item.location))
    _inline(callee, functions, registers, out, local, shared, prefix, aliases, stack + (name,))
    if item.guard:
        out.append(skip)
