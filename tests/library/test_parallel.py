"""Layers over several ranks, on two CPU processes with gloo: the results and gradients of one process, and what fails."""

import copy
import datetime
import json
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from helpers import calc_diff, random, refused
from ranks import Ranks

from fp8_gemm import bench_parallel, parallel, quantize
from fp8_gemm.monitor import Monitor
from fp8_gemm.nn import Experts, Linear, Recipe
from fp8_gemm.parallel import ColumnParallelLinear, ExpertParallelExperts, RowParallelLinear
from hopperlab import report

BF16, FP32 = torch.bfloat16, torch.float32
EXACT = Recipe(batch_invariant=True)  # a row's bits do not depend on what else is in the batch
ROW_EXACT = Recipe("row", "row", interval=None, batch_invariant=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A function that gives two ranks: the same as long as they are usable."""
    alive = []

    def give():
        if not alive or not alive[-1].usable:
            alive.append(Ranks(2, tmp_path_factory.mktemp("ranks")))
        return alive[-1]

    yield give
    for ranks in alive:
        ranks.close()


@pytest.fixture
def pair(pairs):
    return pairs()


def linear(k, n, precision=EXACT, bias=True):
    torch.manual_seed(1)
    return Linear(k, n, bias, precision=precision)


# ---------------------------------------------------------------- tensor parallel


def column(rank, size, gather, bias):
    whole, x = linear(260, 256, bias=bias), random(9, 260)
    layer = ColumnParallelLinear.from_linear(whole, gather_output=gather, precision=EXACT)
    mine = slice(rank * 128, rank * 128 + 128)
    for x_part in (x, x[0], x[:0], x.view(3, 3, 260), x.to(BF16)):
        want = whole(x_part)
        assert torch.equal(layer(x_part), want if gather else want[..., mine])
    given, mirror = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = random(9, 256, seed=5)
    layer(given).backward(grad if gather else grad[:, mine])
    whole(mirror).backward(grad)
    assert torch.allclose(given.grad, mirror.grad, atol=1e-5)  # the same products, summed in another order
    assert torch.equal(layer.weight.grad, whole.weight.grad[mine])
    assert not bias or torch.equal(layer.bias.grad, whole.bias.grad[mine])


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_has_the_bits_of_one_process(pair, gather, bias):
    pair.run(column, gather, bias)


def row(rank, size, parallel_input, bias):
    whole, x = linear(512, 70, bias=bias), random(9, 512)
    layer = RowParallelLinear.from_linear(whole, input_is_parallel=parallel_input, precision=EXACT)
    mine = slice(rank * 256, rank * 256 + 256)
    halves = [linear(256, 70, bias=False) for _ in range(2)]
    with torch.no_grad():
        for half, weight in zip(halves, whole.weight.chunk(2, dim=1)):
            half.weight.copy_(weight)
        for x_part in (x, x[0], x[:0], x.view(3, 3, 512), x.to(BF16)):
            got = layer(x_part[..., mine] if parallel_input else x_part)
            want = halves[0](x_part[..., :256]) + halves[1](x_part[..., 256:])
            want = want if layer.bias is None else want + layer.bias.to(want.dtype)
            assert torch.equal(got, want) and got.dtype == x_part.dtype
            if x_part.dtype == FP32 and x_part.numel():
                assert calc_diff(got, whole(x_part)) < 1e-9
        layer.reduce_dtype = FP32
        rounded_once = layer(x.to(BF16)[..., mine] if parallel_input else x.to(BF16))
        parts = [half.compute(x.to(BF16)[..., part], precision=EXACT, out_dtype=FP32)
                 for half, part in zip(halves, (slice(256), slice(256, 512)))]  # fmt: skip
        total = parts[0] + parts[1]
        assert torch.equal(rounded_once, (total if layer.bias is None else total + layer.bias).to(BF16))
    given, mirror = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = random(9, 70, seed=5)
    layer(given[:, mine] if parallel_input else given).backward(grad)
    whole(mirror).backward(grad)
    assert torch.equal(given.grad[:, mine], mirror.grad[:, mine])
    assert parallel_input or torch.equal(given.grad, mirror.grad)
    assert torch.equal(layer.weight.grad, whole.weight.grad[:, mine])
    assert not bias or torch.equal(layer.bias.grad, whole.bias.grad)


@pytest.mark.parametrize("parallel_input", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_is_the_sum_of_its_halves(pair, parallel_input, bias):
    pair.run(row, parallel_input, bias)


def mlp(rank, size):
    up, down, x = linear(256, 512, "fp8"), linear(512, 192, "fp8"), random(9, 256)
    tp = torch.nn.Sequential(ColumnParallelLinear.from_linear(up), torch.nn.GELU(), RowParallelLinear.from_linear(down))
    whole = torch.nn.Sequential(up, torch.nn.GELU(), down)
    given, mirror = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = tp(given), whole(mirror)
    got.square().sum().backward()
    want.square().sum().backward()
    assert calc_diff(got, want) < 1e-6 and calc_diff(given.grad, mirror.grad) < 1e-4
    watch = Monitor(tp, error_rate=1)
    tp(x)
    for record in watch.snapshot()["layers"].values():
        assert record["kernel_error"] < 1e-3 and record["error"] < 0.1 and record["fallback"] is None
    other = RowParallelLinear(512, 192)
    assert not other.bias.any() and set(other.state_dict()) == {"weight", "bias"}
    other.load_state_dict(tp[2].state_dict())
    assert torch.equal(other(tp[1](tp[0](x))), tp(x))
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = ColumnParallelLinear.from_linear(up, alone, gather_output=True)
    assert torch.equal(single(x), up(x))


def test_an_mlp_of_both(pair):
    pair.run(mlp)


# ---------------------------------------------------------------- expert parallel

TOKENS = {  # tokens of each rank, and which experts they may choose
    "even": ((8, 8), range(4)), "uneven": ((3, 13), range(4)), "no tokens here": ((9, 0), range(4)),
    "no tokens at all": ((0, 0), range(4)), "hot first rank": ((6, 7), (0, 1)), "hot second rank": ((6, 7), (2, 3)),
    "one idle expert": ((6, 7), (0, 1, 3)),
}  # fmt: skip


def experts(precision=EXACT, router=False):
    torch.manual_seed(2)
    return Experts(4, 192, 72, precision=precision, router=router)


def tokens_of(case, dropped=0.2):
    """(x, ids, weights) of each rank."""
    counts, allowed = TOKENS[case]
    allowed, generator = torch.tensor(list(allowed)), torch.Generator().manual_seed(3)
    x = random(sum(counts), 192, seed=4)
    ids = allowed[torch.rand(len(x), len(allowed), generator=generator).argsort(1)[:, :2]]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < dropped, -1, ids)
    weights = torch.rand(ids.shape, generator=generator)
    return list(zip(x.split(counts), ids.split(counts), weights.split(counts)))


def expert_results(rank, size, case, chunks, precision, dtype):
    whole, data = experts(precision), tokens_of(case)
    layer = ExpertParallelExperts.from_experts(whole, chunks=chunks)
    assert layer.gate_up.shape == (2, 144, 192)
    x, ids, weights = data[rank]
    with torch.no_grad():
        got, want = layer(x.to(dtype), ids, weights), whole(x.to(dtype), ids, weights)
    assert got.dtype == dtype
    if isinstance(precision, Recipe) and precision.batch_invariant:
        assert torch.equal(got, want)
    else:  # torch's products of fewer rows may add in another order
        assert calc_diff(got, want) < (1e-9 if dtype == FP32 else 1e-5)


@pytest.mark.parametrize("case", TOKENS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_experts_have_the_bits_of_one_process(pair, case, chunks):
    pair.run(expert_results, case, chunks, EXACT, FP32)


@pytest.mark.parametrize("precision", [ROW_EXACT, Recipe(), "fp32", "bf16"], ids=str)
def test_other_precisions_of_experts(pair, precision):
    pair.run(expert_results, "uneven", 2, precision, BF16 if precision == "bf16" else FP32)


def routed(rank, size):
    whole, x = experts(router=True), tokens_of("uneven")[rank][0]
    layer = ExpertParallelExperts.from_experts(whole).freeze()
    with torch.no_grad():
        assert torch.equal(layer(x[None]), whole(x[None]))
    torch.manual_seed(rank)
    built = ExpertParallelExperts(4, 192, 72)  # ranks draw different weights, but one router
    first = built.router.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(built.router, first)
    with refused(ValueError, "no Linear"):
        Monitor(layer)


def test_routers_are_whole_and_alike(pair):
    pair.run(routed)


def expert_gradients(rank, size, case, precision, limit):
    whole, data = experts(precision, router=False), tokens_of(case)
    layer = ExpertParallelExperts.from_experts(whole, chunks=2)
    x, ids, weights = data[rank]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    grads = random(sum(len(d[0]) for d in data), 192, seed=6).split([len(d[0]) for d in data])
    layer(x, ids, weights).backward(grads[rank])

    all_x, all_ids, all_weights = (torch.cat(tensors) for tensors in zip(*data))
    all_x.requires_grad_(), all_weights.requires_grad_()
    whole(all_x, all_ids, all_weights).backward(torch.cat(grads))
    start = sum(len(d[0]) for d in data[:rank])
    mine, here = slice(start, start + len(x)), slice(rank * 2, rank * 2 + 2)
    pairs = [(x.grad, all_x.grad[mine]), (weights.grad, all_weights.grad[mine]), (layer.gate_up.grad, whole.gate_up.grad[here]),
             (layer.down.grad, whole.down.grad[here])]  # fmt: skip
    for got, want in pairs:
        assert got.shape == want.shape and (calc_diff(got, want) < limit if want.any() else not got.any())


@pytest.mark.parametrize("case", ["uneven", "no tokens here", "hot second rank"])
@pytest.mark.parametrize("precision, limit", [("fp8", 1e-3), ("fp32", 1e-9)])
def test_gradients_of_experts(pair, case, precision, limit):
    """FP8: dispatched rows are quantised twice, and weight gradients sum over tokens in another order."""
    pair.run(expert_gradients, case, precision, limit)


def traffic(rank, size, precision, dtype):
    """Bytes of the three exchanges of one call."""
    layer = ExpertParallelExperts.from_experts(experts(precision))
    sent, real = [], dist.all_to_all_single

    def counted(out, source, *arguments, **options):
        sent.append(source.numel() * source.element_size())
        return real(out, source, *arguments, **options)

    dist.all_to_all_single = counted
    try:
        with torch.no_grad():
            x, ids, weights = tokens_of("even", dropped=0)[rank]
            layer(x.to(dtype), ids, weights)
    finally:
        dist.all_to_all_single = real
    return sent


def test_rows_travel_in_half_the_bytes(pair):
    fp8, bf16 = pair.run(traffic, Recipe(), BF16), pair.run(traffic, "bf16", BF16)
    for rank in range(2):
        counts, there, back = fp8[rank]
        assert counts == 4 * 4 and there == 8 * 2 * (192 + 2 * 4) and bf16[rank][1] == 8 * 2 * 192 * 2
        assert there < 0.53 * bf16[rank][1] and back == bf16[rank][2]


@pytest.mark.parametrize("rows, k", [(7, 260), (7, 128), (4, 100), (1, 300), (1, 1)], ids=str)
@pytest.mark.parametrize("recipe", ["1x128", "row"])
def test_packing_loses_nothing(recipe, rows, k):
    scaled = quantize(random(rows, k), recipe)
    again = parallel.unpack(parallel.pack(scaled), k, recipe, scaled.data.dtype)
    assert torch.equal(again.data.view(torch.uint8), scaled.data.view(torch.uint8)) and torch.equal(again.scale, scaled.scale)
    empty = quantize(torch.empty(0, k), recipe)
    assert parallel.unpack(parallel.pack(empty), k, recipe, scaled.data.dtype).data.shape == (0, k)


def collectives_wait(rank, size):
    """Names of the collectives that layers call, each asynchronous: only waiting for those raises, on NCCL."""
    called = set()

    def watched(name, real):
        def call(*arguments, async_op=False, **options):
            assert async_op, f"{name} is called without async_op"
            called.add(name)
            return real(*arguments, async_op=async_op, **options)

        return call

    names = ("all_reduce", "all_gather", "all_to_all_single", "broadcast")
    originals = {name: getattr(dist, name) for name in names}
    for name, real in originals.items():
        setattr(dist, name, watched(name, real))
    try:
        x = random(8, 192).requires_grad_()
        ColumnParallelLinear(192, 256, gather_output=True)(x).sum().backward()
        RowParallelLinear(192, 256, input_is_parallel=False)(x).sum().backward()
        ExpertParallelExperts(4, 192, 72, chunks=2)(x).sum().backward()
    finally:
        for name, real in originals.items():
            setattr(dist, name, real)
    return called == set(names)


def test_every_collective_is_waited_for(pair):
    assert pair.run(collectives_wait) == [True, True]


# ---------------------------------------------------------------- new layers, copies, mixed gradients


def gathered(tensor, size):
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.detach())
    return parts


def fresh(rank, size):
    """From one seed on all ranks: together the slices are like one layer's weight, and the generators stay alike."""
    torch.manual_seed(7)
    column, row = ColumnParallelLinear(512, 256), RowParallelLinear(512, 256)
    moe = ExpertParallelExperts(4, 192, 72)
    next_draw = torch.rand(3)
    assert all(torch.equal(part, next_draw) for part in gathered(next_draw, size))
    all_experts = lambda weight: [*torch.cat(gathered(weight, size))]  # noqa: E731
    whole = [(gathered(column.weight, size), 512), (gathered(column.bias, size), 512), (gathered(row.weight, size), 512),
             (all_experts(moe.gate_up), 192), (all_experts(moe.down), 72)]  # fmt: skip
    for parts, fan_in in whole:
        assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
        drawn, bound = torch.cat([part.flatten() for part in parts]), fan_in**-0.5
        assert 0.98 * bound < drawn.abs().max() <= bound and abs(drawn.std() - bound / 3**0.5) < 0.05 * bound
    assert not row.bias.any() and all(torch.equal(part, moe.router) for part in gathered(moe.router, size))

    torch.manual_seed(7)
    again, before = ColumnParallelLinear(512, 256), column.weight.detach().clone()
    assert torch.equal(again.weight, before) and torch.equal(again.bias, column.bias)
    for layer in (column, row, moe):
        old = [parameter.detach().clone() for parameter in layer.parameters()]
        layer.reset_parameters()
        assert all(not torch.equal(a, b) or not b.any() for a, b in zip(old, layer.parameters()))
    assert all(torch.equal(part, moe.router) for part in gathered(moe.router, size)) and not row.bias.any()
    assert ColumnParallelLinear(512, 256, device="meta").weight.is_meta


def test_new_layers_of_one_seed_are_slices_of_one(pair):
    pair.run(fresh)


def gradients_on_one_rank(rank, size, layer, trained):
    """The second rank's x has no gradient: both ranks' backward passes end, with the gradients that they have otherwise."""
    if layer == "experts":
        module, data = ExpertParallelExperts.from_experts(experts(), chunks=2), tokens_of("no tokens here")
    elif layer == "column":
        module, data = ColumnParallelLinear.from_linear(linear(192, 256)), [(random(9, 192),)] * 2
    else:
        module, data = RowParallelLinear.from_linear(linear(256, 192), input_is_parallel=False), [(random(9, 256),)] * 2
    if trained == "frozen":
        module.freeze()
    module.requires_grad_(trained == "all" or (trained == "first rank's" and rank == 0))
    got = []
    for alike in (True, False):
        x, *routing = data[rank]
        x = x.clone().requires_grad_(alike or rank == 0)
        module.zero_grad(set_to_none=True)
        y = module(x, *routing)
        assert y.requires_grad
        y.square().sum().backward()
        got.append([x.grad if rank == 0 else None, *(parameter.grad for parameter in module.parameters())])
    for a, b in zip(*got):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert rank == 1 or got[0][0].any()


@pytest.mark.parametrize("layer, trained", [
    ("experts", "all"), ("experts", "none"), ("experts", "frozen"), ("experts", "first rank's"),
    ("column", "all"), ("row", "all"),
])  # fmt: skip
def test_a_rank_without_a_gradient_takes_part_in_the_backward_pass(pair, layer, trained):
    pair.run(gradients_on_one_rank, layer, trained)


def recorded_on_one_rank(rank, size):
    """Chunks are given up by all ranks if one records gradients."""
    layer = ExpertParallelExperts.from_experts(experts("fp32"), chunks=3)
    data = tokens_of("uneven")[rank]
    with torch.no_grad():
        want = layer(*data)
    with torch.set_grad_enabled(rank == 0):
        got = layer(*data)
    assert got.requires_grad == (rank == 0) and calc_diff(got, want) < 1e-9


def test_gradients_recorded_on_one_rank_give_the_same_results(pair):
    pair.run(recorded_on_one_rank)


def copied(rank, size):
    group, x = dist.new_group(), random(9, 192)
    makers = [lambda group: ColumnParallelLinear(192, 256, group=group),
              lambda group: RowParallelLinear(192, 256, group=group, input_is_parallel=False),
              lambda group: ExpertParallelExperts(4, 192, 72, group=group)]  # fmt: skip
    for make in makers:
        layer = make(group)
        for other in (copy.deepcopy(layer), copy.copy(layer), copy.deepcopy(torch.nn.Sequential(layer))[0]):
            assert other.group is group and layer.group is group
            assert torch.equal(other(x), layer(x))
        assert next(copy.deepcopy(layer).parameters()) is not next(layer.parameters()) is next(copy.copy(layer).parameters())
        with refused(TypeError, "group", "cannot be pickled", "state_dict()", "group=None"):
            pickle.dumps(torch.nn.Sequential(layer))
        default = make(None)
        assert torch.equal(pickle.loads(pickle.dumps(default))(x), default(x))


def test_copies_share_the_group_and_pickles_refuse_it(pair):
    pair.run(copied)


# ---------------------------------------------------------------- the benchmark


def bench(rank, size, path):
    bench_parallel.main(["--small", "--record", str(path)])


def test_benchmark_records_what_it_measured(pair, tmp_path):
    pair.run(bench, tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["ranks"] == 2 and record["collectives"] == "gloo" and record["commit"]
    rows = {row["name"]: row for row in record["layers"]}
    assert len(rows) == 10 and all(row["seconds"] > 0 and row["speedup"] > 0 for row in rows.values())
    assert all(row["worst_row_error"] < 1e-2 for row in rows.values()) and rows["column-parallel Linear"]["bit_equal"]
    assert rows["column-parallel Linear"]["bytes_moved"] == {}
    assert rows["row-parallel Linear"]["bytes_moved"] == {"all_reduce": 2 * 64 * 256 * 2}
    # Half of 128 pairs travel: of even routing, or with all tokens on one rank, or all of the second rank's 64 to the first.
    half = {"counts": 2 * 2 * 4, "dispatch": 64 * (256 + 8), "dispatch_in_bf16": 64 * 512, "combine": 64 * 512}
    for routing in ("even routing", "tokens on one rank", "one hot rank"):
        assert rows[f"expert-parallel Experts, {routing}, 1 chunk"]["bytes_moved"] == half
    assert report.sent_bytes(rows["expert-parallel Experts, even routing, 1 chunk"]) == 16 + 64 * (256 + 8) + 64 * 512
    assert "1 rank ms" in bench_parallel.table(record["layers"])
    shown = report.parallel_markdown({**record, "telemetry": {"sm_clock_mhz": {"median": 1}, "power_w": {"max": 2}},
                                      "machine": {"name": "a card", "driver": "1"}})  # fmt: skip
    assert all(f"| {name} |" in shown for name in rows) and "2 GPUs" in shown and "a card" in shown
    axes = report.plot_parallel(record).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)[::-1]
    widths = [bar.get_width() / 1e3 for bar in axes.patches]
    assert widths == pytest.approx([row[key] for key in ("seconds_one_rank", "seconds", "communication_seconds") for row in record["layers"][::-1]])


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        bench_parallel.main([])
    assert "rank 1 of this host has no GPU" in capsys.readouterr().err and not torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_benchmark_routings_are_what_their_names_say(ranks):
    sizes, held = bench_parallel.SMALL, bench_parallel.SMALL.experts // ranks
    found = bench_parallel.routings(sizes, ranks, "cpu", torch.Generator().manual_seed(0))
    for ids, shares in found.values():
        assert ids.shape == (sizes.tokens, sizes.top_k) and sum(shares) == sizes.tokens and len(shares) == ranks
        ordered = ids.sort(dim=1).values
        assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()  # the experts of a token differ
    count = lambda name: torch.bincount(found[name][0][found[name][0] >= 0], minlength=sizes.experts)  # noqa: E731
    assert len(count("even routing").unique()) == 1
    assert count("skewed routing")[0] == count("skewed routing").max() > count("skewed routing")[-1]
    assert not count("one hot rank")[held:].any() and count("one hot rank")[:held].all()
    assert found["tokens on one rank"][1] == [sizes.tokens] + [0] * (ranks - 1)


def measure_a_wrong_row(rank, size):
    """One row of the last rank is off; every rank hears of it."""
    right = random(64, 32)
    wrong = right.clone()
    wrong[5] *= 1.02 if rank == size - 1 else 1
    case = bench_parallel.Case("wrong", lambda: right, lambda: wrong, lambda y: y, lambda: None, {})
    with refused(RuntimeError, "wrong: a row differs", "0.02", "nothing was timed"):
        bench_parallel.measure(case, torch.device("cpu"), bench_parallel.SMALL)


def test_benchmark_times_nothing_wrong(pair):
    pair.run(measure_a_wrong_row)


def bench_failure(rank, size):
    bench_parallel.FAILURE_TIMEOUT = datetime.timedelta(seconds=2)
    return bench_parallel.failure(torch.device("cpu"))


def test_benchmark_records_how_a_failure_is_seen(pair):
    first, last = pair.run(bench_failure)
    assert last["raised"] == "ValueError" and "x has shape (8, 100)" in last["message"]
    assert first["raised"] == "RuntimeError" and "all_to_all failed on rank 0 of 2" in first["message"]
    assert first["seconds"] < 2 + 10


def test_benchmark_says_how_to_start_it(capsys):
    with pytest.raises(SystemExit):
        bench_parallel.main([])
    assert "torch.distributed.run --nproc-per-node 2" in capsys.readouterr().err


# ---------------------------------------------------------------- refusals and failures


def refusals(rank, size):
    with refused(ValueError, "out_features", "255", "2 ranks", "multiple of 2"):
        ColumnParallelLinear(8, 255)
    with refused(ValueError, "in_features", "7"):
        RowParallelLinear(7, 8)
    with refused(ValueError, "experts", "3"):
        ExpertParallelExperts(3, 8, 8)
    with refused(ValueError, "chunks", "0"):
        ExpertParallelExperts(4, 8, 8, chunks=0)
    for chunks in (1.5, True, "2"):
        with refused(TypeError, "chunks", repr(chunks), "an integer, at least 1"):
            ExpertParallelExperts(4, 8, 8, chunks=chunks)
    for x in (torch.ones(3, 1), torch.ones(3, 4), torch.ones(())):
        with refused(ValueError, f"x has shape {tuple(x.shape)}", "(…, 8)", "all ranks' features"):
            RowParallelLinear(8, 4, input_is_parallel=False)(x)
    with refused(ValueError, "x has shape (3, 8)", "(…, 4)", "input_is_parallel=False"):
        RowParallelLinear(8, 4)(torch.ones(3, 8))
    for make, layer in ((ColumnParallelLinear.from_linear, Linear(8, 8)), (RowParallelLinear.from_linear, Linear(8, 8)),
                        (ExpertParallelExperts.from_experts, Experts(4, 8, 8))):  # fmt: skip
        with refused(ValueError, "layer is frozen", "Slice first, then freeze()"):
            make(layer.freeze())


def test_refusals(pair):
    pair.run(refusals)
    with refused(RuntimeError, "not initialised", "init_process_group"):
        ColumnParallelLinear(8, 8)


def one_fails(rank, size, how):
    """Rank 1 fails before its collective. Returns what rank 0 raised, and after how long."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))  # of the other groups: 60
    layer = ExpertParallelExperts.from_experts(experts(), group)
    x, ids, weights = tokens_of("even")[0]
    layer(x, ids, weights)
    if rank == 1 and how == "bad input":
        with refused(ValueError, "x has shape (8, 100)"):
            layer(x[:, :100], ids, weights)
        return time.sleep(4)  # it lives on, but does not call
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        layer(x, ids, weights)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("how", ["bad input", "process ends"])
def test_when_one_rank_fails_the_others_raise_in_time(pair, how):
    raised = pair.run(one_fails, how, expect=2 if how == "bad input" else 1)[0]
    assert raised is not None
    message, seconds = raised
    assert "all_to_all failed on rank 0 of 2" in message and "Look for the first error" in message and seconds < 20
