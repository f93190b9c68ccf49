"""Every mistake that the simulator must name, planted alone in a right kernel and run in several orders of events."""

import re
import sys
from pathlib import Path

import gemms
import numpy as np
import pytest
import torch
from hopperlab import sim
from hopperlab.tensormap import TensorMap

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulator.md"
MARK = "<!-- mistakes -->"
ORDERS = [dict(order="lazy"), dict(order="eager"), dict(seed=1), dict(seed=2), dict(seed=3)]
SHAPE = {"pipelined": (256, 128, 1024), "cluster": (512, 128, 768)}
PHASE = "const int s = i % Stages, phase = i / Stages & 1;"

# number and name -> kernel, replacements, what must be said (one of several where the order decides)
MISTAKES = {
    "1 producer does not wait on empty": (
        "pipelined", [("mbarrier_wait(&empty[s], phase ^ 1);", "")],
        "race on tiles .*(second TMA load into it|still reads it|not ordered after wgmma).*empty"
        r"|arrives on full\[0\] again while its phase 0 still waits.*must wait on the slot's empty barrier"),
    "2 consumer does not wait on full": (
        "pipelined", [("mbarrier_wait(&full[s], phase);", "")], r"race on tiles .*wgmma .*without having waited for full\[0\]"),
    "3 wrong producer parity": (
        "pipelined", [("mbarrier_wait(&empty[s], phase ^ 1);", "mbarrier_wait(&empty[s], phase);")],
        r"thread 0 .*line 33 .*waits for parity 0 of empty\[0\].*first wait for an empty slot, it must use parity 1"),
    "4 phase bit never flips": (
        "pipelined", [(PHASE + "\n        const float", PHASE.replace("i / Stages & 1", "0") + "\n        const float")],
        r"without having waited for full\[0\] \(phase 1\).*flips each time|passed the wait on full\[\d\] .* twice in its phase .* phase bit flip|was not waited for here: does the phase bit flip"),
    "5 expect_tx too short": (
        "pipelined", [("&full[s], StageBytes)", "&full[s], StageBytes - 128)")], r"deliver 32768 bytes to full\[\d\], but expect_tx announced 32640"),
    "5 expect_tx too long": (
        "pipelined", [("&full[s], StageBytes)", "&full[s], StageBytes + 128)")],
        r"wait for parity 0 of full\[0\].*128 of 32896 expected bytes.*announces more than the copies deliver"),
    "6 empty never arrived": (
        "pipelined", [("if (thread == 0) mbarrier_arrive(&empty[s]);", "")], r"thread 0 .*parity 0 of empty\[0\].*lacks 2 of 2 arrivals"),
    "7 all threads arrive": (
        "pipelined", [("if (thread == 0) mbarrier_arrive(&empty[s]);", "mbarrier_arrive(&empty[s]);")],
        r"128 arrivals on empty\[0\].*count of 2.*Let one thread arrive"),
    "8 slot released before wgmma finished": (
        "pipelined", [("        if (thread == 0) mbarrier_arrive(&empty[s]);\n", ""),
                      ("wgmma_wait<0>();", "if (thread == 0) mbarrier_arrive(&empty[s]); wgmma_wait<0>();")],
        "race on tiles .*TMA load .*(still reads it|not ordered after wgmma)"),
    "9 accumulators read without wait_group": (
        "pipelined", [("wgmma_wait<0>();", "")], "register .* still belongs to an asynchronous wgmma.*wgmma_wait"),
    "10 no wgmma.fence": ("pipelined", [("wgmma_fence();", "")], "no wgmma.fence before the first wgmma"),
    "11 descriptor swizzle differs from the map's": (
        "pipelined", [("Swizzle::Bytes128", "Swizzle::Bytes64")],
        "descriptor of operand A says a 64-byte swizzle, but the tile was written with a 128-byte swizzle"),
    "11 descriptor without swizzle": (
        "pipelined", [("Swizzle::Bytes128", "Swizzle::None")], "descriptor of operand A says no swizzle, but the tile was written with a 128-byte"),
    "12 wrong stride offset": ("pipelined", [("1024)", "512)")], "steps 512 bytes .*must be 8 x 128 = 1024"),
    "13 a thread skips a collective": (
        "pipelined", [("wgmma_fence();", "if (threadIdx.x == 130) continue; wgmma_fence();")], "have diverged from it|exited, but .*needs all 128"),
    "14 whole warp issues the TMA": (
        "pipelined", [("if (threadIdx.x == 0) {\n      int i", "if (threadIdx.x < 32) {\n      int i")],
        r"threads 0..31 .*32 threads issue the same TMA load|32 arrivals on full\[0\]"),
    "15 global store out of bounds": (
        "pipelined", [("*(u32*)&D[(row + 8) *", "*(u32*)&D[(row + 136) *")], r"writes 4 bytes at \d+ bytes after the end of 'D' \(argument 4\)"),
    "16 barriers not initialised": (
        "pipelined", [("if (threadIdx.x == 0) {\n    for", "if (threadIdx.x == 999) {\n    for")], "no mbarrier was initialised at (full|empty)"),
    "17 no __syncthreads after init": (
        "pipelined", [("  __syncthreads();\n", "")], "race on (full|empty).*no barrier orders that after its mbarrier.init|no mbarrier was initialised"),
    "18 __syncthreads in one branch": (
        "pipelined", [("registers_increase<232>();", "registers_increase<232>(); __syncthreads();")],
        r"__syncthreads at line 42 .*exited without reaching it|at barrier 0: 256 of 384 threads are there"),
    "19 no proxy fence before a TMA store": (
        "cluster", [("      fence_proxy_async_shared();\n", "")], "TMA store .*ordinary store .*no proxy fence in between"),
    "20 no barrier before a TMA store": (
        "cluster", [("      named_barrier_sync(consumer + 1, 128);\n      if (thread == 0) {", "      if (thread == 0) {")],
        "TMA store .*no barrier orders that after the store"),
    "21 staging reused without wait_group.read": (
        "cluster", [("      if (thread == 0) tma_store_wait_read<0>();", "")], "the TMA store .*may still read it.*tma_store_wait_read"),
    "22 empty count ignores the other CTA": (
        "cluster", [("mbarrier_init(&empty[s], 2 * Cluster)", "mbarrier_init(&empty[s], 2)")],
        "race on tiles .*(not ordered after|still reads|second TMA load)|arrivals on empty"),
    "23 releases only its own CTA": (
        "cluster", [("if (thread < Cluster) mbarrier_arrive_remote(&empty[s], thread);", "if (thread == 0) mbarrier_arrive(&empty[s]);"),
                    ("mbarrier_init(&empty[s], 2 * Cluster)", "mbarrier_init(&empty[s], 2)")],
        "race on tiles .*(not ordered after|still reads|second TMA load)"),
    "24 multicast mask wrong": (
        "cluster", [("&full[s], 3,", "&full[s], 1 << rank,")], "8192 of 32768 expected bytes.*went to another CTA|nothing has written"),
    "25 no cluster barrier after init": (
        "cluster", [("  cluster_sync();                                                // peers", "  __syncthreads(); //")],
        r"cluster_sync\(\) \(a barrier of the whole cluster\)|no mbarrier was initialised"),
    "26 a CTA exits while a peer still writes to it": (
        "cluster", [("  cluster_sync();                                                // nobody", "  //")],
        "exits without knowing that the access|which has exited"),
    "27 staging swizzle forgotten": (
        "cluster", [("((column % 8 ^ tile_row % 8) * 16)", "column % 8 * 16")], "tensor map undoes a 128-byte swizzle, but the store at .* without it"),
    "28 two threads issue the store": (
        "cluster", [("      if (thread == 0) {\n        for (int half", "      if (thread < 2) {\n        for (int half")],
        "2 threads issue the same TMA store"),
    "29 misaligned tile": (
        "pipelined", [("tma_load_2d(tiles + s * StageBytes,", "tma_load_2d(tiles + 64 + s * StageBytes,")], "is not 128-byte aligned"),
    "30 setmaxnreg over budget": (
        "pipelined", [("registers_increase<232>", "registers_increase<248>")], r"10240 registers \(setmaxnreg.inc to 248\).*168 x 384 = 64512"),
    "32 kernel exits with a TMA store in flight": (
        "cluster", [("    if (thread == 0) tma_store_wait<0>();\n", "")], "exits with the TMA store at .* in flight"),
    "33 two warpgroups use one barrier": (
        "cluster", [("named_barrier_sync(consumer + 1, 128)", "named_barrier_sync(1, 128)")],
        r"race on barrier 1 of block \(\d, 0, 0\): warp \d.* nothing orders that after warp \d.*'s arrival"),
}  # fmt: skip


def launch(which, ptx, **options):
    m, n, k = SHAPE[which]
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    inputs = gemms.inputs(m, n, k)
    settings = gemms.launch_options(which, m, n) | dict(
        grid=1 if which == "pipelined" else 2, source=gemms.KERNELS / f"{which}.cu"
    )
    sim.launch(ptx, "gemm", gemms.arguments(which, *inputs, out), **settings, **options)
    return out


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named_in_every_order(name):
    which, replacements, message = MISTAKES[name]
    ptx = gemms.compile_variant(which, *replacements)
    for order in ORDERS:
        with pytest.raises(sim.SimulatorError, match=f"(?s){message}"):
            launch(which, ptx, math="fast", **order)


def message_of(name):
    """What is said in the lazy order."""
    which, replacements, _ = MISTAKES[name]
    with pytest.raises(sim.SimulatorError) as caught:
        launch(which, gemms.compile_variant(which, *replacements), math="fast")
    # What differs between versions of the compiler is left out: lines of the PTX and names of registers.
    text = re.sub(r" \(PTX line [^)]*\)", "", str(caught.value))
    text = re.sub(r"register %\w+", "register %f7", text)
    return f"**{name}** ({which}.cu)\n\n```text\n{text}\n```\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_documented_messages_are_the_real_ones(name):
    assert message_of(name) in DOCUMENT.read_text(), "run: PYTHONPATH=common python tests/sim/test_mistakes.py"


@pytest.mark.parametrize("which", SHAPE)
def test_right_kernels_raise_nothing_in_100_orders(which):
    ptx = gemms.compile_variant(which)
    first = launch(which, ptx, math="fast")
    for seed in range(100):
        assert torch.equal(launch(which, ptx, math="fast", seed=seed, order=("lazy", "eager")[seed % 2]), first), seed


def test_29_a_box_that_the_hardware_refuses():
    a = torch.zeros(64, 256, dtype=torch.uint8)
    for box, swizzle, message in (
        ((320, 8), 0, "box: .*1 to 256"),
        ((256, 8), 128, "128-byte swizzle allows at most 128"),
        ((24, 8), 0, "multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            TensorMap.tiled(a, box=box, swizzle=swizzle)


def test_31_shared_memory_read_that_nothing_wrote(run):
    for order in ORDERS:
        with pytest.raises(
            sim.Hazard, match=r"thread \d+ .*line 2 of kernel.cu.* reads s \+ \d+ .*nothing has written yet"
        ):
            run("""extern "C" __global__ void k(float* o) { __shared__ float s[64]; s[threadIdx.x] = 1; __syncthreads();
              o[threadIdx.x] = s[threadIdx.x + 1]; }""", np.zeros(64, np.float32), block=33, **order)  # fmt: skip


@pytest.mark.parametrize("row, right", [("threadIdx.x % 16 + threadIdx.x / 32 * 16", True), ("threadIdx.x % 16", False)])
def test_warps_that_stmatrix_into_the_same_rows(run, row, right):
    source = f"""
    #include "hopper.cuh"
    extern "C" __global__ void k(u32* o) {{ __shared__ __align__(128) u16 tile[64 * 16];
      store_matrix_x4(tile + ({row}) * 16 + threadIdx.x % 32 / 16 * 8, 1, 2, 3, 4); __syncthreads();
      o[threadIdx.x] = tile[threadIdx.x % 32]; }}"""
    for order in ORDERS:
        if right:
            run(source, np.zeros(64, np.uint32), block=64, prelude="", **order)
            continue
        with pytest.raises(sim.Hazard, match="race on tile .*: warp 0 .* and warp 1 .* store into the same row with the stmatrix at"):
            run(source, np.zeros(64, np.uint32), block=64, prelude="", **order)


def test_missing_second_syncthreads(run):
    """The classic race of a tiled kernel, in lock step and one block at a time."""
    source = """extern "C" __global__ void k(const float* x, float* y) {
      __shared__ float tile[64];
      float sum = 0;
      for (int i = 0; i < 4; ++i) {
        tile[threadIdx.x] = x[i * 64 + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < 64; ++j) sum += tile[j];
        SECOND
      }
      y[threadIdx.x] = sum;
    }"""
    x, y = np.ones(256, np.float32), np.zeros(64, np.float32)
    for order in ORDERS:
        run(source.replace("SECOND", "__syncthreads();"), x, y, block=64, **order)
        with pytest.raises(sim.Hazard, match=r"race on tile .*line 5 of kernel.cu"):
            run(source.replace("SECOND", ""), x, y, block=64, **order)


if __name__ == "__main__":
    text = DOCUMENT.read_text().split(MARK)[0] + MARK + "\n\n"
    DOCUMENT.write_text(text + "\n".join(message_of(name) for name in MISTAKES))
    sys.exit(0)
