"""Kernel: one call that runs on the machine its tensors live on, and refuses what neither machine could run."""

import ctypes
import struct

import pytest
import torch

from hopperlab.kernel import Arguments, Kernel, Packing, Parameter, _launch_config

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


# ---- what a GPU launch is made of, without a GPU ----------------------------------------------------------------------


def test_arguments_lie_as_the_abi_says():
    """Against ctypes, which follows the C compiler: scalars aligned to their size, tensor maps to 64 bytes."""
    declared = [("b8", 128, 64), ("u32", 4, 4), ("u64", 8, 8), ("u8", 1, 1), ("f32", 4, 4), ("b8", 128, 64), ("u16", 2, 2), ("f64", 8, 8)]
    packing = Packing([Parameter(f"p{i}", *each) for i, each in enumerate(declared)])
    values = [bytes(range(128)), 2**32 - 5, 0x1122334455667788, 200, 0.5, bytes(range(127, -1, -1)), 65535, -2.25]
    arguments = Arguments(packing, values)
    assert arguments.address % 8 == 0
    addresses = struct.unpack(f"{len(declared)}Q", ctypes.string_at(arguments.address, 8 * len(declared)))

    class Between(ctypes.Structure):  # the two maps, which ctypes cannot align
        _fields_ = [("i", ctypes.c_uint32), ("p", ctypes.c_uint64), ("b", ctypes.c_uint8), ("f", ctypes.c_float)]

    assert [address - addresses[0] - 128 for address in addresses[1:5]] == [getattr(Between, name).offset for name in "ipbf"]
    assert all(address % alignment == 0 for address, (_, _, alignment) in zip(addresses, declared))
    kinds = {"u32": "<I", "u64": "<Q", "u8": "<B", "f32": "<f", "u16": "<H", "f64": "<d"}
    for address, (kind, size, _), value in zip(addresses, declared, values):
        there = ctypes.string_at(address, size)
        assert (there if kind == "b8" else struct.unpack(kinds[kind], there)[0]) == value


def test_parameters_of_a_kernel_with_maps_are_placed_by_its_ptx(tmp_path):
    path = tmp_path / "maps.cu"
    path.write_text("""
#include "hopper.cuh"
extern "C" __global__ void mixed(int n, const __grid_constant__ TensorMap map, float* out, unsigned short s, double d) {
  if (n == 1) tma_prefetch_map(&map);
  *out = s + (float)d;
}""")
    kernel = Kernel(path, "mixed")
    assert [(p.bytes, p.alignment) for p in kernel.parameters] == [(4, 4), (128, 64), (8, 8), (2, 2), (8, 8)]
    assert kernel.packing.offsets == [0, 64, 192, 200, 208] and kernel.packing.table == 216


def test_values_of_arguments(affine):
    x, _, n, scale, shift, offset = affine.parameters
    memory = torch.zeros(4)
    assert affine.value(memory, x) == memory.data_ptr() and affine.value(-1, n) == 2**32 - 1 and affine.value(2**32 - 1, n) == 2**32 - 1
    assert affine.value(1, scale) == 1.0 and affine.value(True, shift) == 1 and affine.value(-(2**40), offset) == 2**64 - 2**40
    for value, parameter in ((memory, n), (1.5, n), (2**32, n), (256, shift), ("4", n), (None, x)):
        with pytest.raises((TypeError, OverflowError)):
            affine.value(value, parameter)


def test_a_launch_configuration_has_its_stream_and_attributes():
    driver = pytest.importorskip("cuda.bindings.driver")
    for cluster, early, wanted in (((1, 1, 1), False, []), ((2, 1, 1), False, ["CLUSTER"]), ((1, 1, 1), True, ["PROGRAMMATIC"]),
                                   ((2, 1, 1), True, ["CLUSTER", "PROGRAMMATIC"])):  # fmt: skip
        config = _launch_config((4, 2, 1), (128, 1, 1), cluster, 1024, early, 9)
        assert (config.gridDimX, config.gridDimY, config.blockDimX, config.sharedMemBytes, int(config.hStream)) == (4, 2, 128, 1024, 9)
        assert isinstance(config, driver.CUlaunchConfig) and config.numAttrs == len(wanted)
        assert all(name in attribute.id.name for name, attribute in zip(wanted, config.attrs))
