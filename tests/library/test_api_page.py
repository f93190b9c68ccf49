"""docs/api.md is what the docstrings say, and the docstrings say what a caller needs."""

import importlib
import importlib.util
import inspect
import re

import pytest
import torch

import fp8_gemm
from hopperlab import stage


def load_generator():
    spec = importlib.util.spec_from_file_location("make_api", stage.root() / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api = load_generator()
SHAPE = re.compile(r"\((?:…|\w[\w·/ ]*)(?:, (?:\w[\w·/ ()]*)?)+\)|scale_shape")  # (M, K), (groups + 1,), (…, K)
REFERS = re.compile(r"\b[Aa]s (?:[A-Z]\w*|\w*_\w*|\w+\.\w+|gemm|quantize)|by its (?:first )?name|The same as|'s\b")
ERRORS = re.compile(r"[Rr]aises|[Ee]rrors|[Rr]aised|[Rr]aising|refused")


def public() -> dict[str, object]:
    """Every documented function, class, method and property, by its dotted name."""
    found = {}
    for module in (fp8_gemm, *(importlib.import_module(f"fp8_gemm.{name}") for name in make_api.MODULES)):
        prefix = module.__name__
        for name, value in make_api.public(module).items():
            if callable(value) and value.__name__ == name:
                found[f"{prefix}.{name}"] = value
                if inspect.isclass(value):
                    found |= {f"{prefix}.{name}.{member}": getattr(value, member) for member in make_api.members(value)}
    return found


PUBLIC = public()


def source_raises(value) -> bool:
    """Whether calling it, or constructing it, raises in its own code."""
    if inspect.isclass(value):
        return any("raise " in inspect.getsource(vars(value)[name]) for name in ("__init__", "__post_init__") if name in vars(value)
                   and vars(value)[name].__module__ == value.__module__ and "<string>" not in vars(value)[name].__code__.co_filename)  # fmt: skip
    return inspect.isroutine(value) and "raise " in inspect.getsource(value)


def takes_tensors(value) -> bool:
    if not inspect.isroutine(value):
        return False
    return any("Tensor" in str(parameter.annotation) for parameter in inspect.signature(value).parameters.values())


def test_the_page_is_what_the_docstrings_say():
    assert make_api.PAGE.read_text() == make_api.page(), "run: make api"


def test_everything_public_is_on_the_page():
    page = make_api.page()
    for name in fp8_gemm.__all__:
        assert f"\n### {name}\n" in page
    for name in ("deep_gemm.fp8_gemm_nt", "nn.Linear", "nn.convert", "parallel.ExpertParallelExperts", "monitor.Monitor"):
        assert f"\n### {name}\n" in page


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    value = PUBLIC[name]
    text = make_api.documentation(value)
    assert text, f"{name} has no docstring"
    if takes_tensors(value):
        assert SHAPE.search(text) or REFERS.search(text), f"{name} takes tensors, and its docstring gives no shape"
    if source_raises(value):
        assert ERRORS.search(text), f"{name} raises, and its docstring does not say what"


def test_defaults_are_shown_as_they_are_written():
    assert "interval: int | None = 128" in make_api.signature("gemm", fp8_gemm.gemm)
    assert torch.bfloat16 is inspect.signature(fp8_gemm.gemm).parameters["out_dtype"].default
