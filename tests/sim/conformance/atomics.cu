// Atomics and reductions on global memory from several CTAs. What is stored does not depend on the order of the CTAs:
// operations commute exactly, or the order is fixed by a semaphore. Grids are far smaller than the machine, so all CTAs
// run at the same time and may wait for one another.

#include "hopper.cuh"

#define EACH(ptx, slot, value) asm volatile("{ .reg .b32 old; " ptx " old, [%0], %1; }" ::"l"(out + slot), "r"(value) : "memory");
#define SILENT(ptx, slot, value) asm volatile(ptx " [%0], %1;" ::"l"(out + slot), "r"(value) : "memory");

// out holds its initial values.
extern "C" __global__ void atomic_integer(const u32* a, u32* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 x = a[i];
  EACH("atom.global.add.u32", 0, x)
  EACH("atom.global.min.u32", 1, x)
  EACH("atom.global.max.u32", 2, x)
  EACH("atom.global.min.s32", 3, x)
  EACH("atom.global.max.s32", 4, x)
  EACH("atom.global.and.b32", 5, x | 0xF0F00000)
  EACH("atom.global.or.b32", 6, x & 0x00FF00FF)
  EACH("atom.global.xor.b32", 7, x)
  EACH("atom.global.inc.u32", 8, 36)
  EACH("atom.global.dec.u32", 9, 41)
  EACH("atom.relaxed.gpu.global.add.s32", 10, x)
  EACH("atom.acq_rel.sys.global.add.u32", 11, x & 0xFFFF)
  SILENT("red.global.add.u32", 12, x)
  SILENT("red.global.min.s32", 13, x)
  SILENT("red.global.max.u32", 14, x)
  SILENT("red.global.and.b32", 15, x | 0x0000FFFF)
  SILENT("red.global.or.b32", 16, x & 0x0F0F0F0F)
  SILENT("red.global.xor.b32", 17, x)
  SILENT("red.release.gpu.global.add.u32", 18, 1)
  SILENT("red.global.inc.u32", 19, 10)
  asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, 0; @p red.global.add.u32 [%0], 1; }" ::"l"(out + 20), "r"(x) : "memory");
  // Every thread swaps its value in and adds what came out to a sum.
  u32 old;
  asm volatile("atom.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(out + 21), "r"(x) : "memory");
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(out + 22), "r"(old) : "memory");
  // Tickets are a permutation of 0 ... threads - 1; the last one adds the value that stayed: then the sum is that of all.
  __threadfence();
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(out + 24) : "memory");
  out[32 + old] = 1000 + old;
  if (old == gridDim.x * blockDim.x - 1) {
    __threadfence();
    __stcg(out + 22, __ldcg(out + 22) + __ldcg(out + 21));
    __stcg(out + 21, 0u);
  }
}

extern "C" __global__ void atomic_wide(const u64* a, u64* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const u64 x = a[i];
#define WIDE(ptx, slot, value) asm volatile(ptx " [%0], %1;" ::"l"(out + slot), "l"(value) : "memory");
  WIDE("red.global.add.u64", 0, x)
  WIDE("red.global.min.u64", 1, x)
  WIDE("red.global.max.u64", 2, x)
  WIDE("red.global.min.s64", 3, x)
  WIDE("red.global.max.s64", 4, x)
  WIDE("red.global.and.b64", 5, x | 0xFFFF)
  WIDE("red.global.or.b64", 6, x & 0xFF00FF00FF00FF00ull)
  WIDE("red.global.xor.b64", 7, x)
  // Compare and swap until it succeeds: a product of odd numbers, which commutes.
  u64 seen = 0, wanted;
  do {
    wanted = seen;
    asm volatile("atom.global.cas.b64 %0, [%1], %2, %3;" : "=l"(seen) : "l"(out + 8), "l"(wanted), "l"(wanted * (x | 1)) : "memory");
  } while (seen != wanted);
}

// Whole numbers below 2^11 add exactly in every format, in any order.
extern "C" __global__ void atomic_float(const u32* a, u32* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = float(a[i] % 8);
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(out), "f"(x) : "memory");
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(out + 2), "d"(double(x)) : "memory");
  asm volatile("{ .reg .f32 old; atom.global.add.f32 old, [%0], %1; }" ::"l"(out + 6), "f"(-x) : "memory");
  // One thread per address: the rounding of a single addition, subnormals included.
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(out + 16 + i), "f"(__uint_as_float(a[i])) : "memory");
}

extern "C" __global__ void atomic_half(const u32* a, u32* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 halves = pack_f16(float(a[i] % 8), i % 2 ? 1.0f : 0.0f), bfloats = pack_bf16(i % 3 ? 0.0f : 1.0f, i % 5 ? 1.0f : 0.0f);
  asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(out), "r"(halves) : "memory");
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(out + 1), "r"(bfloats) : "memory");
}

// Four floats by one reduction: whole numbers that meet, then one thread per address, subnormals included.
extern "C" __global__ void atomic_vector(const u32* a, u32* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = float(a[i] % 8);
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(out + i % 4 * 4), "f"(x), "f"(x + 1), "f"(x + 2), "f"(-x) : "memory");
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(out + 16 + 4 * i), "f"(__uint_as_float(a[4 * i])),
               "f"(__uint_as_float(a[4 * i + 1])), "f"(__uint_as_float(a[4 * i + 2])), "f"(__uint_as_float(a[4 * i + 3])) : "memory");
}

// Shared-memory atomics, returned values included where they do not depend on the order.
extern "C" __global__ void atomic_shared(const u32* a, u32* out) {
  __shared__ u32 slot[8];
  __shared__ u32 histogram[16];
  const int i = threadIdx.x;
  if (i < 8) slot[i] = i == 2 || i == 5 ? 0xFFFFFFFF : 0;
  if (i < 16) histogram[i] = 0;
  __syncthreads();
  const u32 x = a[i];
#define SHARED(ptx, index, value) asm volatile("{ .reg .b32 old; " ptx " old, [%0], %1; }" ::"r"(shared_address(&slot[index])), "r"(value) : "memory");
  SHARED("atom.shared.add.u32", 0, x)
  SHARED("atom.shared.max.s32", 1, x)
  SHARED("atom.shared.min.u32", 2, x)
  SHARED("atom.shared.xor.b32", 3, x)
  SHARED("atom.shared::cta.inc.u32", 4, 50)
  SHARED("atom.shared.and.b32", 5, x | 0xFF)
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(shared_address(&slot[6])), "r"(x & 0xFF00) : "memory");
  asm volatile("red.shared.add.f32 [%0], 0f3F800000;" ::"r"(shared_address(&slot[7])) : "memory");
  u32 place;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(place) : "r"(shared_address(&histogram[x % 16])) : "memory");
  __syncthreads();
  if (i < 8) out[i] = slot[i];
  if (i < 16) out[8 + i] = histogram[i];
  out[32 + i] = place < histogram[x % 16];
}

// Split-K, last one sums: each CTA writes its partial result, takes a ticket, and the last adds all of them in order.
extern "C" __global__ void split_k_ticket(const float* a, float* partial, u32* ticket, float* out) {
  __shared__ u32 mine;
  const int i = threadIdx.x, width = blockDim.x;
  partial[blockIdx.x * width + i] = a[blockIdx.x * width + i] * 1.5f;
  __threadfence();
  __syncthreads();
  if (i == 0) mine = atomicAdd(ticket, 1);
  __syncthreads();
  if (mine != gridDim.x - 1) return;
  __threadfence();
  float sum = 0;
  for (int cta = 0; cta < gridDim.x; ++cta) sum += __ldcg(&partial[cta * width + i]);
  out[i] = sum;
}

// Split-K in turn: CTA i waits for CTA i - 1, adds its part, and passes the turn on. The rounding order is fixed.
extern "C" __global__ void split_k_turns(const float* a, u32* turn, float* out) {
  const int i = threadIdx.x;
  if (i == 0) {
    u32 now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != blockIdx.x);
  }
  __syncthreads();
  float sum = blockIdx.x ? __ldcg(&out[i]) : 0.0f;
  __stcg(&out[i], sum + a[blockIdx.x * blockDim.x + i]);
  __syncthreads();
  if (i == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
}

// A lock by compare and swap around a read-modify-write that commutes.
extern "C" __global__ void spin_lock(const u32* a, u32* lock, u32* out) {
  if (threadIdx.x == 0) {
    u32 old;
    do {
      asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(lock) : "memory");
    } while (old != 0);
    const u32 sum = __ldcg(out);
    __stcg(out, sum + a[blockIdx.x]);
    asm volatile("{ .reg .b32 old; atom.release.gpu.global.exch.b32 old, [%0], 0; }" ::"l"(lock) : "memory");
  }
}
