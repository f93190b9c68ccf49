"""What only a GPU can show: no call waits for the device, CUDA graphs, streams, other threads' current device."""

import pytest
import torch
from helpers import calc_diff, random

from fp8_gemm import (
    gemm, grouped_gemm, k_grouped_gemm, kernels, masked_gemm, quantize, quantize_grouped, quantize_k_grouped, warmup,
)  # fmt: skip
from fp8_gemm.kernels import ahead
from hopperlab import capability
from hopperlab import compile as compiler

pytestmark = pytest.mark.skipif(not capability.hopper().ok, reason=capability.hopper().sentence())
BF16, FP32 = torch.bfloat16, torch.float32


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.fixture
def calls():
    """Every kind of call, by name; their tensors stay the same."""
    a, b = quantize(random(300, 512, device="cuda")), quantize(random(256, 512, seed=1, device="cuda"), "128x128")
    experts = quantize_grouped(random(4, 256, 512, seed=2, device="cuda"))
    stack = quantize_grouped(random(4, 80, 512, seed=3, device="cuda"), "1x128")
    x, counts, masked_m = random(300, 512, seed=4, device="cuda", dtype=BF16), ints(100, 0, 130, 70), ints(80, 0, 1, 40)
    indices = torch.cat([torch.full((n,), g, dtype=torch.int32, device="cuda") for g, n in ((0, 90), (-1, 10), (2, 200))])
    k_offsets = ints(0, 100, 100, 512)
    (p, offsets), (q, _) = (quantize_k_grouped(random(r, 500, seed=r, device="cuda"), ints(0, 100, 100, 500)) for r in (64, 96))
    return {
        "dense": lambda: gemm(a, b),
        "on the fly": lambda: gemm(x, b),
        "into": lambda: gemm(a, b, c=torch.ones(300, 256, device="cuda"), out_dtype=FP32),
        "counts": lambda: grouped_gemm(a, experts, counts=counts, out=torch.zeros(300, 256, dtype=BF16, device="cuda")),
        "indices": lambda: grouped_gemm(a, experts, indices=indices, out=torch.zeros(300, 256, dtype=BF16, device="cuda")),
        "masked": lambda: masked_gemm(stack, experts, masked_m, out=torch.zeros(4, 80, 256, dtype=BF16, device="cuda")),
        "k_grouped": lambda: k_grouped_gemm(p, q, offsets),
        "k_grouped plain": lambda: k_grouped_gemm(x[:64].float(), x[:96].float(), k_offsets),
    }  # fmt: skip


NAMES = ("dense", "on the fly", "into", "counts", "indices", "masked", "k_grouped", "k_grouped plain")


@pytest.mark.parametrize("name", NAMES)
def test_no_call_waits_for_the_device(calls, name):
    want = calls[name]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = calls[name]()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_after_warmup_a_call_of_plain_tensors_compiles_nothing(monkeypatch):
    (done,) = warmup([(64, 512, 1024)])
    assert done.backend == "cuda"
    monkeypatch.setattr(compiler, "compile_source", lambda *arguments: pytest.fail("compiled"))
    x, w = (random(rows, 1024, seed=rows, device="cuda", dtype=BF16) for rows in (64, 512))
    assert torch.isfinite(gemm(x, w)).all()


def test_behind_a_first_call_kernels_for_every_m_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path))
    monkeypatch.setenv(ahead.VARIABLE, "1")
    monkeypatch.setattr(ahead, "_begun", {})
    kernels.kernel.cache_clear()
    x, w = random(5000, 1168, device="cuda", dtype=BF16), random(528, 1168, seed=1, device="cuda", dtype=BF16)
    gemm(x[:40], w)
    (thread,) = ahead._begun.values()
    thread.join()
    monkeypatch.setattr(compiler, "compile_source", lambda *arguments: pytest.fail("compiled"))
    for m in (1, 16, 100, 129, 300, 1000, 2500, 5000):
        assert calc_diff(gemm(x[:m], w), x[:m].float() @ w.float().t()) < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_capture_and_replay(calls, name):
    want = calls[name]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[name]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = calls[name]()
    got.fill_(-7)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_a_replay_follows_new_data_and_new_group_sizes():
    experts, counts = quantize_grouped(random(3, 256, 512, seed=2, device="cuda")), ints(50, 0, 100)
    x, out = random(150, 512, device="cuda", dtype=BF16), torch.zeros(150, 256, dtype=BF16, device="cuda")
    grouped_gemm(x, experts, counts=counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, experts, counts=counts, out=out)
    x.copy_(random(150, 512, seed=9, device="cuda"))
    counts.copy_(ints(0, 149, 1))
    graph.replay()
    assert torch.equal(out, grouped_gemm(x, experts, counts=counts))


@pytest.mark.parametrize("rows", (1, 70, 1000))
def test_kernels_that_overlap_see_what_the_kernel_before_wrote(rows):
    """Each product quantises what the last one wrote, into buffers that are used again at once. Kernels start before the one in
    front of them has ended: one that reads too early, or old bytes from a cache, changes a bit of some step."""
    layers = [quantize(random(256, 256, seed=seed, device="cuda") / 16, "128x128") for seed in range(8)]
    buffers = torch.empty(2, rows, 256, dtype=BF16, device="cuda")

    def step(i, wait):
        gemm(buffers[i % 2], layers[i % len(layers)], out=buffers[1 - i % 2])
        if i % 5 == 0:
            buffers[1 - i % 2] *= 1.5  # a kernel of torch's between two of the library's
        wait()

    def run(steps, wait):
        buffers[0] = random(rows, 256, seed=99, device="cuda").to(BF16)
        for i in range(steps):
            step(i, wait)
        return buffers[steps % 2].clone()

    want = {steps: run(steps, torch.cuda.synchronize) for steps in (1, 40, 400)}
    for steps, expected in want.items():
        assert expected.isfinite().all() and expected.any()
        assert torch.equal(run(steps, lambda: None), expected)

    start = random(rows, 256, seed=99, device="cuda").to(BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers[0] = start
        for i in range(40):
            step(i, lambda: None)
    for _ in range(5):
        graph.replay()
    assert torch.equal(buffers[0], want[40])


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_their_own(calls, name):
    want = calls[name]()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(calls[name]())
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    a, b = random(100, 300, device="cuda:1"), random(64, 300, seed=1, device="cuda:1")
    with torch.cuda.device(0):
        got = gemm(a, b)
    assert got.device == torch.device("cuda", 1)
    assert torch.equal(got.cpu(), gemm(a.to("cuda:0"), b.to("cuda:0")).cpu())
