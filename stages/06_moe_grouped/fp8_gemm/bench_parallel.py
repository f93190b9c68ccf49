"""How much faster several ranks are than one, and what travels between them: tensor-parallel Linears, expert-parallel Experts.

    python -m torch.distributed.run --nproc-per-node 2 -m fp8_gemm.bench_parallel --record results/parallel.json
    … --tokens 256        fewer tokens, as in decoding
    … --failure           at the end, also let the last rank fail and record what the first one saw of it

On GPUs through NCCL at the sizes of a large model, on CPUs through gloo at small ones. Every case is first computed on one rank
alone, with all of its weights and tokens; results are compared row by row, then both are timed.
"""

import argparse
import contextlib
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# NVLink's in-switch reductions need multicast memory, which virtual machines and partitioned hosts often lack.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fp8_gemm.monitor import worst_row_error  # noqa: E402
from fp8_gemm.nn import Experts, Linear, Permutation  # noqa: E402
from fp8_gemm.parallel import ColumnParallelLinear, ExpertParallelExperts, RowParallelLinear  # noqa: E402
from hopperlab import report, telemetry  # noqa: E402

# Of one row, |y - alone| / |alone|. Sums of partial products that travel in bfloat16 are off by about 0.003; FP8 costs 0.04, and
# one wrong tile of 128 features in 16384 is 0.1.
LARGEST_DIFFERENCE = 0.01
TIMEOUT = datetime.timedelta(seconds=120)  # of a collective: more than any compilation before it takes
FAILURE_TIMEOUT = datetime.timedelta(seconds=5)


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
    parser.add_argument("--tokens", type=int, help="of all ranks together")
    parser.add_argument("--failure", action="store_true", help="at the end let the last rank fail: does the first raise in time?")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("it needs several processes: python -m torch.distributed.run --nproc-per-node 2 -m fp8_gemm.bench_parallel")
    started_here = not dist.is_initialized()
    on_gpu = torch.cuda.is_available() if started_here else dist.get_backend() == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu and device.index >= torch.cuda.device_count():
        parser.error(f"rank {device.index} of this host has no GPU: NCCL needs one for each rank, and {torch.cuda.device_count()} are visible. "
                     "Start as many processes as there are GPUs, or set CUDA_VISIBLE_DEVICES= to run over gloo on CPUs")  # fmt: skip
    if on_gpu:
        torch.cuda.set_device(device)
    if started_here:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, timeout=TIMEOUT)
    sizes = SMALL if options.small or not on_gpu else Sizes()
    sizes = replace(sizes, tokens=options.tokens) if options.tokens else sizes
    with telemetry.Recorder(device.index) if on_gpu else contextlib.nullcontext() as recorder:
        rows = [measure(case, device, sizes) for case in cases(sizes, device)]
    record = report.environment() | {"kind": "parallel", "ranks": dist.get_world_size(), "collectives": dist.get_backend(),
                                     "sizes": asdict(sizes), "layers": rows}  # fmt: skip
    if on_gpu:
        record["telemetry"] = recorder.summary()  # of each rank's own GPU; rank 0 writes
    if dist.get_rank() == 0:
        print(table(rows))
        print(report.save(record, options.record))
    if options.failure:
        record["failure"] = failure(device)
        if dist.get_rank() == 0:
            print(record["failure"])
            report.save(record, options.record)
    if started_here and not options.failure:  # a group that failed is not waited for again
        dist.destroy_process_group()
    elif started_here:
        sys.stdout.flush()
        os._exit(0)


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
    for routing, (ids, tokens_of_rank) in routings(sizes, ranks, device, generator).items():
        weights = torch.full(ids.shape, 1 / sizes.top_k, device=device)
        parts = [tensor.split(tokens_of_rank)[rank] for tensor in (x, ids, weights)]
        for chunks in dict.fromkeys((1, sizes.chunks)):
            layer = ExpertParallelExperts.from_experts(moe, chunks=chunks)
            exchange, moved = _expert_traffic(layer, *parts[:2], device)
            yield Case(f"expert-parallel Experts, {routing}, {chunks} {'chunk' if chunks == 1 else 'chunks'}",
                       lambda: moe(x, ids, weights), lambda: layer(*parts), lambda y: y.split(tokens_of_rank)[rank],
                       exchange, moved)  # fmt: skip


def routings(sizes: Sizes, ranks: int, device, generator) -> dict[str, tuple[torch.Tensor, list[int]]]:
    """Experts of each token (tokens, k), and how many tokens each rank brings.

    Even as can be · popularities of experts that fall like 1 / place, without repeats · every row to the first rank's experts,
    so that the others multiply nothing (where it has fewer than k, tokens have so many, and -1) · every token from the first
    rank, so that the others bring none.
    """
    tokens, experts, k = sizes.tokens, sizes.experts, sizes.top_k
    even = (torch.arange(tokens * k, device=device) % experts).view(tokens, k)
    noise = -torch.empty(tokens, experts, device=device).exponential_(generator=generator).log()  # Gumbel
    popularity = -torch.arange(1, experts + 1, device=device).float().log()
    held, place = experts // ranks, torch.arange(k, device=device)
    hot = torch.where(place < held, (torch.arange(tokens, device=device)[:, None] + place) % held, -1)
    shares = [len(part) for part in torch.arange(tokens).tensor_split(ranks)]
    return {
        "even routing": (even, shares), "skewed routing": ((noise + popularity).topk(k).indices, shares),
        "one hot rank": (hot, shares), "tokens on one rank": (even, [tokens] + [0] * (ranks - 1)),
    }  # fmt: skip


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
    return exchange, {"counts": layer.chunks * sent.element_size() * (sent.numel() - layer.held), "dispatch": others_to * width,
                      "dispatch_in_bf16": others_to * 2 * layer.hidden,
                      "combine": others_of * layer.hidden * x.element_size()}  # fmt: skip


def measure(case: Case, device: torch.device, sizes: Sizes) -> dict:
    """One line of the record: compared, then timed. Raises RuntimeError, on all ranks, where results of any differ."""
    with torch.no_grad():
        got, want = case.together(), case.expected(case.alone())
        difference = _over_ranks(worst_row_error(got, want), device, dist.ReduceOp.MAX)
        equal = _over_ranks(float(torch.equal(got, want)), device, dist.ReduceOp.MIN) == 1
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{case.name}: a row differs from that of one rank alone by {difference:.2g} of its norm, more "
                               f"than {LARGEST_DIFFERENCE:g}: nothing was timed")  # fmt: skip
        del got, want
        alone, together, exchange = (seconds(call, device, sizes.rounds) for call in (case.alone, case.together, case.exchange))
    moved = {name: _over_ranks(count, device, dist.ReduceOp.SUM) for name, count in case.bytes_moved.items()}
    return {
        "name": case.name, "seconds_one_rank": alone, "seconds": together, "speedup": alone / together,
        "communication_seconds": exchange, "bytes_moved": {name: int(count) for name, count in moved.items()},
        "worst_row_error": difference, "bit_equal": equal,
    }  # fmt: skip


def seconds(call: Callable, device: torch.device, rounds: int) -> float:
    """Median over rounds of the slowest rank's time, all ranks starting together."""
    times = []
    for i in range(rounds + 1):
        _wait(device)
        dist.barrier()
        _wait(device)  # the barrier itself is work of the device
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


def failure(device: torch.device) -> dict:
    """The last rank refuses its input and does not call; what the first one raises, and after how many seconds.

    In a group of its own, whose timeout is short. NCCL raises in the waiting call with TORCH_NCCL_BLOCKING_WAIT=1, which a
    group reads when it is made; without, its watchdog ends the process at the timeout.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    group = dist.new_group(timeout=FAILURE_TIMEOUT)
    layer = ExpertParallelExperts(2 * dist.get_world_size(), 256, 128, group=group, device=device, dtype=torch.bfloat16)
    x = torch.ones(8, 256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        _wait(device)
        start, raised = time.perf_counter(), None
        try:
            layer(x[:, :100] if dist.get_rank() == dist.get_world_size() - 1 else x)
        except (RuntimeError, ValueError) as error:
            raised = error
        elapsed = time.perf_counter() - start
    if isinstance(raised, ValueError):  # the one that failed: it lives on, so that closing its connection is no hint to others
        time.sleep(2 * FAILURE_TIMEOUT.total_seconds())
    return {"timeout_seconds": FAILURE_TIMEOUT.total_seconds(), "raised": type(raised).__name__, "seconds": elapsed,
            "message": str(raised)[:300]}  # fmt: skip


def table(rows: list[dict]) -> str:
    """The record's layers as text. "moving": the collectives run alone, as a share of the layer's time; overlap hides some."""
    lines = [f"{'layer':<58}{'1 rank ms':>10}{'all ms':>9}{'faster':>8}{'moving':>8}{'MB sent':>9}  bits"]
    for row in rows:
        bits = "equal" if row["bit_equal"] else f"within {row['worst_row_error']:.0e}"
        lines.append(f"{row['name']:<58}{row['seconds_one_rank'] * 1e3:>10.3f}{row['seconds'] * 1e3:>9.3f}{row['speedup']:>7.2f}x"
                     f"{row['communication_seconds'] / row['seconds']:>8.0%}{report.sent_bytes(row) / 1e6:>9.2f}  {bits}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
