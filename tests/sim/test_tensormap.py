"""Tensor maps: what is accepted, how it is described, and what is refused with which words."""

import ctypes
import types

import pytest
import torch

from hopperlab.tensormap import TensorMap, encoded_at, simulated_index


def test_dimensions_are_innermost_first():
    tensor = torch.zeros(6, 40, 64, dtype=torch.bfloat16)[:, :32]
    made = TensorMap.tiled(tensor, box=(64, 16, 2), swizzle=128)
    assert made.dims == (64, 32, 6) and made.strides == (128, 5120) and made.box_bytes == 64 * 16 * 2 * 2
    assert made.address == tensor.data_ptr() and made.element_type == "BFLOAT16" and made.rank == 3


def test_fp8_is_copied_as_bytes():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        made = TensorMap.tiled(torch.zeros(4, 128, dtype=dtype), box=(128, 4))
        assert (made.element_type, made.element_bytes, made.strides) == ("UINT8", 1, (128,))


def test_one_row_needs_no_stride():
    made = TensorMap.tiled(torch.zeros(1, 100, dtype=torch.uint8), box=(112, 1))
    assert made.strides[0] % 16 == 0


def test_element_strides_thin_out_the_box():
    assert TensorMap.tiled(torch.zeros(32, 64, dtype=torch.uint8), box=(64, 16), element_strides=(1, 3)).box_bytes == 64 * 6


@pytest.mark.parametrize("tensor, strides", [
    (torch.zeros(501, dtype=torch.int32), [2016]), (torch.zeros(64, dtype=torch.uint8), [64]), (torch.zeros(4, 64, dtype=torch.uint8), [64]),
])  # fmt: skip
def test_the_driver_always_gets_strides(monkeypatch, tensor, strides):
    """It refuses a null pointer, which an empty list becomes, although a map of one dimension has none."""
    driver = pytest.importorskip("cuda.bindings.driver")
    given, memory = {}, ctypes.create_string_buffer(b"the map", 128)

    def encode(kind, rank, address, dims, strides, *rest):
        given.update(rank=rank, dims=list(map(int, dims)), strides=list(map(int, strides)))
        return driver.CUresult.CUDA_SUCCESS, types.SimpleNamespace(getPtr=lambda: ctypes.addressof(memory))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    made = TensorMap.tiled(tensor, box=(16, 2)[: tensor.dim()])
    assert encoded_at.__wrapped__(made.layout, made.address) == memory.raw  # what is kept would outlive the driver of this test
    assert given == {"rank": tensor.dim(), "dims": [*reversed(tensor.shape)], "strides": strides}


def test_bytes_for_the_simulator_name_the_map():
    made = TensorMap.tiled(torch.zeros(64, dtype=torch.uint8), box=(16,))
    assert len(made.simulator_bytes(3)) == 128 and simulated_index(made.simulator_bytes(3)) == 3
    assert simulated_index(bytes(128)) is None


BYTES = torch.zeros(64, 256, dtype=torch.uint8)


@pytest.mark.parametrize("tensor, options, error, message", [
    (torch.zeros(4, 4, dtype=torch.complex64), dict(box=(4, 4)), TypeError, "tensor: dtype torch.complex64"),
    (torch.zeros(()), dict(box=()), ValueError, "tensor: 0 dimensions; TMA maps have 1 to 5"),
    (torch.zeros(1, 1, 1, 1, 1, 16), dict(box=(1,) * 6), ValueError, "6 dimensions"),
    (BYTES, dict(box=(16,)), ValueError, "box: 1 numbers for a tensor of 2 dimensions"),
    (BYTES[:0], dict(box=(16, 8)), ValueError, "is empty"),
    (BYTES.T, dict(box=(16, 8)), ValueError, "innermost dimension has a stride of 256 elements"),
    (BYTES[:, :100].contiguous(), dict(box=(16, 8)), ValueError, "stride of dimension 0 is 100 bytes; TMA needs a multiple of 16"),
    (BYTES[:, 8:], dict(box=(16, 8)), ValueError, "address 0x.*8 is not a multiple of 16 bytes"),
    (BYTES, dict(box=(16, 257)), ValueError, "257 in dimension 1; 1 to 256"),
    (BYTES, dict(box=(0, 8)), ValueError, "0 in dimension 0; 1 to 256"),
    (BYTES, dict(box=(24, 8)), ValueError, "innermost dimension is 24 bytes .* multiple of 16"),
    (BYTES, dict(box=(128, 8), swizzle=64), ValueError, "64-byte swizzle allows at most 64"),
    (BYTES, dict(box=(16, 8), swizzle=16), ValueError, "swizzle: 16 bytes; allowed are"),
    (BYTES, dict(box=(16, 8), element_strides=(1, 9)), ValueError, "element_strides"),
    (BYTES, dict(box=(16, 8), element_strides=(2, 1)), ValueError, "the innermost 1"),
    (BYTES, dict(box=(16, 8), l2_promotion=32), ValueError, "l2_promotion: 32"),
    (BYTES, dict(box=(16, 8), fill_nan=True), ValueError, "fill_nan: only for float16"),
    (BYTES, dict(box=(16.5, 1)), TypeError, r"box: \(16.5, 1\); it must be a tuple of integers"),
    (BYTES, dict(box=16), TypeError, "box: 16; it must be a tuple of integers"),
    (BYTES, dict(box=(16, 8), element_strides=(1, 1.5)), TypeError, r"element_strides: \(1, 1.5\); it must be a tuple"),
    (BYTES, dict(box=(16, 8), swizzle=32.0), ValueError, "swizzle: 32.0 bytes; allowed are"),
    (BYTES, dict(box=(16, 8), l2_promotion=64.0), ValueError, "l2_promotion: 64.0; allowed are"),
])  # fmt: skip
def test_refusals(tensor, options, error, message):
    with pytest.raises(error, match=message):
        TensorMap.tiled(tensor, **options)


def test_limits_of_size_are_checked_without_the_memory():
    huge = torch.empty(1, dtype=torch.uint8).expand(1)
    with pytest.raises(ValueError, match=r"stride of dimension 0 is 1099511627776 bytes; 0 to 2\*\*40 - 1"):
        TensorMap.tiled(torch.as_strided(torch.empty(0, dtype=torch.uint8, device="meta"), (2, 16), (1 << 40, 1)), box=(16, 2))
    assert TensorMap.tiled(huge.repeat(16), box=(16,)).dims == (16,)
