"""The lesson's experiments: what promotion and block scales do to the error, and what they cost.

    python stages/05_block_scaled/experiment.py RECORD_FOLDER             needs a Hopper GPU
    python stages/05_block_scaled/experiment.py RECORD_FOLDER --small     tiny shapes, any machine, times nothing

Writes 05_accuracy.json and 05_speed.json. The published records lie in docs/results/.
"""

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hopperlab import bench, capability, check, reference, report, stage, telemetry
from hopperlab.formats import E4M3, cast_saturating
from hopperlab.quantize import BLOCK, ScaledTensor, expand_scale, quantize

PLAIN, BLOCKS, GRADIENT = ("tensor", "tensor"), ("1x128", "128x128"), ("1x128", "1x128")


@dataclass(frozen=True)
class Sizes:
    """What is run. Shapes are (M, N, K); an interval of None never promotes."""

    rows: int = 256  # M and N of the products whose error is followed along K
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)  # K
    intervals: tuple[int | None, ...] = (128, 256, 512, 1024, 2048, None)
    thresholds: tuple[float, ...] = (1e3, 2e3, 4e3, 1e4)
    threshold_lengths: tuple[int, ...] = (4096, 16384)
    counted: tuple[int, ...] = tuple(range(1024, 32769, 1024))  # K of sums of equal products
    outlier_shape: tuple[int, int, int] = (512, 512, 4096)
    outlier_factors: tuple[int, ...] = (1, 10, 100, 1000, 10000, 100000)
    drift_steps: int = 64
    drift_shape: tuple[int, int] = (256, 1024)
    folding_shape: tuple[int, int, int] = (512, 512, 2048)
    spreads: tuple[int, ...] = (0, 1, 2, 4)  # standard deviation of log2 of the magnitudes of B's blocks
    report_shape: tuple[int, int, int] = (256, 256, 1024)
    output_shape: tuple[int, int, int] = (512, 1024, 4096)
    promotion_shape: tuple[int, int, int] = (4096, 4096, 4096)
    block_shapes: tuple[tuple[int, int, int], ...] = ((4096, 4096, 4096), (8192, 8192, 8192))
    widths: tuple[int, ...] = (112, 128, 160, 192)
    gradient_shapes: tuple[tuple[int, int, int], ...] = ((4096, 7168, 4096), (7168, 2048, 8192))
    timed: bool = True


SMALL = Sizes(rows=16, lengths=(256,), intervals=(128, None), thresholds=(1e3,), threshold_lengths=(256,), counted=(128, 256),
              outlier_shape=(16, 16, 256), outlier_factors=(100,), drift_steps=8, drift_shape=(16, 128), folding_shape=(16, 144, 256),
              spreads=(0, 4), report_shape=(16, 136, 384), output_shape=(16, 144, 256), promotion_shape=(16, 16, 256),
              block_shapes=((16, 136, 256),), widths=(112,), gradient_shapes=((16, 16, 256),), timed=False)  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """The stage's steps, the sizes, and where tensors live."""

    steps: object  # the stage's module
    sizes: Sizes
    device: torch.device

    def normal(self, seed: int, rows: int, k: int) -> torch.Tensor:
        """Random normal FP32, the same on every machine."""
        values = np.random.default_rng([seed, rows, k]).standard_normal((rows, k), dtype=np.float32)
        return torch.from_numpy(values).to(self.device)

    def positive(self, seed: int, rows: int, k: int) -> torch.Tensor:
        """Random FP32, uniform between 0 and 1."""
        return torch.from_numpy(np.random.default_rng([seed, rows, k]).random((rows, k), dtype=np.float32)).to(self.device)

    def promoted(self, a: ScaledTensor, b: ScaledTensor, **options) -> torch.Tensor:
        """The FP32 output of the step of that name."""
        out = torch.empty(a.rows, b.rows, device=self.device)
        self.steps.promoted(a, b, out, **options)
        return out

    def product(self, a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The output of the step that takes these scales."""
        out = torch.empty(a.rows, b.rows, dtype=dtype, device=self.device)
        (self.steps.overlapped if (a.recipe, b.recipe) == BLOCKS else self.steps.promoted)(a, b, out)
        return out


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the Frobenius norm: root of the sum of squared errors over that of the squares."""
    return float((value.double() - exact).norm() / exact.norm())


def bias(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean error in the direction of the exact value over the mean magnitude: negative is toward zero."""
    return float(((value.double() - exact) * exact.sign()).mean() / exact.abs().mean())


def rescaled(scaled: ScaledTensor, scale: torch.Tensor) -> ScaledTensor:
    return ScaledTensor(scaled.data, scale.contiguous(), scaled.recipe)


def as_it_is(x: torch.Tensor) -> ScaledTensor:
    """Rounded to e4m3 with scale 1, so that sums have the magnitude of the values."""
    return ScaledTensor(cast_saturating(x, E4M3), torch.ones(1, device=x.device), "tensor")


def changed(x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of elements that are not equal."""
    return float((x != y).double().mean())


# ---- accuracy -------------------------------------------------------------------------------------------------------


def interval(lab: Lab) -> list[dict]:
    """Error against K and promotion interval, and whether the bits are the model's."""
    rows = []
    for inputs, draw in (("positive", lab.positive), ("normal", lab.normal)):
        for k in lab.sizes.lengths:
            a, b = (quantize(draw(seed, lab.sizes.rows, k), "tensor") for seed in (1, 2))
            exact = reference.matmul_exact(a, b)
            for every in lab.sizes.intervals:
                out = lab.promoted(a, b, interval=every)
                model = lab.steps.unscaled_then_scaled(a, b, torch.float32, interval=every)
                rows.append({"inputs": inputs, "k": k, "interval": every, "bias": bias(out, exact), "error": relative(out, exact),
                             "bits": torch.equal(out, model)})  # fmt: skip
    return rows


def threshold(lab: Lab) -> list[dict]:
    """Promotion by magnitude beside promotion by interval, for values that fill e4m3's range and for values around one."""
    rows, rules = [], [{"interval": every} for every in lab.sizes.intervals]
    rules += [{"interval": None, "threshold": limit} for limit in lab.sizes.thresholds]
    fill = lambda x: quantize(x, "tensor")  # noqa: E731
    for inputs, draw, convert in (("positive, scaled to 448", lab.positive, fill), ("normal, scaled to 448", lab.normal, fill),
                                  ("positive, scale 1", lab.positive, as_it_is), ("normal, scale 1", lab.normal, as_it_is)):  # fmt: skip
        for k in lab.sizes.threshold_lengths:
            a, b = (convert(draw(seed, lab.sizes.rows, k)) for seed in (1, 2))
            exact = reference.matmul_exact(a, b)
            outs = [lab.promoted(a, b, **rule) for rule in rules]
            every_block, never = outs[lab.sizes.intervals.index(BLOCK)], outs[lab.sizes.intervals.index(None)]
            rows += [{"inputs": inputs, "k": k, "threshold": 0.0, **rule, "bias": bias(out, exact), "error": relative(out, exact),
                      "same_as_every_block": torch.equal(out, every_block), "same_as_never": torch.equal(out, never)}
                     for rule, out in zip(rules, outs)]  # fmt: skip
    return rows


def fourteen_bits(lab: Lab) -> list[dict]:
    """Sums of K equal products 1 · v, one accumulator for all of K and promoted every 128. Exact is K · v."""
    rows, one = [], torch.ones(1, device=lab.device)
    for value in (1.0, 1.75):
        for k in lab.sizes.counted:
            a, b = (ScaledTensor(torch.full((16, k), v, device=lab.device).to(E4M3.dtype), one, "tensor") for v in (1.0, value))
            row = {"value": value, "k": k, "exact": k * value}
            for name, every in (("never", None), ("every 128", BLOCK)):
                out = lab.promoted(a, b, interval=every)
                row[name] = float(out[0, 0])
                if k == lab.sizes.counted[-1]:
                    row[f"{name}, bits"] = torch.equal(out, lab.steps.unscaled_then_scaled(a, b, torch.float32, interval=every))
            rows.append(row)
    return rows


def outliers(lab: Lab) -> list[dict]:
    """Four channels of the activations multiplied by a factor, and what each recipe makes of that.

    error          of the product, against the FP64 product of what was quantised
    error_of_rest  the same without the outlier channels: what the scales they forced did to all other channels
    """
    m, n, k = lab.sizes.outlier_shape
    channels = torch.from_numpy(np.random.default_rng(0).permutation(k)[:4].copy()).to(lab.device)
    weights, rows = lab.normal(2, n, k), []
    for factor in lab.sizes.outlier_factors:
        x = lab.normal(1, m, k)
        x[:, channels] *= factor
        rest = x.clone()
        rest[:, channels] = 0
        for recipes in (PLAIN, ("row", "row"), BLOCKS):
            for power_of_two in (False, True):
                a, b = (quantize(v, recipe, power_of_two=power_of_two) for v, recipe in zip((x, weights), recipes))
                without = a.data.view(torch.uint8).clone()
                without[:, channels] = 0
                a_rest = ScaledTensor(without.view(a.data.dtype), a.scale, a.recipe)
                rows.append({"factor": factor, "recipes": " x ".join(recipes), "power_of_two": power_of_two,
                             "error": relative(lab.product(a, b), x.double() @ weights.double().t()),
                             "error_of_rest": relative(lab.product(a_rest, b), rest.double() @ weights.double().t())})  # fmt: skip
    return rows


def delayed(lab: Lab) -> dict:
    """A tensor per training step, whose magnitude drifts and jumps. Its scale from itself, or from the steps before.

    Delayed scaling takes the largest amax of the last `history` steps, times 2^margin. The first step knows its own.
    """
    generator = np.random.default_rng(5)
    drift = np.cumsum(generator.normal(0, 0.2, lab.sizes.drift_steps))
    jumps = np.where(generator.random(lab.sizes.drift_steps) < 0.1, generator.choice([-3.0, 3.0], lab.sizes.drift_steps), 0.0)
    tensors = [lab.normal(step, *lab.sizes.drift_shape) * float(2.0**level) for step, level in enumerate(drift + jumps)]
    amax = [float(x.abs().max()) for x in tensors]

    def outcome(x: torch.Tensor, largest: float) -> tuple[float, float]:
        scaled = x / torch.full_like(x, largest / E4M3.max)
        value = cast_saturating(scaled, E4M3).double() * (largest / E4M3.max)
        beyond = E4M3.max * (1 + 2.0**-20)  # amax / (amax / 448) may round to a little more than 448
        return float((scaled.abs() > beyond).double().mean()), relative(value, x.double())

    methods = []
    for name, history, margin in (("online", 0, 0), *((f"last {h}, margin {m}", h, m) for h in (1, 4, 16) for m in (0, 1))):
        known = [max(amax[max(0, step - history) : step] or amax[:1]) if history else amax[step] for step in range(len(amax))]
        saturated, error = zip(*(outcome(x, largest * 2.0**margin) for x, largest in zip(tensors, known)))
        methods.append({"name": name, "history": history, "margin": margin, "saturated": saturated, "error": error})
    return {"amax": amax, "methods": methods}


def folding(lab: Lab) -> dict:
    """B's scales applied before the kernel runs: as a factor of A's scales, as a second factor of D, in B's data.

    epilogue  share of outputs whose value changes when B's scale is multiplied with A's once, offline; and when D, already
              scaled by A's, is multiplied by B's: a second rounding
    data      block scales folded into FP8 data that keeps one scale, the largest or the median of the blocks' scales.
              error is against the values before folding; the other two against what was quantised
    """
    m, n, k = lab.sizes.folding_shape
    x, w, epilogue, data = lab.normal(1, m, k), lab.normal(2, n, k), [], []
    for recipes in (PLAIN, ("row", "tensor"), ("tensor", "row")):
        for power_of_two in (False, True):
            a, b = (quantize(v, recipe, power_of_two=power_of_two) for v, recipe in zip((x, w), recipes))
            a_one, b_one = (rescaled(v, torch.ones_like(v.scale)) for v in (a, b))
            if b.recipe == "tensor":
                folded = rescaled(a, a.scale * b.scale), b_one
            else:
                folded = a_one, rescaled(b, a.scale * b.scale)
            plain, once, twice = lab.product(a, b), lab.product(*folded), lab.product(a, b_one) * b.scale
            epilogue.append({"recipes": " x ".join(recipes), "power_of_two": power_of_two, "offline_product": changed(once, plain),
                             "second_factor": changed(twice, plain),
                             "second_factor_bf16": changed(twice.bfloat16(), plain.bfloat16())})  # fmt: skip
    blocks = torch.Size((-(-n // BLOCK), -(-k // BLOCK)))
    levels = torch.from_numpy(np.random.default_rng(7).standard_normal(blocks, dtype=np.float32)).to(lab.device)
    for spread in lab.sizes.spreads:
        magnitude = (2.0 ** (spread * levels)).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
        for power_of_two in (False, True):
            b = quantize(w * magnitude, "128x128", power_of_two=power_of_two)
            before = b.dequantize(torch.float64)
            for kept, scale in (("largest", b.scale.max()), ("median", b.scale.median())):
                wanted = b.data.float() * (expand_scale(b) / scale)
                after = cast_saturating(wanted, E4M3).double() * scale.double()
                data.append({"spread": spread, "power_of_two": power_of_two, "kept": kept, "changed": changed(after, before),
                             "overflow": float((wanted.abs() > E4M3.max).double().mean()),
                             "zeroed": float(((after == 0) & (before != 0)).double().mean()), "error": relative(after, before),
                             "error_before": relative(before, (w * magnitude).double()),
                             "error_after": relative(after, (w * magnitude).double())})  # fmt: skip
    return {"epilogue": epilogue, "data": data}


def bad_block(lab: Lab) -> list[dict]:
    """One scale replaced by its neighbour's along K, times two, and the report of the error. Planted in A, then in B."""
    m, n, k = lab.sizes.report_shape
    a, b = check.problem(m, n, k, recipes=BLOCKS, device=lab.device)
    found = []
    for name, index in (("A", (m // 2, 1)), ("B", (1, k // BLOCK - 2))):
        wrong = {"A": a, "B": b}
        scale = wrong[name].scale.clone()
        scale[index] = 2 * scale[index[0], index[1] + 1]
        wrong[name] = rescaled(wrong[name], scale)
        described = check.error_report(lab.product(wrong["A"], wrong["B"], torch.bfloat16), a, b)
        found.append({"operand": name, "scale": index, "k_block": index[1], "report": described.to_json(), "text": str(described)})
    return found


def fp8_output(lab: Lab) -> list[dict]:
    """D in narrower formats. error: against the exact product of what the kernel was given; total: of what was quantised."""
    m, n, k = lab.sizes.output_shape
    x, w = lab.normal(1, m, k), lab.normal(2, n, k)
    a, b = quantize(x, BLOCKS[0]), quantize(w, BLOCKS[1])
    out, exact, original = lab.product(a, b), reference.matmul_exact(a, b), x.double() @ w.double().t()
    outputs = {"float32": out, "bfloat16": out.bfloat16()}
    for recipe in ("1x128", "row", "tensor"):
        for fmt in ("e4m3", "e5m2"):
            outputs[f"{fmt}, {recipe}"] = quantize(out, recipe, fmt).dequantize()
    return [{"output": name, "error": relative(value, exact), "total": relative(value, original)} for name, value in outputs.items()]


# ---- speed ----------------------------------------------------------------------------------------------------------


def input_sets(lab: Lab, shape: tuple[int, int, int]) -> list[bench.InputSet]:
    """As every measurement takes them; untimed, one set is enough."""
    m, n, k = shape
    if lab.sizes.timed:
        return bench.input_sets(m, n, k)[:8]
    return [bench.InputSet(lab.normal(1, m, k).bfloat16(), lab.normal(2, n, k).bfloat16())]


def timed(lab: Lab, shape: tuple[int, int, int], calls: dict[str, list], more: dict[str, dict]) -> list[dict]:
    """One row per candidate, `more` beside it. Untimed, every candidate runs once and has no time."""
    rows = [{"m": shape[0], "n": shape[1], "k": shape[2], "name": name, **more.get(name, {})} for name in calls]
    if not lab.sizes.timed:
        for made in calls.values():
            made[0]()
        return rows
    flops = 2 * shape[0] * shape[1] * shape[2]
    for row, timing in zip(rows, bench.measure(calls, rounds=7).values()):
        row |= {"microseconds": timing.seconds * 1e6, "spread": timing.spread, "tflops": flops / timing.seconds / 1e12}
        print("{m}x{n}x{k} {name:36} {microseconds:9.1f} µs {tflops:6.0f} TFLOP/s, spread {spread:.3f}".format(**row))
    return rows


def outputs(lab: Lab, sets: list[bench.InputSet], dtype: torch.dtype) -> list[torch.Tensor]:
    """Zeros, one for each set."""
    return [torch.zeros(len(inputs.a), len(inputs.b), dtype=dtype, device=lab.device) for inputs in sets]


def peers(sets: list[bench.InputSet], names: tuple[str, ...]) -> tuple[dict[str, list], dict[str, str]]:
    """The peers' calls, and why one is missing."""
    running, missing = bench.peers(sets)
    calls = {name: running[name][0] for name in names if name in running}
    return calls, {name: missing[name] for name in names if name in missing}


def promotion_speed(lab: Lab) -> tuple[list[dict], dict[str, str]]:
    """What promotion costs by interval, and what looking at the magnitude costs."""
    sets = input_sets(lab, lab.sizes.promotion_shape)
    outs, scaled = outputs(lab, sets, torch.bfloat16), [inputs.quantised(*PLAIN) for inputs in sets]
    around_one = [(as_it_is(inputs.a), as_it_is(inputs.b)) for inputs in sets]
    timed_intervals = [every for every in lab.sizes.intervals if every in (128, 256, 512, None)]
    candidates = {f"interval {every or 'never'}": (scaled, {"interval": every}) for every in timed_intervals}
    for limit in lab.sizes.thresholds:
        candidates[f"threshold {limit:.0f}"] = (scaled, {"interval": None, "threshold": limit})
    candidates[f"threshold {limit:.0f}, scale 1"] = (around_one, {"interval": None, "threshold": limit})
    calls = {name: [lambda a=a, b=b, out=out, o=options: lab.steps.promoted(a, b, out, **o) for (a, b), out in zip(operands, outs)]
             for name, (operands, options) in candidates.items()}  # fmt: skip
    peer_calls, missing = peers(sets, ("cublas tensor",))
    return timed(lab, lab.sizes.promotion_shape, calls | peer_calls, {}), missing


def block_speed(lab: Lab, shape: tuple[int, int, int]) -> tuple[list[dict], dict[str, str]]:
    """Block scales: tile widths, 256 rows per tile, and the peers. All of ours must have the same bits."""
    sets = input_sets(lab, shape)
    outs = outputs(lab, sets, torch.bfloat16)
    operands = [(a, b, lab.steps.m_major(a, b)) for a, b in (inputs.quantised(*BLOCKS) for inputs in sets)]
    kernels = {f"block scaled, 128 x {width}": (lab.steps.block_scaled, {"tile": lab.steps.Tile(1, width)}) for width in lab.sizes.widths}
    kernels["overlapped, 256 x 128"] = (lab.steps.overlapped, {})
    kernels["overlapped, the compiler's hints"] = (lab.steps.overlapped, {"dense_ffma": False})
    calls = {name: [lambda a=a, b=b, out=out, o={**options, **scales}, step=step: step(a, b, out, **o)
                    for (a, b, scales), out in zip(operands, outs)] for name, (step, options) in kernels.items()}  # fmt: skip
    bits = {}
    for name, made in calls.items():
        made[0]()
        bits[name] = outs[0].clone()
    same = {name: {"same_bits": torch.equal(out, bits["overlapped, 256 x 128"])} for name, out in bits.items()}
    peer_calls, missing = peers(sets, ("deep_gemm", "cublas tensor", "cublas block"))
    return timed(lab, shape, calls | peer_calls, same), missing


def gradient_speed(lab: Lab, shape: tuple[int, int, int]) -> tuple[list[dict], dict[str, str]]:
    """Weight gradients, added to an FP32 output, beside DeepGEMM's kernel for the same scales."""
    sets, missing = input_sets(lab, shape), {}
    outs, operands = outputs(lab, sets, torch.float32), [inputs.quantised(*GRADIENT) for inputs in sets]
    calls = {}
    for rounds in (1, 2):
        options = {"accumulate": True, "tile": lab.steps.Tile(rounds, 128, 8 // rounds)}
        calls[f"wgrad, {128 * rounds} x 128"] = [lambda a=a, b=b, out=out, o={**options, **lab.steps.m_major(a, b)}:
                                                 lab.steps.wgrad(a, b, out, **o) for (a, b), out in zip(operands, outs)]  # fmt: skip
    try:
        calls["deep_gemm 1x128 x 1x128"] = [deep_gemm_gradient(a, b, out) for (a, b), out in zip(operands, outs)]
        calls["deep_gemm 1x128 x 1x128"][0]()
    except Exception as error:  # it may be missing, too old, or refuse: recorded, not hidden
        calls.pop("deep_gemm 1x128 x 1x128", None)
        missing["deep_gemm 1x128 x 1x128"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    exact, errors = reference.matmul_exact(*operands[0]), {}
    for name, made in calls.items():
        outs[0].zero_()
        made[0]()
        errors[name] = {"error": relative(outs[0], exact)}
    return timed(lab, shape, calls, errors), missing


def deep_gemm_gradient(a: ScaledTensor, b: ScaledTensor, out: torch.Tensor):
    """A call of DeepGEMM's kernel that adds to out, its scales laid out beforehand."""
    import deep_gemm

    scaled = [(x.data, deep_gemm.get_mn_major_tma_aligned_tensor(x.scale)) for x in (a, b)]
    return lambda: deep_gemm.fp8_gemm_nt(*scaled, out, c=out, recipe=(1, 1, 128))


# ---- records --------------------------------------------------------------------------------------------------------


def accuracy_record(lab: Lab) -> dict:
    experiments = (interval, threshold, fourteen_bits, outliers, delayed, folding, bad_block, fp8_output)
    return {"kind": "accuracy", **report.environment()} | {experiment.__name__: experiment(lab) for experiment in experiments}


def speed_record(lab: Lab) -> dict:
    record = {"kind": "sweep", **report.environment(), "missing": {}}
    with telemetry.Recorder() if lab.sizes.timed else contextlib.nullcontext() as recorder:
        record["promotion"], missing = promotion_speed(lab)
        record["missing"] |= missing
        families = ("blocks", block_speed, lab.sizes.block_shapes), ("gradient", gradient_speed, lab.sizes.gradient_shapes)
        for name, experiment, shapes in families:
            record[name] = []
            for shape in shapes:
                rows, missing = experiment(lab, shape)
                record[name] += rows
                record["missing"] |= missing
                if lab.device.type == "cuda":
                    torch.cuda.empty_cache()
    return record | ({"telemetry": recorder.summary()} if recorder else {})


def main(folder: Path, small: bool = False) -> None:
    if not small:
        capability.require_hopper("Without one, --small runs every experiment on tiny shapes.")
    lab = Lab(stage.load(Path(__file__).resolve().parent).module, SMALL if small else Sizes(), capability.device())
    for name, make in (("05_accuracy.json", accuracy_record), ("05_speed.json", speed_record)):
        print(report.save(make(lab), folder / name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="RECORD_FOLDER")
    parser.add_argument("--small", action="store_true", help="tiny shapes on any machine; nothing is timed")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.small)
