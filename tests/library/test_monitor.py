"""The monitor: what it counts, what it recomputes, when it moves a layer to FP32, and what it costs when off."""

import copy
import os
import re
import subprocess
import sys
import timeit
import warnings

import pytest
import torch
from helpers import random, refused

from fp8_gemm import ScaledTensor, dispatch, monitor, quantize
from fp8_gemm.monitor import Limits, Monitor, cast_losses, worst_row_error
from fp8_gemm.nn import Experts, Linear, Recipe, convert

BF16 = torch.bfloat16


def model():
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict({"enter": Linear(260, 70), "plain": torch.nn.Linear(70, 192), "moe": Experts(4, 192, 72)})
    layers.forward = lambda x: layers["moe"](layers["plain"](layers["enter"](x)))
    return layers


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)  # torch's own, when its compiler is imported
        yield


def broken(monkeypatch, spoil):
    """Spoil what the library computes, but not what backend="reference" recomputes."""
    real = dispatch.run

    def run(problem, operands, out, backend=None, **overrides):
        real(problem, operands, out, backend, **overrides)
        if backend is None:
            spoil(out)

    monkeypatch.setattr(dispatch, "run", run)


# ---------------------------------------------------------------- counts


def test_counts_and_amax():
    layers, x = model(), random(3, 5, 260)
    watch = Monitor(layers, error_rate=0, history=4)
    for i in range(6):
        layers["enter"](x * (i + 1))
    x[0, 0, :2], x[1, 0, 0], x[2, 2, 2] = torch.nan, torch.inf, -torch.inf
    layers["enter"](x)
    record = watch.snapshot()["layers"]["enter"]
    assert record["calls"] == 7 and record["sampled_calls"] == 0 and record["error"] is None and record["fallback"] is None
    assert (record["input_nan"], record["input_inf"]) == (2, 2)
    assert record["output_nan"] == 3 * 70 and record["output_inf"] == 0  # three rows hold one
    want = [float(random(3, 5, 260).abs().amax()) * i for i in (4, 5, 6)] + [float(x[torch.isfinite(x)].abs().amax())]
    assert record["amax"] == pytest.approx(want)
    assert set(watch.snapshot()["layers"]) == {"enter", "moe"} and watch.snapshot()["layers"]["moe"]["calls"] == 0


def test_calls_without_rows_leave_the_history_in_order():
    layer, x = Linear(260, 70), torch.ones(3, 260)
    watch = Monitor(layer, error_rate=0, history=3)
    want = []
    for i in (1, 2, 0, 3, 0, 0, 4, 5, 0):
        layer(x * i if i else x[:0])
        want += [float(i)] * bool(i)
        assert watch.snapshot()["layers"][""]["amax"] == want[-3:]
    assert watch.snapshot()["layers"][""]["calls"] == 9 and 'fp8_gemm_amax{layer=""} 5.0' in watch.prometheus()


def test_output_overflow_is_counted_and_not_blamed_on_fp8():
    """65504 is the largest float16: the exact result does not fit either, and no FP32 product would help."""
    layer = Linear(256, 8, bias=False)
    torch.nn.init.ones_(layer.weight)
    watch = Monitor(layer, error_rate=1)
    layer(torch.full((2, 256), 1000.0, dtype=torch.float16))
    record = watch.snapshot()["layers"][""]
    assert record["output_inf"] == 16 and record["worst_error"] == 0 and record["fallback"] is None


@pytest.mark.parametrize("format, largest, half_step", [("e4m3", 448, 16), ("e5m2", 57344, 4096)])
def test_cast_losses(format, largest, half_step):
    x = random(4, 256)
    own = quantize(x, "1x128", format)
    assert cast_losses(x, own) == {"saturated": 0, "zero_after_cast": int((own.data.float() == 0).sum())}
    stale = ScaledTensor(own.data, torch.ones_like(own.scale), "1x128")
    x = torch.zeros(4, 256)
    x[0, :4] = torch.tensor([largest, largest + half_step, largest + half_step * 1.01, -largest * 3])
    x[1, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    assert cast_losses(x, stale)["saturated"] == 2
    x[2, :2] = torch.tensor([1e4, 1e-9])
    scaled = quantize(x, "1x128", format)
    assert cast_losses(x, scaled)["zero_after_cast"] == 1


def test_sampled_calls_count_what_the_cast_loses():
    layer, x = Linear(256, 8), torch.ones(4, 256)
    x[:, ::2] = 1e-6
    watch = Monitor(layer, error_rate=1)
    layer(x)
    record = watch.snapshot()["layers"][""]
    assert record["zero_after_cast"] == 4 * 128 and record["saturated"] == 0


# ---------------------------------------------------------------- errors


def test_worst_row_error():
    exact = random(9, 64)
    assert worst_row_error(exact.clone(), exact) == 0
    y = exact.clone()
    y[4] *= 1.5
    assert worst_row_error(y, exact) == pytest.approx(0.5)
    y[7, 7] = torch.nan
    assert worst_row_error(y, exact) == torch.inf
    exact[7, 8] = torch.inf  # nothing is known about this row
    assert worst_row_error(y, exact) == pytest.approx(0.5)
    assert worst_row_error(torch.zeros(3, 4), torch.zeros(3, 4)) == 0
    assert worst_row_error(torch.ones(3, 4), torch.zeros(3, 4)) == torch.inf
    assert worst_row_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    exact = torch.tensor([[7e4, 1.0], [6e4, 1.0]])  # float16 ends at 65504
    assert worst_row_error(exact.half(), exact) < 1e-3
    assert worst_row_error(torch.full((2, 2), torch.inf, dtype=torch.float16), exact) == torch.inf  # 6e4 had fitted


@pytest.mark.parametrize("rate, calls, sampled", [(1, 5, 5), (0.5, 5, 3), (0.01, 5, 1), (0, 5, 0)])
def test_the_share_of_calls_that_is_recomputed(rate, calls, sampled):
    layer = Linear(260, 70)
    watch = Monitor(layer, error_rate=rate)
    for _ in range(calls):
        layer(random(5, 260))
    record = watch.snapshot()["layers"][""]
    assert (record["calls"], record["sampled_calls"]) == (calls, sampled)
    assert (record["seconds"] is not None) == bool(sampled)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("precision", ["fp8", Recipe("tensor", "tensor"), "bf16"], ids=str)
def test_a_healthy_model_stays_in_fp8(dtype, precision):
    layers = model()
    convert(layers, {"enter": precision, "plain": "fp8", "moe": "fp8" if precision == "fp8" else "bf16"})
    watch = Monitor(layers, error_rate=1)
    layers(random(300, 260, dtype=dtype))
    layers(random(260, dtype=dtype)[None])
    layers["enter"](random(260, dtype=dtype))
    for name, record in watch.snapshot()["layers"].items():
        low, high = (1e-4, 8e-3) if record["precision"] == "bf16" else (1e-2, 0.12)
        assert low < record["error"] <= record["worst_error"] < high, (name, record)
        if record["precision"] == "bf16":
            assert record["kernel_error"] is None
        else:
            assert record["kernel_error"] < 0.01 and record["fallback"] is None


@pytest.mark.parametrize("name", ["enter", "moe"])
def test_a_wrong_kernel_moves_its_layer_to_fp32_and_says_so_once(monkeypatch, name):
    layers = model()
    watch = Monitor(layers, error_rate=1)
    before, x = layers[name].precision, random(40, 260 if name == "enter" else 192)
    broken(monkeypatch, lambda out: out[7].mul_(1.3))  # one row of one call
    with pytest.warns(UserWarning, match=f"'{name}'.*FP32.*kernel_error.*restore") as caught:
        layers[name](x)
        for _ in range(3):
            y = layers[name](x)
    assert len(caught) == 1 and layers[name].precision == "fp32"
    assert torch.equal(y, layers[name](x)) and watch.snapshot()["layers"][name]["error"] < 1e-5
    assert watch.snapshot()["layers"][name]["fallback"].startswith("kernel_error")
    monkeypatch.undo()
    watch.restore(name)
    assert layers[name].precision == before
    layers[name](x)
    assert watch.snapshot()["layers"][name]["fallback"] is None
    with refused(ValueError, "name", "none"):
        watch.restore(name)


def test_data_that_fp8_does_not_fit_moves_the_layer():
    layer, x = Linear(260, 70, precision=Recipe("tensor", "tensor")), random(40, 260)
    x[0] *= 1e6  # with one scale for all, every other row vanishes
    watch = Monitor(layer, error_rate=1)
    with pytest.warns(UserWarning, match="FP8 does not fit"):
        layer(x)
    assert layer.precision == "fp32" and watch.snapshot()["layers"][""]["fallback"].startswith("error")
    layer.set_precision(Recipe())
    watch.close()
    Monitor(layer, error_rate=1)
    layer(x)  # a scale for each row and block
    assert layer.precision == Recipe()


def test_limits_can_be_moved_and_switched_off(monkeypatch):
    broken(monkeypatch, lambda out: out.mul_(1.5))
    layer = Linear(260, 70)
    watch = Monitor(layer, error_rate=1, limits=Limits(error=None, kernel_error=None))
    layer(random(5, 260))
    assert layer.precision == Recipe() and watch.snapshot()["layers"][""]["kernel_error"] > 0.4
    watch.close()
    Monitor(layer, error_rate=1, limits=Limits(error=0.3, kernel_error=None))
    with pytest.warns(UserWarning, match="error 0.5"):
        layer(random(5, 260))


def test_watching_changes_no_result_and_no_gradient():
    layers, x = model(), random(9, 260).requires_grad_()
    want = layers(x)
    (want_grad,) = torch.autograd.grad(want.sum(), x)
    Monitor(layers, error_rate=1)
    got = layers(x)
    assert torch.equal(got, want) and torch.equal(torch.autograd.grad(got.sum(), x)[0], want_grad)
    with torch.inference_mode():
        layers(x)
    with torch.autocast("cpu", dtype=BF16):
        layers(x)
    layers(x), layers(x[:0])


def test_copies_are_not_watched():
    layer = Linear(260, 70)
    watch = Monitor(layer, error_rate=1)
    copy.deepcopy(layer)(random(5, 260))
    assert watch.snapshot()["layers"][""]["calls"] == 0 and layer.monitor is not None


def test_loading_the_module_does_not_load_torchs_compiler():
    check = "import sys, fp8_gemm.monitor; sys.exit('torch._dynamo' in sys.modules or 'triton' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", check], env=environment).returncode == 0


# ---------------------------------------------------------------- reports and errors


def test_prometheus_text(monkeypatch):
    layers = model()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(monitor.telemetry, "sample", lambda index: {"power_w": 512.5, "sm_clock_mhz": 1755})
    watch = Monitor(layers, error_rate=1)
    layers["enter"](random(5, 260))
    lines = watch.prometheus().splitlines()
    assert 'fp8_gemm_calls_total{layer="enter"} 1' in lines and 'fp8_gemm_calls_total{layer="moe"} 0' in lines
    assert 'fp8_gemm_elements_total{layer="enter",kind="input_nan"} 0' in lines
    assert 'fp8_gemm_fallback{layer="enter"} 0' in lines and 'fp8_gemm_gpu_power_w{gpu="0"} 512.5' in lines
    assert any(line.startswith('fp8_gemm_kernel_error{layer="enter"} ') for line in lines)
    assert not any(line.startswith('fp8_gemm_error{layer="moe"}') for line in lines)  # nothing known yet
    for line in lines:
        assert re.fullmatch(r'# (HELP|TYPE) fp8_gemm_\w+ .+|fp8_gemm_\w+\{(\w+="[^"]*",?)+\} (\+Inf|NaN|[-\d.e]+)', line), line
    assert len({line for line in lines if line.startswith("# TYPE")}) == sum(line.startswith("# TYPE") for line in lines)


def test_gpu_figures_only_where_there_is_one(monkeypatch):
    layer = Linear(260, 70)
    watch = Monitor(layer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert watch.snapshot()["gpu"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def missing(index):
        raise RuntimeError("NVML cannot be read")

    monkeypatch.setattr(monitor.telemetry, "sample", missing)
    assert watch.snapshot()["gpu"] == {"unavailable": "NVML cannot be read"} and "fp8_gemm_gpu" not in watch.prometheus()


def test_labels_are_escaped():
    assert monitor._labels({"layer": 'a"b\\c\n'}) == r'layer="a\"b\\c\n"'
    assert [monitor._number(x) for x in (3, 0.5, torch.inf)] == ["3", "0.5", "+Inf"]


def test_refusals():
    layer = Linear(260, 70)
    for rate in (-0.1, 2):
        with refused(ValueError, "error_rate", str(rate), "0 (never) to 1"):
            Monitor(layer, error_rate=rate)
    with refused(ValueError, "history", "0"):
        Monitor(layer, history=0)
    for history in (1.5, True, "64"):
        with refused(TypeError, "history", repr(history), "an integer, at least 1"):
            Monitor(layer, history=history)
    for rate in (True, "0.1"):
        with refused(TypeError, "error_rate", repr(rate), "0 (never) to 1"):
            Monitor(layer, error_rate=rate)
    with refused(ValueError, "error_rate", "5e-324", "pass 0"):
        Monitor(layer, error_rate=5e-324)
    with refused(TypeError, "error is True", "positive number"):
        Limits(error=True)
    with refused(ValueError, "kernel_error", "-1", "positive"):
        Limits(kernel_error=-1)
    with refused(ValueError, "no Linear", "convert"):
        Monitor(torch.nn.Linear(3, 4))
    first = Monitor(layer)
    with refused(ValueError, "another Monitor", "close()"):
        Monitor(layer)
    first.close()
    second = Monitor(layer, error_rate=0)
    first.close()  # again: ends nothing of the second
    layer(random(5, 260))
    assert second.snapshot()["layers"][""]["calls"] == 1
    second.close()
    assert layer.monitor is None


def test_a_compiled_layer_says_that_it_is_watched():
    layer, x = Linear(260, 70), random(5, 260)
    watch = Monitor(layer, error_rate=1)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
        assert watch.snapshot()["layers"][""]["calls"] == 2
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="watched layer"):
            torch.compile(layer, fullgraph=True, backend="eager")(x)


def test_off_costs_one_attribute_test():
    layer = Linear(260, 70)
    watch = Monitor(layer)
    watch.close()
    seconds = min(timeit.repeat("layer.monitor is not None", globals={"layer": layer}, number=10000, repeat=5)) / 10000
    assert layer.monitor is None and seconds < 2e-6  # 60 ns measured; the bound is for busy machines
