"""Launches kernels/gemm.cu: constants from the plan, tensor maps from the tensors. CUDA tensors run on the GPU, CPU tensors on the
simulator, bit for bit alike."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from fp8_gemm.kernels import ahead
from fp8_gemm.plan import BLOCK_K, PANEL_ROWS, Plan, every_size, halves, panel_bytes, plan, shared_bytes, stores_by_tma, turns, vector_scales
from fp8_gemm.problem import Operands, Problem, bytes_spanned, check_disjoint
from fp8_gemm.tune import lookup
from hopperlab.kernel import Arguments, Kernel
from hopperlab.tensormap import TensorMap, encoded_at

SOURCE = Path(__file__).with_name("gemm.cu")
KINDS = {"dense": "Dense", "contiguous": "Contiguous", "masked": "Masked", "k_grouped": "KGrouped"}
OUTPUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
SMS_OF_AN_H200 = 132  # what plans for the simulator are made for


@functools.cache
def kernel(constants: tuple) -> Kernel:
    """The kernel for one plan's constants. M, N and K are arguments: a new shape with the same plan compiles nothing, and all M of one
    N and K have up to two dozen plans."""
    macros = dict(constants)
    # Where each row of Y has a scale of its own, each FFMA has a factor of its own: there is no operand to keep.
    return Kernel(SOURCE, "gemm", macros, dense_ffma=not macros["VECTOR_Y"])


def run(problem: Problem, operands: Operands, out: torch.Tensor, **overrides) -> None:
    """Compute the problem into out, shape problem.out_shape. overrides: options of plan()."""
    if out.numel() == 0:
        return
    if problem.k == 0:
        from fp8_gemm import reference_backend  # nothing to multiply: zeros, bias, what was there

        return reference_backend.run(problem, operands, out)
    launch(problem, plan_for(problem, out.device, **overrides), operands, out)


@functools.lru_cache(maxsize=65536)
def plan_for(problem: Problem, device: torch.device, **overrides) -> Plan:
    """The plan of a call on this device: a tuned one, if there is one and nothing is overridden, else the model's. On a CPU, where
    the simulator runs it, the model's for an H200."""
    if not overrides:
        overrides = lookup(problem, device) or {}
    return plan(problem, _sms_of(device), **overrides)


def for_every_size(problem: Problem, device: torch.device, **overrides) -> dict[Kernel, Problem]:
    """The kernels that problems of this N and K run with, whatever their number of tokens; for each the smallest that does."""
    needed = {}
    for sized in every_size(problem):
        needed.setdefault(kernel_of(sized, plan_for(sized, device, **overrides)), sized)
    return needed


def _sms_of(device: torch.device) -> int:
    return _sms(device.index) if device.type == "cuda" else SMS_OF_AN_H200


@functools.cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def constants_of(problem: Problem, chosen: Plan) -> dict:
    """The macros of gemm.cu for one problem and plan."""
    x_format, y_format = (problem.format_b, problem.format_a) if chosen.swap_ab else (problem.format_a, problem.format_b)
    return {
        "KIND": KINDS[problem.kind], "SWAPPED": int(chosen.swap_ab), "CONSUMERS": chosen.consumers, "ROUNDS": chosen.rounds,
        "BLOCK_Y": chosen.block_y, "NUM_STAGES": chosen.num_stages, "GROUP_X": chosen.group, "SPLITS": chosen.splits,
        "MULTICAST": chosen.multicast, "CTAS_PER_SM": chosen.ctas_per_sm,
        "INTERVAL": (problem.interval or 0) // BLOCK_K, "VECTOR_Y": int(vector_scales(problem, chosen.swap_ab)),
        "TURNS": int(turns(chosen, problem)), "HALVES": int(halves(chosen, problem)),
        "STORE_BY_TMA": int(stores_by_tma(chosen, problem)), "ACCUMULATE": int(problem.accumulate), "BIAS": int(problem.bias),
        "OUTPUT": OUTPUT[problem.out_dtype], "X_FORMAT": x_format, "Y_FORMAT": y_format,
    }  # fmt: skip


def launch(problem: Problem, chosen: Plan, operands: Operands, out: torch.Tensor) -> None:
    """Run one plan. Nothing here reads a tensor's values, so nothing waits for the GPU."""
    a, b = _for_tma(operands.a), _for_tma(operands.b)
    if a is not operands.a or b is not operands.b:
        operands = replace(operands, a=a, b=b)
    if out.is_cuda:
        o = operands
        groups = o.masked_m if problem.kind == "masked" else o.offsets
        return prepare(problem, chosen, operands, out)(o.a, o.a_scale, o.b, o.b_scale, o.bias, groups, o.ends, out)
    x_scale, y_scale = _sides(chosen, operands.a_scale, operands.b_scale)
    begins, ends = _group_ends(problem, operands)
    nothing = operands.a_scale  # a pointer that the kernel does not follow
    return kernel_of(problem, chosen)[_launch_shape(problem, chosen)](
        *_tensor_maps(problem, chosen, operands, out), x_scale, y_scale, nothing if operands.bias is None else operands.bias, begins, ends,
        out, *_numbers(problem, chosen, operands),
    )  # fmt: skip


def launch_for(problem: Problem, operands: Operands, out: torch.Tensor, **overrides) -> Launch | None:
    """What run() launches, for any operands of these layouts on a GPU; None where it does not simply launch."""
    if out.numel() == 0 or problem.k == 0 or _for_tma(operands.a) is not operands.a or _for_tma(operands.b) is not operands.b:
        return None
    return prepare(problem, plan_for(problem, out.device, **overrides), operands, out)


# ---- what gemm.cu's parameters are: three maps, six pointers, numbers ------------------------------------------------


def _sides(chosen: Plan, of_a, of_b) -> tuple:
    """What belongs to X and to Y, of what belongs to A and to B."""
    return (of_b, of_a) if chosen.swap_ab else (of_a, of_b)


def _tensor_maps(problem: Problem, chosen: Plan, operands: Operands, out: torch.Tensor) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Of X, of Y and of D; where the threads store D its map is not used, and is X's."""
    x, y = _sides(chosen, _three_dimensions(operands.a), _three_dimensions(operands.b))
    rows = chosen.block_x // 2 if turns(chosen, problem) or chosen.multicast > 1 else chosen.block_x  # of one copy
    x_map = TensorMap.tiled(x, box=(BLOCK_K, rows, 1), swizzle=128)
    y_map = TensorMap.tiled(y, box=(BLOCK_K, chosen.block_y, 1), swizzle=128)
    if not stores_by_tma(chosen, problem):
        return x_map, y_map, x_map
    panel = panel_bytes(chosen, problem)
    box = (panel // out.element_size(), PANEL_ROWS, 1)
    return x_map, y_map, TensorMap.tiled(_three_dimensions(out), box=box, swizzle=panel)


def _numbers(problem: Problem, chosen: Plan, operands: Operands) -> tuple[int, ...]:
    x_rows, y_rows = _sides(chosen, problem.m, problem.n)
    strides = _sides(chosen, _scale_strides(operands.a_scale, problem.recipe_a), _scale_strides(operands.b_scale, problem.recipe_b))
    return x_rows, y_rows, problem.k, problem.groups, problem.m, problem.n, *strides[0], *strides[1]


def _group_ends(problem: Problem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.kind == "masked":
        return operands.masked_m, operands.masked_m
    if operands.offsets is None:
        return operands.a_scale, operands.a_scale  # not followed
    return operands.offsets, operands.offsets[1:] if operands.ends is None else operands.ends


def kernel_of(problem: Problem, chosen: Plan) -> Kernel:
    return kernel(tuple(constants_of(problem, chosen).items()))


def _launch_shape(problem: Problem, chosen: Plan) -> tuple[int, int, int, int]:
    """(CTAs, threads of each, CTAs of a cluster, bytes of shared memory)"""
    return chosen.ctas(problem), 128 * (1 + chosen.consumers), chosen.splits * chosen.multicast, shared_bytes(chosen, problem)


# ---- launching on a GPU again and again --------------------------------------------------------------------------------


class Launch:
    """One plan on one GPU for operands of one layout: all that does not change from call to call. Calling it launches."""

    __slots__ = ("bytes", "chosen", "device", "gpu", "layouts", "numbers", "packing", "problem")

    def __init__(self, problem: Problem, chosen: Plan, operands: Operands, out: torch.Tensor):
        made = kernel_of(problem, chosen)
        self.problem, self.chosen, self.device = problem, chosen, out.device
        self.layouts = [each.layout for each in _tensor_maps(problem, chosen, operands, out)]
        numbers = _numbers(problem, chosen, operands)
        self.numbers = [made.value(number, parameter) for number, parameter in zip(numbers, made.parameters[-len(numbers) :])]
        self.bytes = {name: bytes_spanned(tensor) for name, tensor in (*operands.named(), ("out", out))}
        self.gpu, self.packing = made.prepare(out.device.index, *_launch_shape(problem, chosen), early=True), made.packing

    def __call__(self, a, a_scale, b, b_scale, bias, groups, ends, out) -> None:
        """groups: offsets, or masked_m. All tensors as in Operands."""
        a_address, b_address = a.data_ptr(), b.data_ptr()
        if (a_address | b_address) % 16:  # the layout is one that TMA can read, this address is not
            masked = self.problem.kind == "masked"
            return launch(self.problem, self.chosen, Operands(a, b, a_scale, b_scale, bias, None if masked else groups, ends,
                                                              groups if masked else None), out)  # fmt: skip
        self.gpu(packed(
            self, a_address, a_scale.data_ptr(), b_address, b_scale.data_ptr(), None if bias is None else bias.data_ptr(),
            None if groups is None else groups.data_ptr(), None if ends is None else ends.data_ptr(), out.data_ptr(),
        ))  # fmt: skip


@functools.lru_cache(maxsize=8192)  # about 2 KB each
def packed(launch: Launch, a: int, a_scale: int, b: int, b_scale: int, bias: int | None, groups: int | None, ends: int | None,
           out: int) -> Arguments:  # fmt: skip
    """The arguments of a launch with operands at these addresses, which in a loop of inference or training come again and again.

    A pure function of addresses and layouts, as is what check_disjoint finds: so a call at known addresses checks nothing.
    """
    masked = launch.problem.kind == "masked"
    inputs = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias, "masked_m" if masked else "offsets": groups, "ends": ends}
    check_disjoint("out", out, launch.bytes["out"], {name: (start, launch.bytes[name]) for name, start in inputs.items() if start})
    if groups is None:
        groups = ends = a_scale  # not followed, as bias where there is none
    elif ends is None:
        ends = groups if masked else groups + 4  # offsets[1:]
    (x, y), (x_scale, y_scale) = _sides(launch.chosen, a, b), _sides(launch.chosen, a_scale, b_scale)
    of_x, of_y, of_d = launch.layouts
    x_map, y_map = encoded_at(of_x, x), encoded_at(of_y, y)
    d_map = encoded_at(of_d, out) if stores_by_tma(launch.chosen, launch.problem) else x_map
    return Arguments(launch.packing, [x_map, y_map, d_map, x_scale, y_scale, bias or a_scale, groups, ends, out, *launch.numbers])


_launches: dict[tuple, Launch] = {}
MOST_LAUNCHES = 4096


def prepare(problem: Problem, chosen: Plan, operands: Operands, out: torch.Tensor) -> Launch:
    """The Launch for operands like these, whose a and b TMA can read."""
    tensors = (operands.a, operands.a_scale, operands.b, operands.b_scale, out)
    key = (kernel, problem, chosen, out.device, operands.ends is None, *[(tensor.shape, tensor.stride()) for tensor in tensors])
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        found = _launches[key] = Launch(problem, chosen, operands, out)
        fewer = {} if chosen.num_sms == _sms_of(out.device) else {"num_sms": chosen.num_sms}
        if plan_for(problem, out.device, **fewer) == chosen:  # no tile is asked for, which other M need not have
            ahead.start(problem, out.device, **fewer)
    return found


def _three_dimensions(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x[None]


def _for_tma(data: torch.Tensor) -> torch.Tensor:
    """FP8 data (rows, K) or (groups, rows, K) as TMA can read it: every stride and the address a multiple of 16 bytes.

    Where it is not (K or a pitch that is no multiple of 16), a copy is made, padded with zeros, which add nothing.
    """
    if data.stride(-1) == 1 and data.data_ptr() % 16 == 0 and not any(s % 16 for s, d in zip(data.stride()[:-1], data.shape) if d > 1):
        return data
    *leading, k = data.shape
    padded = torch.zeros(*leading, -(-k // 16) * 16, dtype=torch.uint8, device=data.device)
    padded[..., :k] = data.view(torch.uint8)
    return padded.view(data.dtype)


def _scale_strides(scale: torch.Tensor, recipe: str) -> tuple[int, int, int, int]:
    """(group stride, log2 of the rows that share a scale, row stride, K-block stride), as Scales in gemm.cu wants them."""
    dimensions = {"tensor": 1, "row": 1, "1x128": 2, "128x128": 2}[recipe]
    group = scale.stride(0) if scale.dim() > dimensions else 0
    strides = scale.stride()[scale.dim() - dimensions :]
    return {
        "tensor": (group, 0, 0, 0),
        "row": (group, 0, strides[0], 0),
        "1x128": (group, 0, *strides[-2:]),
        "128x128": (group, 7, *strides[-2:]),
    }[recipe]
