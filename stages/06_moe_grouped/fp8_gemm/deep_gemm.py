"""The names DeepGEMM's users call, with its argument order: its FP8 functions for SM90, on this library.

    import fp8_gemm.deep_gemm as deep_gemm      # instead of: import deep_gemm

Operands are pairs (FP8 data, float32 scales); results are written to d. What differs: any backend runs them, the CPU included;
any M, N, K and group sizes are right, so alignments are offered only because callers lay buffers out by them; scales may be
row-major, as get_mn_major_tma_aligned_tensor makes them or in any other strides, and are read where they lie; the casts saturate
and have no floor under the scale.
The API followed is that of DeepGEMM 2.x, with the names of its first release as well. Errors are those of the library's own calls
(TypeError, ValueError; RuntimeError for a backend that cannot) and name the argument.
"""

import itertools

import torch

from fp8_gemm import ops
from fp8_gemm.dispatch import SMS_OF_AN_H200
from fp8_gemm.gemm import gemm
from fp8_gemm.grouped import grouped_gemm, k_grouped_gemm, masked_gemm
from fp8_gemm.problem import is_readable
from fp8_gemm.quantize import GroupedTensor, ScaledTensor, quantize
from hopperlab.quantize import BLOCK, TMA_ALIGNMENT
from hopperlab.reference import calc_diff

__all__ = [
    "align", "calc_diff", "ceil_div", "fp8_gemm_nn", "fp8_gemm_nt", "fp8_gemm_tn", "fp8_gemm_tt", "fp8_m_grouped_gemm_nt_masked",
    "gemm_fp8_fp8_bf16_nt", "get_col_major_tma_aligned_tensor", "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout", "get_mn_major_tma_aligned_tensor", "get_num_sms", "get_tma_aligned_size",
    "k_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous", "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
    "m_grouped_fp8_gemm_nn_contiguous", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked", 
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_masked", "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8", "per_token_cast_to_fp8", "set_num_sms", "transform_sf_into_required_layout",
    "wgrad_gemm_fp8_fp8_fp32_nt",
]  # fmt: skip

Operand = tuple[torch.Tensor, torch.Tensor]
WEIGHT_RECIPES = {128: "128x128", 1: "1x128"}  # by the granularity along N
CONTIGUOUS_ALIGNMENT = 128  # rows to which DeepGEMM's callers pad each group; nothing here needs it
_num_sms: int | None = None


# ---------------------------------------------------------------- dense


def fp8_gemm_nt(
    a: Operand, b: Operand, d: torch.Tensor, c: torch.Tensor | None = None, recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None, recipe_b: tuple[int, int] | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """d (M, N) = a (M, K) · b (N, K)ᵀ + c. Scales of a (M, ceil(K/128)); of b (ceil(N/128), ceil(K/128)), or with recipe
    (1, 1, 128) (N, ceil(K/128)). d and c are of one type, bfloat16, float16 or float32; c may be d.

    compiled_dims and disable_ue8m0_cast change nothing here: no size is compiled in, and SM90 scales stay float32.
    """
    recipe_of_b = _recipe_of_b(recipe, recipe_a, recipe_b)
    operands = _matrix("a", a, "1x128", d), _matrix("b", b, recipe_of_b, d)
    gemm(*operands, c=c, out=d, out_dtype=_dtype("d", d), **_overrides(d))


def fp8_gemm_nn(a: Operand, b: Operand, d: torch.Tensor, c=None, recipe=None, *more, **options) -> None:
    """As fp8_gemm_nt with b (K, N) and its scales transposed. FP8 wgmma reads along K: b must be a view of a K-major tensor."""
    fp8_gemm_nt(a, _transposed(b), d, c, recipe, *more, **options)


def fp8_gemm_tn(a: Operand, b: Operand, d: torch.Tensor, c=None, recipe=None, *more, **options) -> None:
    """As fp8_gemm_nn with a (K, M) as well."""
    fp8_gemm_nt(_transposed(a), _transposed(b), d, c, recipe, *more, **options)


def fp8_gemm_tt(a: Operand, b: Operand, d: torch.Tensor, c=None, recipe=None, *more, **options) -> None:
    """As fp8_gemm_nt with a (K, M)."""
    fp8_gemm_nt(_transposed(a), b, d, c, recipe, *more, **options)


def gemm_fp8_fp8_bf16_nt(lhs: Operand, rhs: Operand, out: torch.Tensor) -> None:
    """fp8_gemm_nt by its first name."""
    fp8_gemm_nt(lhs, rhs, out)


def wgrad_gemm_fp8_fp8_fp32_nt(lhs: Operand, rhs: Operand, out: torch.Tensor) -> None:
    """out (M, N) float32 += lhs · rhsᵀ, both scaled 1x128 along K: scales (M or N, ceil(K/128)), or (ceil(K/128), M or N) as
    per_channel_cast_to_fp8 makes them."""
    lhs, rhs = (_k_blocks_last(*_pair(name, operand)) for name, operand in (("lhs", lhs), ("rhs", rhs)))
    fp8_gemm_nt(lhs, rhs, out, c=out, recipe=(1, 1, 128))


# ---------------------------------------------------------------- groups


def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand, b: Operand, d: torch.Tensor, grouped_layout: torch.Tensor, recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None, recipe_b: tuple[int, int] | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, *, expected_m_for_psum_layout: int | None = None,
) -> None:  # fmt: skip
    """d (M, N): each row of a (M, K) times the b (G, N, K) of its group.

    grouped_layout  (M,) int32: the group of each row, ascending, -1 for padding, whose rows of d keep what they hold; or with
                    use_psum_layout (G,) int32: where each group ends, each starting at the last end rounded up to the alignment

    Raises as grouped_gemm does, and ValueError for a grouped_layout of another type or shape.
    """
    activations, weights = _matrix("a", a, "1x128", d), _stack("b", b, _recipe_of_b(recipe, recipe_a, recipe_b), d)
    if not use_psum_layout:
        grouped_gemm(activations, weights, indices=grouped_layout, out=d, out_dtype=_dtype("d", d), **_overrides(d))
        return
    if not isinstance(grouped_layout, torch.Tensor):
        raise TypeError(f"grouped_layout is a {type(grouped_layout).__name__}; it must be an int32 tensor ({weights.groups},)")
    if tuple(grouped_layout.shape) != (weights.groups,) or grouped_layout.dtype != torch.int32:
        raise ValueError(f"grouped_layout is {grouped_layout.dtype} of shape {tuple(grouped_layout.shape)}; with "
                         f"use_psum_layout it must be int32 ({weights.groups},), where each group ends")  # fmt: skip
    if is_readable(grouped_layout):
        before = 0
        for group, end in enumerate(grouped_layout.tolist()):
            if not before <= end <= activations.rows:
                raise ValueError(f"grouped_layout[{group}] is {end}; group ends must not decrease: allowed are {before} to {activations.rows}")
            before = end
    starts = torch.nn.functional.pad(align(grouped_layout[:-1], CONTIGUOUS_ALIGNMENT), (1, 0)).clamp_max(activations.rows)
    ends = torch.maximum(grouped_layout, starts)  # an empty group may end where the group before it did
    offsets = torch.nn.functional.pad(starts, (0, 1), value=activations.rows)
    ops.call("grouped", activations, weights, offsets, ends, "1x128", weights.recipe, _dtype("d", d), BLOCK, None,
             grad_format="e4m3", options=_overrides(d), out=d)  # fmt: skip


def m_grouped_fp8_gemm_nn_contiguous(
    a: Operand, b: Operand, d: torch.Tensor, grouped_layout: torch.Tensor, recipe=None, *more, **options
) -> None:
    """As m_grouped_fp8_gemm_nt_contiguous with b (G, K, N) and its scales transposed; b a view of a K-major tensor."""
    m_grouped_fp8_gemm_nt_contiguous(a, _transposed(b), d, grouped_layout, recipe, *more, **options)


def m_grouped_fp8_gemm_nt_masked(
    a: Operand, b: Operand, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int,
    recipe: tuple[int, int, int] | None = None, recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None, compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """d (G, max M, N): the first masked_m[g] rows of a[g] (max M, K) times b[g] (N, K) transposed. Later rows stay as they are.

    expected_m, the rows a group usually has, is a hint that this library's plans do not need.
    """
    weights = _stack("b", b, _recipe_of_b(recipe, recipe_a, recipe_b), d)
    masked_gemm(_stack("a", a, "1x128", d), weights, masked_m, out=d, out_dtype=_dtype("d", d), **_overrides(d))


def fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe=None, *more, **options) -> None:
    """m_grouped_fp8_gemm_nt_masked by its name in DeepGEMM 2.0."""
    m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe, *more, **options)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs: Operand, rhs: Operand, out: torch.Tensor, m_indices: torch.Tensor) -> None:
    """m_grouped_fp8_gemm_nt_contiguous by its first name."""
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Operand, rhs: Operand, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """m_grouped_fp8_gemm_nt_masked by its first name."""
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


def k_grouped_fp8_gemm_nt_contiguous(
    a: Operand, b: Operand, d: torch.Tensor, ks: list[int], ks_tensor: torch.Tensor, c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128), compiled_dims: str = "mn", *, use_psum_layout: bool = False,
) -> None:  # fmt: skip
    """d[g] (M, N) = a[g] (M, ks[g]) · b[g] (N, ks[g])ᵀ + c[g], for each group; d and c (G, M, N).

    a, b       data flat: the groups' matrices one after another, each (M, ks[g]) row-major; scales (sum of ks / 128, M or N)
    ks         multiples of 128, 0 included, on the host
    ks_tensor  (G,) int32: the same on the device

    Copies a and b into one (M, sum of ks): call k_grouped_gemm with that layout to save the copy. Raises ValueError for other
    recipes, sizes, shapes and strides than these.
    """
    offsets = _k_offsets(d, ks, ks_tensor, recipe, use_psum_layout)
    operands = [_k_groups(name, operand, rows, ks, d) for name, operand, rows in (("a", a, d.shape[1]), ("b", b, d.shape[2]))]
    k_grouped_gemm(*operands, offsets, c=c, out=d, out_dtype=_dtype("d", d), **_overrides(d))


def k_grouped_fp8_gemm_tn_contiguous(
    a: Operand, b: Operand, d: torch.Tensor, ks: list[int], ks_tensor: torch.Tensor, c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128), compiled_dims: str = "mn", *, use_psum_layout: bool = False,
) -> None:  # fmt: skip
    """As k_grouped_fp8_gemm_nt_contiguous with a (sum of ks, M) and b (sum of ks, N), as per_channel_cast_to_fp8 makes them.

    FP8 wgmma reads along K, so both are transposed, one pass over their data; a transposed view of K-major data costs none.
    Errors as there.
    """
    offsets = _k_offsets(d, ks, ks_tensor, recipe, use_psum_layout)
    operands = []
    for name, operand, rows in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
        data, scale = _pair(name, operand)
        if tuple(data.shape) != (sum(ks), rows):
            raise ValueError(f"{name}[0] has shape {tuple(data.shape)}; it must be {(sum(ks), rows)}, sum of ks by columns of d")
        _check_k_scales(name, scale, rows, sum(ks) // BLOCK)
        k_major = data.view(torch.uint8).t().contiguous().view(data.dtype)  # bytes: not every torch can copy FP8 so
        operands.append(_matrix(name, (k_major, scale.t()), "1x128", d))
    k_grouped_gemm(*operands, offsets, c=c, out=d, out_dtype=_dtype("d", d), **_overrides(d))


def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(lhs: Operand, rhs: Operand, out: torch.Tensor, batch_sizes: list[int]) -> None:
    """out[g] (M, N) float32 += lhs[g] (M, batch_sizes[g]) · rhs[g] (N, batch_sizes[g])ᵀ, for each group, in one launch.

    lhs, rhs     data flat, as in k_grouped_fp8_gemm_nt_contiguous; scales (sum of ceil(batch_sizes / 128), M or N)
    batch_sizes  any sizes, 0 included, on the host: they are copied to the device, so a CUDA graph cannot hold this call

    Copies lhs and rhs as k_grouped_fp8_gemm_nt_contiguous does. Raises ValueError for other sizes, shapes and strides.
    """
    _check_k_sizes(out, "out", batch_sizes, "batch_sizes", 1)
    operands = [_k_groups(name, operand, rows, batch_sizes, out)
                for name, operand, rows in (("lhs", lhs, out.shape[1]), ("rhs", rhs, out.shape[2]))]  # fmt: skip
    ends = itertools.accumulate((align(size, BLOCK) for size in batch_sizes), initial=0)
    offsets = torch.tensor(list(ends), dtype=torch.int32, device=out.device)
    k_grouped_gemm(*operands, offsets, c=out, out=out, out_dtype=_dtype("out", out), **_overrides(out))


def _k_offsets(d, ks, ks_tensor, recipe, use_psum_layout) -> torch.Tensor:
    """Where each group of K begins, (G + 1,) int32, after the checks that both layouts share."""
    if tuple(recipe) != (1, 1, BLOCK) or use_psum_layout:
        raise ValueError(f"recipe is {recipe} and use_psum_layout {use_psum_layout}; SM90 has (1, 1, 128) without it")
    _check_k_sizes(d, "d", ks, "ks", BLOCK)
    if tuple(ks_tensor.shape) != (len(ks),) or ks_tensor.dtype != torch.int32:
        raise ValueError(f"ks_tensor is {ks_tensor.dtype} of shape {tuple(ks_tensor.shape)}; it must be int32 ({len(ks)},), "
                         "ks on the device")  # fmt: skip
    if is_readable(ks_tensor) and ks_tensor.tolist() != list(ks):
        raise ValueError(f"ks_tensor holds {ks_tensor.tolist()} and ks is {list(ks)}; they must be equal")
    return torch.nn.functional.pad(ks_tensor.cumsum(0), (1, 0)).int()


def _check_k_sizes(d: torch.Tensor, d_name: str, ks: list[int], name: str, multiple: int) -> None:
    if d.dim() != 3 or d.shape[0] != len(ks):
        raise ValueError(f"{d_name} has shape {tuple(d.shape)} and {name} {len(ks)} entries; {d_name} must be (groups, M, N)")
    for group, size in enumerate(ks):
        if size < 0 or size % multiple:
            allowed = f"multiples of {multiple}: pad the group with zeros, or call k_grouped_gemm, which takes any sizes"
            raise ValueError(f"{name}[{group}] is {size}; allowed are {allowed if multiple > 1 else '0 and more'}")


def _check_k_scales(name: str, scale: torch.Tensor, rows: int, blocks: int) -> None:
    if tuple(scale.shape) != (blocks, rows):
        raise ValueError(f"{name}[1] has shape {tuple(scale.shape)}; it must be {(blocks, rows)}, a row of scales for each K "
                         "block")  # fmt: skip


def _k_groups(name: str, operand: Operand, rows: int, ks: list[int], d: torch.Tensor) -> ScaledTensor:
    """Flat groups side by side: (rows, sum of ks), each group filled up with zeros to a multiple of 128."""
    data, scale = _pair(name, operand)
    total = sum(ks)
    if data.numel() != rows * total or not data.is_contiguous():
        raise ValueError(f"{name}[0] has {data.numel()} elements, strides {data.stride()}; it must be contiguous, {rows} x "
                         f"{total} elements")  # fmt: skip
    _check_k_scales(name, scale, rows, sum(ceil_div(size, BLOCK) for size in ks))
    groups = data.view(torch.uint8).flatten().split([rows * size for size in ks])  # bytes: not every torch can join FP8
    padded = [torch.nn.functional.pad(group.view(rows, size), (0, -size % BLOCK)) for group, size in zip(groups, ks)]
    return _matrix(name, (torch.cat(padded, dim=1).view(data.dtype), scale.t()), "1x128", d)


# ---------------------------------------------------------------- operands


class _StridedMatrix(ScaledTensor):
    """Scales in any strides, which the backends read where they lie. Elsewhere strides give away a transposed scale; DeepGEMM's
    callers are expected to have transposed ones."""

    def _check_scale_strides(self):
        pass


class _StridedStack(GroupedTensor):
    """The same of several matrices."""

    def _check_scale_strides(self):
        pass

    def __getitem__(self, group: int) -> ScaledTensor:
        return _StridedMatrix(self.data[group], self.scale[group], self.recipe)


def _pair(name: str, operand) -> Operand:
    if not isinstance(operand, (tuple, list)) or len(operand) != 2 or not all(isinstance(x, torch.Tensor) for x in operand):
        raise TypeError(f"{name} is {type(operand).__name__}; it must be a pair (FP8 data, float32 scales): "
                        "per_token_cast_to_fp8(x)")  # fmt: skip
    return operand[0], operand[1]


def _matrix(name: str, operand: Operand, recipe: str, d: torch.Tensor) -> ScaledTensor:
    data, scale = _pair(name, operand)
    if ops.traced(data, d):  # operators take row-major scales
        scale = scale.contiguous()
    return (ScaledTensor if scale.is_contiguous() else _StridedMatrix)(data, scale, recipe)


def _stack(name: str, operand: Operand, recipe: str, d: torch.Tensor) -> GroupedTensor:
    data, scale = _pair(name, operand)
    if ops.traced(data, d):
        scale = scale.contiguous()
    return (GroupedTensor if scale.is_contiguous() else _StridedStack)(data, scale, recipe)


def _k_blocks_last(data: torch.Tensor, scale: torch.Tensor) -> Operand:
    """Scales (rows, K blocks), whichever way they were given."""
    rows, blocks = data.shape[0], ceil_div(data.shape[-1], BLOCK)
    given = tuple(scale.shape)
    return data, scale.t() if given == (blocks, rows) != (rows, blocks) else scale


def _transposed(operand: Operand) -> Operand:
    data, scale = _pair("operand", operand)
    return data.mT, scale.mT


def _recipe_of_b(recipe, recipe_a, recipe_b) -> str:
    """"128x128" or "1x128" from DeepGEMM's granularities (M, N, K), or (M, K) and (N, K)."""
    if (recipe_a is None) != (recipe_b is None):
        raise ValueError(f"recipe_a is {recipe_a} and recipe_b {recipe_b}; pass both, or neither")
    if recipe is None and recipe_a is not None and recipe_b is not None:
        recipe = (recipe_a[0], recipe_b[0], recipe_a[1] if recipe_a[1] == recipe_b[1] else None)
    recipe = (1, 128, 128) if recipe is None else tuple(recipe)
    if len(recipe) != 3 or recipe[0] != 1 or recipe[1] not in WEIGHT_RECIPES or recipe[2] != BLOCK:
        raise ValueError(f"recipe is {recipe}; SM90 has (1, 128, 128) and (1, 1, 128)")
    return WEIGHT_RECIPES[recipe[1]]


def _dtype(name: str, d: torch.Tensor) -> torch.dtype:
    if not isinstance(d, torch.Tensor):
        raise TypeError(f"{name} is a {type(d).__name__}; it must be the torch.Tensor that takes the result")
    return d.dtype


def _overrides(d: torch.Tensor) -> dict:
    return {"num_sms": _num_sms} if _num_sms is not None and d.is_cuda else {}


# ---------------------------------------------------------------- helpers


def ceil_div(x: int, y: int) -> int:
    """x / y rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def set_num_sms(num_sms: int) -> None:
    """Let kernels use only so many SMs from now on; others stay free for communication. No effect on a CPU.

    Raises ValueError unless it is 1 to the number of SMs.
    """
    global _num_sms
    available = _available_sms()
    if not 0 < num_sms <= available:
        raise ValueError(f"num_sms is {num_sms}; allowed are 1 to {available}")
    _num_sms = num_sms


def get_num_sms() -> int:
    """What set_num_sms set, else all SMs of the current device (132, an H200's, without a GPU)."""
    return _num_sms or _available_sms()


def _available_sms() -> int:
    if not torch.cuda.is_available():
        return SMS_OF_AN_H200
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_m_alignment_for_contiguous_layout() -> int:
    """Rows to which callers pad the groups of a contiguous layout, 128 as in DeepGEMM. Nothing here needs the padding."""
    return CONTIGUOUS_ALIGNMENT


get_mk_alignment_for_contiguous_layout = get_m_alignment_for_contiguous_layout


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """x elements rounded up to a multiple of 16 bytes."""
    return align(x, TMA_ALIGNMENT // element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Scales (…, rows, K blocks) float32 with the same values, laid out M-major: strides (1, rows padded to 16 bytes).

    Raises ValueError for another type or number of dimensions.
    """
    if sf.dim() not in (2, 3) or sf.dtype != torch.float32:
        raise ValueError(f"sf is {sf.dtype} of shape {tuple(sf.shape)}; it must be float32 (rows, K blocks) or (groups, rows, "
                         "K blocks)")  # fmt: skip
    *groups, rows, k_blocks = sf.shape
    storage = sf.new_zeros(*groups, k_blocks, get_tma_aligned_size(rows, sf.element_size()))
    out = storage.mT[..., :rows, :]
    out.copy_(sf)
    return out


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor


def transform_sf_into_required_layout(
    sf: torch.Tensor, mn: int, k: int, recipe: tuple[int, ...], num_groups: int | None = None, is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Scales sf in the layout SM90 kernels read: M-major if each row has its own, unchanged if 128 rows share one.

    sf       float32 (ceil(mn / rows per scale), ceil(k / K per scale)), with num_groups in front of it
    recipe   scales' granularity (M, N, K), of which is_sfa takes M or N; or (rows, K)

    Raises ValueError for scales of another shape, or is_sfa left out where it is needed.
    """
    if len(recipe) == 3 and is_sfa is None:
        raise ValueError(f"is_sfa is None with recipe {tuple(recipe)}; it must say whether these are scales of A")
    rows_per_scale = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    wanted = (*([] if num_groups is None else [num_groups]), ceil_div(mn, rows_per_scale), ceil_div(k, recipe[-1]))
    if tuple(sf.shape) != wanted:
        raise ValueError(f"sf has shape {tuple(sf.shape)}; mn = {mn}, k = {k} and recipe {tuple(recipe)} need {wanted}")
    return get_mn_major_tma_aligned_tensor(sf) if rows_per_scale == 1 else sf


def _check_granularity(gran_k: int) -> None:
    if gran_k != BLOCK:
        raise ValueError(f"gran_k is {gran_k}; SM90 has {BLOCK}")


def per_token_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> Operand:
    """x (M, K) as e4m3 with a scale for each row and 128 of K: (M, K), (M, ceil(K/128)). use_ue8m0: powers of two."""
    _check_granularity(gran_k)
    scaled = quantize(x, "1x128", power_of_two=use_ue8m0)
    return scaled.data, scaled.scale


def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> Operand:
    """x (K, N) as e4m3 with a scale for each column and 128 of K: (K, N), (ceil(K/128), N)."""
    _check_granularity(gran_k)
    scaled = quantize(x.t(), "1x128", power_of_two=use_ue8m0)
    return scaled.data.t().contiguous(), scaled.scale.t().contiguous()


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK) -> Operand:
    """x (N, K) as e4m3 with a scale for each 128 x 128: (N, K), (ceil(N/128), ceil(K/128))."""
    _check_granularity(gran_k)
    scaled = quantize(x, "128x128", power_of_two=use_ue8m0)
    return scaled.data, scaled.scale
