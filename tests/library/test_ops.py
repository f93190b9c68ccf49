"""PyTorch's side of the library: registered operators, tracing, gradients, torch.compile, autocast."""

import pytest
import torch
from helpers import calc_diff, ints, random, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fp8_gemm import (
    ScaledTensor,
    gemm,
    grouped_gemm,
    k_grouped_gemm,
    masked_gemm,
    quantize,
    quantize_grouped,
    quantize_k_grouped,
    swiglu_quantize,
)
from fp8_gemm.nn import Experts, Linear

BF16, FP32 = torch.bfloat16, torch.float32
X, W, E = random(6, 260), random(12, 260, seed=1), random(3, 12, 260, seed=2)
STACK = random(3, 4, 260, seed=3)
COUNTS, MASKED, K_OFFSETS = ints(2, 0, 4), ints(4, 0, 3), ints(0, 100, 100, 260)
OFFSETS = ints(0, 2, 2, 6)
HOW = ("1x128", "128x128", BF16, 128, None, "e4m3", "")


def pair(x, recipe):
    scaled = (quantize if x.dim() == 2 else quantize_grouped)(x, recipe)
    return scaled.data, scaled.scale


def leaf(x):
    return x.clone().requires_grad_()


OPERATORS = {
    "gemm": ((X, None, W, None, None, *HOW), (*pair(X, "1x128"), *pair(W, "128x128"), random(12), *HOW),
             (leaf(X), None, leaf(W), None, leaf(random(12)), *HOW)),
    "grouped": ((X, None, E, None, OFFSETS, None, *HOW), (X, None, *pair(E, "128x128"), OFFSETS, ints(1, 2, 5), *HOW),
                (leaf(X), None, leaf(E), None, OFFSETS, None, *HOW)),
    "masked": ((STACK, None, E, None, MASKED, *HOW), (*pair(STACK, "1x128"), *pair(E, "128x128"), MASKED, *HOW),
               (leaf(STACK), None, leaf(E), None, MASKED, *HOW)),
    "k_grouped": ((X, None, W, None, K_OFFSETS, None, FP32, None, "e4m3", ""),
                  (leaf(X), None, leaf(W), None, K_OFFSETS, ints(90, 100, 200), FP32, None, "e4m3", "")),
    "quantize": ((X, "1x128", "e4m3", 0, False), (W, "128x128", "e5m2", 1, True), (X, "row", "e4m3", 0, False)),
    "quantize_grouped": ((E, "128x128", "e4m3", 0, False), (E, "tensor", "e5m2", 2, False),
                         (E[:, :7], "1x128", "e4m3", 0, False)),
    "pack_k_groups": ((X, K_OFFSETS, None), (random(260, 6).t(), K_OFFSETS, ints(90, 100, 200)), (X[:, :0], ints(0, 0), None)),
    "gemm_out": ((X, None, W, None, None, *HOW[:5], False, "", torch.zeros(6, 12, dtype=BF16)),
                 (*pair(X, "1x128"), *pair(W, "128x128"), None, *HOW[:5], True, "", torch.zeros(6, 12, dtype=BF16))),
    "grouped_out": ((X, None, E, None, OFFSETS, None, *HOW[:5], "", torch.zeros(6, 12, dtype=BF16)),),
    "masked_out": ((STACK, None, E, None, MASKED, *HOW[:5], "", torch.zeros(3, 4, 12, dtype=BF16)),),
    "k_grouped_out": ((X, None, W, None, K_OFFSETS, None, FP32, None, True, "", torch.zeros(3, 6, 12)),),
}  # fmt: skip
CASES = [(name, i) for name, cases in OPERATORS.items() for i in range(len(cases))]


@pytest.mark.parametrize("name, case", CASES, ids=[f"{name}-{i}" for name, i in CASES])
def test_operators_keep_pytorchs_rules(name, case):
    """Schema, fake implementation, gradient registration, and the same through AOTAutograd with dynamic shapes."""
    arguments, operator = OPERATORS[name][case], getattr(torch.ops.fp8_gemm, name).default
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
        # PyTorch's schema check multiplies FP8 tensors, which torch cannot. It looks for changed inputs; so does this.
        tests.remove("test_schema")
        given = tensors[:-1] if name.endswith("_out") else tensors
        before = [tensor.detach().clone() for tensor in given]
        operator(*arguments)
        assert all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(before, given))
    torch.library.opcheck(operator, arguments, test_utils=tests)


# ---------------------------------------------------------------- shapes without data


def results(x, w, e, stack, counts, masked, k_offsets):
    return {
        "gemm": gemm(x, w, out_dtype=FP32),
        "quantised weight": gemm(x, quantize(w, "128x128")),
        "leading": gemm(x.view(2, 3, -1), w),
        "grouped": grouped_gemm(x, e, counts=counts),
        "masked": masked_gemm(stack, e, masked),
        "k_grouped": k_grouped_gemm(x, w, k_offsets),
    }


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_shapes_and_types_without_data(kind):
    given = (X, W, E, STACK, COUNTS, MASKED, K_OFFSETS)
    real = results(*given)
    if kind == "meta":
        shaped = results(*(tensor.to("meta") for tensor in given))
    else:
        with FakeTensorMode() as mode:
            shaped = results(*(mode.from_tensor(tensor) for tensor in given))
    for name, tensor in real.items():
        got = shaped[name]
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (got.shape, got.dtype, got.stride()), name
    with refused(ValueError, "K", "must be equal"):
        gemm(X.to("meta"), W[:, :99].to("meta"))


# ---------------------------------------------------------------- gradients


def gradients(result, *inputs, seed=9):
    grad = random(*result.shape, seed=seed).to(result.dtype)
    return torch.autograd.grad(result, inputs, grad)


def assert_close_gradients(got, want, limit=2e-3):
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == w.dtype
        assert calc_diff(g, w) < limit, calc_diff(g, w)


@pytest.mark.parametrize("grad_format, limit", [("e4m3", 2e-3), ("e5m2", 4e-3)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gradients_of_gemm(dtype, grad_format, limit):
    shapes = ((130, 260), (70, 260), (70,), (130, 70))
    x, w, bias, c = (leaf(random(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(shapes))
    got = gradients(gemm(x, w, bias=bias, c=c, out_dtype=dtype, grad_format=grad_format), x, w, bias, c)
    want = gradients(x @ w.t() + bias + c, x, w, bias, c)
    assert_close_gradients(got, want, limit)


def test_gradients_are_the_fp8_gemms_they_say_they_are():
    x, w = leaf(random(130, 260)), leaf(random(70, 260, seed=1))
    grad = random(130, 70, seed=9).to(BF16)
    got_x, got_w = torch.autograd.grad(gemm(x, w), (x, w), grad)
    with torch.no_grad():
        assert torch.equal(got_x, gemm(quantize(grad), quantize(w.t(), "128x128"), out_dtype=FP32))
        assert torch.equal(got_w, gemm(quantize(grad.t()), quantize(x.t()), out_dtype=FP32))


@pytest.mark.parametrize("recipe", ["128x128", "1x128"])
def test_a_quantised_weight_passes_gradients_through(recipe):
    """128x128 blocks transpose into themselves: dA from the quantised weight equals dA from the plain one."""
    x, w = leaf(random(30, 260)), random(70, 260, seed=1)
    (got,) = gradients(gemm(x, quantize(w, recipe)), x)
    (want,) = gradients(gemm(x, w), x)
    assert torch.equal(got, want) if recipe == "128x128" else calc_diff(got, want) < 2e-3


def test_gradient_of_a_plain_weight_beside_quantised_activations():
    x, w = random(30, 260), leaf(random(70, 260, seed=1))
    (got,) = gradients(gemm(quantize(x), w), w)
    assert_close_gradients([got], gradients(x @ w.t(), w))


@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_gradients_come_back_in_the_layout_given(layout):
    a, b = random(20, 150), random(30, 150, seed=1)
    given = [leaf(a.t().contiguous() if layout[0] == "t" else a), leaf(b.t().contiguous() if layout[1] == "n" else b)]
    got = gradients(gemm(*given, layout=layout), *given)
    want = gradients(gemm(plain_a := leaf(a), plain_b := leaf(b)), plain_a, plain_b)
    assert torch.equal(got[0], want[0].t() if layout[0] == "t" else want[0])
    assert torch.equal(got[1], want[1].t() if layout[1] == "n" else want[1])


def test_gradients_of_empty_and_expanded():
    x, w = leaf(torch.empty(0, 260)), leaf(random(7, 260))
    gx, gw = gradients(gemm(x, w), x, w)
    assert gx.shape == (0, 260) and not gw.any()
    x = leaf(random(5, 260))
    gemm(x, w, out_dtype=FP32).sum().backward()  # an expanded gradient
    assert calc_diff(x.grad, w.detach().sum(0).expand(5, -1)) < 2e-3


@pytest.mark.parametrize("sizes", [[20, 0, 50], [0, 0, 3], [1, 130, 1]], ids=str)
@pytest.mark.parametrize("way", ["counts", "offsets", "indices"])
def test_gradients_of_contiguous_groups(sizes, way):
    total = sum(sizes) + 5  # five rows of no group
    x, w = leaf(random(total, 260)), leaf(random(3, 40, 260, seed=1))
    with torch.no_grad():
        x[sum(sizes) :] = torch.nan
    index = [group for group, size in enumerate(sizes) for _ in range(size)]
    given = {"counts": ints(*sizes), "indices": ints(*index, *[-1] * 5),
             "offsets": torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int()}  # fmt: skip
    got = grouped_gemm(x, w, **{way: given[way]}, out_dtype=FP32)
    want = torch.cat([torch.einsum("mk,mnk->mn", x[: sum(sizes)], w[index]), torch.zeros(5, 40)])
    assert not got[sum(sizes) :].any() and calc_diff(got, want) < 2e-3
    got, want = gradients(got, x, w), gradients(want, x, w)
    assert not got[0][sum(sizes) :].any()
    assert_close_gradients([got[0][: sum(sizes)], got[1]], [want[0][: sum(sizes)], want[1]])


def test_gradients_of_masked_groups():
    x, w, masked_m = leaf(random(3, 9, 260)), leaf(random(3, 40, 260, seed=1)), ints(9, 0, 4)
    inside = torch.arange(9)[None, :] < masked_m[:, None]
    with torch.no_grad():
        x[~inside] = torch.inf
    got = masked_gemm(x, w, masked_m, out_dtype=FP32)
    clean = leaf(torch.where(inside[..., None], x.detach(), 0))
    want = torch.einsum("gmk,gnk->gmn", clean, w)
    assert not got[~inside].any() and calc_diff(got, want) < 2e-3
    grad = torch.where(inside[..., None], random(3, 9, 40, seed=9), 0)
    assert_close_gradients(torch.autograd.grad(got, (x, w), grad), torch.autograd.grad(want, (clean, w), grad))


def test_gradients_of_k_groups():
    a, b, c = leaf(random(20, 260)), leaf(random(30, 260, seed=1)), leaf(random(3, 20, 30, seed=2))
    got = k_grouped_gemm(a, b, K_OFFSETS, c=c)
    bounds = K_OFFSETS.tolist()
    want = torch.stack([a[:, s:e] @ b[:, s:e].t() for s, e in zip(bounds, bounds[1:])]) + c
    assert calc_diff(got, want) < 2e-3
    assert_close_gradients(gradients(got, a, b, c), gradients(want, a, b, c))


@pytest.mark.parametrize("run", [
    lambda x: gemm(x, W), lambda x: gemm(W, x, out_dtype=FP32), lambda x: gemm(x, quantize(W, "128x128")),
    lambda x: gemm(quantize(x), W),
    lambda x: gemm(W, W, c=x[:, :12].repeat(2, 1), out_dtype=FP32), lambda x: gemm(W, W, bias=x[:2, :6].flatten()),
    lambda x: grouped_gemm(x, E, counts=COUNTS), lambda x: masked_gemm(x.expand(3, 6, 260), E, MASKED),
    lambda x: k_grouped_gemm(x, W, K_OFFSETS), lambda x: quantize(x).dequantize(),
    lambda x: quantize_grouped(x[None]).dequantize(),
    lambda x: swiglu_quantize(x).dequantize(), lambda x: quantize_k_grouped(x, K_OFFSETS)[0].dequantize(), Linear(260, 12),
    Linear(260, 12).requires_grad_(False), Experts(2, 260, 12), Experts(2, 260, 12, layout="masked").requires_grad_(False),
])  # fmt: skip
def test_forward_mode_is_refused(run):
    """A tangent would come out as zero, or not at all."""
    with refused(ValueError, "forward-mode tangent", "backward()", "detach()"):
        torch.func.jvp(run, (X,), (torch.ones_like(X),))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with refused(ValueError, "forward-mode tangent"):
            run(dual)
        run(dual.detach())
        run(X)


def test_forward_mode_is_refused_under_compile():
    torch._dynamo.reset()
    with refused(ValueError, "forward-mode tangent"):
        torch.compile(lambda x: torch.func.jvp(lambda x: gemm(x, W), (x,), (torch.ones_like(x),)), backend="eager")(X)


def test_functional_transforms_raise():
    for transform in (torch.func.grad, torch.func.vjp, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            transform(lambda x: gemm(x, W).float().sum(), *[X] * (transform is torch.func.vjp))(X)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: gemm(x, W))(X[None])
    x = leaf(X)
    (first,) = torch.autograd.grad(gemm(x, W, out_dtype=FP32).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()


def test_no_gradient_no_detour():
    assert not gemm(leaf(X), W).detach().requires_grad and gemm(leaf(X), W).requires_grad
    with torch.no_grad():
        assert not gemm(leaf(X), W).requires_grad
    with torch.inference_mode():
        assert torch.equal(gemm(X, W), gemm(X.clone(), W.clone()))


# ---------------------------------------------------------------- torch.compile


def compiled(function, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def test_compile_a_layer_and_its_gradients_without_graph_breaks():
    def layer(x, w1, w2, bias):
        return gemm(torch.relu(gemm(x, w1, bias=bias)), w2, out_dtype=FP32).sum()

    inputs = [random(2, 5, 260), random(40, 260, seed=1), random(30, 40, seed=2), random(40, seed=3)]
    eager, traced = [leaf(t) for t in inputs], [leaf(t) for t in inputs]
    layer(*eager).backward()
    compiled(layer)(*traced).backward()
    for e, t in zip(eager, traced):
        assert torch.equal(e.grad, t.grad)


def test_compile_with_a_new_m_does_not_compile_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    w8 = quantize(W, "128x128")
    layers = [lambda x: gemm(x, W) * 2, lambda x: gemm(quantize(x), w8), lambda x: quantize(x).dequantize(),
              lambda x: quantize_grouped(x.expand(2, *x.shape), "1x128").dequantize(),
              lambda x: swiglu_quantize(x).dequantize()]  # fmt: skip
    for layer in layers:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for rows in (5, 6, 7, 8, 17, 64):  # the scales of 1x128 are padded to multiples of four rows
            x = random(rows, 260)
            assert torch.equal(step(x), layer(x))
        assert counter.frame_count == 1


def test_export_for_any_m():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return gemm(quantize(x), w8)

    w8 = quantize(W, "128x128")
    program = torch.export.export(Layer(), (X,), dynamic_shapes={"x": {0: torch.export.Dim("m", min=2, max=1000)}})
    for rows in (2, 7, 400):
        x = random(rows, 260)
        assert torch.equal(program.module()(x), gemm(quantize(x), w8))


@pytest.mark.parametrize("kind", ["grouped", "masked"])
def test_weight_gradients_are_operators_when_compiled(kind):
    """Inductor fails on the look-ups of pack_k_groups behind a masked GEMM, so they must not be in the graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    backward = []

    def keep(graph, inputs):
        backward.append(graph)
        return make_boxed_func(graph.forward)

    def experts(x, w):
        return grouped_gemm(x, w, counts=COUNTS) if kind == "grouped" else masked_gemm(x, w, MASKED)

    given = [X if kind == "grouped" else STACK, E]
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=keep)
    got, want = [leaf(t) for t in given], [leaf(t) for t in given]
    torch.compile(experts, fullgraph=True, backend=backend)(*got).sum().backward()
    experts(*want).sum().backward()
    assert all(torch.equal(g.grad, w.grad) for g, w in zip(got, want))
    called = [str(node.target) for node in backward[0].graph.nodes if node.op == "call_function"]
    assert called.count("fp8_gemm.pack_k_groups.default") == 2
    assert not any("searchsorted" in name or "index" in name for name in called)


def test_compile_from_quantising_to_fp8_output():
    weight = quantize(W, "128x128")

    def run(x, data, scale):
        return gemm(x, ScaledTensor(data, scale, "128x128"))

    assert torch.equal(compiled(run)(X, weight.data, weight.scale), gemm(X, weight))
    assert torch.equal(compiled(lambda x: gemm(x, weight))(X), gemm(X, weight))
    assert torch.equal(compiled(lambda x, w: gemm(quantize(x), quantize(w, "128x128")))(X, W), gemm(X, W))
    got = compiled(lambda x, w: gemm(x, w, out_dtype=torch.float8_e4m3fn).dequantize())(X, W)
    assert torch.equal(got, gemm(X, W, out_dtype=torch.float8_e4m3fn).dequantize())


@pytest.mark.parametrize("way", ["counts", "indices"])
def test_compile_experts(way):
    groups = {"counts": COUNTS, "indices": ints(0, 0, 2, 2, 2, 2)}[way]

    def experts(x, w, groups):
        return grouped_gemm(x, w, **{way: groups}) + 1

    assert torch.equal(compiled(experts)(X, E, groups), experts(X, E, groups))
    x, w = leaf(X), leaf(E)
    compiled(experts)(x, w, groups).sum().backward()
    want = [leaf(X), leaf(E)]
    experts(*want, groups).sum().backward()
    assert torch.equal(x.grad, want[0].grad) and torch.equal(w.grad, want[1].grad)


def test_compile_masked_and_k_grouped():
    out = torch.zeros(3, 4, 12, dtype=BF16)
    got = compiled(lambda x, w, m: masked_gemm(x, w, m, out=torch.zeros_like(out)))(STACK, E, MASKED)
    assert torch.equal(got, masked_gemm(STACK, E, MASKED, out=out))
    got = compiled(lambda a, b, o: k_grouped_gemm(a, b, o))(X, W, K_OFFSETS)
    assert torch.equal(got, k_grouped_gemm(X, W, K_OFFSETS))


def test_compile_with_options_and_deep_gemm_names():
    import fp8_gemm.deep_gemm as deep_gemm

    got = compiled(lambda x: gemm(x, W, exact=True, batch_invariant=True))(X)
    assert torch.equal(got, gemm(X, W, exact=True))
    with refused(ValueError, "block_m", "backend='cuda'"):
        compiled(lambda x: gemm(x, W, block_m=64))(X)

    def caller(a, a_scale, b, b_scale):
        d = torch.empty(6, 12, dtype=BF16)
        deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), d)
        return d

    operands = *pair(X, "1x128"), *pair(W, "128x128")
    assert torch.equal(compiled(caller)(*operands), gemm(X, W))


def test_compile_writing_in_place():
    def accumulate(x, w, out):
        gemm(x, w, out=out, c=out, out_dtype=FP32)
        return out * 2

    first, second = random(6, 12), random(6, 12)
    assert torch.equal(compiled(accumulate)(X, W, first), accumulate(X, W, second))
    assert torch.equal(first, second)


# ---------------------------------------------------------------- autocast, deterministic mode, threads


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_changes_nothing(dtype):
    x, w = leaf(X), leaf(W)
    want = gemm(x, w, out_dtype=FP32)
    want_gradients = gradients(want, x, w)
    with torch.autocast("cpu", dtype=dtype):
        got = gemm(x, w, out_dtype=FP32)
        assert torch.equal(gemm(X, quantize(W, "128x128"), out_dtype=FP32), want)
        assert got.dtype == FP32 and torch.equal(got, want)
    for g, w in zip(gradients(got, x, w), want_gradients):
        assert torch.equal(g, w)


def test_the_same_call_gives_the_same_bits():
    (a, offsets), (b, _) = quantize_k_grouped(X, K_OFFSETS), quantize_k_grouped(W, K_OFFSETS)
    first = gemm(X, W), grouped_gemm(X, E, counts=COUNTS, out=torch.zeros(6, 12, dtype=BF16)), k_grouped_gemm(a, b, offsets)
    for _ in range(10):
        again = gemm(X, W), grouped_gemm(X, E, counts=COUNTS, out=torch.zeros(6, 12, dtype=BF16)), k_grouped_gemm(a, b, offsets)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_threads_share_the_library():
    from concurrent.futures import ThreadPoolExecutor

    want = gemm(X, W)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(got, want) for got in pool.map(lambda _: gemm(X, W), range(32)))
