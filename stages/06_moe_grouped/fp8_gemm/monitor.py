"""Watching a model's FP8 layers: what overflows, what is lost, how far results are off, and when a layer should leave FP8.

    watch = fp8_gemm.monitor.Monitor(model, error_rate=0.01)     # Linear and Experts of fp8_gemm.nn
    ...                                                          # train or serve
    watch.snapshot()["layers"]["lm_head"]["worst_error"]
    print(watch.prometheus())

A layer without a monitor pays one attribute test for each call. With one, counts and amax stay on the device until they are
asked for; only sampled calls wait for it. Calls are seen where Python runs: replays of CUDA graphs are not, and under
torch.compile a watched layer breaks the graph (fullgraph=True refuses it).
"""

import math
import time
import warnings
from dataclasses import dataclass
from numbers import Integral, Real

import torch

from fp8_gemm.nn import Layer, Recipe
from fp8_gemm.quantize import ScaledTensor, quantize
from hopperlab import telemetry
from hopperlab.formats import spacing
from hopperlab.quantize import expand_scale

CALL_COUNTS = ("input_nan", "input_inf", "output_nan", "output_inf")  # elements, of every call
CAST_COUNTS = ("saturated", "zero_after_cast")  # elements, of the rows of sampled calls
SAMPLED_ROWS = 256  # of a sampled call, recomputed at most: spread evenly, so that a wrong tile shows


def _check_number(name: str, value, kind: type, what: str) -> None:
    """Refuse what is no number of that kind: True is none, although Python counts it as 1."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be {what}")


@dataclass(frozen=True)
class Limits:
    """When a layer moves to the FP32 fallback. Relative errors of the worst row, |y - exact| / |exact| in the 2-norm.

    error         against the FP32 product of the values before quantisation: what FP8 costs. Normal data in e4m3 with block
                  scales gives about 0.04, a layer of experts 0.06
    kernel_error  against the reference backend on the same FP8 operands: what the kernel adds to that. About 0.005 for
                  bfloat16 results; one wrong tile is far above

    None: recorded, without consequence. Raises TypeError or ValueError for limits that are not positive numbers.
    """

    error: float | None = 0.2
    kernel_error: float | None = 0.05

    def __post_init__(self):
        for name in ("error", "kernel_error"):
            value = getattr(self, name)
            if value is None:
                continue
            _check_number(name, value, Real, "a positive number, or None for no limit")
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be positive, or None for no limit")


def cast_losses(x: torch.Tensor, scaled: ScaledTensor) -> dict[str, torch.Tensor]:
    """What quantising x (rows, K) to scaled lost: {name: count ()}, int64 on the device.

    saturated        finite elements beyond the largest value by more than half its spacing: the scale is too small for them.
                     Scales from a tensor's own amax saturate nothing; scales from earlier steps may
    zero_after_cast  elements other than zero that became zero: the scale is too large for them
    """
    largest = scaled.format.max + float(spacing(scaled.format.max, scaled.format)) / 2
    magnitude = (x.detach().float() / expand_scale(scaled)).abs()
    return {
        "saturated": (torch.isfinite(x) & (magnitude > largest)).sum(),
        "zero_after_cast": ((x != 0) & (scaled.data.float() == 0)).sum(),
    }


def worst_row_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """max over rows of |y - exact| / |exact|, 2-norms of rows (rows, N); the worst, since a mean hides one wrong row.

    Rows whose exact result is not finite, or not in y's type, are left out; a result that is not finite where it should be is an
    error of inf.
    """
    finite = torch.isfinite(exact.to(y.dtype)).all(dim=1)
    off = (y.float() - exact.float()).norm(dim=1)
    relative = torch.where(off == 0, 0.0, off / exact.float().norm(dim=1)).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(torch.where(finite, relative, 0.0).amax()) if y.shape[0] else 0.0


class _Probe:
    """The record of one layer; called after its forward pass."""

    def __init__(self, name: str, layer: Layer, every: int, history: int, limits: Limits):
        self.name, self.layer, self.every, self.limits = name, layer, every, limits
        self.history, self.calls, self.sampled_calls, self.seconds = history, 0, 0, None
        self.kept = 0  # amax values so far; calls without rows have none
        self.last = dict.fromkeys(("error", "kernel_error"))
        self.worst = dict.fromkeys(("error", "kernel_error"))
        self.fallback: str | None = None  # why the layer left FP8
        self.before: Recipe | str | None = None  # its precision until then
        self.counts = self.amax = None  # on the layer's device

    def __call__(self, y: torch.Tensor, x: torch.Tensor, *routing: torch.Tensor) -> None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad():
            self._prepare(x.device)
            if x.numel():
                self._count(y, x)
            if self.every and self.calls % self.every == 0 and x.numel():
                self._check(y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), routing)
            self.calls += 1

    def _prepare(self, device: torch.device) -> None:
        if self.counts is None or self.counts.device != device:
            with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
                counts = torch.zeros(len(CALL_COUNTS) + len(CAST_COUNTS), dtype=torch.int64)
                amax = torch.full((self.history,), torch.nan)
                self.counts = (counts if self.counts is None else self.counts).to(device)
                self.amax = (amax if self.amax is None else self.amax).to(device)

    def _count(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Without reading anything: counts and amax stay on the device."""
        found = [torch.isnan(x).sum(), torch.isinf(x).sum(), torch.isnan(y).sum(), torch.isinf(y).sum()]
        self.counts[: len(found)] += torch.stack(found)
        amax = torch.where(torch.isfinite(x), x, 0).abs().amax()
        self.amax[self.kept % self.history] = amax
        self.kept += 1

    def _check(self, y: torch.Tensor, x: torch.Tensor, routing: tuple) -> None:
        """Recompute some rows in FP32 and by the reference backend. Waits for the device."""
        precision = self.layer.precision
        fp8 = isinstance(precision, Recipe)
        self.seconds = self._time(x, routing)
        # One scale for the whole tensor depends on all of its rows.
        step = 1 if fp8 and precision.activation == "tensor" else -(-x.shape[0] // SAMPLED_ROWS)
        x, y, routing = x[::step], y[::step], [tensor[::step] for tensor in routing]
        found = {"error": worst_row_error(y, self.layer.compute(x, *routing, precision="fp32", out_dtype=torch.float32))}
        if fp8:
            losses = cast_losses(x, quantize(x, precision.activation))
            self.counts[len(CALL_COUNTS) :] += torch.stack([losses[name] for name in CAST_COUNTS])
            again = self.layer.compute(x, *routing, precision=precision, backend="reference", out_dtype=y.dtype)
            found["kernel_error"] = worst_row_error(y, again)
        self.sampled_calls += 1
        for name, value in found.items():
            self.last[name], self.worst[name] = value, max(value, self.worst[name] or 0.0)
        if fp8:
            self._judge(found)

    def _judge(self, found: dict[str, float]) -> None:
        for name in ("kernel_error", "error"):
            limit = getattr(self.limits, name)
            if limit is not None and found[name] > limit:
                self.before, self.fallback = self.layer.precision, f"{name} {found[name]:.3g} > {limit:g}"
                self.layer.set_precision("fp32")
                warnings.warn(f"layer {self.name!r} moves to FP32 from its next call on: {self.fallback}. "
                              + ("The kernel's results differ from the reference: report it with fp8_gemm.explain's output. "
                                 if name == "kernel_error" else "FP8 does not fit its data. ")
                              + f"Monitor.restore({self.name!r}) undoes this", stacklevel=2)  # fmt: skip
                return

    def _time(self, x: torch.Tensor, routing: tuple) -> float:
        """Seconds of the layer, run once more."""
        if not x.is_cuda:
            start = time.perf_counter()
            self.layer.compute(x, *routing, precision=self.layer.precision)
            return time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        self.layer.compute(x, *routing, precision=self.layer.precision)
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    def record(self) -> dict:
        counts = dict.fromkeys(CALL_COUNTS + CAST_COUNTS, 0)
        amax = []
        if self.counts is not None:
            counts = dict(zip(counts, self.counts.tolist()))
            start = self.kept % self.history if self.kept > self.history else 0
            amax = [value for value in self.amax.roll(-start).tolist() if not math.isnan(value)]
        return {
            "precision": str(self.layer.precision), "calls": self.calls, **counts, "amax": amax,
            "sampled_calls": self.sampled_calls, **self.last, **{f"worst_{name}": value for name, value in self.worst.items()},
            "seconds": self.seconds, "fallback": self.fallback,
        }  # fmt: skip


class Monitor:
    """Watches the Linear and Experts layers of a model until close().

    error_rate  share of each layer's calls that are recomputed, 0 … 1: every round(1 / error_rate)-th, the first included
    history     how many amax values to keep for each layer
    limits      when a layer moves to FP32, with one warning
    gpu         the GPU whose NVML figures snapshot() adds, by NVML's number; None for none

    Raises TypeError or ValueError, also for a model without such layers, or with ones that are watched already.
    """

    def __init__(self, model: torch.nn.Module, *, error_rate: float = 0.01, history: int = 64, limits: Limits = Limits(),
                 gpu: int | None = 0):  # fmt: skip
        _check_number("error_rate", error_rate, Real, "a number, 0 (never) to 1 (every call)")
        _check_number("history", history, Integral, "an integer, at least 1")
        if not 0 <= error_rate <= 1:
            raise ValueError(f"error_rate is {error_rate!r}; allowed are 0 (never) to 1 (every call)")
        if error_rate and math.isinf(1 / float(error_rate)):
            raise ValueError(f"error_rate is {error_rate!r}, one call in more than a float can count: pass 0 for never")
        if history < 1:
            raise ValueError(f"history is {history!r}; it must be at least 1")
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Layer) and module.watchable}
        if not layers:
            raise ValueError("model has no Linear or Experts of fp8_gemm.nn: fp8_gemm.nn.convert(model, {'*': 'fp8'}) makes them")
        watched = [name for name, layer in layers.items() if layer.monitor is not None]
        if watched:
            raise ValueError(f"model has layers that another Monitor watches, such as {watched[0]!r}: close() that one first")
        every = round(1 / error_rate) if error_rate else 0
        self.gpu = gpu
        self._probes = {name: _Probe(name, layer, every, history, limits) for name, layer in layers.items()}
        for probe in self._probes.values():
            # Here and not on the class: disable() loads torch's compiler, two seconds that only those who watch should pay.
            probe.hook = torch.compiler.disable(probe, reason="a watched layer keeps its records outside of graphs")
            probe.layer.monitor = probe.hook

    def close(self) -> None:
        """Stop watching. Layers that moved to FP32 stay there. Copies of a watched model are not watched."""
        for probe in self._probes.values():
            if probe.layer.monitor is probe.hook:  # and not that of a Monitor which came after
                probe.layer.monitor = None

    def restore(self, name: str) -> None:
        """Give a layer that moved to FP32 its precision back. Raises ValueError for a layer that did not."""
        moved = [probe.name for probe in self._probes.values() if probe.fallback]
        if name not in moved:
            raise ValueError(f"name is {name!r}; layers that moved to FP32: {', '.join(map(repr, moved)) or 'none'}")
        probe = self._probes[name]
        probe.layer.set_precision(probe.before)
        probe.fallback = probe.before = None

    def snapshot(self) -> dict:
        """{"layers": {name: record}, "gpu": NVML figures or None}. Waits for the device.

        A record: precision, calls; input_nan, input_inf, output_nan, output_inf (elements of all calls); saturated,
        zero_after_cast (elements of sampled rows); amax of the inputs, oldest first; sampled_calls; error and kernel_error of the
        last sampled call and the worst so far (Limits says of what); seconds of the last sampled call; fallback: why the layer
        computes in FP32, or None.
        """
        return {"layers": {name: probe.record() for name, probe in self._probes.items()}, "gpu": self._gpu()}

    def _gpu(self) -> dict | None:
        if self.gpu is None or not torch.cuda.is_available():
            return None
        try:
            return telemetry.sample(self.gpu)
        except RuntimeError as error:  # figures about the card are no reason to stop serving
            return {"unavailable": str(error)}

    def prometheus(self) -> str:
        """snapshot() in Prometheus' text format."""
        found, lines = self.snapshot(), []

        def metric(name, kind, help, samples):
            samples = [(labels, value) for labels, value in samples if value is not None]
            if samples:
                lines.append(f"# HELP fp8_gemm_{name} {help}\n# TYPE fp8_gemm_{name} {kind}")
                lines.extend(f"fp8_gemm_{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in samples)

        layers = found["layers"].items()
        metric("calls_total", "counter", "Forward passes of a layer.", [({"layer": n}, r["calls"]) for n, r in layers])
        metric("elements_total", "counter", "Elements that are not finite (all calls) or lost in the cast (sampled rows).",
               [({"layer": n, "kind": kind}, r[kind]) for n, r in layers for kind in CALL_COUNTS + CAST_COUNTS])  # fmt: skip
        metric("amax", "gauge", "Largest finite input of the last call.",
               [({"layer": n}, r["amax"][-1] if r["amax"] else None) for n, r in layers])  # fmt: skip
        for name, help in (("error", "Relative error of the worst row against FP32, last sampled call."),
                           ("kernel_error", "The same against the reference backend."),
                           ("seconds", "Duration of the last sampled call.")):  # fmt: skip
            metric(name, "gauge", help, [({"layer": n}, r[name]) for n, r in layers])
        metric("fallback", "gauge", "1 where a limit moved the layer to FP32.",
               [({"layer": n}, int(r["fallback"] is not None)) for n, r in layers])  # fmt: skip
        for name, value in (found["gpu"] or {}).items():
            if not isinstance(value, str):
                metric(f"gpu_{name}", "gauge", "NVML.", [({"gpu": str(self.gpu)}, value)])
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    quoted = {name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in quoted.items())


def _number(value: float) -> str:
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
