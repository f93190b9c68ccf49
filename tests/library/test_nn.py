"""Layers: the results and gradients of their plain counterparts, cached and frozen weights, policies, compiling, training."""

import copy
import pickle

import pytest
import torch
from helpers import calc_diff, random, refused
from torch.nn import functional as F

from fp8_gemm import gemm, grouped_gemm, quantize, quantize_grouped, swiglu_quantize
from fp8_gemm.nn import Experts, Linear, Policy, Recipe, convert

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN = 192  # one and a half scaling blocks


def linear(n=70, k=260, **options):
    torch.manual_seed(1)
    return Linear(k, n, **options)


def experts(**options):
    torch.manual_seed(2)
    return Experts(**{"experts": 4, "hidden": HIDDEN, "intermediate": 72, **options})


def routing(tokens, k=2, experts=4, seed=0, dropped=0.0):
    """Random ids, all different within a token, and weights; a share of pairs dropped (-1)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices
    ids = torch.where(torch.rand(tokens, k, generator=generator) < dropped, -1, ids)
    return ids, torch.rand(tokens, k, generator=generator)


def gradients(module, *inputs):
    inputs[0].requires_grad_()
    y = module(*inputs)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return y, torch.autograd.grad(y, [inputs[0], *parameters], random(*y.shape, seed=7).to(y.dtype), allow_unused=True)


# ---------------------------------------------------------------- Linear


@pytest.mark.parametrize("shape", [(260,), (5, 260), (2, 0, 260), (2, 3, 260)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_gemm_and_looks_like_nn_linear(shape, dtype, bias):
    layer, x = linear(bias=bias), random(*shape, dtype=dtype)
    y = layer(x)
    want = gemm(x.view(-1, 260), layer.weight, bias=layer.bias, out_dtype=dtype)
    assert y.dtype == dtype and torch.equal(y, want.view(*shape[:-1], 70))
    if y.numel():
        assert calc_diff(y.float(), F.linear(x.float(), layer.weight, layer.bias)) < 1e-3
    plain = torch.nn.Linear(260, 70, bias=bias)
    assert list(plain.state_dict()) == list(layer.state_dict()) and isinstance(layer, torch.nn.Linear)


def test_linear_has_the_gradients_of_nn_linear():
    layer, x = linear(), random(130, 260)
    got = gradients(layer, x)
    layer.set_precision("fp32")
    want = gradients(layer, x.clone())
    assert torch.equal(want[0], F.linear(x, layer.weight, layer.bias))
    for g, w in zip((got[0], *got[1]), (want[0], *want[1])):
        assert g.shape == w.shape and calc_diff(g, w) < 2e-3


RECIPES = (Recipe(), Recipe("1x128", "1x128"), Recipe("row", "row", interval=None), Recipe("tensor", "tensor"),
           Recipe(batch_invariant=True), Recipe(grad_format="e5m2"))  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_linear_follows_its_recipe(recipe):
    layer, x = linear(precision=recipe), random(9, 260)
    extra = {"batch_invariant": True} if recipe.batch_invariant else {}
    want = gemm(x, layer.weight, bias=layer.bias, out_dtype=FP32, recipe=(recipe.activation, recipe.weight),
                interval=recipe.interval, **extra)  # fmt: skip
    assert torch.equal(layer(x), want)
    with torch.no_grad():
        assert torch.equal(layer(x), want)
    assert repr(recipe) in repr(layer)
    if recipe.batch_invariant:
        assert torch.equal(layer(x[3:4]), want[3:4])


def test_refusals():
    with refused(ValueError, "precision", "'fp7'", "'fp8', 'bf16', 'fp32'"):
        linear(precision="fp7")
    with refused(ValueError, "recipe", "'1x128'"):
        Recipe("1x128", "row")
    with refused(ValueError, "backend", "'cublas'", "'reference'"):
        Recipe(backend="cublas")
    with refused(ValueError, "activation", "'tensor'", "'1x128' or 'row'"):
        experts(precision=Recipe("tensor", "tensor"))
    with refused(ValueError, "top_k", "9", "1 to 4"):
        experts(top_k=9)
    with refused(ValueError, "layout", "'padded'", "'masked'"):
        experts(layout="padded")
    with refused(ValueError, "hidden", "0"):
        experts(hidden=0)
    layer, x = experts(router=False), random(3, HIDDEN)
    ids, weights = routing(3)
    with refused(ValueError, "topk_ids", "no router", "router=True"):
        layer(x)
    with refused(ValueError, "topk_weights", "pass both"):
        layer(x, ids)
    with refused(ValueError, "x has shape (3, 100)", "192"):
        layer(x[:, :100], ids, weights)
    with refused(ValueError, "topk_ids has shape (2, 2)", "(3, k)"):
        layer(x, ids[:2], weights[:2])
    with refused(ValueError, "topk_weights has shape (3, 1)"):
        layer(x, ids, weights[:, :1])
    with refused(TypeError, "topk_ids is torch.float32", "integers"):
        layer(x, weights, weights)
    with refused(ValueError, "topk_ids[1, 0] is 4", "0 to 3"):
        layer(x, torch.tensor([[0, 1], [4, 1], [0, 2]]), weights)
    with refused(ValueError, "topk_ids[2] is [3, 3]", "differ"):
        layer(x, torch.tensor([[-1, -1], [2, 1], [3, 3]]), weights)


# ---------------------------------------------------------------- cached weights


def counted(monkeypatch):
    """A list that grows with each quantised weight."""
    import fp8_gemm.nn as nn

    calls, real = [], nn._quantize_weight
    monkeypatch.setattr(nn, "_quantize_weight", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


def test_a_weight_is_quantised_once_until_it_changes(monkeypatch):
    calls, layer, x = counted(monkeypatch), linear(), random(5, 260)

    def run():
        with torch.no_grad():
            y = layer(x)
            assert torch.equal(y, gemm(x, quantize(layer.weight, layer.precision.weight), bias=layer.bias, out_dtype=FP32))
        return len(calls)

    assert (run(), run(), run()) == (1, 1, 1)
    layer(x)  # recorded: the weight goes in plain, for its gradient
    assert len(calls) == 1
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).sum().backward()
    optimizer.step()
    assert (run(), run()) == (2, 2)
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
    assert (run(), run()) == (3, 3)
    layer.weight = torch.nn.Parameter(random(70, 260))
    assert (run(), run()) == (4, 4)
    layer.weight.data = random(70, 260, seed=5)
    assert (run(), run()) == (5, 5)
    layer.set_precision(Recipe("1x128", "1x128"))
    assert (run(), run()) == (6, 6)
    layer.to(torch.float64).to(FP32)
    assert (run(), run()) == (7, 7)
    layer.weight.data.mul_(2)  # PyTorch does not count this
    layer.refresh()
    assert run() == 8


@pytest.mark.parametrize("optimiser", [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
], ids=["fused AdamW", "fused SGD", "foreach AdamW"])  # fmt: skip
@pytest.mark.parametrize("make", [lambda: Linear(64, 64), lambda: Experts(2, 64, 64)], ids=["Linear", "Experts"])
def test_what_an_optimiser_changes_is_quantised_again(make, optimiser):
    """Fused ones do not count their writes in _version."""
    layer, x = make(), random(8, 64)
    step = optimiser(layer.parameters())
    for early in (True, False):  # also where the weight was quantised between the recorded pass and the step
        layer(x).square().mean().backward()
        if early:
            with torch.no_grad():
                layer(x)
        step.step()
        with torch.no_grad():
            stale, cached = copy.deepcopy(layer), layer(x)
            assert torch.equal(cached, stale(x)), "the copy quantises for itself"


def test_a_new_tensor_at_an_old_address_is_quantised():
    layer, x = Linear(64, 64, bias=False).requires_grad_(False), random(8, 64)
    for seed in range(20):
        layer(x)
        for i in (1, 2):
            layer.weight.data = torch.full((64, 64), 2.0 * seed + i)
        assert torch.equal(layer(x), copy.deepcopy(layer)(x))


def test_layers_run_on_meta_tensors():
    with torch.device("meta"):
        assert Linear(64, 32)(torch.empty(3, 64)).shape == (3, 32)
        assert Linear(64, 32, precision="bf16")(torch.empty(3, 64)).shape == (3, 32)
        assert Experts(2, 64, 32)(torch.empty(3, 64)).shape == (3, 64)


def test_a_frozen_layer_refuses_other_weight_scales_by_way_of_another_precision():
    layer = Linear(256, 64).requires_grad_(False).freeze()
    layer.set_precision("bf16")
    with refused(ValueError, "frozen with '128x128'", "before freeze()"):
        layer.set_precision(Recipe("row", "row"))


def test_a_refused_convert_changes_nothing():
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), Experts(2, 8, 8)])
    with refused(ValueError, "'tensor'", "Experts"):
        convert(model, {"*": Recipe("tensor", "tensor")})
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("ids, weights, error, words", [
    (torch.zeros(4, 2, dtype=torch.uint8), torch.ones(4, 2), ValueError, ["experts of a token must differ"]),
    (torch.tensor([[0, 9]] * 4, dtype=torch.uint8), torch.ones(4, 2), ValueError, ["topk_ids[0, 1] is 9", "0 to 3"]),
    (torch.tensor([[0, 1]] * 4), [1.0], TypeError, ["topk_weights is list"]),
    (torch.tensor([[0, 1]] * 4), torch.ones(4, 2, dtype=torch.int32), TypeError, ["topk_weights is torch.int32", "floats"]),
])  # fmt: skip
def test_refused_routings(ids, weights, error, words):
    with refused(error, *words):
        Experts(4, 8, 8)(random(4, 8), ids, weights)


def test_unsigned_ids_are_ids():
    layer, x, ids = Experts(4, 8, 8), random(4, 8), torch.tensor([[0, 1]] * 4)
    assert torch.equal(layer(x, ids.to(torch.uint8), torch.ones(4, 2)), layer(x, ids, torch.ones(4, 2)))


def test_a_frozen_parameter_uses_the_cache_and_passes_gradients_on(monkeypatch):
    calls, layer, x = counted(monkeypatch), linear().requires_grad_(False), random(5, 260).requires_grad_()
    for _ in range(3):
        (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert len(calls) == 1 and calc_diff(grad, layer.weight.sum(0).expand(5, -1)) < 2e-3


def test_copies_and_pickles_do_not_share_the_cache():
    layer, x = linear(), random(5, 260)
    with torch.no_grad():
        want = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other._cache is None and torch.equal(other(x), want)
            other.weight.mul_(2)
            assert not torch.equal(other(x), want)
        assert torch.equal(layer(x), want)


def test_parameters_made_in_inference_mode_are_not_cached():
    with torch.inference_mode():
        layer, x = linear(), random(5, 260)
        first = layer(x)
        layer.weight.mul_(2), layer.bias.mul_(2)
        assert torch.equal(layer(x), 2 * first)


def test_a_weight_cached_in_inference_mode_serves_training_around_it():
    layer, x = linear().requires_grad_(False), random(5, 260)
    with torch.inference_mode():
        want = layer(x)
    y = layer(x.requires_grad_())
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, want) and grad.any()


# ---------------------------------------------------------------- frozen layers and state dicts


@pytest.mark.parametrize("make", [linear, experts])
def test_freezing_changes_no_bit_and_round_trips(make):
    layer = make()
    x = random(6, layer.in_features if isinstance(layer, Linear) else HIDDEN)
    checkpoint = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(layer.freeze()(x), want) and "frozen" in repr(layer)
        assert not any(name in layer._parameters for name in layer.WEIGHTS)
        torch.manual_seed(99)
        other = type(layer)(*([260, 70] if make is linear else [4, HIDDEN, 72])).freeze()
        other.load_state_dict(layer.state_dict())  # frozen to frozen
        assert torch.equal(other(x), want)
        torch.manual_seed(98)
        other = type(layer)(*([260, 70] if make is linear else [4, HIDDEN, 72])).freeze()
        other.load_state_dict(checkpoint)  # a checkpoint of plain weights
        assert torch.equal(other(x), want)
        assert set(checkpoint) == set(make().state_dict())  # and it was not changed by loading
        with pytest.raises(RuntimeError, match="freeze"):
            make().load_state_dict(layer.state_dict())
        other.to(BF16)
        assert all(b.dtype == (FP32 if name.endswith("scale") else torch.float8_e4m3fn) for name, b in other.named_buffers())
        assert calc_diff(other(x), want) < 1e-4  # its bias or router became bfloat16, its weights did not
    (grad,) = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
    assert grad.abs().sum() > 0


def test_a_frozen_layer_keeps_its_weight_recipe():
    layer = linear().freeze()
    layer.set_precision("fp32")
    assert calc_diff(layer(random(5, 260)), linear()(random(5, 260))) < 2e-3
    layer.set_precision(Recipe(grad_format="e5m2"))
    with refused(ValueError, "'1x128'", "'128x128'", "before freeze"):
        layer.set_precision(Recipe("1x128", "1x128"))
    with refused(ValueError, "'bf16'", "set_precision"):
        linear(precision="bf16").freeze()


def test_plain_checkpoints_go_both_ways():
    plain, layer = torch.nn.Linear(260, 70), linear()
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    torch.nn.Linear(260, 70).load_state_dict(layer.state_dict())


# ---------------------------------------------------------------- Experts


def by_hand(layer, x, ids, weights):
    """A loop over tokens in FP32."""
    y = torch.zeros_like(x)
    for token, (experts, ws) in enumerate(zip(ids.tolist(), weights)):
        for expert, w in zip(experts, ws):
            if expert >= 0:
                gate, up = F.linear(x[token], layer.gate_up[expert]).chunk(2)
                y[token] = y[token] + w * F.linear(F.silu(gate) * up, layer.down[expert])
    return y


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", Recipe("row", "row", interval=None)], ids=str)
def test_experts_and_their_gradients(layout, dropped, precision):
    layer, x = experts(router=False, layout=layout, precision=precision), random(13, HIDDEN)
    ids, weights = routing(13, dropped=dropped)
    got = gradients(layer, x, ids, weights)
    if dropped == 1.0:
        assert not any(tensor.any() for tensor in (got[0], *got[1]))
        return
    want = gradients(ByHand(layer), x.clone(), ids, weights)
    limit = {"fp32": 1e-9, "bf16": 1e-4}.get(precision, 4e-3)
    for g, w in zip((got[0], *got[1]), (want[0], *want[1])):
        assert calc_diff(g, w) < limit
    with torch.no_grad():
        assert torch.equal(layer(x, ids, weights), got[0])  # without gradients: other passes, the same bits


class ByHand(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, ids, weights):
        return by_hand(self.layer, x, ids, weights)


def test_experts_are_the_librarys_grouped_gemms():
    layer, x = experts(top_k=1), random(13, HIDDEN)
    with torch.no_grad():
        ids, _ = layer.route(x)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=4)
        middle = grouped_gemm(x[order], quantize_grouped(layer.gate_up), counts=counts, out_dtype=FP32)
        want = torch.empty(13, HIDDEN)
        want[order] = grouped_gemm(swiglu_quantize(middle), quantize_grouped(layer.down), counts=counts, out_dtype=FP32)
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_few_tokens_and_idle_experts(tokens, layout, precision):
    layer = experts(layout=layout, precision=precision)
    y, grads = gradients(layer, random(1, tokens, HIDDEN))
    assert y.shape == (1, tokens, HIDDEN) and all(g is not None and torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_a_bad_token_spoils_no_other(layout):
    layer, x = experts(layout=layout), random(9, HIDDEN)
    with torch.no_grad():
        want = layer(x)
        x[4, 3] = torch.nan
        got = layer(x, *experts().route(torch.nan_to_num(x)))
    keep = torch.arange(9) != 4
    assert torch.equal(got[keep], want[keep]) and got[4].isnan().any()


def test_router():
    layer, x = experts(top_k=3), random(9, HIDDEN)
    ids, weights = layer.route(x)
    want = F.linear(x, layer.router).softmax(-1)
    assert torch.allclose(weights.sum(-1), torch.ones(9)) and torch.equal(ids, want.topk(3).indices)
    assert torch.allclose(experts(top_k=3, normalize=False).route(x)[1], want.topk(3).values)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(layer.route(x)[1], weights)
    layer(x).sum().backward()
    assert layer.router.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [lambda p: linear(72, 256, precision=p), lambda p: experts(precision=p),
                                  lambda p: experts(precision=p, layout="masked")], ids=["linear", "contiguous", "masked"])  # fmt: skip
def test_the_cuda_kernels_give_layers_the_bits_of_the_model(make):
    """The kernels on the simulator against exact arithmetic: forward; for the dense layer the three GEMMs of training."""
    kernels, model = make(Recipe(backend="simulator")), make(Recipe(batch_invariant=True))
    x = random(5, 256 if isinstance(model, Linear) else HIDDEN)
    with torch.no_grad():
        assert torch.equal(kernels(x), model(x))
    if isinstance(model, Linear):
        got, want = gradients(kernels, x.clone()), gradients(model, x.clone())
        assert all(torch.equal(g, w) for g, w in zip((got[0], *got[1]), (want[0], *want[1])))


# ---------------------------------------------------------------- policies


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            self.layers.append(torch.nn.ModuleDict({"attn": torch.nn.Linear(256, 256), "mlp": torch.nn.Linear(256, 256)}))
        self.moe = Experts(4, 256, 128, precision="fp32")
        self.head = torch.nn.Linear(256, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](F.gelu(layer["attn"](x)))
        return self.head(self.moe(x))


def test_convert_follows_the_policy():
    model, x = Model(), random(5, 256)
    before, keys = model(x), list(model.state_dict())
    parameters, hooked = {name: id(p) for name, p in model.named_parameters()}, []
    model.layers[0]["mlp"].register_forward_hook(lambda *_: hooked.append(1))
    recipe = Recipe(grad_format="e5m2")
    got = convert(model, Policy({"head": "keep", "layers.0.*": recipe, "*attn": "bf16", "*": "fp8"}))
    assert got == {"layers.0.attn": recipe, "layers.0.mlp": recipe, "layers.1.attn": "bf16", "layers.1.mlp": Recipe(),
                   "moe": Recipe()}  # fmt: skip
    assert type(model.head) is torch.nn.Linear and type(model.layers[1]["attn"]) is Linear
    assert list(model.state_dict()) == keys and {name: id(p) for name, p in model.named_parameters()} == parameters
    assert 0 < calc_diff(model(x), before) < 2e-3 and hooked
    model.load_state_dict(Model().state_dict())
    assert convert(model, {"*": "fp32"})["head"] == "fp32"
    assert torch.allclose(model(x), before, atol=1e-5)


def test_a_transformer_layer_computes_by_its_converted_layers():
    """PyTorch's fused path for inference would read linear1.weight and never call the layer."""
    torch.manual_seed(0)
    plain = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0), 2)
    model, x, mask = copy.deepcopy(plain), random(2, 5, 128), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert len(convert(model, {"*": "fp8"})) == 4
    for module in (plain, model):
        module.eval().requires_grad_(False)
    for options in ({}, {"src_key_padding_mask": mask}):
        right, got = plain(x, **options), model(x, **options)
        right = right if right.shape == got.shape else F.pad(right, (0, 0, 0, got.shape[1] - right.shape[1]))
        kept = ~mask if options else torch.ones_like(mask)
        assert 0 < calc_diff(got[kept], right[kept]) < 1e-2  # FP8 was there
        for module in model.modules():
            if isinstance(module, Linear):
                module.freeze()
        assert torch.equal(model(x, **options), got)


def test_convert_changes_nothing_for_an_unknown_pattern():
    model = Model()
    with refused(ValueError, "'layer.*'", "'layers.0.attn'", "'head'"):
        convert(model, {"*": "fp8", "layer.*": "bf16"})
    assert not any(isinstance(module, Linear) for module in model.modules()) and model.moe.precision == "fp32"
    with refused(ValueError, "'*'", "it has no nn.Linear"):
        convert(torch.nn.ReLU(), {"*": "fp8"})
    with refused(ValueError, "'int4'"):
        Policy({"*": "int4"})
    for rules in ({}, "fp8"):
        with refused(TypeError, "rules", "{'*': 'fp8'}"):
            Policy(rules)


def test_convert_keeps_ties_and_takes_a_single_layer():
    single = torch.nn.Linear(260, 70)
    assert convert(single, {"*": "fp8"}) == {"": Recipe()} and type(single) is Linear
    shared = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    shared[1].weight = shared[0].weight
    twice = torch.nn.Sequential(shared[0], shared[0])
    convert(shared, {"*": "fp8"})
    assert shared[0].weight is shared[1].weight and twice[1] is shared[0] and type(twice[1]) is Linear
    attention = torch.nn.MultiheadAttention(64, 2)
    with refused(ValueError, "'*'"):
        convert(attention, {"*": "fp8"})


# ---------------------------------------------------------------- torch.compile, autocast


@pytest.mark.parametrize("make", [linear, experts, lambda: experts(layout="masked")], ids=["linear", "contiguous", "masked"])
@pytest.mark.parametrize("frozen", [False, True])
def test_compile_whole_layers(make, frozen):
    layer = make().freeze() if frozen else make()
    x = random(2, 3, layer.in_features if isinstance(layer, Linear) else HIDDEN)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    want, got = gradients(layer, x.clone()), gradients(compiled, x.clone())
    for g, w in zip((got[0], *got[1]), (want[0], *want[1])):
        assert torch.equal(g, w)


def test_a_compiled_layer_sees_its_weight_change():
    layer, x = linear(), random(5, 260)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        first = compiled(x)
        layer.weight.mul_(2), layer.bias.mul_(2)
        assert torch.equal(compiled(x), 2 * first)


def test_a_compiled_layer_is_not_compiled_again_after_an_eager_call():
    from torch._dynamo.testing import CompileCounter

    layer, x, counter = linear(), random(5, 260), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        compiled(x), layer(x), compiled(x)  # the second one fills the cache
    assert counter.frame_count == 1


@pytest.mark.parametrize("make", [linear, experts])
@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp32"])
def test_autocast_gives_its_type(make, precision):
    layer = make(precision=precision)
    x = random(5, 260 if make is linear else HIDDEN)
    with torch.autocast("cpu", dtype=BF16):
        got = layer(x)
    assert got.dtype == BF16 and calc_diff(got.float(), layer(x)) < 1e-3


# ---------------------------------------------------------------- training


class Mixture(torch.nn.Module):
    """A small language-model-like block: dense, experts with a router, dense."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.enter, self.leave = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)
        self.moe = Experts(4, 128, 128, precision="fp32")

    def forward(self, x):
        x = F.gelu(self.enter(x))
        return self.leave(x + self.moe(x))


def losses(precision, steps=100):
    """Cross-entropy over the steps of training on labels that a fixed random network gives."""
    model = Mixture()
    convert(model, {"*": precision})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    teacher_in, teacher_out = random(96, 64, seed=10), random(32, 96, seed=11)
    curve = []
    for step in range(steps):
        x = random(128, 64, seed=100 + step)
        labels = F.linear(torch.tanh(F.linear(x, teacher_in)), teacher_out).argmax(-1)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve)


def test_fp8_training_follows_bf16():
    """Every step's loss within 3 % of BF16's, the mean of the last 20 within 1 %, while the loss itself falls by a third."""
    bf16, fp8 = losses("bf16"), losses("fp8")
    assert bf16[-20:].mean() < 0.67 * bf16[0]
    assert not torch.equal(bf16, fp8)
    relative = (fp8 / bf16 - 1).abs()
    assert relative.max() < 0.03, relative.max()
    assert abs(fp8[-20:].mean() / bf16[-20:].mean() - 1) < 0.01
