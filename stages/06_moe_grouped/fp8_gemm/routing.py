"""How tokens fall on experts, what that means for the layout of a grouped GEMM, and checks that read group tensors."""

from dataclasses import dataclass

import torch

from fp8_gemm.problem import Problem, check_group_tensor, check_group_values, row_groups
from fp8_gemm.quantize import GroupedTensor, ScaledTensor

TILE_ROWS = 64  # rows of the smallest tile whose tensor-core instructions are full: wgmma's M
DENSE_SHARE = 0.9  # of all tiles non-empty: running every token through every expert wastes less than sorting costs
MASKED_SHARE = 0.5  # of a masked buffer's tiles non-empty: less, and the buffer is mostly padding


@dataclass(frozen=True)
class RoutingReport:
    """How the rows of one step fall on its experts. Tiles are 64 rows high.

    experts, idle_experts  how many there are, and how many of them have no row
    rows, tokens  token-expert pairs, and distinct tokens: the rows of a dense run
    largest, skew  rows of the busiest expert; the same over the mean, 1 when all get as many
    tiles         non-empty tiles: what a grouped GEMM computes
    filled        rows over rows of the non-empty tiles
    masked_share  non-empty tiles over those of a (experts, max_m, …) buffer
    dense_share   non-empty tiles over those of running every token through every expert
    advice, why   "dense", "contiguous" or "masked", and the sentence for it
    """

    experts: int
    rows: int
    tokens: int
    idle_experts: int
    largest: int
    skew: float
    tiles: int
    filled: float
    masked_share: float
    dense_share: float
    advice: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of {self.tokens} tokens on {self.experts} experts, {self.idle_experts} idle; the busiest has "
            f"{self.largest} ({self.skew:.1f} times the mean)\n"
            f"{self.tiles} non-empty tiles of {TILE_ROWS} rows, {self.filled:.0%} filled; they are {self.masked_share:.0%} of a "
            f"masked buffer and {self.dense_share:.0%} of a dense run\n"
            f"advice: {self.advice}: {self.why}"
        )


def routing_report(
    counts: torch.Tensor | None = None, *, topk_ids: torch.Tensor | None = None, num_experts: int | None = None,
    tokens: int | None = None, max_m: int | None = None, fixed_shapes: bool = False,
) -> RoutingReport:  # fmt: skip
    """Measure the routing of one step and advise a layout. Reads the device: for setting up, not for every call.

    counts        (experts,) integers: rows of each expert; or
    topk_ids      (tokens, top_k) integers: the experts of each token, -1 for none, with num_experts
    tokens        how many tokens those counts are of; by default each token is one row
    max_m         rows per expert of the masked buffer; by default the busiest expert's, rounded up to a tile
    fixed_shapes  whether shapes must not depend on the routing (CUDA graphs): then never "contiguous"

    dense: every token through every expert, results masked, when at least 90 % of the tiles have work anyway.
    masked: when at least half of the buffer's tiles have work, or shapes are fixed. contiguous: otherwise.
    Raises TypeError or ValueError.
    """
    if (counts is None) == (topk_ids is None):
        raise ValueError("counts and topk_ids: pass exactly one of them")
    name, given = ("counts", counts) if counts is not None else ("topk_ids", topk_ids)
    if not isinstance(given, torch.Tensor) or given.is_floating_point() or given.dtype == torch.bool:
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{name} is {kind}; it must be a tensor of integers")
    if given.dim() != (1 if counts is not None else 2):
        raise ValueError(f"{name} has shape {tuple(given.shape)}; it must be "
                         f"{'(experts,)' if counts is not None else '(tokens, top_k)'}")  # fmt: skip
    if counts is None:
        if not num_experts or num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; topk_ids needs it, an integer >= 1")
        ids = topk_ids.flatten().long()
        if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_experts:
            raise ValueError(f"topk_ids holds {int(ids.min())} to {int(ids.max())}; allowed are -1 (none) and 0 to "
                             f"{num_experts - 1}")  # fmt: skip
        counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
        tokens = topk_ids.shape[0]
    sizes = counts.tolist()
    if not sizes or min(sizes) < 0:
        raise ValueError(f"counts is {sizes}; it must hold a size >= 0 for at least one expert")
    if num_experts is not None and num_experts != len(sizes):
        raise ValueError(f"num_experts is {num_experts} and counts has {len(sizes)} entries; drop one of them")
    rows, largest = sum(sizes), max(sizes)
    tokens = rows if tokens is None else tokens
    if tokens < largest:
        raise ValueError(f"tokens is {tokens}, but one expert has {largest} rows, and a token reaches an expert once")
    if max_m is not None and max_m < largest:
        raise ValueError(f"max_m is {max_m}, but one expert has {largest} rows: pass max_m >= {largest}")

    tiles = sum(-(-size // TILE_ROWS) for size in sizes)
    buffer_tiles = len(sizes) * -(-(max_m or largest) // TILE_ROWS)
    dense_tiles = len(sizes) * -(-tokens // TILE_ROWS)
    masked_share, dense_share = (tiles / all_tiles if all_tiles else 0.0 for all_tiles in (buffer_tiles, dense_tiles))
    advice, why = _advice(rows, masked_share, dense_share, fixed_shapes)
    return RoutingReport(
        len(sizes), rows, tokens, sizes.count(0), largest, largest * len(sizes) / rows if rows else 1.0, tiles,
        rows / (tiles * TILE_ROWS) if tiles else 1.0, masked_share, dense_share, advice, why,
    )  # fmt: skip


def _advice(rows, masked_share, dense_share, fixed_shapes) -> tuple[str, str]:
    if rows and dense_share >= DENSE_SHARE:
        return "dense", f"{dense_share:.0%} of the tiles of a dense run have work, so sorting tokens by expert saves nothing"
    if fixed_shapes:
        return "masked", f"shapes must not depend on the routing; {masked_share:.0%} of the tiles have work, others are skipped"
    if rows and masked_share >= MASKED_SHARE:
        return "masked", f"{masked_share:.0%} of the buffer's tiles have work, and masked groups need no sorting or offsets"
    return "contiguous", f"only {masked_share:.0%} of a masked buffer's tiles would have work; rows one after another save memory"


def validate_groups(
    a: torch.Tensor | ScaledTensor | GroupedTensor, b: torch.Tensor | ScaledTensor | GroupedTensor, *,
    offsets: torch.Tensor | None = None, counts: torch.Tensor | None = None, indices: torch.Tensor | None = None,
    masked_m: torch.Tensor | None = None, k_offsets: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Check the values of group tensors against the operands they go with. Waits for the device: a debugging aid.

    Pass what the call gets: one of offsets, counts, indices (grouped_gemm), masked_m (masked_gemm) or k_offsets
    (k_grouped_gemm, with quantised operands). Raises ValueError that names the first wrong entry.
    FP8_GEMM_VALIDATE=1 checks every call.
    """
    shape_a, shape_b = (x.shape if isinstance(x, torch.Tensor) else x.data.shape for x in (a, b))
    ends = None
    if masked_m is not None:
        problem = Problem("masked", shape_a[1], shape_b[1], shape_a[2], shape_b[0])
        check_group_tensor("masked_m", masked_m, problem.groups)
    elif k_offsets is not None:
        problem = Problem("k_grouped", shape_a[0], shape_b[0], shape_a[1], k_offsets.shape[0] - 1, "1x128", "1x128")
        offsets = k_offsets
    else:
        problem = Problem("contiguous", shape_a[0], shape_b[1], shape_a[1], shape_b[0])
        on_host = [None if tensor is None else tensor.cpu() for tensor in (offsets, counts, indices)]
        offsets, ends = row_groups(problem.groups, problem.m, **dict(zip(("offsets", "counts", "indices"), on_host)))
        check_group_tensor("offsets", offsets, problem.groups + 1)
    check_group_values(problem, offsets, ends, masked_m)
