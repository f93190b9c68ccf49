"""The dense call on the reference backend: numbers, layouts, outputs, choice of backend, refusals."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_right, calc_diff, part, random, refused

import fp8_gemm
from fp8_gemm import Problem, ScaledTensor, dispatch, gemm, quantize
from fp8_gemm.problem import RECIPE_PAIRS
from hopperlab.reference import matmul_exact, matmul_hopper

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 1, 1), (1, 33, 576), (3, 8, 127), (16, 130, 128), (129, 40, 300), (130, 257, 129)]


def pair(m, n, k, recipe=("1x128", "128x128"), formats=("e4m3", "e4m3"), seed=0):
    return (quantize(random(m, k, seed=seed), recipe[0], formats[0]),
            quantize(random(n, k, seed=seed + 1), recipe[1], formats[1]))  # fmt: skip


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPE_PAIRS, ids=str)
def test_every_recipe_on_ragged_shapes(recipe, shape):
    a, b = pair(*shape, recipe)
    assert_right(gemm(a, b, out_dtype=FP32), a, b)


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_formats_and_output_types_with_bias_and_c(formats, out_dtype):
    a, b = pair(5, 34, 257, formats=formats)
    bias, c = random(34, seed=5, dtype=FP16), random(5, 34, seed=6, dtype=out_dtype)
    kept = c.clone()
    assert_right(gemm(a, b, bias=bias, c=c, out_dtype=out_dtype), a, b, bias=bias, c=c)
    assert torch.equal(c, kept), "c was written"
    out = torch.full((5, 34), torch.nan, dtype=out_dtype)
    assert gemm(a, b, bias=bias, c=c, out=out, out_dtype=out_dtype) is out
    assert_right(out, a, b, bias=bias, c=c)
    out = c.clone()
    gemm(a, b, c=out, out=out, out_dtype=out_dtype)
    assert_right(out, a, b, c=c)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe, interval", [(("1x128", "128x128"), 128), (("1x128", "1x128"), 128), (("row", "row"), 256),
                                              (("tensor", "row"), None)])  # fmt: skip
def test_exact_gives_the_bits_of_the_kernels(recipe, interval, seed):
    a, b = pair(6, 20, 400, recipe, seed=seed)
    got = gemm(a, b, interval=interval, bias=random(20), exact=True)
    assert torch.equal(got, matmul_hopper(a, b, interval=interval, bias=random(20)))


def test_a_row_does_not_depend_on_the_batch_when_batch_invariant():
    a, b = pair(70, 40, 500)
    whole = gemm(a, b, batch_invariant=True)
    for rows in (1, 16, 33):
        assert torch.equal(gemm(part(a, 0, rows), b, batch_invariant=True), whole[:rows])


@pytest.mark.parametrize("m, n, k", [(0, 5, 128), (5, 0, 128), (5, 6, 0), (0, 0, 0)])
def test_empty_dimensions(m, n, k):
    a, b, bias = random(m, k), random(n, k), random(n)
    assert gemm(a, b).shape == (m, n)
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=FP32), (torch.zeros(m, n) if k == 0 else torch.empty(m, n)) + bias)
    c = random(m, n)
    assert torch.equal(gemm(a, b, c=c, out_dtype=FP32), c)


@pytest.mark.parametrize("k", [100_000, 131_073])
def test_very_long_k(k):
    a, b = pair(2, 3, k)
    assert_right(gemm(a, b, out_dtype=FP32), a, b)


# ---------------------------------------------------------------- inputs that broke others


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1e-4])
@pytest.mark.parametrize("recipe", RECIPE_PAIRS, ids=str)
def test_zero_and_tiny_blocks_are_not_flushed(recipe, size):
    """No scale of 0, so no NaN; no floor under amax, so small activations survive."""
    x, w = random(4, 300), random(8, 300, seed=1)
    x[:, 128:256] = 0
    x[1] *= size
    w[:, :128] *= size
    got = gemm(x, w, recipe=recipe, out_dtype=FP32)
    a, b = quantize(x, recipe[0]), quantize(w, recipe[1])
    assert_right(got, a, b)
    if size == 0.0:
        assert not got[1].any() if recipe[0] != "tensor" else True
    elif recipe == ("1x128", "1x128"):
        assert calc_diff(got[1], x[1] @ w.t()) < 2e-3


@pytest.mark.parametrize("value", [448.0, 500.0, 1e30, 65504.0])
def test_large_values_saturate_and_never_become_nan(value):
    x, w = random(3, 256), random(5, 256, seed=1)
    x[1, 7], x[2, 200] = value, -value
    assert_right(gemm(x, w, out_dtype=FP32), quantize(x, "1x128"), quantize(w, "128x128"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row, column", [(0, 0), (2, 255), (1, 130)])
def test_a_bad_element_spoils_its_own_row_only(bad, row, column):
    x, w = random(3, 256), random(5, 256, seed=1)
    clean = gemm(x, w)
    x[row, column] = bad
    got = gemm(x, w)
    assert got[row].isnan().all()
    others = [i for i in range(3) if i != row]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("fault, caught", [("element", 2), ("row", 40), ("tile", 32 * 32), ("column", 70)])
def test_the_assertion_of_these_tests_sees_local_faults(fault, caught):
    """One number for the whole matrix hides a wrong row or tile; every element is compared here."""
    a, b = pair(70, 40, 256)
    got = gemm(a, b, out_dtype=FP32)
    wrong = got.clone()
    {"element": lambda: wrong[3, 4].mul_(1.02), "row": lambda: wrong[5].copy_(got[6]),
     "tile": lambda: wrong[32:64, :32].zero_(), "column": lambda: wrong[:, -1].zero_()}[fault]()  # fmt: skip
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_right(wrong, a, b)


# ---------------------------------------------------------------- layouts and views


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_layouts_of_plain_tensors(layout):
    a, b = random(5, 200), random(9, 200, seed=1)
    given_a = a.t().contiguous() if layout[0] == "t" else a
    given_b = b.t().contiguous() if layout[1] == "n" else b
    assert torch.equal(gemm(given_a, given_b, layout=layout), gemm(a, b))


@pytest.mark.parametrize("view", [
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    lambda x: torch.stack([x, x], 2)[:, :, 0],
    lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    lambda x: x.clone().requires_grad_(),
], ids=["transposed", "window", "strided", "offset", "requires_grad"])  # fmt: skip
def test_views_of_plain_tensors(view):
    a, b = random(6, 300), random(10, 300, seed=1)
    assert torch.equal(gemm(view(a), view(b)), gemm(a, b))


@pytest.mark.parametrize("rows", [1, 5])
def test_expanded_inputs(rows):
    row, b = random(1, 300), random(10, 300, seed=1)
    assert torch.equal(gemm(row.expand(rows, 300), b), gemm(row, b).expand(rows, 10))


def test_misaligned_fp8_data_and_rows_of_any_pitch():
    wide = quantize(random(6, 400), "row")
    b = quantize(random(10, 131, seed=1), "row")
    window = ScaledTensor(wide.data[1:, 3:134], wide.scale[1:].contiguous(), "row")
    packed = ScaledTensor(window.data.contiguous(), window.scale, "row")
    assert torch.equal(gemm(window, b), gemm(packed, b))


@pytest.mark.parametrize("leading", [(2, 3), (1, 1, 4), (0, 3), (2, 1)])
def test_leading_dimensions_come_back(leading):
    x, w, c = random(*leading, 130), random(7, 130, seed=1), random(*leading, 7, dtype=BF16)
    flat = gemm(x.reshape(-1, 130), w, c=c.reshape(-1, 7))
    assert torch.equal(gemm(x, w, c=c), flat.view(*leading, 7))
    out = torch.empty(*leading, 7, dtype=BF16)
    assert gemm(x, w, c=c, out=out) is out and torch.equal(out, flat.view(*leading, 7))
    assert gemm(x, w, c=c, out=c) is c and torch.equal(c, out)


# ---------------------------------------------------------------- FP8 output


@pytest.mark.parametrize("out_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_output_is_the_quantised_fp32_result(out_dtype):
    a, b = pair(5, 300, 256)
    got, want = gemm(a, b, out_dtype=out_dtype), quantize(gemm(a, b, out_dtype=FP32), "1x128", out_dtype)
    assert got.recipe == "1x128" and got.data.dtype == out_dtype
    assert torch.equal(got.scale, want.scale) and torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


# ---------------------------------------------------------------- refusals

X, W = random(4, 256), random(8, 256, seed=1)
A, B = quantize(X, "1x128"), quantize(W, "128x128")


@pytest.mark.parametrize("call, error, words", [
    (lambda: gemm([1], W), TypeError, ["a is a list", "torch.Tensor"]),
    (lambda: gemm(X, fp8_gemm.quantize_grouped(W[None])), TypeError, ["b is a GroupedTensor", "grouped_gemm"]),
    (lambda: gemm(X.double(), W), TypeError, ["a has dtype torch.float64", "a.float()"]),
    (lambda: gemm(X, W.long()), TypeError, ["b has dtype torch.int64", "b.float()"]),
    (lambda: gemm(A.data, W), TypeError, ["a has dtype torch.float8_e4m3fn", "ScaledTensor(a, scale, recipe)"]),
    (lambda: gemm(X[0], W), ValueError, ["a has shape (256,)", "x[None]"]),
    (lambda: gemm(X, W[None]), ValueError, ["b has shape (1, 8, 256)", "grouped_gemm"]),
    (lambda: gemm(X[None], W, layout="tn"), ValueError, ["a has shape (1, 4, 256)", "(K, M)"]),
    (lambda: gemm(X, W.t()), ValueError, ["b has shape (256, 8)", "a (4, 256)", "transpose b"]),
    (lambda: gemm(X, W, layout="NT"), ValueError, ["layout is 'NT'", "'nt'"]),
    (lambda: gemm(X, B, layout="nn"), ValueError, ["b is a ScaledTensor", "quantize(x.t(), '128x128')", "layout='nt'"]),
    (lambda: gemm(A, W, layout="tt"), ValueError, ["a is a ScaledTensor", "quantize(x.t(), '1x128')"]),
    (lambda: gemm(X, W, recipe="1x128"), ValueError, ["recipe is '1x128'", "pair"]),
    (lambda: gemm(X, W, recipe=("1x128", "row")), ValueError, ["recipe is ('1x128', 'row')", "('row', 'row')"]),
    (lambda: gemm(X, W, out_dtype=torch.int8), ValueError, ["out_dtype is torch.int8", "torch.bfloat16"]),
    (lambda: gemm(X, W, c=random(4, 8)), TypeError, ["c has dtype torch.float32", "out_dtype=torch.float32"]),
    (lambda: gemm(X, W, c=random(8, 4, dtype=BF16)), ValueError, ["c has shape (8, 4)", "(4, 8)"]),
    (lambda: gemm(X, W, c=[1]), TypeError, ["c is a list", "torch.Tensor"]),
    (lambda: gemm(X, W, c=torch.empty(4, 8, dtype=BF16, device="meta")), ValueError, ["c is on meta", "c.to('cpu')"]),
    (lambda: gemm(X.clone().requires_grad_(), W, c=random(4, 8)), TypeError, ["c has dtype torch.float32", "out_dtype"]),
    (lambda: gemm(X[None, None], W, c=random(4, 8, dtype=BF16)), ValueError, ["c has shape (4, 8)", "(1, 1, 4, 8)"]),
    (lambda: gemm(X.view(2, 2, -1), W, out=torch.empty(8, 2, 2, dtype=BF16).permute(1, 2, 0)),
     ValueError, ["out has strides", "contiguous()"]),
    (lambda: gemm(X, W, out=torch.empty(4, 8)), TypeError, ["out has dtype torch.float32", "out_dtype=torch.float32"]),
    (lambda: gemm(X, W, out=torch.empty(4, 8), out_dtype=torch.float8_e5m2), ValueError, ["out_dtype", "out cannot be given"]),
    (lambda: gemm(X.clone().requires_grad_(), W, out=torch.empty(4, 8, dtype=BF16)),
     ValueError, ["out", "requires grad", "no_grad"]),
    (lambda: gemm(X, W, interval=64), ValueError, ["interval is 64", "multiples of 128"]),
    (lambda: gemm(X, W, backend="gpu"), ValueError, ["backend is 'gpu'", "'reference'"]),
    (lambda: gemm(X, W, backend="cuda"), RuntimeError, ["backend is 'cuda'", "CUDA tensors", "x.to('cuda')"]),
    (lambda: gemm(X, W, block_m=64), ValueError, ["block_m", "'reference'", "backend='cuda'"]),
    (lambda: gemm(X, W, bias=random(7)), ValueError, ["bias has shape (7,)", "(8,)"]),
    (lambda: ScaledTensor(A.data, A.scale.t(), "1x128"),
     ValueError, ["scale has shape (2, 4)", "transposed", "scale.t().contiguous()"]),
    (lambda: ScaledTensor(A.data, A.scale.contiguous().repeat(1, 2)[:, ::2], "1x128"), ValueError, ["scale has strides", "contiguous()"]),
    (lambda: ScaledTensor(A.data, A.scale.to(BF16), "1x128"), TypeError, ["scale has dtype torch.bfloat16", "scale.float()"]),
    (lambda: ScaledTensor(A.data, A.scale.reshape(2, 4).reshape(-1), "1x128"), ValueError, ["scale", "(8,)", "reshape((4, 2))"]),
])  # fmt: skip
def test_refusals_name_the_argument_and_the_fix(call, error, words):
    with refused(error, *words):
        call()


# ---------------------------------------------------------------- dispatch


@pytest.fixture
def kernels(monkeypatch):
    """A stand-in for the CUDA kernels that records what it is asked for."""
    calls = []
    plan = SimpleNamespace(plan=lambda problem, sms, **overrides: SimpleNamespace(seconds=1e-5))
    monkeypatch.setitem(sys.modules, "fp8_gemm.plan", plan)

    def run(problem, operands, out, **overrides):
        calls.append((problem, overrides))
        out.fill_(7)

    monkeypatch.setattr(dispatch, "_run_function", lambda name: run)
    monkeypatch.setattr(dispatch, "_obstacle", lambda name, problem, device: None)
    dispatch._chosen.cache_clear()
    yield calls
    dispatch._chosen.cache_clear()


def test_the_cpu_runs_the_fallback_unless_the_simulator_is_asked_for(kernels):
    assert dispatch.choose(Problem("dense", 1, 1, 1), torch.device("cpu"))[0] == "reference"
    out = gemm(X, W, backend="simulator", block_m=64, num_stages=3)
    assert (out == 7).all() and kernels == [(Problem("dense", 4, 8, 256), {"block_m": 64, "num_stages": 3})]


def test_the_environment_forces_a_backend(kernels, monkeypatch):
    monkeypatch.setenv("FP8_GEMM_BACKEND", "simulator")
    gemm(X, W)
    assert len(kernels) == 1
    gemm(X, W, backend="reference")  # an argument is stronger
    text = str(fp8_gemm.explain(X, W))
    assert "backend: simulator (forced by FP8_GEMM_BACKEND)" in text and "predicted: 10.0 µs" in text
    monkeypatch.setenv("FP8_GEMM_BACKEND", "gpu")
    with refused(ValueError, "FP8_GEMM_BACKEND is 'gpu'", "'cuda'"):
        gemm(X, W)


@pytest.mark.parametrize("capability, chosen, words", [
    ((9, 0), "cuda", ["not triton: cuda is faster here"]),
    ((8, 9), "triton", ["sm_89", "9.0 alone"]),
    ((10, 0), "triton", ["sm_100", "9.0 alone"]),
    ((8, 0), "reference", ["not triton: a card has no FP8", "8.9"]),
])  # fmt: skip
def test_the_card_decides(monkeypatch, capability, chosen, words):
    monkeypatch.setattr(dispatch, "_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    find_spec = dispatch.importlib.util.find_spec
    monkeypatch.setattr(dispatch.importlib.util, "find_spec",
                        lambda name: object() if name == "fp8_gemm.kernels" else find_spec(name))  # fmt: skip
    backend, forced, reasons = dispatch.choose(Problem("dense", 64, 64, 128), torch.device("cuda", 0))
    assert backend == chosen and forced is None
    text = "\n".join(f"not {name}: {reason}" for name, reason in reasons.items())
    assert all(word in text for word in words), text
    assert "simulator" in reasons and "x.to('cpu')" in reasons["simulator"]


def test_explanation_reads_well_and_runs_nothing():
    explanation = fp8_gemm.explain(X, B, bias=random(8), out_dtype=FP32)
    assert explanation.problem == Problem("dense", 4, 8, 256, bias=True, out_dtype=FP32)
    assert explanation.backend == "reference" and set(explanation.reasons) == {"cuda", "simulator", "triton"}
    text = str(explanation)
    assert text.startswith("dense GEMM, M = 4, N = 8, K = 256: e4m3 1x128 x e4m3 128x128 -> float32, on cpu")
    assert "x.to('cuda')" in text and repr(explanation) == text


@pytest.mark.parametrize("arguments, problem", [
    (dict(a=X, b=W[None].expand(3, 8, 256), counts=torch.tensor([1, 1, 2])), Problem("contiguous", 4, 8, 256, 3)),
    (dict(a=X[None], b=W[None], masked_m=torch.tensor([3])), Problem("masked", 4, 8, 256, 1)),
    (dict(a=X, b=W, k_offsets=torch.tensor([0, 9, 256]), out_dtype=FP32),
     Problem("k_grouped", 4, 8, 256, 2, "1x128", "1x128", out_dtype=FP32)),
    (dict(a=X[None, None], b=quantize(W, "row", "e5m2"), recipe=("row", "row")),
     Problem("dense", 4, 8, 256, recipe_a="row", recipe_b="row", format_b="e5m2")),
    (dict(a=Problem("masked", 4, 8, 256, 2)), Problem("masked", 4, 8, 256, 2)),
])  # fmt: skip
def test_explain_knows_every_kind(arguments, problem):
    assert fp8_gemm.explain(**arguments).problem == problem


def test_explain_refuses_two_kinds_at_once_and_unequal_k():
    with refused(ValueError, "contiguous and masked", "one call"):
        fp8_gemm.explain(X, W[None], counts=torch.tensor([4]), masked_m=torch.tensor([4]))
    with refused(ValueError, "b has shape (256, 8)", "K"):
        fp8_gemm.explain(X, W.t())


@pytest.mark.parametrize("kind, options", [("dense", {}), ("contiguous", {"groups": 3}), ("masked", {"groups": 2}),
                                           ("k_grouped", {"groups": 2, "recipe_b": "1x128", "out_dtype": FP32})])  # fmt: skip
def test_warmup_runs_every_kind_of_shape(kind, options):
    done = fp8_gemm.warmup([(5, 8, 300), Problem("dense", 0, 4, 4)], device="cpu", kind=kind, **options)
    assert [e.problem.m for e in done] == [5, 0] and all(e.backend == "reference" for e in done)
    assert [e.problem.m for e in fp8_gemm.warmup([(8, 128)], device="cpu")] == list(dispatch.WARMUP_ROWS)
    with refused(ValueError, "shapes holds (1,)", "(N, K)"):
        fp8_gemm.warmup([(1,)], device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU warm-up runs what it compiles; this is warm-up where there is none")
def test_warmup_without_a_gpu_fills_the_cache_for_an_h200(tmp_path, monkeypatch):
    """What a call on an H200 compiles, quantisation of plain operands included, is then on disk: nothing compiles again."""
    from fp8_gemm import kernels
    from fp8_gemm.kernels import quantize as quantisers
    from hopperlab import compile as compiler

    monkeypatch.delenv("FP8_GEMM_BACKEND", raising=False)
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))

    def start_process():
        kernels.kernel.cache_clear()
        quantisers.kernel.cache_clear()

    start_process()
    shapes = [(16, 64, 256), Problem("masked", 8, 64, 256, 2), Problem("dense", 0, 4, 4),
              Problem("dense", 16, 64, 256, out_dtype=torch.float8_e4m3fn)]  # fmt: skip
    first = fp8_gemm.warmup(shapes)
    assert all(e.backend == "cuda" and e.plan.num_sms == 132 and "compiled for an H200" in str(e) for e in first)
    assert first[3].problem.out_dtype == torch.float32
    assert len(list((tmp_path / "entries").rglob("*/*"))) == 4  # three GEMM kernels; the casts are one file

    start_process()
    monkeypatch.setattr(compiler, "_nvrtc", lambda *arguments: pytest.fail("compiled again"))
    made = kernels.kernel(tuple(kernels.constants_of(first[0].problem, first[0].plan).items()))
    assert made.compiled.cubin
    for recipe in ("1x128", "128x128"):
        assert all(one.compiled.cubin for one in quantisers.kernels_for(torch.bfloat16, recipe, "e4m3", 256))
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        assert quantisers.kernels_for(torch.float32, "1x128", "e4m3", 256)[0].compiled.cubin
    assert fp8_gemm.warmup([(16, 64, 256)], backend="reference")[0].backend == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU warm-up runs what it compiles; this is warm-up where there is none")
@pytest.mark.parametrize("kind, groups", [("dense", 1), ("contiguous", 8), ("masked", 8)])
def test_after_warmup_no_m_compiles(request, tmp_path, monkeypatch, kind, groups):
    """(N, K) alone stands for every M: here and in the next process nothing reaches the compiler, and here not even the disk."""
    from fp8_gemm import kernels
    from fp8_gemm.kernels import quantize as quantisers
    from hopperlab import compile as compiler

    weights, calls = [(4096, 7168), (7168, 2048)] if kind == "dense" else [(256, 512)], {"source": 0, "nvrtc": 0}
    compile_source = compiler.compile_source

    def count_source(*arguments):
        calls["source"] += 1
        return compile_source(*arguments)

    def count_nvrtc(*arguments):
        calls["nvrtc"] += 1
        return compiler.Compiled("", b"", "")

    monkeypatch.delenv("FP8_GEMM_BACKEND", raising=False)
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_source", count_source)
    monkeypatch.setattr(compiler, "_nvrtc", count_nvrtc)
    for cached in (kernels.kernel, quantisers.kernel):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)  # these kernels are empty
    done = fp8_gemm.warmup(weights, kind=kind, groups=groups)
    assert all(kind == e.problem.kind and "compiled for an H200" in str(e) for e in done) and len(done) <= 20 * len(weights)
    assert calls["nvrtc"] >= len({kernels.kernel_of(e.problem, e.plan) for e in done}) > 4

    def call_all():
        for n, k in weights:
            for m in range(1, 8193):
                problem = Problem(kind, m, n, k, groups)
                assert kernels.kernel_of(problem, kernels.plan_for(problem, torch.device("cpu"))).compiled is not None

    calls.update(source=0, nvrtc=0)
    call_all()
    assert calls == {"source": 0, "nvrtc": 0}
    kernels.kernel.cache_clear()  # as in a new process
    call_all()
    assert 0 < calls["source"] <= len(done) and calls["nvrtc"] == 0


# ---------------------------------------------------------------- importing


def test_importing_is_light():
    code = ("import sys, torch, fp8_gemm; "
            "print([m for m in ('triton', 'cuda.bindings', 'cuda.core', 'matplotlib', 'pynvml', 'hopperlab.sim') "
            "if m in sys.modules and m not in set(torch_only)])")  # fmt: skip
    before = "import sys, torch; torch_only = list(sys.modules)\n"
    got = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert got.stdout.strip() == "[]"


def test_public_names_are_there():
    assert all(getattr(fp8_gemm, name) is not None for name in fp8_gemm.__all__)
    assert callable(fp8_gemm.gemm) and callable(fp8_gemm.quantize)
    assert fp8_gemm.deep_gemm.ceil_div(5, 4) == 2  # loaded when asked for
    importlib.import_module("fp8_gemm.gemm")  # loading the module of that name again must not hide the function
    assert callable(fp8_gemm.gemm)
    with pytest.raises(AttributeError, match="no attribute 'gem'"):
        fp8_gemm.gem  # noqa: B018


def test_error_against_the_originals_is_what_fp8_gives():
    x, w = random(64, 1024), random(96, 1024, seed=1)
    assert 3e-4 < calc_diff(gemm(x, w), x @ w.t()) < 1.5e-3
    exact = matmul_exact(quantize(x, "1x128"), quantize(w, "128x128"))
    assert torch.allclose(exact.float(), gemm(x, w, out_dtype=FP32), atol=1e-3)
