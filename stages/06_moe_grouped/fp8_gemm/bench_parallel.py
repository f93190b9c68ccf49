"""How much faster several ranks are than one, and what travels between them: tensor-parallel Linears, expert-parallel Experts.

    python -m torch.distributed.run --nproc-per-node 2 -m fp8_gemm.bench_parallel --record results/parallel.json

On GPUs through NCCL at the sizes of a large model, on CPUs through gloo at small ones. Every case is first computed on one rank
alone, with all of its weights and tokens; results are compared, then both are timed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

# NVLink's in-switch reductions need multicast memory, which virtual machines and partitioned hosts often lack.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fp8_gemm.nn import Experts, Linear, Permutation  # noqa: E402
from fp8_gemm.parallel import ColumnParallelLinear, ExpertParallelExperts, RowParallelLinear  # noqa: E402
from hopperlab import report  # noqa: E402
from hopperlab.reference import calc_diff  # noqa: E402

LARGEST_DIFFERENCE = 1e-4  # calc_diff of results that round alike but add in another order; FP8 itself costs 7e-4


@dataclass(frozen=True)
class Sizes:
    """Of what is measured. gate_up is (experts, 2 · intermediate, hidden): 4096 x 7168 on GPUs."""

    tokens: int = 4096
    hidden: int = 7168
    features: int = 16384
    experts: int = 32
    intermediate: int = 2048
    top_k: int = 8
    chunks: int = 2
    rounds: int = 20


SMALL = Sizes(tokens=64, hidden=256, features=512, experts=4, intermediate=128, top_k=2, chunks=2, rounds=2)


@dataclass(frozen=True)
class Case:
    """One layer on one rank and on all of them."""

    name: str
    alone: Callable[[], torch.Tensor]  # all tokens, all weights
    together: Callable[[], torch.Tensor]  # this rank's part
    expected: Callable[[torch.Tensor], torch.Tensor]  # this rank's part of what alone gives
    exchange: Callable[[], object]  # the collectives alone, of the same sizes
    bytes_moved: dict[str, int]  # what this rank sends, by collective


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fp8_gemm.bench_parallel", description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, default=Path("results/parallel.json"), help="where rank 0 writes the record")
    parser.add_argument("--small", action="store_true", help="small sizes on GPUs too")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("it needs several processes: python -m torch.distributed.run --nproc-per-node 2 -m fp8_gemm.bench_parallel")
    started_here = not dist.is_initialized()
    on_gpu = torch.cuda.is_available() if started_here else dist.get_backend() == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if started_here:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    sizes = SMALL if options.small or not on_gpu else Sizes()
    try:
        rows = [measure(case, device, sizes) for case in cases(sizes, device)]
        if dist.get_rank() == 0:
            record = report.environment() | {"ranks": dist.get_world_size(), "collectives": dist.get_backend(),
                                             "sizes": asdict(sizes), "layers": rows}  # fmt: skip
            print(table(rows))
            print(report.save(record, options.record))
    finally:
        if started_here:
            dist.destroy_process_group()


def cases(sizes: Sizes, device: torch.device):
    """The layers one after another, so that only one's weights are in memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(sizes.tokens, sizes.hidden, generator=generator, device=device).to(dtype)

    torch.manual_seed(1)
    whole = Linear(sizes.hidden, sizes.features, bias=False, device=device, dtype=dtype)
    column = ColumnParallelLinear.from_linear(whole)
    yield Case("column-parallel Linear", lambda: whole(x), lambda: column(x), lambda y: y.chunk(ranks, dim=-1)[rank],
               lambda: None, {})  # fmt: skip

    torch.manual_seed(2)
    whole_row = Linear(sizes.features, sizes.hidden, bias=False, device=device, dtype=dtype)
    row = RowParallelLinear.from_linear(whole_row)
    middle = torch.randn(sizes.tokens, sizes.features, generator=generator, device=device).to(dtype)
    mine = middle.chunk(ranks, dim=-1)[rank].contiguous()
    partial = torch.zeros(sizes.tokens, sizes.hidden, device=device, dtype=dtype)
    # A ring sends each element twice, but for one share of each direction.
    ring = 2 * (ranks - 1) * partial.numel() * partial.element_size() // ranks
    yield Case("row-parallel Linear", lambda: whole_row(middle), lambda: row(mine), lambda y: y,
               lambda: dist.all_reduce(partial), {"all_reduce": ring})  # fmt: skip
    del whole, column, whole_row, row, middle, mine, partial

    torch.manual_seed(3)
    moe = Experts(sizes.experts, sizes.hidden, sizes.intermediate, top_k=sizes.top_k, device=device, dtype=dtype)
    for routing, ids in routings(sizes, device, generator).items():
        weights = torch.full(ids.shape, 1 / sizes.top_k, device=device)
        parts = [tensor.tensor_split(ranks)[rank] for tensor in (x, ids, weights)]
        for chunks in dict.fromkeys((1, sizes.chunks)):
            layer = ExpertParallelExperts.from_experts(moe, chunks=chunks)
            exchange, moved = _expert_traffic(layer, *parts[:2], device)
            yield Case(f"expert-parallel Experts, {routing}, {chunks} {'chunk' if chunks == 1 else 'chunks'}",
                       lambda: moe(x, ids, weights), lambda: layer(*parts), lambda y: y.tensor_split(ranks)[rank],
                       exchange, moved)  # fmt: skip


def routings(sizes: Sizes, device, generator) -> dict[str, torch.Tensor]:
    """Experts of each token (tokens, k): as even as can be, and with popularities that fall like 1 / rank, without repeats."""
    tokens, experts, k = sizes.tokens, sizes.experts, sizes.top_k
    even = (torch.arange(tokens * k, device=device) % experts).view(tokens, k)
    noise = -torch.empty(tokens, experts, device=device).exponential_(generator=generator).log()  # Gumbel
    popularity = -torch.arange(1, experts + 1, device=device).float().log()
    return {"even routing": even, "skewed routing": (noise + popularity).topk(k).indices}


def _expert_traffic(layer, x, ids, device) -> tuple[Callable[[], None], dict[str, int]]:
    """The three exchanges of a call without its GEMMs, and what this rank sends to others in each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = Permutation(ids, layer.experts).counts.view(ranks, layer.held)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    to, of = sent.sum(1).tolist(), received.sum(1).tolist()
    width = layer.hidden + 4 * -(-layer.hidden // 128)
    packed = [torch.zeros(sum(n), width, dtype=torch.uint8, device=device) for n in (to, of)]
    results = [torch.zeros(sum(n), layer.hidden, dtype=x.dtype, device=device) for n in (to, of)]

    def exchange():
        dist.all_to_all_single(received, sent)
        dist.all_to_all_single(packed[1], packed[0], of, to)
        dist.all_to_all_single(results[0], results[1], to, of)

    others_to, others_of = sum(to) - to[rank], sum(of) - of[rank]
    return exchange, {"dispatch": others_to * width, "dispatch_in_bf16": others_to * 2 * layer.hidden,
                      "combine": others_of * layer.hidden * x.element_size()}  # fmt: skip


def measure(case: Case, device: torch.device, sizes: Sizes) -> dict:
    """One line of the record: compared, then timed. Raises RuntimeError where results differ."""
    with torch.no_grad():
        got, want = case.together(), case.expected(case.alone())
        difference = calc_diff(got.float(), want.float()) if want.numel() else 0.0
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{case.name}: rank {dist.get_rank()} differs from one rank alone by {difference:.2g}, more than "
                               f"{LARGEST_DIFFERENCE:g}: nothing was timed")  # fmt: skip
        alone, together, exchange = (seconds(call, device, sizes.rounds) for call in (case.alone, case.together, case.exchange))
    moved = {name: _over_ranks(count, device, dist.ReduceOp.SUM) for name, count in case.bytes_moved.items()}
    return {
        "name": case.name, "seconds_one_rank": alone, "seconds": together, "speedup": alone / together,
        "communication_seconds": exchange, "bytes_moved": {name: int(count) for name, count in moved.items()},
        "calc_diff": _over_ranks(difference, device, dist.ReduceOp.MAX),
        "bit_equal": _over_ranks(float(torch.equal(got, want)), device, dist.ReduceOp.MIN) == 1,
    }  # fmt: skip


def seconds(call: Callable, device: torch.device, rounds: int) -> float:
    """Median over rounds of the slowest rank's time, all ranks starting together."""
    times = []
    for i in range(rounds + 1):
        _wait(device)
        dist.barrier()
        start = time.perf_counter()
        call()
        _wait(device)
        elapsed = _over_ranks(time.perf_counter() - start, device, dist.ReduceOp.MAX)
        if i:  # the first warms up
            times.append(elapsed)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _over_ranks(value: float, device: torch.device, how) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, how)
    return tensor.item()


def table(rows: list[dict]) -> str:
    """The record's layers as text. "moving": the collectives run alone, as a share of the layer's time; overlap hides some."""
    lines = [f"{'layer':<58}{'1 rank ms':>10}{'all ms':>9}{'faster':>8}{'moving':>8}{'MB sent':>9}  bits"]
    for row in rows:
        sent = sum(count for name, count in row["bytes_moved"].items() if name != "dispatch_in_bf16") / 1e6
        bits = "equal" if row["bit_equal"] else f"within {row['calc_diff']:.0e}"
        lines.append(f"{row['name']:<58}{row['seconds_one_rank'] * 1e3:>10.3f}{row['seconds'] * 1e3:>9.3f}{row['speedup']:>7.2f}x"
                     f"{row['communication_seconds'] / row['seconds']:>8.0%}{sent:>9.2f}  {bits}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
