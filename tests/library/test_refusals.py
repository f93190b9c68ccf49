"""What is refused before anything is run or written: options, recipes, outputs, devices, alike on every path."""

import pytest
import torch
from helpers import ints, random, refused

from fp8_gemm import __main__ as command_line
from fp8_gemm import Problem, ScaledTensor, explain, gemm, k_grouped_gemm, nn, quantize

A8, B8 = random(8, 128), random(16, 128, seed=1)


@pytest.mark.parametrize("options, error, words", [
    ({"group_m": -1}, ValueError, ["group_m is -1", "1 and more"]),
    ({"group_m": 0}, ValueError, ["group_m is 0"]),
    ({"num_sms": 0}, ValueError, ["num_sms is 0"]),
    ({"num_stages": 0}, ValueError, ["num_stages is 0"]),
    ({"group_m": 10**12}, ValueError, ["group_m is 1000000000000"]),
    ({"group_m": 2**31 - 1, "block_n": 16, "block_m": 64}, ValueError, ["group_m=2147483647", "2^31 tiles"]),
    ({"group_m": 1.5}, TypeError, ["group_m is 1.5", "integer"]),
    ({"block_m": "64"}, TypeError, ["block_m is '64'", "integer"]),
    ({"block_m": [64]}, TypeError, ["block_m is [64]", "integer"]),
    ({"block_m": True}, TypeError, ["block_m is True", "integer"]),
    ({"swap_ab": 1}, TypeError, ["swap_ab is 1", "True or False"]),
    ({"foo": 3}, ValueError, ["foo is given", "block_m, block_n"]),
    ({"exact": True}, ValueError, ["exact is given", "backend='reference' takes it"]),
    ({"batch_invariant": True, "block_m": 64}, ValueError, ["block_m=64, batch_invariant=True", "128 x 128"]),
])  # fmt: skip
def test_options_of_a_plan_that_are_none(options, error, words):
    for call in (lambda: gemm(A8, torch.cat([B8, B8]), backend="simulator", **options),
                 lambda: explain(A8, torch.cat([B8, B8]), backend="simulator", **options)):  # fmt: skip
        with refused(error, *words):
            call()


def test_unknown_keywords_of_backends_without_a_plan():
    with refused(ValueError, "foo is given", "no argument of this function"):
        gemm(A8, B8, backend="reference", foo=3)
    with refused(ValueError, "block_m is given", "follows no plan", "backend='cuda'"):
        gemm(A8, B8, backend="reference", block_m=64)


@pytest.mark.parametrize("call", [
    lambda a, w: gemm(a, w, recipe=("foo", "128x128")),
    lambda a, w: gemm(a, w, interval=128.0),
    lambda a, w: gemm(a, w, interval="a"),
    lambda a, w: gemm(a, w, out_dtype="bf16"),
    lambda a, w: gemm(a, w, grad_format="e9"),
], ids=["recipe", "interval", "interval is text", "out_dtype", "grad_format"])  # fmt: skip
def test_the_same_refusal_with_and_without_gradients(call):
    gemm(A8, B8)  # what was seen before changes nothing
    messages = set()
    for a in (A8, A8.clone().requires_grad_()):
        for w in (B8, quantize(B8, "128x128")):
            with pytest.raises((TypeError, ValueError)) as caught:
                call(a, w)
            messages.add(str(caught.value))
    assert len(messages) == 1 and "allowed are" in messages.pop()


def test_batch_invariance_and_one_scale_for_all_rows():
    with refused(ValueError, "batch_invariant is True", "'tensor'", "'1x128' or 'row'"):
        gemm(A8, B8, recipe=("tensor", "tensor"), batch_invariant=True)
    with refused(ValueError, "batch_invariant is True"):
        nn.Recipe("tensor", "tensor", batch_invariant=True)
    scaled = quantize(A8, "tensor")  # whose scale is given
    assert torch.equal(gemm(scaled, B8, recipe=("tensor", "tensor"), batch_invariant=True)[:1],
                       gemm(ScaledTensor(scaled.data[:1], scaled.scale, "tensor"), B8, recipe=("tensor", "tensor"), batch_invariant=True))  # fmt: skip


@pytest.mark.parametrize("out, c, error, words", [
    (torch.zeros(8, 16), torch.zeros(8, 16, requires_grad=True), ValueError, ["c requires grad", "no gradient"]),
    (torch.full((3, 3), 7.0), torch.ones(8, 16), ValueError, ["out has shape (3, 3)", "(8, 16)"]),
    ("s", torch.ones(8, 16), TypeError, ["out is a str"]),
    (torch.full((8, 16), 7.0, dtype=torch.float16), torch.ones(8, 16), TypeError, ["out has dtype torch.float16", "float32"]),
])  # fmt: skip
def test_out_is_looked_at_before_c_is_written_to_it(out, c, error, words):
    before = out.clone() if isinstance(out, torch.Tensor) else out
    with refused(error, *words):
        gemm(A8, B8, c=c, out=out, out_dtype=torch.float32)
    assert isinstance(out, str) or (torch.equal(out, before) and out.grad_fn is None)
    stacked = {"c": c[None] if c.dim() == 2 else c, "out": out[None] if isinstance(out, torch.Tensor) else out}
    with refused(error, *[word.replace("(8, 16)", "(1, 8, 16)").replace("(3, 3)", "(1, 3, 3)") for word in words]):
        k_grouped_gemm(A8, B8, ints(0, 128), **stacked)


def test_meta_tensors_beside_others():
    meta = torch.empty(16, 128, device="meta")
    for call in (lambda: gemm(A8, meta), lambda: gemm(meta, B8), lambda: gemm(A8.clone().requires_grad_(), B8, bias=torch.zeros(16, device="meta")),
                 lambda: nn.Linear(128, 16, device="meta").requires_grad_(False)(A8)):  # fmt: skip
        with refused(ValueError, "is on", "meta", "one device"):
            call()
    with refused(ValueError, "bias has shape (3,)", "(16,)"):
        gemm(torch.empty(8, 128, device="meta"), meta, bias=torch.zeros(3, device="meta"))


def test_explain_takes_what_gemm_takes():
    assert "1x128" in str(explain(A8, B8, out_dtype=torch.float8_e4m3fn, backend="simulator"))
    assert explain(Problem("dense", 4096, 4096, 4096, out_dtype=torch.float8_e4m3fn), backend="simulator").problem.out_dtype == torch.float32
    turned = explain(A8, B8.t(), layout="nn", backend="simulator")
    assert (turned.problem.m, turned.problem.n, turned.problem.k) == (8, 16, 128)
    assert explain(A8, B8, c=torch.zeros(8, 16), out_dtype=torch.float32).problem.accumulate
    for call, error in ((lambda: explain(A8), TypeError), (lambda: explain("x", "w"), TypeError), (lambda: explain(A8.int(), B8), TypeError),
                        (lambda: explain(A8[0], B8), ValueError), (lambda: explain(A8, B8, recipe=("foo", "bar")), ValueError),
                        (lambda: explain(A8, B8, layout="xx"), ValueError), (lambda: explain(A8, B8, grad_format="e9"), ValueError)):  # fmt: skip
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("sizes", [(1.5, 2, 3), (True, 2, 3), ("4", 2, 3)], ids=str)
def test_sizes_are_integers(sizes):
    with refused(TypeError, "m is", "integer"):
        Problem("dense", *sizes)


without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: asking for one is right")


@pytest.mark.parametrize("arguments, message", [
    (("explain", "4x5x6", "--recipe", "foo", "bar"), "recipe_a is 'foo'; allowed are"),
    (("explain", "4x5x6", "--groups", "3"), "groups is 3; a dense problem has 1"),
    (("explain", "--", "-1x5x3"), "m is -1; allowed are 0 and more"),
    (("explain", "4x5x6", "--device", "foo"), "'foo' is no device: write cuda, cuda:1 or cpu"),
    (("smoke", "--device", "meta"), "'meta' is no device with FP8 kernels"),
    pytest.param(("explain", "4x5x6", "--device", "cuda"), "'cuda' is not there: PyTorch sees 0 CUDA GPUs", marks=without_a_gpu),
    pytest.param(("explain", "4x5x6", "--backend", "cuda"), "it takes CUDA tensors", marks=without_a_gpu),
    pytest.param(("warmup", "4x5x6", "--device", "cuda:1"), "'cuda:1' is not there", marks=without_a_gpu),
])  # fmt: skip
def test_the_command_line_says_what_is_wrong_in_a_line(arguments, message, capsys):
    try:
        assert command_line.main(list(arguments)) == 1
    except SystemExit as end:  # argparse's way
        assert end.code == 2
    assert message in capsys.readouterr().err


@without_a_gpu
def test_smoke_reports_a_backend_that_cannot_run(capsys):
    assert command_line.main(["smoke", "--backend", "cuda"]) == 1
    output = capsys.readouterr().out
    assert "backend" in output and "drop --backend" in output and "failed, " in output.splitlines()[-1]
