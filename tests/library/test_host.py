"""The way of a call to its launch, with a driver that only writes down what it is given: on any machine, without a GPU."""

import ctypes
import importlib
import struct
import threading

import pytest
import torch
from helpers import ints, random, refused

from fp8_gemm import bench, dispatch, gemm, grouped_gemm, kernels, masked_gemm, ops, quantize, quantize_grouped, swiglu_quantize
from fp8_gemm.kernels import quantize as quantisers
from fp8_gemm.problem import Operands, Problem
from hopperlab import kernel as hopperlab_kernel
from hopperlab import tensormap
from hopperlab.quantize import is_m_major

driver = pytest.importorskip("cuda.bindings.driver")
BF16, FP32 = torch.bfloat16, torch.float32
EARLY = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAPS, SCALES, OUT = slice(0, 3), slice(3, 5), 8  # places among the parameters of gemm.cu


class Gpu:
    """What reached the driver: (function, parameters, stream) of each launch, addresses of each encoded map."""

    def __init__(self):
        self.launches, self.encoded, self.stream, self.statuses = [], [], 7, []
        self.loaded, self.configs = [], []

    def load(self, kernel):
        self.loaded.append(kernel)
        return driver.CUfunction(len(self.loaded))

    def launch(self, config, function, parameters, extra):
        declared = self.loaded[int(function) - 1].parameters
        addresses = struct.unpack(f"{len(declared)}Q", ctypes.string_at(parameters, 8 * len(declared)))
        values = [ctypes.string_at(address, parameter.bytes) for address, parameter in zip(addresses, declared)]
        numbers = [value if len(value) == tensormap.BYTES else int.from_bytes(value, "little") for value in values]
        self.launches.append((function, numbers, int(config.hStream)))
        self.configs.append(config)
        return (self.statuses.pop(0) if self.statuses else driver.CUresult.CUDA_SUCCESS,)

    def encode(self, kind, rank, address, *layout):
        self.encoded.append(address)
        memory = ctypes.create_string_buffer(struct.pack("<Q", address), tensormap.BYTES)
        made = type("Map", (), {"getPtr": lambda self: ctypes.addressof(memory), "memory": memory})()
        return driver.CUresult.CUDA_SUCCESS, made

    @property
    def last(self):
        return self.launches[-1][1]

    @property
    def map_addresses(self):
        return [struct.unpack_from("<Q", encoded)[0] for encoded in self.last[MAPS]]


def forget():
    ops.forget()
    kernels._launches.clear(), quantisers._known.clear()
    for cached in (kernels.packed, quantisers.packed, tensormap.encoded_at, tensormap._driver_arguments, hopperlab_kernel.Kernel.prepare, dispatch._chosen):
        cached.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors take the way of CUDA tensors. A call seen for the first time runs on the simulator, later ones end in Gpu."""
    made = Gpu()
    monkeypatch.setattr(driver, "cuLaunchKernelEx", made.launch)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", made.encode)
    monkeypatch.setattr(hopperlab_kernel.Kernel, "_loaded", lambda self, index, shared_bytes: made.load(self))
    monkeypatch.setattr(dispatch, "choose", lambda problem, device, backend=None: (backend or "cuda", None, {}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of "cpu"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.stream, raising=False)
    forget()
    yield made
    forget()


@pytest.fixture
def operands():
    return quantize(random(40, 256)), quantize(random(48, 256, seed=1), "128x128")


def test_a_second_call_goes_straight_to_its_launch(gpu, operands):
    a, b = operands
    want = gemm(a, b)
    assert not gpu.launches
    out = gemm(a, b)
    assert out.shape == want.shape and out.dtype == want.dtype and out.is_contiguous() and len(gpu.launches) == 1
    scales = {a.scale.data_ptr(), b.scale.data_ptr()}
    assert set(gpu.last[SCALES]) == scales and gpu.last[OUT] == out.data_ptr() and gpu.launches[0][2] == 7
    assert {a.data.data_ptr(), b.data.data_ptr()} <= set(gpu.map_addresses)


def test_what_reaches_the_driver_is_what_the_simulator_gets(gpu, operands):
    a, b = operands
    problem, chosen = Problem("dense", 40, 48, 256), kernels.plan_for(Problem("dense", 40, 48, 256), torch.device("cpu"))
    bias, out = random(48), torch.empty(40, 48, dtype=BF16)
    for added in (None, bias):
        gemm(a, b, bias=added, out=out)
        gemm(a, b, bias=added, out=out)
        numbers = kernels._numbers(problem, chosen, Operands(a.data, b.data, a.scale, b.scale))
        assert tuple(gpu.last[-len(numbers) :]) == numbers
        assert gpu.last[5] == (a.scale if added is None else bias).data_ptr()


def test_the_first_launch_of_a_plan_nobody_asked_for_compiles_ahead(gpu, operands, monkeypatch):
    seen = []
    monkeypatch.setattr(kernels.ahead, "start", lambda problem, device, **overrides: seen.append((problem, device, overrides)))
    problem, cpu = Problem("dense", 40, 48, 256), torch.device("cpu")
    for _ in range(2):
        gemm(*operands)
    assert seen == [(problem, cpu, {})]
    gemm(*operands, block_m=64, block_n=48, swap_ab=False)
    assert len(seen) == 1
    gemm(*operands, num_sms=100)
    assert seen[1:] == [(problem, cpu, {"num_sms": 100})]


def test_known_addresses_encode_nothing_and_new_ones_only_themselves(gpu, operands):
    a, b = operands
    out = torch.empty(40, 48, dtype=BF16)
    gemm(a, b, out=out), gemm(a, b, out=out)
    encoded = len(gpu.encoded)
    gemm(a, b, out=out)
    assert len(gpu.encoded) == encoded
    other = quantize(random(40, 256, seed=5))
    gemm(other, b, out=out)
    assert gpu.encoded[encoded:] == [other.data.data_ptr()] and other.scale.data_ptr() in gpu.last[SCALES]


def test_groups_and_their_ends(gpu):
    experts, x, counts = quantize_grouped(random(3, 48, 256)), quantize(random(40, 256)), ints(8, 20, 12)
    indices = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), counts)
    offsets = ints(0, 8, 28, 40)
    for groups in ({"offsets": offsets}, {"counts": counts}, {"indices": indices}):
        for _ in range(2):
            grouped_gemm(x, experts, **groups)
        begins, ends = gpu.last[6:8]
        assert begins and ends and (ends == begins + 4) == ("indices" not in groups)
        if "offsets" in groups:
            assert begins == offsets.data_ptr()
    sizes = ints(8, 0, 3)
    for _ in range(2):
        masked_gemm(quantize_grouped(random(3, 8, 256), "1x128"), experts, sizes)
    assert gpu.last[6:8] == [sizes.data_ptr()] * 2


def test_another_layout_or_option_is_another_call(gpu, operands):
    a, b = operands
    pitched = torch.zeros(40, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :256]
    wide = type(a)(pitched, a.scale, "1x128")
    out, wide_out = torch.empty(40, 48, dtype=BF16), torch.empty(40, 96, dtype=BF16)[:, :48]
    calls = (lambda: gemm(a, b, out=out), lambda: gemm(wide, b, out=out), lambda: gemm(a, b, out=wide_out), lambda: gemm(a, b, out_dtype=FP32),
             lambda: gemm(a, b, num_sms=20), lambda: gemm(a, b, batch_invariant=True), lambda: gemm(a, b, bias=random(48)),
             lambda: gemm(a, b, c=out, out=out))  # fmt: skip
    for number, call in enumerate(calls):
        call()
        assert len(gpu.launches) == number  # the first time, the ordinary way
        call()
        assert len(gpu.launches) == number + 1


def test_checks_that_need_addresses_or_this_moment_are_made_in_every_call(gpu, operands, monkeypatch):
    a, b = operands
    memory = torch.zeros(40 * 256 + 40 * 48 * 2, dtype=torch.uint8)
    apart, inside = (memory[start : start + 40 * 48 * 2].view(BF16).view(40, 48) for start in (40 * 256, 0))
    a = type(a)(memory[: 40 * 256].view(torch.float8_e4m3fn).view(40, 256), a.scale, "1x128")
    gemm(a, b, out=apart), gemm(a, b, out=apart)
    launches = len(gpu.launches)
    with refused(ValueError, "out shares memory with a,", "of its own"):
        gemm(a, b, out=inside)
    with refused(ValueError, "out requires grad"):
        gemm(a, b, out=torch.zeros(40, 48, dtype=BF16, requires_grad=True))
    with refused(ValueError, "interval is 192"):
        gemm(a, b, out=apart, interval=192)
    monkeypatch.setenv("FP8_GEMM_BACKEND", "reference")
    seen = []
    monkeypatch.setattr(dispatch, "run", lambda *arguments, **options: seen.append(arguments))
    gemm(a, b, out=apart)
    assert seen and len(gpu.launches) == launches


def test_an_address_that_tma_cannot_read_is_copied(gpu, operands):
    a, b = operands
    gemm(a, b), gemm(a, b)
    launches = len(gpu.launches)
    memory = torch.zeros(40 * 256 + 8, dtype=torch.uint8)
    memory[8:] = a.data.view(torch.uint8).flatten()
    odd = type(a)(memory[8:].view(torch.float8_e4m3fn).view(40, 256), a.scale, "1x128")
    assert odd.data.data_ptr() % 16 == 8
    assert torch.equal(gemm(odd, b), gemm(a, b, backend="simulator")) and len(gpu.launches) == launches


def test_each_stream_has_its_configuration(gpu, operands):
    """One that is shared, with the stream written into it, would be a race between threads."""
    a, b = operands
    gemm(a, b)
    for stream in (7, 9, 7):
        gpu.stream = stream
        gemm(a, b)
    assert [stream for *_, stream in gpu.launches] == [7, 9, 7]


def test_threads_launch_at_once_with_their_own_tensors(gpu, operands):
    a, b = operands
    gemm(a, b)
    inside, results, real = threading.Barrier(2, timeout=30), {}, gpu.launch

    def launch(*arguments):
        inside.wait()  # both threads are between packing and the driver's reading
        inside.wait()
        return real(*arguments)

    hopperlab_kernel.Kernel.prepare.cache_clear(), kernels._launches.clear(), ops.forget()
    driver.cuLaunchKernelEx = launch  # restored with the fixture
    gemm(a, b)
    operand = [quantize(random(40, 256, seed=seed)) for seed in (1, 2)]
    outs = [torch.empty(40, 48, dtype=BF16) for _ in operand]
    gemm(operand[0], b, out=torch.empty(40, 48, dtype=BF16))
    threads = [threading.Thread(target=lambda i=i: results.update({i: gemm(operand[i], b, out=outs[i])})) for i in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert {numbers[OUT] for _, numbers, _ in gpu.launches} == {out.data_ptr() for out in outs}
    for _, numbers, _ in gpu.launches:
        index = [out.data_ptr() for out in outs].index(numbers[OUT])
        assert operand[index].scale.data_ptr() in numbers[SCALES]
        assert operand[index].data.data_ptr() in [struct.unpack_from("<Q", encoded)[0] for encoded in numbers[MAPS]]


def test_a_launch_that_fails_says_so(gpu, operands):
    a, b = operands
    gemm(a, b)
    gpu.statuses = [driver.CUresult.CUDA_ERROR_INVALID_VALUE]
    with refused(RuntimeError, "launching gemm failed", "CUDA_ERROR_INVALID_VALUE"):
        gemm(a, b)


def test_a_thread_without_a_context_gets_one(gpu, operands, monkeypatch):
    core = pytest.importorskip("cuda.core")
    made_current = []
    monkeypatch.setattr(core, "Device", lambda index: type("Device", (), {"set_current": lambda self: made_current.append(index)})())
    a, b = operands
    gemm(a, b)
    gpu.statuses = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    gemm(a, b)
    assert made_current == [None] and len(gpu.launches) == 2


def test_the_host_benchmark_times_every_part(gpu):
    for call in (calls := bench.host_calls(16, 64, 256, device="cpu")).values():
        call()
    rows = bench.measure_host({name: calls[name] for name in ("gemm, out given", "launch alone", "torch: x.zero_()")})
    assert [row["name"] for row in rows] == ["gemm, out given", "launch alone", "torch: x.zero_()"]
    assert all(0 < row["microseconds"] and len(row["rounds_us"]) == bench.HOST_ROUNDS for row in rows)
    assert bench.processor()


# ---- quantising -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quantising(gpu, monkeypatch):
    """Quantisation of CPU tensors, too, ends in Gpu, as that of CUDA tensors ends in the driver."""
    module = importlib.import_module("fp8_gemm.quantize")
    monkeypatch.setattr(module, "on_hopper", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(quantisers, "gpu_launch", lambda kernel, device, ctas, threads: kernel.prepare(None, ctas, threads, early=True))
    return gpu


def on_the_simulator(monkeypatch, call) -> list[tuple]:
    """(entry, grid, block, numbers after the tensors) of each launch that the simulator gets from a call."""
    launches = []

    def launch(self, *arguments, grid, block, **options):
        numbers = [argument for argument in arguments if not isinstance(argument, torch.Tensor)]
        launches.append((self.entry, grid, block, numbers))

    with monkeypatch.context() as patched:
        quantisers._known.clear()
        patched.setattr(quantisers, "gpu_launch", lambda *arguments: None)
        patched.setattr(hopperlab_kernel.Kernel, "launch", launch)
        call()
    quantisers._known.clear()
    return launches


QUANTISERS = {
    "1x128": lambda x: quantize(x),
    "128x128": lambda x: quantize(x, "128x128", "e5m2", margin=2, power_of_two=True),
    "row": lambda x: quantize(x, "row", power_of_two=True),
    "tensor": lambda x: quantize(x, "tensor"),
    "swiglu": lambda x: swiglu_quantize(x, margin=1),
}


@pytest.mark.parametrize("name", QUANTISERS)
def test_quantising_gives_the_driver_what_the_simulator_gets(quantising, monkeypatch, name):
    x = random(40, 200).bfloat16() if name == "tensor" else random(40, 256).bfloat16()[:, :200]
    wanted = on_the_simulator(monkeypatch, lambda: QUANTISERS[name](x))
    for _ in range(2):
        quantising.launches.clear(), quantising.configs.clear()
        got = QUANTISERS[name](x)
        assert len(quantising.launches) == len(wanted) == (2 if name == "tensor" else 1)
        for (function, numbers, stream), config, (entry, grid, block, last) in zip(quantising.launches, quantising.configs, wanted):
            kernel = quantising.loaded[int(function) - 1]
            declared = kernel.parameters[-len(last) :]
            bits = [struct.unpack("<I", struct.pack("<f", n))[0] if p.type == "f32" else int(n) for n, p in zip(last, declared)]
            assert kernel.entry == entry and numbers[-len(last) :] == bits and stream == 7
            assert (config.gridDimX, config.gridDimY, config.gridDimZ) == grid and (config.blockDimX, config.blockDimY) == block[:2]
            assert [attribute.id for attribute in config.attrs] == [EARLY]
        assert quantising.last[0] == x.data_ptr() and quantising.last[1] == got.data.data_ptr()
        assert got.scale.data_ptr() in quantising.last[2:4]
    again = type(got)(got.data, got.scale, got.recipe)  # whose checks the fast way leaves out
    assert (again.format, again.rows, again.k) == (got.format, 40, 100 if name == "swiglu" else 200)
    if name in ("1x128", "swiglu"):
        assert is_m_major(got.scale) and got.scale.stride() == (1, 40)


def test_quantising_again_finds_everything_known(quantising, monkeypatch):
    x = random(40, 256).bfloat16()
    quantize(x)
    made = []
    monkeypatch.setattr(quantisers, "Quantisation", lambda *arguments: made.append(arguments))
    other = random(40, 256, seed=1).bfloat16()
    for each in (x, other, x):
        quantize(each)
        assert quantising.last[0] == each.data_ptr()
    assert not made


def test_quantising_another_layout_or_option_is_another_call(quantising):
    memory = random(43, 512).bfloat16().flatten()
    x = memory[: 40 * 256].view(40, 256)
    calls = (lambda: quantize(x), lambda: quantize(memory.view(43, 512)[:40, :256]), lambda: quantize(x[:39]), lambda: quantize(x.float()),
             lambda: quantize(memory[1 : 40 * 256 + 1].view(40, 256)), lambda: quantize(x, "row"), lambda: quantize(x, format="e5m2"),
             lambda: quantize(x, margin=1), lambda: quantize(x, power_of_two=True), lambda: quantisers.quantize(x, "1x128"),
             lambda: swiglu_quantize(x))  # fmt: skip
    for number, call in enumerate(calls):
        call(), call()
        assert len(quantisers._known) == number + 1
    widths = {kernel.constants["LOAD_BYTES"] for kernel in quantising.loaded}
    assert widths == {16, 2}  # the view that starts at an odd element gets loads that it is aligned for


def test_a_known_quantisation_excuses_no_wrong_argument(quantising):
    x = random(40, 256).bfloat16()
    quantize(x, margin=1)
    launches = len(quantising.launches)
    for change, what in (({"margin": True}, "margin is True"), ({"margin": 1.0}, "margin is 1.0"), ({"recipe": ["1x128"]}, "recipe is"),
                         ({"format": ["e4m3"]}, "format is")):  # fmt: skip
        with refused(ValueError, what):
            quantize(x, **{"margin": 1, **change})
    with refused(TypeError, "x has dtype torch.float64"):
        quantize(x.double(), margin=1)
    assert len(quantising.launches) == launches


def test_quantising_columns_apart_reads_a_copy(quantising):
    x = random(256, 40).t()
    quantize(x), quantize(x)
    assert quantising.last[0] != x.data_ptr()
    rows, k, pitch = quantising.last[3:6]
    assert (rows, k, pitch) == (40, 256, 256)


def test_scales_are_padded_to_whole_16_bytes(quantising):
    scale = quantize(random(38, 300).bfloat16()).scale
    assert scale.shape == (38, 3) and scale.stride() == (1, 40) and scale.untyped_storage().nbytes() == 3 * 40 * 4


def test_nothing_to_quantise_launches_nothing(quantising):
    for shape in ((0, 256), (5, 0)):
        for recipe in ("tensor", "row", "1x128", "128x128"):
            scaled = quantize(torch.empty(shape, dtype=BF16), recipe)
            assert scaled.data.shape == shape and (scaled.scale == 1).all()
    assert not quantising.launches
