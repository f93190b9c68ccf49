"""How a problem is cut: tile, pipeline stages, swap, split-K. A cost model that can be read, printed and overridden."""

import functools
from dataclasses import dataclass, replace

from fp8_gemm.problem import Problem

BLOCK_K = 128
SHARED_BYTES = 227 * 1024  # of one CTA on Hopper
MAX_STAGES = 8
PANEL_ROWS, PANELS = 16, 3  # rows of D that one warp stages for TMA at once, and how many such panels it has
# Accumulators a consumer thread can hold beside everything else: 232 registers less about 40.
MAX_ACCUMULATORS = 192
# The same where two CTAs of one consumer share an SM: 192 registers less about 40; and a half of the SM's 228 KB, less 1 KB each.
MAX_ACCUMULATORS_OF_TWO, SHARED_BYTES_OF_TWO = 152, 113 * 1024

# The machine, for predictions. Rates were measured on an H200 (docs/notes/performance.md).
CLOCK_HZ = 1.6e9  # under FP8 load; the nominal 1.98 GHz is not held
MACS_PER_CYCLE = 4096  # of one SM's tensor cores, FP8
READ_BYTES_PER_S = 4.27e12
LAUNCH_S, FILL_CYCLES, EPILOGUE_CYCLES = 2.5e-6, 1500, 1300
SPLIT_S = 1.0e-6  # handing partial sums over and adding them up
# Share of the tensor cores' peak that the multiplication loop reaches, by (rows of X, promoted or not).
EFFICIENCY = {(256, True): 0.87, (128, True): 0.78, (64, True): 0.55, (256, False): 0.88, (128, False): 0.92, (64, False): 0.62}


@dataclass(frozen=True)
class Plan:
    """One way to run one problem. block_x and block_y are the tile on wgmma's 64-row side and on its column side: block_m and
    block_n, or, where A and B are swapped, block_n and block_m."""

    swap_ab: bool
    consumers: int  # warpgroups that multiply
    rounds: int  # 64-row pieces that each works on in turn
    block_y: int
    num_stages: int
    splits: int
    group: int  # rows of tiles worked on together, for L2
    ctas_per_sm: int
    num_sms: int
    tiles: int
    seconds: float  # predicted

    @property
    def block_x(self) -> int:
        return 64 * self.consumers * self.rounds

    @property
    def block_m(self) -> int:
        return self.block_y if self.swap_ab else self.block_x

    @property
    def block_n(self) -> int:
        return self.block_x if self.swap_ab else self.block_y

    @property
    def waves(self) -> int:
        return -(-self.tiles // (self.num_sms * self.ctas_per_sm))

    def ctas(self, problem: Problem) -> int:
        """CTAs of the launch: no more than fit on the SMs at once, but where K is split a cluster for every tile."""
        most = self.tiles_at_most(problem)
        return most if self.splits > 1 else min(most, self.num_sms * self.ctas_per_sm)

    def tiles_at_most(self, problem: Problem) -> int:
        """Tiles that a call can have, whatever the sizes of its groups: no more CTAs than that are of use."""
        x, y = (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)
        more = problem.groups if problem.kind == "contiguous" else 0  # each group may begin a tile of its own
        x_tiles, y_tiles = -(-x // self.block_x) + (0 if self.swap_ab else more), -(-y // self.block_y) + (more if self.swap_ab else 0)
        return max(1, x_tiles * y_tiles * self.splits * (problem.groups if problem.kind in ("masked", "k_grouped") else 1))

    def __str__(self):
        cut = f"tiles of {self.block_m} x {self.block_n}" + (", A and B swapped" if self.swap_ab else "")
        split = f", K in {self.splits} parts" if self.splits > 1 else ""
        return (f"{cut}{split}, {self.num_stages} pipeline stages, {self.tiles} tiles in {self.waves} wave{'s' * (self.waves != 1)} "
                f"on {self.num_sms} SMs; predicted {self.seconds * 1e6:.1f} µs")  # fmt: skip


def vector_scales(problem: Problem, swap_ab: bool) -> bool:
    """Whether every row of the operand on wgmma's column side has its own scale."""
    return (problem.recipe_a if swap_ab else problem.recipe_b) in ("row", "1x128")


def shared_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of ``struct Shared`` in kernels/gemm.cu."""
    slot, fixed = _shared_parts(plan, problem)
    return -(-(plan.num_stages * slot + fixed) // 1024) * 1024


def _shared_parts(plan: Plan, problem: Problem) -> tuple[int, int]:
    """Bytes of one slot of the ring, and of all that is there once."""
    scales_y = plan.block_y if vector_scales(problem, plan.swap_ab) else -(-_scale_blocks(plan.block_y) // 4) * 4
    slot = (plan.block_x + plan.block_y) * BLOCK_K + 4 * (plan.block_x + scales_y) + 16
    parts = 4 * (plan.splits - 1) * plan.block_x * plan.block_y if plan.splits > 1 else 16
    panels = PANELS if stores_by_tma(plan, problem) else 1
    return slot, 4 * plan.consumers * panels * PANEL_ROWS * panel_bytes(plan, problem) + parts + 8 * plan.consumers


def _scale_blocks(block_y: int) -> int:
    chunk = min(block_y & -block_y, 128)
    return (128 - chunk + block_y - 1) // 128 + 1


def stores_by_tma(plan: Plan, problem: Problem) -> bool:
    """TMA writes whole rows of 16 bytes; accumulation only in FP32, in which it adds; swapped tiles are stored by the threads."""
    size = problem.out_dtype.itemsize
    return (not plan.swap_ab and plan.block_y % 16 == 0 and problem.n * size % 16 == 0
            and (not problem.accumulate or size == 4))  # fmt: skip


def panel_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of a row of D staged together: a swizzle span that divides the tile's row."""
    if not stores_by_tma(plan, problem):
        return 16
    return 64 if plan.block_y * problem.out_dtype.itemsize % 64 == 0 else 32


def _tiles(problem: Problem, plan: Plan) -> int:
    """Tiles of one call. Sizes of groups are on the device: groups are assumed to be equal, which the kernel does not need."""
    x, y = (problem.n, problem.m) if plan.swap_ab else (problem.m, problem.n)
    if problem.kind == "contiguous":
        per_group = -(-problem.m // problem.groups)
        x, y = (x, per_group) if plan.swap_ab else (per_group, y)
    groups = problem.groups if problem.kind != "dense" else 1
    return max(1, -(-x // plan.block_x) * -(-y // plan.block_y)) * groups * plan.splits  # at least one: an empty call still has a plan


def _predict(problem: Problem, plan: Plan) -> float:
    """Seconds: waves of tiles at the tensor cores' rate, or all bytes at the memory's, whichever is longer."""
    k = problem.k // problem.groups if problem.kind == "k_grouped" else problem.k
    k_blocks = max(1, -(-k // BLOCK_K))
    macs = plan.block_x * plan.block_y * BLOCK_K * -(-k_blocks // plan.splits)
    promoted = problem.interval is not None
    cycles = macs / MACS_PER_CYCLE / EFFICIENCY[plan.block_x, promoted] + EPILOGUE_CYCLES
    one_after_another = -(-plan.tiles // plan.num_sms)  # CTAs that share an SM share its tensor cores
    multiply = (one_after_another * cycles + FILL_CYCLES) / CLOCK_HZ
    groups = problem.groups if problem.kind in ("contiguous", "masked") else 1
    outputs = problem.m * problem.n * (problem.groups if problem.kind in ("masked", "k_grouped") else 1)
    rows = problem.m * (problem.groups if problem.kind == "masked" else 1)
    moved = rows * problem.k + groups * problem.n * problem.k + outputs * problem.out_dtype.itemsize * (2 if problem.accumulate else 1)
    busy = min(1.0, plan.tiles / plan.num_sms * 1.4)  # about 70 % of the SMs are needed to draw the memory's full rate
    return LAUNCH_S + max(multiply, moved / READ_BYTES_PER_S / busy) + SPLIT_S * (plan.splits > 1)


def _finish(problem: Problem, plan: Plan, num_stages: int | None = None) -> Plan | None:
    """The plan with its stages, tiles and time filled in; None if it does not fit the hardware."""
    accumulators = plan.rounds * plan.block_y // 2 + (plan.block_y // 2 if problem.interval is not None else 0)
    if accumulators > MAX_ACCUMULATORS or plan.block_y % 8 or not 8 <= plan.block_y <= 256:
        return None
    if plan.rounds == 2 and problem.interval is not None and problem.interval > BLOCK_K:
        return None  # the rounds share one accumulator, which must be emptied after every block
    if plan.consumers == 1 and accumulators + (plan.block_y // 2 if vector_scales(problem, plan.swap_ab) else 0) <= MAX_ACCUMULATORS_OF_TWO:
        plan = replace(plan, ctas_per_sm=2)
    slot, fixed = _shared_parts(plan, problem)
    most = min(MAX_STAGES, ((SHARED_BYTES, SHARED_BYTES_OF_TWO)[plan.ctas_per_sm - 1] - fixed) // slot)
    if not 2 <= (num_stages or most) <= most:
        return None
    sized = replace(plan, num_stages=num_stages or most, tiles=_tiles(problem, plan))
    return replace(sized, seconds=_predict(problem, sized))


@functools.lru_cache(maxsize=65536)
def plan(problem: Problem, sms: int = 132, *, block_m: int | None = None, block_n: int | None = None, num_stages: int | None = None,
         swap_ab: bool | None = None, split_k: int | None = None, num_sms: int | None = None, group_m: int | None = None,
         batch_invariant: bool = False) -> Plan:  # fmt: skip
    """The plan with the shortest predicted time.

    sms              of the GPU; num_sms: use no more than these
    block_m, block_n tile: 64, 128 or 256 on wgmma's row side (M, or N if swapped), a multiple of 8 on its column side
    num_stages       slots of the ring, 2 to 8: as many as fit, unless given
    swap_ab          whether A takes the column side, for few tokens
    split_k          parts that K is cut into; dense problems only
    group_m          rows of tiles that are worked on together
    batch_invariant  the plan depends on neither M nor the number of tokens, and K is never split: a row's bits do not depend
                     on the rows it is computed with. Costs speed where M is small

    Raises ValueError when no plan has the overrides given.
    """
    usable = num_sms or sms
    if not 1 <= usable <= sms:
        raise ValueError(f"num_sms is {num_sms}; this GPU has {sms}: allowed are 1 to {sms}")
    best = None
    for candidate in _candidates(problem, usable, batch_invariant, split_k):
        if swap_ab not in (None, candidate.swap_ab) or split_k not in (None, candidate.splits):
            continue
        if block_m not in (None, candidate.block_m) or block_n not in (None, candidate.block_n):
            continue
        finished = _finish(problem, replace(candidate, group=group_m or candidate.group), num_stages)
        if finished is None or (num_sms and finished.splits > 1 and finished.waves > 1):  # of which there are as many as tiles
            continue
        if best is None or finished.seconds < best.seconds:
            best = finished
    if best is None:
        given = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages, "swap_ab": swap_ab, "split_k": split_k}
        asked = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(f"no plan for {problem.kind} {problem.m} x {problem.n} x {problem.k} has {asked or 'what is asked'}. Allowed: "
                         "one side of the tile 64, 128 or 256, the other a multiple of 8 up to 128 (192 beside 128 or 64; 256 where "
                         "nothing is promoted); split_k 1 to 8, dense problems only, no more than K / 128; num_stages 2 to 8, while they "
                         "fit into 227 KB. Leave one of them out")  # fmt: skip
    return best


def promising(problem: Problem, sms: int, count: int) -> list[Plan]:
    """The ``count`` plans with the shortest predicted times, best first: what a search on the device should time."""
    finished = (_finish(problem, candidate) for candidate in _candidates(problem, sms, False, None))
    return sorted((made for made in finished if made is not None), key=lambda made: made.seconds)[:count]


ROWS = ((1, 1), (2, 1), (2, 2))  # (consumers, rounds): 64, 128 and 256 rows of X
COLUMNS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
COLUMNS_SWAPPED = (8, 16, 24, 32, 48, 64, 96, 128)
SPLITS, MAX_SPLITS = (2, 3, 4, 5, 6, 8), 8


def _candidates(problem: Problem, sms: int, batch_invariant: bool, split_k: int | None):
    """Every cut the kernel can make, before hardware limits."""
    if batch_invariant:
        yield Plan(False, 2, 1, 128, 0, 1, 8, 1, sms, 0, 0.0)
        return
    units = -(-problem.k // max(problem.interval or BLOCK_K, BLOCK_K))
    for swapped in (False, True):
        for consumers, rounds in ROWS:
            for block_y in COLUMNS_SWAPPED if swapped else COLUMNS:
                one = Plan(swapped, consumers, rounds, block_y, 0, 1, 8 // rounds, 1, sms, 0, 0.0)
                yield one
                if problem.kind == "dense":
                    wanted = (split_k,) if split_k in range(2, MAX_SPLITS + 1) else ()
                    if split_k is None and _tiles(problem, one) < sms:  # splitting K only helps where SMs have nothing to do
                        wanted = SPLITS
                    yield from (replace(one, splits=splits) for splits in wanted if splits <= units)
