"""Names of what lies in shared memory behind `Shared& shared = *reinterpret_cast<Shared*>(raw)`.

PTX knows dynamic shared memory as one run of bytes, so the layout of the struct is worked out from the CUDA source. A wrong
name is worse than an address: whatever this reader does not understand in full (conditional compilation, types and
expressions beyond the plain ones, a second use of the bytes) makes it give up, and reports say the address.
"""

import ast
import contextlib
import operator
import re
from dataclasses import dataclass

_SIZES = {
    1: "u8 s8 char bool", 2: "u16 s16 short bf16 fp16", 4: "u32 s32 int unsigned float f32", 8: "u64 s64 double f64 float2 int2 uint2",
    16: "float4 int4 uint4",
}  # fmt: skip
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_SIZE_OF |= {"unsigned char": 1, "unsigned short": 2, "unsigned int": 4, "long long": 8, "unsigned long long": 8}
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FOR_NATURALS = (ast.Div, ast.Mod, ast.LShift, ast.RShift, ast.BitAnd)  # of negative numbers C and Python make different things
_ALIGNED = r"(?:alignas|__align__)\s*\([^()]*\)\s*"
_MEMBER = re.compile(rf"(?P<align>{_ALIGNED})?(?P<type>[A-Za-z]\w*(?: \w+)*) (?P<names>[A-Za-z_]\w*\b.*)")


class _Unclear(Exception):
    """The source says something that this reader does not understand."""


@dataclass(frozen=True)
class Member:
    """A member of the struct: its first byte, the bytes of an element, and the array's dimensions (none for a scalar)."""

    name: str
    offset: int
    element: int
    dimensions: tuple[int, ...]

    @property
    def end(self) -> int:
        size = self.element
        for count in self.dimensions:
            size *= count
        return self.offset + size

    def place(self, offset: int) -> tuple[str, int]:
        """'a[1]' and the bytes from there to an offset of the struct.

        Barriers have all their indices; of a tile's array the last one, which counts elements of the tile, is left in bytes.
        """
        text, rest, size = self.name, offset - self.offset, self.end - self.offset
        for count in self.dimensions if self.element == 8 else self.dimensions[:-1]:
            size //= count
            text += f"[{rest // size}]"
            rest %= size
        return text, rest


def shared_members(source: str, entry: str, symbol: str, constants: dict | None) -> list[Member]:
    """Members of the struct that kernel `entry` lays over the shared variable `symbol`; none where the source leaves a doubt.

    constants: the macros that the source was compiled with.
    """
    try:
        text = re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', " ", source, flags=re.S)
        macros = _macros(text, constants or {})
        text = re.sub(r"^\s*#[^\n]*", "", text, flags=re.M)
        struct = _struct_over(text, entry, symbol)
        if {symbol, struct} & macros.keys():
            raise _Unclear
        before, body = _split_at_struct(text, struct)
        sizes = _types(before, macros)
        return _members(body, _Values(macros, before, sizes), sizes)
    except _Unclear:
        return []


def find(members: list[Member], offset: int) -> tuple[str, int] | None:
    """(name, bytes from its start) of what lies at an offset of the struct; None in padding and outside."""
    return next((m.place(offset) for m in members if m.offset <= offset < m.end), None)


def _macros(text, constants) -> dict[str, str]:
    if "\\\n" in text or re.search(r"^\s*#\s*(if|ifdef|ifndef|undef|pragma\s+pack)\b", text, re.M):
        raise _Unclear
    macros = {name: str(int(value) if isinstance(value, bool) else value) for name, value in constants.items()}
    for name, value in re.findall(r"^\s*#\s*define\s+(\w+)(?!\()\b[ \t]*([^\n]*)", text, re.M):
        if name in macros:
            raise _Unclear
        macros[name] = value
    return macros


def _struct_over(text, entry, symbol) -> str:
    """Name of the struct that the kernel's only use of the symbol casts it to."""
    heads = re.findall(rf"\b{re.escape(entry)}\s*\([^{{;]*\)\s*\{{", text)
    if len(heads) != 1:
        raise _Unclear
    body = _block(text, text.index(heads[0]) + len(heads[0]))
    body = re.sub(rf"extern\s+__shared__[^;]*\b{symbol}\s*\[\s*\]\s*;", "", body)
    cast = re.findall(rf"reinterpret_cast<\s*(\w+)\s*\*\s*>\s*\(\s*{symbol}\s*\)\s*;|\(\s*(\w+)\s*\*\s*\)\s*{symbol}\s*;", body)
    if len(cast) != 1 or len(re.findall(rf"\b{symbol}\b", body)) != 1:
        raise _Unclear
    return cast[0][0] or cast[0][1]


def _block(text, start) -> str:
    """The text from start, which follows an opening brace, to the brace that closes it."""
    depth = 1
    for found in re.finditer(r"[{}]", text[start:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return text[start : start + found.start()]
    raise _Unclear


def _split_at_struct(text, name) -> tuple[str, str]:
    """What stands before the struct outside of all braces, and the struct's body."""
    heads = list(re.finditer(rf"\bstruct\s+(?:{_ALIGNED})?{re.escape(name)}\s*\{{", text))
    if len(heads) != 1:
        raise _Unclear
    before = text[: heads[0].start()]
    if before.count("{") != before.count("}") or re.search(r"template\s*<[^;{}]*>\s*$", before):
        raise _Unclear
    while "{" in before:
        shorter = re.sub(r"\{[^{}]*\}", ";", before)
        if shorter == before:
            raise _Unclear
        before = shorter
    return before, _block(text, heads[0].end())


def _types(before, macros) -> dict[str, int]:
    """Sizes of the known types that the source does not define itself."""
    own = {*re.findall(r"\btypedef\b[^;]*?(\w+)\s*;|\b(?:using|struct|class|enum)\s+(\w+)", before)}
    own = {name for pair in own for name in pair} | macros.keys()
    sizes = {name: size for name, size in _SIZE_OF.items() if own.isdisjoint(name.split())}
    for known, name in re.findall(r"\btypedef (\w+) (\w+)\s*;", before):
        if len(re.findall(rf"\btypedef [^;]*\b{name}\s*;", before)) == 1 and name not in _SIZE_OF and (size := sizes.get(macros.get(known, known))):
            sizes[name] = size
    return sizes


class _Values:
    """Constant expressions over macros and the constexpr integers that are defined once, before the struct."""

    def __init__(self, macros, before, sizes):
        self.sizes = sizes
        # A macro is text: `A + B` would mean something else next to a product. Those of one token are safe.
        self.numbers = {}
        for name, text in macros.items():
            if re.fullmatch(r"\s*\w+\s*", text):
                with contextlib.suppress(_Unclear):
                    self.numbers[name] = self(text)
        seen = set(macros)
        for declared in re.findall(r"\bconstexpr (?:int|unsigned|unsigned int|u32|long long|size_t|bool) ([^;]*);", before):
            for part in declared.split(","):
                name, equals, value = part.partition("=")
                if not equals or name.strip() in seen:
                    raise _Unclear
                seen.add(name.strip())
                with contextlib.suppress(_Unclear):  # unless the struct needs it
                    self.numbers[name.strip()] = self(value)
        self.names = seen

    def __call__(self, text: str) -> int:
        value = self._number(text)
        if value < 0:
            raise _Unclear
        return value

    def _number(self, text: str) -> int:
        text = re.sub(r"\b(0[xX][\da-fA-F]+|\d+)[uUlL]+\b", r"\1", text.strip())
        text = re.sub(r"\bsizeof\s*\(([\w ]+)\)", lambda found: str(self.sizes.get(found[1].strip(), "unknown")), text)
        condition, question, rest = _at_top(text, "?")
        if question:
            first, colon, second = _at_top(rest, ":")
            if not colon:
                raise _Unclear
            return self._number(first if self._number(condition) else second)
        while (found := re.search(r"\(([^()]*)\)", text)) or "(" in text:  # from the inside, since C and Python bind differently
            if not found or re.search(r"[\w)]\s*$", text[: found.start()]):  # a call, a cast before it
                raise _Unclear
            text = f"{text[: found.start()]} {self._number(found[1])} {text[found.end() :]}"
        if re.search(r"(?<!&)&(?!&)", text) and re.search(r"[<>=!|]|&&", text):
            raise _Unclear
        text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
        try:
            return self._value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ZeroDivisionError):
            raise _Unclear from None

    def _value(self, node) -> int:
        kind = type(node)
        if kind is ast.Constant and type(node.value) is int:
            value = node.value
        elif kind is ast.Name and node.id in self.numbers:
            value = self.numbers[node.id]
        elif kind is ast.UnaryOp and type(node.op) is ast.USub:
            value = -self._value(node.operand)
        elif kind is ast.UnaryOp and type(node.op) is ast.Not and type(node.operand) in (ast.Name, ast.Constant):  # else C binds it closer
            value = int(not self._value(node.operand))
        elif kind is ast.BoolOp:
            values = [bool(self._value(each)) for each in node.values]
            value = int(all(values) if type(node.op) is ast.And else any(values))
        elif kind is ast.Compare and len(node.ops) == 1:
            value = int(_OPERATORS[type(node.ops[0])](self._value(node.left), self._value(node.comparators[0])))
        elif kind is ast.BinOp and type(node.op) in _OPERATORS:
            left, right = self._value(node.left), self._value(node.right)
            if type(node.op) in _FOR_NATURALS and min(left, right) < 0 and not (type(node.op) is ast.BitAnd and left == -right):
                raise _Unclear
            value = _OPERATORS[type(node.op)](left, right)
        else:
            raise _Unclear
        if not -(1 << 31) < value < 1 << 31:  # beyond, C and Python differ
            raise _Unclear
        return value


def _at_top(text: str, mark: str) -> tuple[str, str, str]:
    """text before, at and after the first mark outside of parentheses, and, of a ':', of another '?' … ':'."""
    depth = questions = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter == mark and questions == 0:
            return text[:at], mark, text[at + 1 :]
        if depth == 0 and mark == ":":
            questions += (letter == "?") - (letter == ":")
    return text, "", ""


def _members(body, value, sizes) -> list[Member]:
    found, offset = [], 0
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        if not statement:
            continue
        match = _MEMBER.fullmatch(statement)
        if not match or match["type"] not in sizes:
            raise _Unclear
        size = sizes[match["type"]]
        align = max(size, value(re.search(r"\((.*)\)", match["align"])[1]) if match["align"] else 1)
        for declared in match["names"].split(","):
            name = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*((?:\[[^\[\]]+\]\s*)*)", declared)
            if not name or name[1] in value.names:
                raise _Unclear
            dimensions = tuple(value(d) for d in re.findall(r"\[([^\[\]]+)\]", name[2]))
            if 0 in dimensions:
                raise _Unclear
            member = Member(name[1], -(-offset // align) * align, size, dimensions)
            found.append(member)
            offset = member.end
    return found
