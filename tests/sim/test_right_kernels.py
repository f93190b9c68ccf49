"""Right kernels of many styles: the right result, and not one complaint, in every order of events."""

import gemms
import pytest
import torch

from hopperlab import sim
from hopperlab.compile import compile_source
from hopperlab.tensormap import TensorMap

ORDERS = [dict(order="lazy"), dict(order="eager")] + [dict(seed=s, order=("lazy", "eager")[s % 2]) for s in range(12)]


@pytest.fixture(scope="module")
def ptx():
    return compile_source((gemms.KERNELS / "right.cu").read_text(), "right.cu").ptx


def f8(*shape, generator):
    return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_double_buffer(ptx, order):
    generator = torch.Generator().manual_seed(1)
    a, b, d = f8(64, 640, generator=generator), f8(64, 640, generator=generator), torch.zeros(64, 64)
    maps = [TensorMap.tiled(x, box=(128, 64), swizzle=128) for x in (a, b)]
    sim.launch(ptx, "double_buffer", [*maps, d, 640], grid=1, block=128, shared_bytes=4 * 64 * 128, **order)
    assert torch.allclose(d, a.float() @ b.float().T, atol=0.5)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_operands_made_in_the_kernel(ptx, order):
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(64, 256, generator=generator) for _ in range(2))
    d = torch.zeros(64, 64)
    sim.launch(ptx, "made_in_kernel", [a, b, d, 256], grid=1, block=128, shared_bytes=2 * 64 * 128, **order)
    assert torch.allclose(d, a.to(torch.float8_e4m3fn).float() @ b.to(torch.float8_e4m3fn).float().T, atol=0.5)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_ampere_style(ptx, order):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(rows, 160, generator=generator).to(torch.bfloat16) for rows in (32, 8))
    d = torch.zeros(32, 8)
    sim.launch(ptx, "ampere_style", [a, b, d, 160], grid=1, block=64, **order)
    assert torch.allclose(d, a.float() @ b.float().T, atol=1e-3)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_store_ring(ptx, order):
    x, y = torch.randn(6 * 64, 32), torch.zeros(6 * 64, 32)
    sim.launch(ptx, "store_ring", [TensorMap.tiled(y, box=(32, 64), swizzle=128), x, 6], grid=1, block=128, **order)
    assert torch.equal(x, y)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_copied_ring(ptx, order):
    x, sums = torch.randn(8, 27), torch.full((32,), float("nan"))  # rows of the last block beyond 27 lie outside of x
    sim.launch(ptx, "copied_ring", [x, sums, 27, 8], grid=1, block=64, **order)
    expected = torch.zeros(32)
    for block in x:
        expected[:27] += block
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_parts_to_first(ptx, order):
    x, sums = torch.randn(4, 64, 4), torch.zeros(64, 4)
    sim.launch(ptx, "parts_to_first", [x, sums, 4], grid=4, block=96, cluster=4, **order)
    assert torch.equal(sums, x[0] + x[1] + x[2] + x[3])


@pytest.mark.parametrize("old, new, message", [
    ("if (k > 0) wgmma_wait<0>();", "", "still reads it|still belongs|not ordered"),
    ("    fence_proxy_async_shared();\n    __syncthreads();\n    wgmma_hold", "    __syncthreads();\n    wgmma_hold", "no proxy fence"),
    ("wait_group 1;\" ::: \"memory\");\n    __syncthreads();", "wait_group 1;\" ::: \"memory\");", "race on tile_|nothing has written"),
    ("tma_store_wait_read<1>();", "tma_store_wait_read<2>();", "may still read"),
    ("(pair / 8 ^ row % 8) * 16", "(pair / 8) * 16", "descriptor of operand A undoes a 128-byte swizzle, but the store at .* without it"),
    ("      mbarrier_wait(&full[s], phase);\n      sum", "      sum", r"race on slots .*nothing orders that after the write"),
    ("      mbarrier_wait(&empty[s], phase ^ 1);\n      copy_async", "      copy_async", "race on slots .*nothing orders that after the read"),
    ("copy_async_arrive(&full[s]);", "if (lane < rows) copy_async_arrive(&full[s]);", r"full\[0\].*lacks 5 of 32 arrivals"),
    ("+ lane, lane < rows);", "+ lane, true);", "reads 4 bytes at 0 bytes after the end of argument 0"),
    ("  cluster_wait();     ", "  //", "race on full .*no barrier orders that after its mbarrier.init|no mbarrier was initialised"),
    ("  mbarrier_wait_cluster(&full, 0);", "", "reads parts .*nothing has written|race on parts"),
    ("(ranks - 1) * sizeof parts[0]", "(ranks - 2) * sizeof parts[0]", "reads parts .*nothing has written|race on parts|expect_tx announced"),
    ("(ranks - 1) * sizeof parts[0]", "ranks * sizeof parts[0]", "parity 0 of full .*1024 of 4096 expected bytes"),
    ("&full, 0, sum);", "&full, rank ^ 1, sum);", r"reaches into block \(\d, 0, 0\), which has exited"),
])  # fmt: skip
def test_broken_versions_are_reported(old, new, message):
    text = (gemms.KERNELS / "right.cu").read_text()
    assert old in text
    broken = compile_source(text.replace(old, new), "right.cu").ptx
    for order in ORDERS[:4]:
        with pytest.raises(sim.SimulatorError, match=f"(?s){message}"):
            test_double_buffer(broken, order)
            test_operands_made_in_the_kernel(broken, order)
            test_ampere_style(broken, order)
            test_store_ring(broken, order)
            test_copied_ring(broken, order)
            test_parts_to_first(broken, order)


@pytest.mark.parametrize("order", [dict(order="lazy"), dict(seed=0), dict(seed=1)], ids=str)
def test_an_arrival_that_does_not_wait_for_the_copies_is_reported(order):
    """Only where copies take their time: in the eager order they are done at once."""
    text = (gemms.KERNELS / "right.cu").read_text()
    broken = compile_source(text.replace("copy_async_arrive(&full[s]);", "mbarrier_arrive(&full[s]);"), "right.cu").ptx
    with pytest.raises(sim.Hazard, match="reads slots .*nothing has written"):
        test_copied_ring(broken, order)


@pytest.mark.parametrize("order", [dict(order="lazy"), dict(order="eager"), dict(seed=1)])
@pytest.mark.parametrize("padding", [0, 5, 16])
def test_a_store_fills_the_last_16_bytes_of_a_row(order, padding):
    """An H200 clips rows to whole 16-byte pieces. Where the storage ends before, the rest of the piece has no place."""
    source = """#include "hopper.cuh"
    extern "C" __global__ void store(const __grid_constant__ TensorMap map) {
      __shared__ __align__(128) u8 tile[4 * 96];
      for (int i = threadIdx.x; i < sizeof tile; i += 32) tile[i] = 1 + i / 96;
      fence_proxy_async_shared();
      __syncthreads();
      if (threadIdx.x == 0) {
        tma_store_2d(&map, tile, 0, 0);
        tma_store_commit();
        tma_store_wait<0>();
      }
    }"""
    memory = torch.zeros(2 * 96 + 75 + padding, dtype=torch.uint8)
    rows = torch.as_strided(memory, (3, 75), (96, 1))
    sim.launch(compile_source(source, "store.cu").ptx, "store", [TensorMap.tiled(rows, box=(96, 4))], grid=1, block=32, **order)
    expected = torch.zeros(3 * 96, dtype=torch.uint8)
    for row in range(3):
        expected[row * 96 : row * 96 + 80] = row + 1
    assert torch.equal(memory, expected[: len(memory)])
