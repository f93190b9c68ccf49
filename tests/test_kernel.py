"""Kernel: one call that runs on the machine its tensors live on, and refuses what neither machine could run."""

import pytest
import torch

from hopperlab.kernel import Kernel

SOURCE = """
struct Pair { float x, y; };
extern "C" __global__ void affine(const float* x, float* y, int n, float scale, unsigned char shift, long long offset) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * scale + (float)shift + (float)offset;
}
extern "C" __global__ void other(int* x) { *x = gridDim.x * 100 + gridDim.y * 10 + gridDim.z; }
"""


@pytest.fixture
def affine(tmp_path):
    path = tmp_path / "affine.cu"
    path.write_text(SOURCE)
    return Kernel(path, "affine")


def test_runs_where_the_tensors_are(affine, device):
    x = torch.arange(300, dtype=torch.float32, device=device)
    y = torch.full_like(x, -1)
    affine[2, 128](x, y, 250, 0.5, 7, -(2**40))
    assert torch.equal(y[:250], x[:250] * 0.5 + 7 - 2.0**40) and bool((y[250:] == -1).all())


def test_parameters_come_from_the_ptx(affine):
    assert [(p.type, p.bytes) for p in affine.parameters] == [
        ("u64", 8), ("u64", 8), ("u32", 4), ("f32", 4), ("u8", 1), ("u64", 8)]  # fmt: skip


def test_grid_of_three_dimensions(affine, device):
    out = torch.zeros(1, dtype=torch.int32, device=device)
    Kernel(affine.path, "other")[(2, 3, 4), 1](out)
    assert int(out) == 234


def test_a_missing_entry_lists_what_there_is(affine):
    with pytest.raises(ValueError, match=r'no kernel "missing"; it has \[\'affine\', \'other\'\]|\[\'other\', \'affine\'\]'):
        Kernel(affine.path, "missing").parameters


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no kernel source"):
        Kernel(tmp_path / "none.cu", "f").compiled


@pytest.mark.parametrize("launch, message", [
    ((1, 2048), "2048 threads; allowed are 1024"),
    ((0, 32), "grid: got 0"),
    (((1, 70000), 32), "grid.y: got 70000"),
    ((1, (8, 8, 8, 8)), "block: got"),
    ((3, 32, 2), "not a multiple of the cluster"),
    ((16, 32, 16), "16 CTAs; allowed are 8"),
    ((1, 32, 1, 300000), "shared_bytes: got 300000"),
])  # fmt: skip
def test_impossible_launches_are_refused(affine, launch, message):
    with pytest.raises(ValueError, match=message):
        affine[launch]


@pytest.mark.parametrize("launch", [1, (1,), (1, 2, 3, 4, 5)])
def test_a_launch_is_two_to_four_things(affine, launch):
    with pytest.raises(TypeError, match=r"kernel\[grid, block\]"):
        affine[launch]


def test_wrong_arguments_are_refused(affine, device):
    x = torch.zeros(4, device=device)
    with pytest.raises(TypeError, match=r"takes 6 arguments \(u64, u64, u32, f32, u8, u64\), 2 were given"):
        affine[1, 32](x, x)
    with pytest.raises(ValueError, match="no tensor"):
        affine[1, 32](1, 2, 3, 4.0, 5, 6)
    with pytest.raises(ValueError, match="tensors of one device"):
        affine[1, 32](x, torch.zeros(4, device="meta"), 4, 1.0, 0, 0)
    for bad in ((x, x, x, 1.0, 0, 0), (x, x, 2**33, 1.0, 0, 0), (x, x, 4, 1.0, 300, 0), (x, x, "4", 1.0, 0, 0)):
        with pytest.raises((TypeError, OverflowError, ValueError), match="argument|param"):
            affine[1, 32](*bad)


def test_simulator_options_are_refused_on_a_gpu(affine, device):
    if device.type == "cpu":
        pytest.skip("a Hopper GPU is needed to see the refusal; on the CPU the options are the simulator's")
    x = torch.zeros(4, device=device)
    with pytest.raises(TypeError, match="options of the simulator"):
        affine[1, 32](x, x, 4, 1.0, 0, 0, seed=1)
