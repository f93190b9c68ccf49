"""Writes docs/api.md, the reference of the library, from its docstrings: python docs/make_api.py, or make api."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import fp8_gemm

PAGE = Path(__file__).with_name("api.md")
MODULES = ("deep_gemm", "nn", "parallel", "monitor")  # beside fp8_gemm itself
WIDTH = 110  # columns of a signature in one line
HEAD = """# API reference

Written by `make api` from the docstrings; edit those. How to use it all: [library.md](library.md), [integration.md](integration.md).
"""


def public(module) -> dict[str, object]:
    """The module's public names: its __all__, else the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in vars(module).items()
            if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__}  # fmt: skip


def members(cls: type) -> dict[str, object]:
    """What a class defines beside its fields: its public methods and properties. Those of its bases stand with them."""
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and name != "extra_repr"
            and (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))}  # fmt: skip


def documentation(value) -> str:
    """The docstring that was written for it; dataclasses make one of their own where there is none."""
    text = inspect.cleandoc(value.__doc__ or "")  # its own: getdoc would look at bases outside of the project
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text


def signature(name: str, value) -> str:
    """name(parameters) -> result, over several lines where it is long."""
    if isinstance(value, property):
        return name + _result(value.fget)
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    keyword_only = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    shown = [_short(str(p)) for p in parameters]
    if keyword_only is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown.insert(keyword_only, "*")
    result = "" if inspect.isclass(value) else _result(function)
    line = f"{name}({', '.join(shown)}){result}"
    return line if len(line) <= WIDTH else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){result}"


def _result(function) -> str:
    annotation = inspect.signature(function).return_annotation
    if annotation is inspect.Signature.empty:
        return ""
    return " -> " + _short(inspect.formatannotation(annotation))


def _short(text: str) -> str:
    """Types and functions by their own names, memory addresses left out."""
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"\b(?:fp8_gemm|hopperlab|collections|typing)\.(?:\w+\.)*(?=\w)", "", text).replace("'", '"')


def markdown(text: str) -> str:
    """A docstring as Markdown: paragraphs whose columns are aligned keep them, others flow."""
    parts = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        indented = all(line.startswith("    ") for line in lines)
        aligned = any(re.search(r"\S {2,}\S", line) or line.startswith(" ") for line in lines)
        parts.append(f"```text\n{paragraph}\n```" if aligned and not indented else paragraph)
    return "\n\n".join(parts)


def entries(module) -> Iterator[str]:
    """The module's names, each with its signature and docstring, in the order of the module."""
    documented = [fp8_gemm.__name__, *(f"fp8_gemm.{name}" for name in MODULES)]
    for name, value in public(module).items():
        known_as = getattr(value, "__name__", name)
        yield f"### {module.__name__.removeprefix('fp8_gemm.') + '.' if module is not fp8_gemm else ''}{name}"
        if known_as != name:
            yield f"The same as `{known_as}`."
        elif not callable(value):
            yield f"```py\n{name} = {value!r}\n```"
        else:
            yield f"```py\n{signature(name, value)}\n```"
            yield markdown(documentation(value))
            bases = [base.__name__ for base in getattr(value, "__bases__", ()) if base.__module__ in documented and base.__name__[0] != "_"]
            if bases:
                yield f"Has the methods of {', '.join(f'`{base}`' for base in bases)} as well."
            for member, method in members(value).items() if inspect.isclass(value) else ():
                yield f"**`{name}.{member}`**"
                yield f"```py\n{signature(member, method)}\n```"
                yield markdown(documentation(getattr(value, member)))


def page() -> str:
    """The whole of docs/api.md."""
    parts = [HEAD.rstrip()]
    for module in (fp8_gemm, *(importlib.import_module(f"fp8_gemm.{name}") for name in MODULES)):
        parts += [f"## {module.__name__}", markdown(inspect.getdoc(module)), *entries(module)]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
