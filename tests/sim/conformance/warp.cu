// Instructions in which the lanes of a warp, or the threads of a CTA, work together. Launch with one CTA of 128 threads.

#include "hopper.cuh"

#define KERNEL(name) extern "C" __global__ void name(const u32* a, const u32* b, u32* out, int n)
#define OPERANDS                                     \
  const int i = threadIdx.x;                         \
  [[maybe_unused]] const u32 x = a[i], y = b[i], lane = lane_id(); \
  int row = 0;
#define STORE(value) out[row++ * n + i] = (value)

// The third operand of shfl: bits 0-4 clamp, bits 8-12 the mask that splits the warp into segments. ISA 9.7.9.6.
#define SHUFFLE(mode, source, bounds)                                                                              \
  { u32 d, p; asm volatile("{ .reg .pred p; shfl.sync." mode ".b32 %0|p, %2, %3, " bounds ", 0xffffffff; selp.u32 %1, 1, 0, p; }" \
                           : "=r"(d), "=r"(p) : "r"(x), "r"(source)); STORE(d); STORE(p); }
KERNEL(warp_shuffle) {
  OPERANDS
  SHUFFLE("up", 1, "0") SHUFFLE("up", 5, "0") SHUFFLE("up", 3, "0x1800") SHUFFLE("up", 1, "0x1C00")
  SHUFFLE("down", 1, "31") SHUFFLE("down", 7, "31") SHUFFLE("down", 3, "0x1807") SHUFFLE("down", 2, "0x101F") SHUFFLE("down", 4, "20")
  SHUFFLE("bfly", 1, "31") SHUFFLE("bfly", 16, "31") SHUFFLE("bfly", 5, "0x181F") SHUFFLE("bfly", 9, "0x1807")
  SHUFFLE("idx", 0, "31") SHUFFLE("idx", y & 31, "31") SHUFFLE("idx", y & 7, "0x181F") SHUFFLE("idx", y & 31, "0x1807") SHUFFLE("idx", 40, "31")
}

// The two halves of a warp shuffle apart, in different branches.
KERNEL(warp_shuffle_divergent) {
  OPERANDS
  u32 d;
  if (lane < 16) {
    asm volatile("shfl.sync.bfly.b32 %0, %1, 3, 31, 0xffff;" : "=r"(d) : "r"(x));
  } else {
    asm volatile("shfl.sync.idx.b32 %0, %1, 20, 31, 0xffff0000;" : "=r"(d) : "r"(x + 1));
  }
  STORE(d);
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
  if (lane % 3 == 0) asm volatile("shfl.sync.up.b32 %0, %0, 3, 0, 0x49249249;" : "+r"(d));
  STORE(d);
}

#define VOTE(ptx)                                                                                                  \
  { u32 d; asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync." ptx ".pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q; }" \
                        : "=r"(d) : "r"(bit)); STORE(d); }
KERNEL(warp_vote) {
  OPERANDS
  // Warp 0: mixed, warp 1: all true, warp 2: all false, warp 3: one true.
  const u32 warp = i / 32, bit = warp == 0 ? x & 1 : warp == 1 ? 1 : warp == 2 ? 0 : lane == 17;
  VOTE("all") VOTE("any") VOTE("uni")
  u32 d;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }" : "=r"(d) : "r"(bit));
  STORE(d);
  d = 0;
  if (lane >= 8) asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, !p, 0xffffff00; }" : "=r"(d) : "r"(bit));
  STORE(d);
}

KERNEL(warp_match) {
  OPERANDS
  u32 d, p;
  const u32 key = x & 3, same = i / 32 == 1 ? 7 : key;
  const u64 wide = u64(y & 1) << 40 | (x & 1);
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(key));
  STORE(d);
  asm volatile("match.any.sync.b64 %0, %1, 0xffffffff;" : "=r"(d) : "l"(wide));
  STORE(d);
  asm volatile("{ .reg .pred p; match.all.sync.b32 %0|p, %2, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(d), "=r"(p) : "r"(same));
  STORE(d);
  STORE(p);
  d = 0;
  if (lane < 10) asm volatile("match.any.sync.b32 %0, %1, 0x3ff;" : "=r"(d) : "r"(key));
  STORE(d);
}

#define REDUCE(ptx) { u32 d; asm volatile("redux.sync." ptx " %0, %1, 0xffffffff;" : "=r"(d) : "r"(x)); STORE(d); }
KERNEL(warp_reduce) {
  OPERANDS
  REDUCE("add.u32") REDUCE("add.s32") REDUCE("min.u32") REDUCE("max.u32") REDUCE("min.s32") REDUCE("max.s32")
  REDUCE("and.b32") REDUCE("or.b32") REDUCE("xor.b32")
  u32 d = 0;
  if (lane & 1) asm volatile("redux.sync.add.u32 %0, %1, 0xaaaaaaaa;" : "=r"(d) : "r"(x));
  STORE(d);
}

KERNEL(warp_elect) {
  OPERANDS
  u32 leader, elected;
  asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(leader), "=r"(elected));
  STORE(leader);
  STORE(elected);
  leader = elected = 99;
  if (lane >= 12) asm volatile("{ .reg .pred p; elect.sync %0|p, 0xfffff000; selp.u32 %1, 1, 0, p; }" : "=r"(leader), "=r"(elected));
  STORE(leader);
  STORE(elected);
}

KERNEL(warp_registers) {
  OPERANDS
  u32 d;
#define SPECIAL(name) asm volatile("mov.u32 %0, %%" name ";" : "=r"(d)); STORE(d);
  SPECIAL("tid.x") SPECIAL("tid.y") SPECIAL("tid.z") SPECIAL("ntid.x") SPECIAL("ctaid.x") SPECIAL("nctaid.x") SPECIAL("laneid")
  SPECIAL("lanemask_eq") SPECIAL("lanemask_lt") SPECIAL("lanemask_le") SPECIAL("lanemask_gt") SPECIAL("lanemask_ge")
  SPECIAL("cluster_ctarank") SPECIAL("cluster_nctarank") SPECIAL("dynamic_smem_size")
}

// The compiler reconverges a warp after a branch, so each branch sees its own lanes.
KERNEL(warp_active_mask) {
  OPERANDS
  u32 d;
  asm volatile("activemask.b32 %0;" : "=r"(d));
  STORE(d);
  if (lane & 1) {
    asm volatile("activemask.b32 %0;" : "=r"(d));
    out[row * n + i] = d;
  } else {
    out[row * n + i] = x;
  }
}

// bar.red: one value over all threads of the barrier. ISA 9.7.13.1.
KERNEL(barrier_reduce) {
  OPERANDS
  u32 d;
#define BARRIER(ptx, bit)                                                                                              \
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red." ptx ".aligned.pred q, 0, p; selp.u32 %0, 1, 0, q; }" \
               : "=r"(d) : "r"(bit) : "memory"); STORE(d);
  BARRIER("and", 1u) BARRIER("and", u32(i != 77)) BARRIER("or", 0u) BARRIER("or", u32(i == 77))
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.cta.red.popc.aligned.u32 %0, 0, p; }" : "=r"(d) : "r"(x & 1) : "memory");
  STORE(d);
  // Warps 2 and 3 only, on barrier 5.
  d = 0;
  if (i >= 64)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.cta.red.popc.aligned.u32 %0, 5, 64, !p; }" : "=r"(d) : "r"(x & 1) : "memory");
  STORE(d);
}

// Two warps produce, two consume, through a ring of two slots guarded by named barriers.
KERNEL(barrier_named) {
  __shared__ u32 slots[2][64];
  const int i = threadIdx.x, j = i % 64;
  enum { Full = 1, Empty = 3 };  // two barriers each: 1, 2 and 3, 4
  if (i < 64) {
    for (int step = 0; step < 6; ++step) {
      const int slot = step % 2;
      if (step >= 2) named_barrier_sync(Empty + slot, 128);
      slots[slot][j] = a[j] * (step + 1) + b[j];
      named_barrier_arrive(Full + slot, 128);
    }
  } else {
    u32 sum = 0;
    for (int step = 0; step < 6; ++step) {
      const int slot = step % 2;
      named_barrier_sync(Full + slot, 128);
      sum = sum * 31 + slots[slot][63 - j];
      if (step < 4) named_barrier_arrive(Empty + slot, 128);
    }
    out[j] = sum;
  }
}
