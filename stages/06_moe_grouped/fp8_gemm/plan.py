"""How a problem is cut: tile, pipeline stages, swap, split-K. A cost model that can be read, printed and overridden."""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

from fp8_gemm.problem import LARGEST_SIZE, Problem

BLOCK_K = 128
SHARED_BYTES = 227 * 1024  # of one CTA on Hopper
MAX_STAGES = 9  # of 25 shapes more made one 1.4 % faster, and others up to 4 % slower
# Where weights are read once, more bytes of them on their way than this make HBM slower, by up to 5 %: in one wave of tiles, and in more.
BYTES_ON_THEIR_WAY, BYTES_ON_THEIR_WAY_IN_WAVES = 11.2e6, 15.2e6
PANEL_ROWS = 16  # rows of D that one warp stages for TMA
# Accumulators a consumer thread can hold beside everything else: 232 registers less about 40.
MAX_ACCUMULATORS = 192
# The same where two CTAs of one consumer share an SM: 192 registers less about 40; and a half of the SM's 228 KB, less 1 KB each. (Two of
# two consumers, with 104 registers and tiles of 128 x 64, were slower than one of them.)
MAX_ACCUMULATORS_OF_TWO, SHARED_BYTES_OF_TWO = 152, 113 * 1024

# The machine, for predictions: rates and costs, fitted to 4700 measurements on H200s (docs/notes/performance.md).
CLOCK_HZ = 1.92e9  # in products of a few µs; those of a ms run at 1.5 to 1.7 GHz
MACS_PER_CYCLE = 4096  # of one SM's tensor cores, FP8
L2_BYTES_PER_CYCLE = 61.8  # into one SM
READ_BYTES_PER_S = 4.35e12  # from HBM, all SMs together
SMS_FOR_FULL_RATE = 0.33  # of all: with fewer SMs at work than this, HBM's rate is theirs, each its share
# Clusters must lie in one GPC, of 16 or 18 SMs, so that those of 3 or 6 CTAs leave places free: (CTAs of a cluster, CTAs on an SM) to the
# share of the places that they can fill.
PLACES = {(3, 1): 0.87, (3, 2): 0.82, (6, 1): 0.79, (6, 2): 0.79}
# From a slot of the ring being given back to its being full again: the way to HBM and back, the slot's bytes, and something for each of
# its rows outside of the operand: TMA fills those with zeros more slowly than it copies others.
LATENCY_CYCLES, FILL_BYTES_PER_CYCLE, ROW_OUTSIDE_CYCLES = 2090, 32, 30
# Promotion, in shares of the products' time on top of it, where each output has a factor of its own, which is read and multiplied. With a
# factor for a row it is hidden: other warps multiply meanwhile.
VECTOR_FACTORS = 1.08
# Before a CTA's first product and after its last block: the start, the last wgmma and promotion; D's bytes, through shared memory; each panel of
# columns that a warp stores on its own; more for each output where threads store. And between two of its tiles, where the first one's outputs
# are stored under the second one's wgmma.
EPILOGUE_CYCLES, STORE_BYTES_PER_CYCLE, PANEL_CYCLES, SCATTERED_STORE_CYCLES = 2820, 20.7, 281, 0.315
BETWEEN_CYCLES = 775
# Two CTAs that share rows of A, in tiles of two rounds: less comes from L2, which is power, and clocks where the GPU is at its power limit;
# but each waits for the other. A share of the products' time, and seconds of a call. Narrower tiles gain too little to predict.
MULTICAST_SAVES, MULTICAST_S = 0.03, 1.5e-6
# K split: for handing over; for each output of each part that is sent and added.
HAND_OVER_CYCLES, SUM_CYCLES = 125, 0.328
# Tiles on their side come after all upright ones, and read the weights again: from HBM where those are more than this, two thirds of L2's 60 MB.
STAYS_BYTES = 40 << 20


class Plan(NamedTuple):
    """One way to run one problem. block_x and block_y are the tile on wgmma's 64-row side and on its column side: block_m and
    block_n, or, where A and B are swapped, block_n and block_m. (A tuple: many are made to find one, while a call waits.)"""

    swap_ab: bool
    consumers: int  # warpgroups that multiply
    rounds: int  # 64-row pieces that each works on in turn
    block_y: int
    num_stages: int
    splits: int
    multicast: int  # CTAs of a cluster, with tiles side by side, that share their rows of A
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
    def at_once(self) -> int:
        """CTAs that run at the same time."""
        places = int(self.num_sms * self.ctas_per_sm * PLACES.get((self.splits, self.ctas_per_sm), 1))
        return max(1, places // self.multicast * self.multicast)

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.at_once)

    def ctas(self, problem: Problem) -> int:
        """CTAs of the launch: no more than fit on the SMs at once, but where K is split a cluster for every tile."""
        most = self.tiles_at_most(problem)
        return most if self.splits > 1 else min(most, self.at_once)

    def tiles_at_most(self, problem: Problem) -> int:
        """Tiles that a call can have, whatever the sizes of its groups: no more CTAs than that are of use."""
        x, y = (problem.n, problem.m) if self.swap_ab else (problem.m, problem.n)
        more = problem.groups if problem.kind == "contiguous" else 0  # each group may begin a tile of its own
        x_tiles, y_tiles = -(-x // self.block_x) + (0 if self.swap_ab else more), -(-y // self.block_y) + (more if self.swap_ab else 0)
        y_tiles = -(-y_tiles // self.multicast) * self.multicast
        return max(1, x_tiles * y_tiles * self.splits * (problem.groups if problem.kind in ("masked", "k_grouped") else 1))

    def __str__(self):
        cut = f"tiles of {self.block_m} x {self.block_n}" + (", A and B swapped" if self.swap_ab else "")
        split = f", K in {self.splits} parts" if self.splits > 1 else ", rows of A shared by two" if self.multicast > 1 else ""
        pair = ", two CTAs on an SM" if self.ctas_per_sm > 1 else ""
        return (f"{cut}{split}{pair}, {self.num_stages} pipeline stages, {self.tiles} tiles in {self.waves} wave{'s' * (self.waves != 1)} "
                f"on {self.num_sms} SMs; predicted {self.seconds * 1e6:.1f} µs")  # fmt: skip


def vector_scales(problem: Problem, swap_ab: bool) -> bool:
    """Whether every row of the operand on wgmma's column side has its own scale."""
    return (problem.recipe_a if swap_ab else problem.recipe_b) in ("row", "1x128")


def shared_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of ``struct Shared`` in kernels/gemm.cu."""
    operands, other, fixed = _shared_parts(plan, problem)
    return -(-(max(plan.num_stages * operands, _parts_bytes(plan, problem)) + plan.num_stages * other + fixed) // 1024) * 1024


def piece(plan: Plan, problem: Problem) -> int:
    """Columns of a tile that one CTA of a cluster adds up and stores where K is split, else all: ``PieceY`` in kernels/gemm.cu."""
    unit = 16 if stores_by_tma(plan, problem) else 8
    return -(-plan.block_y // (unit * plan.splits)) * unit


def _parts_bytes(plan: Plan, problem: Problem) -> int:
    """Of the sums that a CTA gets from the others of its cluster. They arrive where operands lay."""
    return 4 * (plan.splits - 1) * plan.block_x * piece(plan, problem)


def _shared_parts(plan: Plan, problem: Problem) -> tuple[int, int, int]:
    """Bytes of one slot's operands, of all else for one slot, and of all that is there once."""
    scales_y = plan.block_y if vector_scales(problem, plan.swap_ab) else -(-_scale_blocks(plan.block_y) // 4) * 4
    fixed = 4 * plan.consumers * PANEL_ROWS * panel_bytes(plan, problem) + 8 * plan.consumers + 8
    return (plan.block_x + plan.block_y) * BLOCK_K, 4 * (plan.block_x + scales_y) + 16, fixed


def _scale_blocks(block_y: int) -> int:
    chunk = min(block_y & -block_y, 128)
    return (128 - chunk + block_y - 1) // 128 + 1


def stores_by_tma(plan: Plan, problem: Problem) -> bool:
    """TMA writes whole rows of 16 bytes; accumulation only in FP32, in which it adds; swapped tiles are stored by the threads."""
    size = problem.out_dtype.itemsize
    return (not plan.swap_ab and plan.block_y % 16 == 0 and problem.n * size % 16 == 0
            and (not problem.accumulate or size == 4))  # fmt: skip


# Tiles on their side cost 1 to 2 % in all others (two rounds whose operands move). They spare a fourth of a tile's rows for each group on
# average: worth it for groups of this many rows and fewer. Dense problems spare half a tile or nothing, which is known.
MOST_ROWS_TURNED, MOST_DENSE_ROWS_TURNED = 2048, 8192


def turns(plan: Plan, problem: Problem) -> bool:
    """Whether the last rows, where half of a tile's rows hold them, are multiplied by tiles on their side: ``Turns`` in kernels/gemm.cu."""
    if (plan.rounds < 2 or plan.block_y != 64 * plan.consumers or plan.swap_ab or vector_scales(problem, plan.swap_ab)
            or problem.interval is None or plan.splits > 1):  # fmt: skip
        return False
    if problem.kind == "dense":
        return problem.m <= MOST_DENSE_ROWS_TURNED and 0 < problem.m % plan.block_x <= plan.block_x // 2
    return problem.kind != "k_grouped" and _tokens(problem) <= MOST_ROWS_TURNED


def panel_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of a row of D staged together: the widest swizzle span that divides what a CTA stores of the tile's row."""
    if not stores_by_tma(plan, problem):
        return 16
    row = math.gcd(plan.block_y, piece(plan, problem)) * problem.out_dtype.itemsize
    return next(span for span in (128, 64, 32) if row % span == 0)


def _tokens(problem: Problem) -> float:
    """Rows of A that one tile can be filled from. Sizes of groups are on the device: planned is for equal ones, half full if masked."""
    return {"contiguous": problem.m / problem.groups, "masked": problem.m / 2}.get(problem.kind, problem.m)


def _tiles(problem: Problem, plan: Plan) -> int:
    """Tiles of one call, each split counted; at least one, since an empty call still has a plan."""
    across, down = max(1, -(-problem.n // (plan.multicast * plan.block_n))) * plan.multicast, _tokens(problem) / plan.block_m
    step = 0.5 if turns(plan, problem) else 1  # of a tile's rows; tiles on their side are half as many
    if problem.kind == "contiguous" and problem.groups > 1:  # sizes differ: a group's last step is half full on average
        return math.ceil(problem.groups * max(step, down + step / 2) * across)
    return math.ceil(max(step, math.ceil(down / step) * step) * across) * problem.groups * plan.splits


def _together(*times: float) -> float:
    """The time of things that go on at the same time: the longest, and more where others take nearly as long (the norm of order 3)."""
    return sum([time**3 for time in times]) ** (1 / 3)


def _predict(problem: Problem, plan: Plan) -> float:
    """Seconds: waves of tiles on the SMs, beside all bytes from memory; then what only begins when a tile's products are complete."""
    block_x, block_y, tokens = plan.block_x, plan.block_y, _tokens(problem)
    groups = problem.groups
    k = problem.k // groups if problem.kind == "k_grouped" else problem.k
    k_blocks = -(-max(1, -(-k // BLOCK_K)) // plan.splits)

    # A block of k: its products, while its bytes come from L2 and while the slots given back are filled again.
    multiply = block_x * block_y * BLOCK_K / MACS_PER_CYCLE
    if problem.interval is not None:
        factors = VECTOR_FACTORS if vector_scales(problem, plan.swap_ab) else 0
        multiply *= 1 + factors * BLOCK_K / problem.interval
    slot = (block_x + block_y) * BLOCK_K
    rows, block = (tokens, block_y) if plan.swap_ab else (tokens, block_x)
    pieces = max(1, math.ceil(rows / block))
    moves_up = problem.kind == "dense" and not problem.accumulate and not plan.swap_ab and pieces > 1  # the last tile, onto rows of its own
    outside = block - rows / pieces if problem.kind in ("dense", "k_grouped") and not moves_up else 0
    refill = (LATENCY_CYCLES + slot / FILL_BYTES_PER_CYCLE + ROW_OUTSIDE_CYCLES * outside) / plan.num_stages

    alone = plan.rounds * 64 * block_y * BLOCK_K / MACS_PER_CYCLE  # a warpgroup's own pieces, one after another

    def products(ctas: int) -> float:
        """Cycles until the CTAs that share an SM have each multiplied their tile: latencies overlap, the SM's work adds up."""
        return k_blocks * _together(ctas * multiply, ctas * slot / L2_BYTES_PER_CYCLE, refill, alone)

    outputs, size = block_x * piece(plan, problem), problem.out_dtype.itemsize  # that one CTA stores
    tail = EPILOGUE_CYCLES + outputs * size * (2 if problem.accumulate else 1) / STORE_BYTES_PER_CYCLE
    panels = piece(plan, problem) * size / panel_bytes(plan, problem) if stores_by_tma(plan, problem) else 0
    store = PANEL_CYCLES * panels if panels else SCATTERED_STORE_CYCLES * outputs
    tail += store + (plan.splits - 1) * SUM_CYCLES * outputs + (HAND_OVER_CYCLES if plan.splits > 1 else 0)

    full_waves = plan.waves - 1
    in_last_wave = plan.tiles - full_waves * plan.at_once
    # A tile is stored while the next is multiplied, if its sums are promoted.
    between = BETWEEN_CYCLES + store if problem.interval is not None and plan.splits == 1 else tail
    # CTAs are spread over SMs before two share one; but those of a cluster of 3 or 6 share (64 x 2112 x 7168, 99 CTAs: 0.5 µs more).
    on_an_sm = plan.ctas_per_sm if plan.splits % 3 == 0 else -(-in_last_wave // plan.num_sms)
    cycles = full_waves * (products(plan.ctas_per_sm) + between) + products(on_an_sm)

    sharing = plan.multicast > 1 and plan.rounds == 2
    if sharing:
        cycles *= 1 - MULTICAST_SAVES

    all_tokens = groups * tokens if problem.kind in ("contiguous", "masked") else problem.m
    weights = groups if problem.kind in ("contiguous", "masked") else 1
    all_outputs = all_tokens * problem.n * (groups if problem.kind == "k_grouped" else 1)
    moved = (all_tokens + weights * problem.n) * problem.k + all_outputs * size * (2 if problem.accumulate else 1)
    upright = problem.kind == "dense" and problem.m > plan.block_x // 2  # some tiles are. (Groups' weights were not seen to be read again.)
    if upright and turns(plan, problem) and problem.n * problem.k > STAYS_BYTES:
        moved += problem.n * problem.k
    drawing = min(1.0, plan.tiles / plan.num_sms / SMS_FOR_FULL_RATE)
    return (MULTICAST_S if sharing else 0) + _together(cycles / CLOCK_HZ, moved / READ_BYTES_PER_S / drawing) + tail / CLOCK_HZ


def _accumulators(problem: Problem, plan: Plan) -> int:
    """Registers of a consumer thread that hold sums."""
    return plan.rounds * plan.block_y // 2 + (plan.block_y // 2 if problem.interval is not None else 0)


def _pairs(problem: Problem, plan: Plan) -> bool:
    """Whether two CTAs of the plan find registers on an SM."""
    factors = plan.block_y // 2 if vector_scales(problem, plan.swap_ab) else 0
    return plan.block_x == 64 and _accumulators(problem, plan) + factors <= MAX_ACCUMULATORS_OF_TWO


def _useful_stages(plan: Plan) -> int:
    """Slots of the ring that make the plan faster; at least two."""
    if plan.splits == 1 and not plan.swap_ab:
        return MAX_STAGES
    weights = min(plan.tiles, plan.at_once) * plan.block_n * BLOCK_K  # bytes in one slot of all CTAs
    return max(2, int((BYTES_ON_THEIR_WAY if plan.waves == 1 else BYTES_ON_THEIR_WAY_IN_WAVES) / weights))


def _finish(problem: Problem, plan: Plan, num_stages: int | None = None, pairs: bool = True) -> Plan | None:
    """The plan with its stages, tiles and time filled in; None if it does not fit the hardware. pairs: two CTAs may share an SM."""
    if _accumulators(problem, plan) > MAX_ACCUMULATORS or plan.block_y % 8 or not 8 <= plan.block_y <= 256:
        return None
    if plan.rounds == 2 and problem.interval is not None and problem.interval > BLOCK_K:
        return None  # the rounds share one accumulator, which must be emptied after every block
    if plan.group * -(-(problem.m if plan.swap_ab else problem.n) // plan.block_y) > LARGEST_SIZE:
        return None  # the kernel counts their tiles in an int
    if plan.ctas_per_sm == 2 and not (pairs and _pairs(problem, plan)):
        return None
    operands, other, fixed = _shared_parts(plan, problem)
    room = (SHARED_BYTES, SHARED_BYTES_OF_TWO)[plan.ctas_per_sm - 1] - fixed
    most = min(MAX_STAGES, room // (operands + other), (room - _parts_bytes(plan, problem)) // other)
    if not 2 <= (num_stages or most) <= most:
        return None
    sized = plan._replace(tiles=_tiles(problem, plan))
    sized = sized._replace(num_stages=num_stages or min(most, _useful_stages(sized)))
    return sized._replace(seconds=_predict(problem, sized))


def bucket(size: int) -> int:
    """A number of tokens rounded up to the largest that shares its plan: a multiple of 8; beyond 128 of an eighth of its power of
    two, but of 128 at most, so that the number of tiles, and how full the last wave is, stay what they are; beyond 8192 of a 64th."""
    power = (size - 1).bit_length()
    step = 1 << max(3, min(power - 4, 7), power - 6)
    return -(-size // step) * step


def with_tokens(problem: Problem, tokens: int) -> Problem:
    """The problem with another size along the dimension of tokens: M, but K for k_grouped problems, whose M and N are weights'."""
    if problem.kind == "k_grouped":
        return replace(problem, k=min(tokens, LARGEST_SIZE))
    return replace(problem, m=min(tokens, LARGEST_SIZE // (problem.groups if problem.kind == "masked" else 1)))


def bucketed(problem: Problem) -> Problem:
    """The problem that plans are chosen for: with its tokens rounded up."""
    return with_tokens(problem, bucket(problem.k if problem.kind == "k_grouped" else problem.m))


MOST_TOKENS, MOST_OF_A_GROUP = 65536, 2304  # the larger counts; more lead to no other plan, which a test asserts


def every_size(problem: Problem) -> list[Problem]:
    """One problem for each bucket of tokens: their plans are all that problems of this N and K follow."""
    most = max(MOST_TOKENS, MOST_OF_A_GROUP * problem.groups) if problem.kind == "contiguous" else MOST_TOKENS
    sizes, tokens = [], 0
    while tokens < most:
        tokens = bucket(tokens + 1)
        sizes.append(with_tokens(problem, tokens))
    return sizes


OVERRIDES = ("block_m", "block_n", "num_stages", "swap_ab", "split_k", "multicast", "ctas_per_sm", "num_sms", "group_m", "batch_invariant")


def check_overrides(overrides: dict) -> None:
    """Check names and types of options of :func:`plan`. Raises TypeError or ValueError."""
    for name, value in overrides.items():
        if name not in OVERRIDES:
            hint = " (backend='reference' takes it)" if name == "exact" else ""
            raise ValueError(f"{name} is given, which is no argument and no option of a plan{hint}; options are {', '.join(OVERRIDES)}")
        if name in ("swap_ab", "batch_invariant"):
            if not isinstance(value, bool) and (value is not None or name == "batch_invariant"):
                raise TypeError(f"{name} is {value!r}; it must be True or False")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} is {value!r}; it must be an integer, or None for the plan's own choice")
        elif value is not None and not 1 <= value <= LARGEST_SIZE:
            raise ValueError(f"{name} is {value}; allowed are 1 and more, or None for the plan's own choice")


def plan(problem: Problem, sms: int = 132, **overrides) -> Plan:
    """The plan with the shortest predicted time for the problem's tokens rounded up to their ``bucket``; tiles and time are its own.

    sms              of the GPU; num_sms: use no more than these
    block_m, block_n tile: 64, 128 or 256 on wgmma's row side (M, or N if swapped); on its column side a multiple of 16, or of 8
                     up to 128 if swapped
    num_stages       slots of the ring, 2 to 9: as many as fit and help, unless given
    swap_ab          whether A takes the column side, for few tokens
    split_k          parts that K is cut into; dense problems only
    multicast        2: two CTAs share their rows of A, each loading half of them for both; not swapped, not split. 1: none do
    ctas_per_sm      2: two CTAs, with half of its shared memory each, run on an SM at the same time; tiles of 64 only. 1: one
    group_m          rows of tiles that are worked on together
    batch_invariant  the plan depends on neither M nor the number of tokens, and K is never split: a row's bits do not depend
                     on the rows it is computed with. Costs speed where M is small

    Raises ValueError when no plan has the overrides given, or for another override, and TypeError for one of another type.
    """
    check_overrides(overrides)
    return _planned(problem, sms, **overrides)


@functools.lru_cache(maxsize=65536)
def _planned(problem: Problem, sms: int = 132, *, block_m: int | None = None, block_n: int | None = None, num_stages: int | None = None,
             swap_ab: bool | None = None, split_k: int | None = None, multicast: int | None = None,
             ctas_per_sm: int | None = None, num_sms: int | None = None, group_m: int | None = None,
             batch_invariant: bool = False) -> Plan:  # fmt: skip
    usable = num_sms or sms
    if not 1 <= usable <= sms:
        raise ValueError(f"num_sms is {num_sms}; this GPU has {sms}: allowed are 1 to {sms}")
    best = _best(bucketed(problem), usable, usable == sms, batch_invariant, swap_ab, block_m, block_n, split_k, num_stages, group_m, multicast,
                 ctas_per_sm)  # fmt: skip
    if best is None:
        given = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages, "swap_ab": swap_ab, "split_k": split_k,
                 "multicast": multicast, "ctas_per_sm": ctas_per_sm, "num_sms": num_sms, "group_m": group_m,
                 "batch_invariant": batch_invariant or None}  # fmt: skip
        asked = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(f"no plan for {problem.kind} {problem.m} x {problem.n} x {problem.k} has {asked or 'what is asked'}. Allowed: "
                         "block_m 64, 128 or 256 and block_n a multiple of 16 up to 128 (192 beside 128 or 64; 256 where nothing is "
                         "promoted), or, swapped, block_n 64, 128 or 256 and block_m a multiple of 8 up to 128; split_k 1 to 8, dense "
                         "problems only, no more than K / 128; multicast 1 or 2, and 2 only where A and B are not swapped, K is not "
                         "split and there are two SMs; ctas_per_sm 1, or 2 for tiles of 64 on wgmma's row side where no num_sms is "
                         "given; num_stages 2 to 9, while they fit into 227 KB, or 113 KB where two CTAs share an SM (not with "
                         "ctas_per_sm=1); batch_invariant has one tile, 128 x 128; group_m with all columns fewer than 2^31 tiles. "
                         "Leave one of them out")  # fmt: skip
    return _finish(problem, best, best.num_stages, pairs=usable == sms)


@functools.lru_cache(maxsize=65536)
def _best(problem: Problem, sms: int, pairs: bool, batch_invariant: bool, swap_ab: bool | None, block_m: int | None,
          block_n: int | None, split_k: int | None, num_stages: int | None, group_m: int | None,
          multicast: int | None, ctas_per_sm: int | None) -> Plan | None:  # fmt: skip
    """The fastest candidate that is what was asked for; None if none is. pairs: every SM is used, and may have two CTAs."""
    best = None
    for candidate in _candidates(problem, sms, batch_invariant, split_k, (block_m, block_n), multicast, ctas_per_sm if pairs else 1):
        if swap_ab not in (None, candidate.swap_ab) or split_k not in (None, candidate.splits):
            continue
        if multicast not in (None, candidate.multicast) or ctas_per_sm not in (None, candidate.ctas_per_sm):
            continue
        if block_m not in (None, candidate.block_m) or block_n not in (None, candidate.block_n):
            continue
        # The GPU spreads CTAs over all SMs before it puts two on one: to leave SMs free, no more CTAs than the others, pairs or not.
        finished = _finish(problem, candidate._replace(group=group_m or candidate.group), num_stages, pairs)
        if finished is None or (not pairs and finished.splits > 1 and finished.waves > 1):
            continue
        if best is None or finished.seconds < best.seconds:
            best = finished
    return best


def promising(problem: Problem, sms: int, count: int) -> list[Plan]:
    """The ``count`` plans with the shortest predicted times, best first: what a search on the device should time."""
    finished = (_finish(bucketed(problem), candidate) for candidate in _candidates(bucketed(problem), sms))
    best = sorted((made for made in finished if made is not None), key=lambda made: made.seconds)[:count]
    return [_finish(problem, made) for made in best]


# Rows of tiles worked on together. 132 tiles of 256 x 128 in 8 rows touch 2048 rows of A and about as many of B, the fewest possible:
# 1 % faster than 4 rows at 8192 cubed, where L2 does not hold both operands. B is read again for the next rows: where K is short, L2
# holds twice as many, which is 0.5 to 1 % faster; at K of 7168 and 8192 it is 2 to 3 % slower.
ROWS_TOGETHER, ROWS_TOGETHER_SHORT = 8, 16
SHORT_K = 4096


def short(problem: Problem) -> bool:
    """Whether a tile has so few blocks of K that its beginning and end decide. (K of k_grouped problems is their tokens: unknown.)"""
    return problem.kind != "k_grouped" and problem.k <= SHORT_K


def halves(plan: Plan, problem: Problem) -> bool:
    """Whether outputs are stored in halves, ``Halves`` in kernels/gemm.cu: it spares 250 cycles between two tiles, and costs 8 in each
    block of K."""
    return plan.rounds == 2 and problem.interval is not None and plan.splits == 1 and short(problem)


def _shares(problem: Problem, plan: Plan) -> bool:
    """Whether it may pay that two CTAs share rows of A: in large tiles with a factor for each row, if no CTA is without a tile."""
    large = plan.rounds == 2 or (plan.block_x, plan.block_y) == (128, 160)  # 128 x 128 and 128 x 192 were as fast or slower
    return (large and -(-problem.n // plan.block_y) % 2 == 0 and problem.interval is not None
            and not vector_scales(problem, plan.swap_ab))  # fmt: skip


ROWS = {64: (1, 1), 128: (2, 1), 256: (2, 2)}  # rows of X: (consumers, rounds)
# Columns that are tried: about those that were timed. Others (multiples of 16, or of 8 if swapped) only where they are asked for.
COLUMNS, COLUMNS_SWAPPED = (16, 32, 64, 96, 112, 128, 160, 192, 224, 256), (8, 16, 24, 32, 48, 64, 96, 128)
# Columns of a tile of 64 rows from which on one CTA has more slots than each of two, and makes use of them.
LEAST_COLUMNS_OF_ONE = 48
# Parts of K, likewise. Clusters of 4 and 8 CTAs were never the fastest; they may leave part of a GPC's 16 or 18 SMs unused.
SPLITS, MAX_SPLITS = (2, 3, 6), 8
LEAST_UNITS = 2  # blocks of K, or intervals of promotion, in a part
LARGEST_TILE_OF_SIX = 64 * 64  # clusters of 6 with larger ones were slower than others, and than predicted


def _candidates(problem: Problem, sms: int, batch_invariant: bool = False, split_k: int | None = None, asked: tuple = (),
                multicast: int | None = None, ctas_per_sm: int | None = None):  # fmt: skip
    """Every cut worth a prediction, before hardware limits; asked: sizes of tiles that are tried whether worth it or not."""
    together = ROWS_TOGETHER_SHORT if short(problem) else ROWS_TOGETHER
    if batch_invariant:
        yield Plan(False, 2, 1, 128, 0, 1, 1, together, 1, sms, 0, 0.0)
        return

    def of_use(known, step, rows, least):
        """Sizes of at least ``least`` of which the half would not hold all rows, and those asked for; never none."""
        others = [size for size in asked if size and size not in known and size % step == 0 and size <= known[-1]]
        return [size for size in known if least <= size < 2 * rows or size in asked] + others or known[:1]

    # A tile holds all rows of A, or at least 128: otherwise B is read once more, never the fastest way. Sizes of groups are not known.
    least = min(problem.m, 128) if problem.kind in ("dense", "k_grouped") else 0
    units = -(-problem.k // max(problem.interval or BLOCK_K, BLOCK_K))
    for swapped in (False, True):
        if swapped:
            # Two rounds spare reading B twice. Swapped, B is read once anyway.
            rows = [size for size in of_use((64, 128, 256), 256, problem.n, 0) if size < 256 or size in asked]
            columns = of_use(COLUMNS_SWAPPED, 8, problem.m, least)
        else:
            rows, columns = of_use((64, 128, 256), 256, problem.m, least), of_use(COLUMNS, 16, problem.n, 0)
        for block_x in rows:
            consumers, rounds = ROWS[block_x]
            for block_y in columns:
                if block_y == 112 and block_x == 256 and block_y not in asked:
                    continue  # pays where N is 7168 and K is split, for it cuts N into 64; else one kernel more
                one = Plan(swapped, consumers, rounds, block_y, 0, 1, 1, together, 1, sms, 0, 0.0)
                if _accumulators(problem, one) > MAX_ACCUMULATORS:
                    continue
                cuts = [one]
                if not swapped and sms > 1 and (multicast == 2 or (multicast is None and _shares(problem, one))):
                    cuts.insert(0, one._replace(multicast=2))  # first: where it is predicted to take as long, less is moved
                if problem.kind == "dense":
                    wanted, in_part = (split_k,) if split_k in range(2, MAX_SPLITS + 1) else (), 1
                    if split_k is None and _tiles(problem, one) < sms:  # splitting K only helps where SMs have nothing to do
                        wanted, in_part = SPLITS if block_x * block_y <= LARGEST_TILE_OF_SIX else SPLITS[:-1], LEAST_UNITS
                    cuts += [one._replace(splits=splits) for splits in wanted if splits * in_part <= units]
                pairs = ctas_per_sm != 1 and _pairs(problem, one)
                for cut in cuts:
                    # More parts than run at once: never among the fastest (30 x 16512 x 9600, 258 of them: 9.5 % behind).
                    if cut.splits > 1 and split_k is None and _tiles(problem, cut) > cut._replace(ctas_per_sm=2 if pairs else 1).at_once:
                        continue
                    if pairs:
                        yield cut._replace(ctas_per_sm=2)
                    # One CTA on an SM pays where there are no more, and two would have fewer slots; in clusters of 6 it never did.
                    if not pairs or (block_y >= LEAST_COLUMNS_OF_ONE and cut.splits < 6 and _tiles(problem, cut) <= sms):
                        yield cut
