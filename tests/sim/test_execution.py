"""Ordinary kernels: control flow, memory, warp collectives, atomics, calls, and the messages of their mistakes."""

import numpy as np
import pytest
import torch
from hopperlab import sim

K = 'extern "C" __global__ void k'


def test_divergence_and_merge(run):
    out = np.zeros(96, np.int32)
    run(
        """extern "C" __global__ void k(int* out) {
          int t = threadIdx.x, x = 0;
          for (int i = 0; i < t % 7; ++i) { if (i & 1) x += t; else x -= i; if (x > 60) break; }
          switch (t % 5) { case 0: x += 100; break; case 1: x *= 2; case 2: x -= 1; break; case 4: x = -x; break; }
          out[t] = x;
        }""",
        out,
        block=96,
    )

    def expected(t):
        x = 0
        for i in range(t % 7):
            x = x + t if i & 1 else x - i
            if x > 60:
                break
        return {0: x + 100, 1: 2 * x - 1, 2: x - 1, 3: x, 4: -x}[t % 5]

    assert out.tolist() == [expected(t) for t in range(96)]


def test_many_blocks_in_lock_step_equal_one_at_a_time(run):
    source = """extern "C" __global__ void k(const float* x, float* y, int n) {
      __shared__ float tile[64];
      int i = blockIdx.x * 64 + threadIdx.x;
      tile[threadIdx.x] = i < n ? x[i] : 0.f;
      __syncthreads();
      float s = 0;
      for (int j = 0; j <= threadIdx.x; ++j) s += tile[j];
      for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if (i < n) y[i] = s;
    }"""
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    results = []
    for options in ({}, {"seed": 3}):
        y = np.zeros(1000, np.float32)
        run(source, x, y, 1000, grid=16, block=64, **options)
        results.append(y)
    assert np.array_equal(*results) and np.abs(results[0]).min() > 0


def test_atomics_and_printf(run, capsys):
    total, slots = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    report = run(
        r"""extern "C" __device__ int printf(const char*, ...);
        extern "C" __global__ void k(u32* total, u32* slots) {
          u32 place = atomicAdd(total, 1);
          slots[place] = threadIdx.x + blockIdx.x * 32;
          atomicMax(&slots[0], threadIdx.x);
          if (threadIdx.x == 5) printf("block %d: %5.2f %s %lld\n", blockIdx.x, 1.5, "text", 1ll << 40);
        }""",
        total,
        slots,
        grid=2,
    )
    assert total[0] == 64 and sorted(slots[1:]) == list(range(1, 64))
    assert report.printed == [f"block {b}:  1.50 text 1099511627776\n" for b in (0, 1)]
    assert capsys.readouterr().out == "".join(report.printed)


def test_device_functions_local_arrays_and_generic_addresses(run):
    out = np.zeros(64, np.int32)
    run(
        """__device__ __noinline__ int sum(const int* p, int n) { int s = 0; for (int i = 0; i < n; ++i) s += p[i]; return s; }
        extern "C" __global__ void k(int* out) {
          __shared__ int tile[64];
          int local[8];
          for (int i = 0; i < 8; ++i) local[i] = i * threadIdx.x;
          tile[threadIdx.x] = 1;
          __syncthreads();
          const int* p = threadIdx.x & 1 ? local : tile;
          out[threadIdx.x] = sum(p, threadIdx.x % 8 + 1) + *p;
        }""",
        out,
        block=64,
    )
    expected = [t * sum(range(t % 8 + 1)) if t & 1 else t % 8 + 2 for t in range(64)]
    assert out.tolist() == expected


def test_blocks_may_wait_for_one_another(run):
    """A later block releases an earlier one, and the other way round: blocks are interleaved."""
    for earlier_waits in (0, 1):
        flag, out = np.zeros(1, np.int32), np.zeros(2, np.int32)
        run(
            """extern "C" __global__ void k(int* flag, int* out, int waits) {
              if ((blockIdx.x == 0) == waits) { while (atomicAdd(flag, 0) == 0); out[blockIdx.x] = 7; }
              else { out[blockIdx.x] = 3; __threadfence(); atomicExch(flag, 1); }
            }""",
            flag,
            out,
            earlier_waits,
            grid=2,
            block=1,
        )
        assert sorted(out.tolist()) == [3, 7]


def test_a_thread_may_wait_for_another_of_its_warp(run):
    flag = np.zeros(1, np.int32)
    run(
        """extern "C" __global__ void k(int* flag) {
          if (threadIdx.x == 0) while (*(volatile int*)flag == 0);
          else if (threadIdx.x == 1) *(volatile int*)flag = 5;
        }""",
        flag,
    )
    assert flag[0] == 5


def test_spinning_forever_is_a_deadlock(run):
    with pytest.raises(
        sim.Deadlock, match=r"thread 0 of block \(0, 0, 0\) at .*kernel.cu.* spins on memory that nothing changes"
    ):
        run(K + "(int* f) { while (*(volatile int*)f == 0); }", np.zeros(1, np.int32), block=1)


def test_out_of_bounds_names_tensor_thread_and_line(run, tmp_path):
    source = K + "(const float* x, float* y) {\n  y[threadIdx.x] =\n    x[threadIdx.x + 3];\n}"
    path = tmp_path / "k.cu"
    path.write_text(source)
    storage = torch.zeros(64)
    with pytest.raises(sim.MemoryFault, match=r"thread 29 of block \(0, 0, 0\), line 3 of kernel.cu.*reads 4 bytes at 0 bytes"
                       r" after the end of 'x' \(argument 0\) \(128 bytes\)"):  # fmt: skip
        run(source, storage[:32], torch.zeros(32), source=path)
    with pytest.raises(sim.MemoryFault, match="writes 4 bytes at 0 bytes after the end of argument 1 "):
        run(source, torch.zeros(40), storage[:31])


def test_misaligned_access(run):
    with pytest.raises(sim.MemoryFault, match="thread 1 .*misaligned global access of 16 bytes"):
        run(
            K + "(u8* p) { *(uint4*)(p + threadIdx.x * 8) = uint4{1,2,3,4}; }",
            np.zeros(1024, np.uint8).view("u8")[:128],
        )


def test_shared_memory_bounds_and_uninitialised_reads(run):
    out = np.zeros(32, np.int32)
    with pytest.raises(sim.MemoryFault, match=r"thread 8 .*writes 4 bytes at shared address"):
        run(
            K + "(int* o) { __shared__ int s[8]; s[threadIdx.x] = 1; __syncthreads(); o[threadIdx.x] = s[0]; }",
            out,
        )
    with pytest.raises(sim.Hazard, match=r"thread 31 .*reads s \+ 128 .*nothing has written"):
        run(
            K
            + "(int* o) { __shared__ int s[33]; s[threadIdx.x] = 1; __syncthreads(); o[threadIdx.x] = s[threadIdx.x + 1]; }",
            out,
        )


def test_syncthreads_that_some_threads_never_reach(run):
    with pytest.raises(
        sim.Hazard, match=r"__syncthreads at line 1 .*threads 0..9 of block .* exited without reaching it"
    ):
        run(
            K + "(int* o) { if (threadIdx.x < 10) return; __syncthreads(); o[0] = 1; }",
            np.zeros(1, np.int32),
        )
    with pytest.raises(sim.Hazard, match="meet at different barriers"):
        run(
            K + "(int* o) { if (threadIdx.x < 10) { __syncthreads(); o[0] = 1; } else { o[1] = 2; __syncthreads(); } }",
            np.zeros(2, np.int32),
        )


CLUSTER_ORDERS = [dict(order="lazy"), dict(order="eager")] + [dict(seed=seed) for seed in range(8)]


@pytest.mark.parametrize("order", CLUSTER_ORDERS, ids=str)
def test_threads_that_leave_after_arriving_at_the_cluster_barrier_count_once(run, order):
    """Block 1 arrives and exits, before or after the last threads of block 0 arrive. They wait for each other, now and a second time."""
    source = """#include "hopper.cuh"
    extern "C" __global__ void k(int* flag, int* out, int early) {
      __shared__ int values[64];
      const int t = threadIdx.x;
      if (cluster_rank() == 1) {
        if (!early) while (*(volatile int*)flag == 0);
        cluster_arrive();
        if (early) *(volatile int*)flag = 1;
        return;
      }
      if (t >= 32 && early) while (*(volatile int*)flag == 0);
      values[t] = 10 + t;
      if (!early) *(volatile int*)flag = 1;
      cluster_sync();
      out[t] = values[63 - t];
      cluster_sync();
    }"""
    for early in (0, 1):
        flag, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
        run(source, flag, out, early, grid=2, block=64, cluster=2, prelude="", **order)
        assert out.tolist() == [73 - t for t in range(64)]


def test_a_cluster_barrier_that_some_threads_never_reach_waits_for_them_to_exit(run):
    """barrier.cluster.wait is for all threads that have not exited: who leaves without arriving is not missed."""
    out = np.zeros(64, np.int32)
    for order in CLUSTER_ORDERS:
        run(
            """#include "hopper.cuh"
            extern "C" __global__ void k(int* out) {
              if (cluster_rank() == 1 && threadIdx.x >= 32) return;
              cluster_sync();
              if (cluster_rank() == 0) out[threadIdx.x] += 1;
            }""",
            out, grid=2, block=64, cluster=2, prelude="", **order,
        )  # fmt: skip
    assert (out == len(CLUSTER_ORDERS)).all()


ONE_FOR_ALL = """#include "hopper.cuh"
extern "C" __global__ void k(int* out) {
  __shared__ int values[32], own[32], flag;
  __shared__ u64 full, empty;
  const int t = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) mbarrier_init(&full, 1), mbarrier_init(&empty, 1), flag = 1;
  values[t] = t;
  __syncthreads();
  if (warp == 0) {
    FIRST
    if (t == 0) mbarrier_arrive(&empty);
    SECOND
  } else {
    mbarrier_wait(&empty, 0);
    THERE
  }
}"""


@pytest.mark.parametrize("order", CLUSTER_ORDERS, ids=str)
def test_a_lane_speaks_for_the_others_after_they_have_met(run, order):
    """Lane 0 arrives for its warp. What the others have read or written before counts from a __syncwarp() on, what it did itself at once."""
    read, write, there = "out[t] = values[t];", "values[t] = t;", "values[t] = 7;"
    alone = "if (t == 0) flag = 2;"
    right = [
        (read + "__syncwarp();", "", there),
        (read + "named_barrier_sync(1, 32);", "", there),
        (write + "__syncwarp();", "", "out[t] = values[t];"),
        (alone, "", "out[t] = flag;"),
        ("own[t] = t;" + alone, "out[t] = own[t];", "out[t] = flag;"),  # what the others did is not what the second warp is after
        (alone + "own[t] = t;", "out[t] = own[t];", "out[t] = flag;"),
        ("__syncwarp();" + alone + "__syncwarp();" + read + "__syncwarp();", "", there + "out[t] = flag;"),
    ]
    wrong = [
        (read, "", there),
        ("__syncwarp();" + read, "", there),
        (read, "__syncwarp();", there),  # after the arrival it is too late
        (write, "", "out[t] = values[t];"),
        (alone + read, "", there),
        ("if (t == 1) flag = 2;", "", "out[t] = flag;"),  # another lane
        ("if (t < 16) " + read + "if (t < 16) __syncwarp(0xFFFF);" + read, "", there),
    ]
    for first, second, other in right:
        source = ONE_FOR_ALL.replace("FIRST", first).replace("SECOND", second).replace("THERE", other)
        run(source, np.zeros(32, np.int32), block=64, prelude="", **order)
    for first, second, other in wrong:
        source = ONE_FOR_ALL.replace("FIRST", first).replace("SECOND", second).replace("THERE", other)
        with pytest.raises(sim.Hazard, match="race on (values|flag).*by warp 0"):
            run(source, np.zeros(32, np.int32), block=64, prelude="", **order)


def test_shuffle_with_missing_lanes(run):
    with pytest.raises(sim.Hazard, match="exited before"):
        run(
            K + "(int* o) { if (threadIdx.x < 3) return; o[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 0); }",
            np.zeros(32, np.int32),
        )


def test_unknown_instructions_are_named(run):
    with pytest.raises(sim.UnknownInstruction, match=r"line 1 of kernel.cu .*'vadd.s32.s32.s32' is not modelled"):
        run(
            K + '(int* o) { int r; PTX("vadd.s32.s32.s32 %0, %1, %1;" : "=r"(r) : "r"(o[0])); o[0] = r; }',
            np.zeros(1, np.int32),
        )


@pytest.mark.parametrize("kwargs, message", [
    (dict(block=2048), "2048 threads; at most 1024"),
    (dict(grid=(1, 70000)), "65535"),
    (dict(shared_bytes=240000), "240000 bytes of shared memory"),
    (dict(block=1024, registers=80), "80 registers x 1024 threads need 81920"),
    (dict(cluster=2), "not a multiple of cluster"),
    (dict(grid=32, cluster=32), "16 the limit"),
])  # fmt: skip
def test_launch_limits(run, kwargs, message):
    with pytest.raises(sim.LaunchRefused, match=message):
        run(K + "(int* o) { o[0] = 1; }", np.zeros(1, np.int32), **kwargs)


def test_coverage_and_mix(run):
    report = run(
        K + "(int* o) {\n  if (o[0] > 5)\n    o[1] = 3;\n  o[2] = __popc(o[3]);\n}",
        np.zeros(4, np.int32),
        block=1,
    )
    assert ("kernel.cu", 3) in report.not_covered() and ("kernel.cu", 4) not in report.not_covered()
    assert report.instructions["popc"] == 1


def test_a_tensor_right_behind_another_does_not_hide_the_overrun(run):
    storage = torch.zeros(64)
    with pytest.raises(sim.MemoryFault, match="writes 4 bytes at 0 bytes after the end of argument 0 "):
        run(
            K + "(float* x, float* y) { x[threadIdx.x + 32] = y[threadIdx.x]; }",
            storage[:32],
            storage[32:],
        )


def test_bank_conflicts_are_counted_per_line(run):
    source = """extern "C" __global__ void k(float* y) {
      __shared__ float tile[32][PITCH];
      tile[threadIdx.x][0] = 1;
      __syncthreads();
      y[threadIdx.x] = tile[threadIdx.x][0];
    }"""
    for pitch, wavefronts in ((32, 32), (33, 1)):
        report = run(source, np.zeros(32, np.float32), constants={"PITCH": pitch}, trace=True)
        assert report.bank_conflicts == {("kernel.cu", 3): (1, wavefronts), ("kernel.cu", 5): (1, wavefronts)}


def test_an_endless_loop_is_reported(run, monkeypatch):
    monkeypatch.setattr("hopperlab.sim.machine.STEP_LIMIT", 1000)
    with pytest.raises(
        sim.Deadlock,
        match="thread 0 .* ran 1000 steps without synchronising and is at line 2 of kernel.cu.*an endless loop",
    ):
        run(
            K + "(int* o) {\n  for (int i = 0; i < 10; i += o[0]) o[1] = i;\n}",
            np.zeros(2, np.int32),
            block=1,
        )


def test_a_report_reads_as_text(run):
    text = str(
        run(
            K + "(float* o) {\n  if (o[0] > 5)\n    o[1] = 3;\n  o[2] = exp2f(o[3]);\n}",
            np.zeros(4, np.float32),
            block=1,
        )
    )
    assert "lines that no thread executed: kernel.cu:3" in text and "thread instructions" in text
    assert "last bits may differ from a GPU's: ex2.approx" in text
