"""The quantisation kernels give the bits of hopperlab.quantize.quantize: on the simulator here, on the GPU where there is one."""

import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hard_inputs import hard

from fp8_gemm.kernels import quantize as cuda
from hopperlab import capability, stage
from hopperlab import quantize as reference
from hopperlab.kernel import simulation
from hopperlab.sim.arithmetic import fma_f32

FOLDER = stage.root() / "stages" / "05_block_scaled"
capability.use_triton_interpreter_without_gpu()
triton = stage.load_module(FOLDER / "quantize_triton.py", "quantize_triton")
IMPLEMENTATIONS = {"cuda": cuda.quantize, "triton": triton.quantize}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_equal_bits(implementation, x, recipe, format="e4m3", **options):
    want = reference.quantize(x, recipe, format, **options)
    got = IMPLEMENTATIONS[implementation](x, recipe, format, **options)
    assert got.recipe == recipe and got.data.dtype == want.data.dtype
    assert torch.equal(got.scale.view(torch.int32), want.scale.view(torch.int32)), "scales differ"
    different = got.data.view(torch.uint8) != want.data.view(torch.uint8)
    if different.any():
        m, k = different.nonzero()[0].tolist()
        pytest.fail(f"{int(different.sum())} of {x.numel()} differ; the first, x[{m}][{k}] = {float(x[m, k])!r}, "
                    f"became {float(got.data[m, k])} and not {float(want.data[m, k])}")  # fmt: skip


each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_bits_of_every_kind_of_row(implementation, dtype, format, recipe, device):
    x = hard(150, 264, dtype, device)
    if recipe in ("tensor", "128x128"):  # one huge row would hide the others
        x = x[:16] if recipe == "tensor" else x
        x[4:5], x[7:8] = 1, 2
    assert_equal_bits(implementation, x, recipe, format)


@each
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 3, 7])
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_bits_with_margin_and_power_of_two_scales(implementation, recipe, margin, power_of_two, device):
    x = hard(16, 136, torch.float32, device, seed=1)
    assert_equal_bits(implementation, x, recipe, margin=margin, power_of_two=power_of_two)


@each
def test_a_scale_just_above_a_power_of_two_becomes_the_next(implementation, device):
    x = torch.ones(1, 128, device=device)
    x[0, 0] = 448 + 2.0**-15  # the next FP32 number
    assert_equal_bits(implementation, x, "1x128", power_of_two=True)
    assert reference.quantize(x, "1x128", power_of_two=True).scale == 2


@each
@pytest.mark.parametrize("kind", ["zeros", "smallest", "largest", "NaN", "infinite"])
@pytest.mark.parametrize("recipe", ["tensor", "128x128"])
def test_bits_of_whole_blocks(implementation, recipe, kind, device):
    largest = torch.finfo(torch.float32).max
    values = {"zeros": 0.0, "smallest": 2.0**-149, "largest": largest, "NaN": torch.nan, "infinite": torch.inf}
    x = torch.full((3, 130), values[kind], device=device)
    assert_equal_bits(implementation, x, recipe, power_of_two=kind == "smallest", margin=7)


@each
@pytest.mark.parametrize("k", [1, 2, 127, 128, 129, 130, 132, 136])
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_any_k(implementation, recipe, k, device):
    """Loads of 2, 4, 8 and 16 bytes; rows below, at and beyond a block."""
    assert_equal_bits(implementation, hard(13, k, torch.bfloat16, device, seed=k), recipe)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_misaligned_and_strided_inputs(implementation, recipe, dtype, device):
    buffer = hard(20, 300, dtype, device, seed=2)
    views = {
        "starts off 16 bytes": buffer.flatten()[1 : 1 + 9 * 256].view(9, 256),
        "a slice of columns": buffer[:, 3:139],
        "rows far apart": buffer[::2, :264],
        "one row repeated": buffer[1:2, :256].expand(5, 256),
        "transposed": buffer[:9, :].t(),
    }
    for x in views.values():
        assert_equal_bits(implementation, x, recipe)


@each
@pytest.mark.parametrize("shape", [(1, 128), (3, 500), (8, 1024), (13, 1300), (37, 264)])
def test_m_major_scales_as_tma_wants_them(implementation, shape, device):
    x = hard(*shape, torch.bfloat16, device, seed=3)
    want = reference.quantize(x, "1x128")
    poison = torch.full((1 << 16,), torch.nan, device=device)  # what a fresh allocation may hold
    del poison
    got = IMPLEMENTATIONS[implementation](x, "1x128", m_major=True)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert_m_major(got.scale, want.scale)


def assert_m_major(scale: torch.Tensor, want: torch.Tensor) -> None:
    """scale holds what want does, and lies in memory as scale_to_m_major(want) does, its padding of zeros included."""
    whole = reference.scale_to_m_major(want)
    assert torch.equal(scale, want) and scale.storage_offset() == 0
    assert torch.equal(scale.as_strided(whole.shape, whole.stride()), whole)
    assert scale.untyped_storage().nbytes() == 4 * whole.numel()


@each
@pytest.mark.parametrize("k", [4096, 16384, 16392, 40001])
def test_long_rows(implementation, k, device):
    """Rows that just fit into registers, and those that must be read twice."""
    assert_equal_bits(implementation, hard(4, k, torch.bfloat16, device, seed=4), "row")


@each
@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0)])
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_empty(implementation, recipe, shape, device):
    assert_equal_bits(implementation, torch.empty(shape, dtype=torch.bfloat16, device=device), recipe)


@each
def test_refuses_what_it_cannot_take(implementation):
    quantize, x = IMPLEMENTATIONS[implementation], torch.zeros(2, 128)
    with pytest.raises(TypeError, match="x is a list"):
        quantize([[1.0]], "row")
    with pytest.raises(TypeError, match="x has dtype torch.float64"):
        quantize(x.double(), "row")
    with pytest.raises(ValueError, match=r"x has shape \(128,\)"):
        quantize(x[0], "row")
    with pytest.raises(ValueError, match="recipe is 'column'"):
        quantize(x, "column")
    with pytest.raises(ValueError, match="format is 'e3m4'"):
        quantize(x, "row", "e3m4")
    with pytest.raises(ValueError, match="margin is 8"):
        quantize(x, "row", margin=8)
    with pytest.raises(ValueError, match="m_major is True with recipe 'row'"):
        quantize(x, "row", m_major=True)


@pytest.mark.skipif(not capability.has_hopper(), reason=capability.hopper().sentence())
@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_bits_of_full_size_on_the_gpu(implementation, recipe, dtype, device):
    for shape in ((4096, 7168), (8200, 2056), (129, 7169)):
        assert_equal_bits(implementation, hard(*shape, dtype, device, seed=5), recipe)


@pytest.mark.skipif(capability.has_hopper(), reason="the simulator's check runs where kernels run on the simulator")
@pytest.mark.parametrize("recipe", reference.RECIPES)
def test_the_simulator_reports_no_hazard_in_any_order(recipe):
    x = hard(130, 392, torch.bfloat16, seed=6)
    for options in ({"order": "lazy"}, {"order": "eager"}, {"seed": 1}, {"seed": 2}):
        with simulation(**options) as reports:
            assert_equal_bits("cuda", x, recipe)
        assert len(reports) == (2 if recipe == "tensor" else 1)


@pytest.mark.skipif(capability.has_hopper(), reason="the GPU runs what Triton compiles in the tests above")
def test_what_triton_compiles_for_hopper_gives_the_same_bits_on_the_simulator():
    """Above, Triton's interpreter ran the kernels, and another cast and division with it."""
    program = Path(__file__).with_name("triton_on_simulator.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [stage.root() / "common", stage.root() / "stages" / "06_moe_grouped", program.parent]))
    run = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("input_type, load_bytes", [
    ("bf16", 16), ("bf16", 8), ("bf16", 4), ("bf16", 2), ("fp16", 16), ("fp16", 2), ("float", 16), ("float", 8), ("float", 4),
])  # fmt: skip
def test_compiles_without_spills_or_local_memory(input_type, load_bytes):
    for held in (4, cuda.MOST_HELD):
        assert cuda.kernel("whole_rows", input_type, "e4m3", load_bytes, held=held).compiled.problems == []


@pytest.mark.parametrize("input_type, load_bytes", [("bf16", 16), ("bf16", 2), ("float", 16)])
def test_nothing_is_read_or_written_while_the_kernel_before_may_still_write(input_type, load_bytes):
    """They are launched early: griddepcontrol.wait comes first, and no load goes through ld.global.nc, which may be stale."""
    ptx = cuda.kernel("blocks_1x128", input_type, "e4m3", load_bytes).compiled.ptx
    bodies = re.findall(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}", ptx, re.S)
    assert {name for name, _ in bodies} == {*sum(cuda.ENTRIES.values(), ()), "swiglu_1x128"}
    for name, body in bodies:
        before, after = body.split("griddepcontrol.wait;")
        touched = r"\b(?:ld|st|atom|red)\.(?:[a-z]+\.)*global"
        assert not re.search(touched, before) and re.search(touched, after), name
        assert ".nc." not in body and "griddepcontrol.launch_dependents;" in after, name


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """The kernel's arithmetic, step by step in float32, (rows, 2 K) -> (rows, K); on the CPU."""
    f32 = np.float32
    gate, up = (half.float().cpu().numpy() for half in x.chunk(2, dim=1))
    with np.errstate(all="ignore"):
        t = np.fmax(-gate, f32(-20))
        shifted = fma_f32(t, f32(float.fromhex("0x1.715476p0")), f32(1.5 * 2**23))
        n = shifted - f32(1.5 * 2**23)
        r = fma_f32(n, f32(float.fromhex("-0x1.7f7d1cp-20")), fma_f32(n, f32(float.fromhex("-0x1.62e4p-1")), t))
        total = np.full_like(r, f32(1 / 720))
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1, 1):
            total = fma_f32(total, r, f32(coefficient))
        power = (total.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(f32)
        power = np.where(-gate > 88, f32(np.inf), power)
        return torch.from_numpy(gate * (f32(1) / (f32(1) + power)) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [384, 264, 129])
def test_swiglu_has_the_bits_of_its_definition(dtype, k, device):
    x = hard(40, 2 * k, dtype, device, seed=7)
    x[0] = torch.linspace(-120, 120, 2 * k).to(dtype)
    want = reference.quantize(swiglu(x), "1x128", margin=1)
    for m_major in (False, True):
        got = cuda.swiglu_quantize(x, margin=1, m_major=m_major)
        assert torch.equal(got.scale.cpu(), want.scale)
        assert torch.equal(got.data.cpu().view(torch.uint8), want.data.view(torch.uint8))
    assert_m_major(got.scale, want.scale.to(device))


def test_swiglu_is_silu_times_up_as_torch_knows_it():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(8)) * 8
    x[0, :256] = torch.linspace(-87, 87, 256)
    exact = torch.nn.functional.silu(x[:, :256].double()) * x[:, 256:].double()
    assert ((swiglu(x).double() - exact).abs() / exact.abs()).max() < 2.0**-20
    assert cuda.swiglu_quantize(x, "e5m2").format.name == "e5m2"


def test_swiglu_of_nothing_and_of_what_it_cannot_take(device):
    assert cuda.swiglu_quantize(torch.empty(0, 256, device=device)).data.shape == (0, 128)
    assert cuda.swiglu_quantize(torch.empty(3, 0, device=device)).scale.shape == (3, 0)
    with pytest.raises(ValueError, match="must be even"):
        cuda.swiglu_quantize(torch.zeros(2, 129, device=device))


# ---- the division of quantize_vector --------------------------------------------------------------------------------


def corrected_quotient(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What the kernel computes for x / scale, in float32."""
    reciprocal = np.float32(1) / scale
    quotient = x * reciprocal
    return fma_f32(-fma_f32(quotient, scale, -x), reciprocal, quotient)


def test_the_division_never_crosses_a_midpoint_of_fp8():
    """The corrected quotient lies on the same side of every FP8 midpoint as the IEEE quotient, or on it as that does.

    With r = (1/s)(1 + d1), the product q = x·r(1 + d2) and the remainder (q·s - x)(1 + d3), |d| <= 2^-24, the last fma rounds
    A = x/s + (x/s - q)(d1 + d3 + d1·d3), so |A - x/s| is at most 2^-46·(x/s), but for a factor of 1 + 2^-22. A midpoint t
    has 5 significant bits. The two quotients differ with respect to t only if a boundary M at which FP32 rounding changes to or
    from t lies between A and x/s. In units where s and x are integers S and X of 24 bits and t = τ·2^19, 16 <= τ < 32:
    M = t ± 1/2, and |X·2^j - S·M| <= 2^-46·S·t, that is X·2^(j+1) = S·(τ·2^20 ± 1) + N with |N| <= 8, j >= 23. Modulo 2^20:
    S is within 8 of a multiple of 2^20. (Below τ = 16 M is t - 1/4, and no S is left.) X is then τ·S, aligned, or next to it.
    """
    scales = [base + near for base in range(1 << 23, (1 << 24) + 1, 1 << 20) for near in range(-16, 17)]
    pairs = []
    for s in (s for s in scales if 1 << 23 <= s < 1 << 24):
        for tau in range(16, 32):
            x = s * tau / 2 ** (4 if s * tau < 1 << 28 else 5)
            pairs += [(int(x) + near, s, tau) for near in range(-2, 4)]
    x, s, tau = (np.array(column) for column in zip(*pairs))
    x, s, t = x.astype(np.float32), s.astype(np.float32), tau / 16.0
    t = np.where(x / s < 0.75 * t, t / 2, t)  # x / s is in the binade of t or in the one below
    assert np.abs(x / s / t - 1).max() < 1e-6
    ieee, ours = x / s, corrected_quotient(x, s)
    assert (np.sign(ieee - t) == np.sign(ours - t)).all()
    assert (ieee == t).any() and (ieee > t).any() and (ieee < t).any()
    plain = x * (np.float32(1) / s)
    assert (np.sign(ieee - t) != np.sign(plain - t)).any(), "without the correction some of these are wrong"


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_the_division_for_every_pair_of_bf16(format):
    """Every significand of amax with every significand of x, over all exponents that matter."""
    largest = reference.format_of(format).max
    amax, significand = np.meshgrid(np.arange(128, 256, dtype=np.float32), np.arange(128, 256, dtype=np.float32))
    scale = amax / np.float32(largest)
    for exponent in range(28 if format == "e4m3" else 42):
        x = significand * np.float32(2.0**-exponent)
        wanted, got = (reference.cast_saturating(torch.from_numpy(q), format).view(torch.uint8)
                       for q in (x / scale, corrected_quotient(x, scale)))  # fmt: skip
        assert torch.equal(wanted, got)


def test_the_model_of_the_division_agrees_with_exact_arithmetic():
    """A thousand random pairs against rational numbers: the fma used above rounds once."""
    generator = np.random.default_rng(0)
    x, s = (generator.uniform(1, 2, 1000).astype(np.float32) for _ in range(2))
    r = np.float32(1) / s
    q = x * r
    for i, ours in enumerate(corrected_quotient(x, s)):
        exact = Fraction(float(q[i])) * Fraction(float(s[i])) - Fraction(float(x[i]))
        remainder = np.float32(float(exact))
        last = Fraction(float(q[i])) - Fraction(float(remainder)) * Fraction(float(r[i]))
        below, above = np.nextafter(ours, np.float32(0)), np.nextafter(ours, np.float32(9))
        distance = abs(last - Fraction(float(ours)))
        assert distance <= abs(last - Fraction(float(below))) and distance <= abs(last - Fraction(float(above)))
