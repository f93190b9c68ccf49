// Address spaces, widths of loads and stores, control flow and calls.

#include "hopper.cuh"

// Dynamic indices keep the array in local memory.
extern "C" __global__ void local_array(const u32* a, u32* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  u32 values[16];
  for (int j = 0; j < 16; ++j) values[j] = a[(i + j) % n];
  for (int j = 0; j < 40; ++j) {
    const u32 from = values[j % 16] % 16, to = (values[from] >> 8) % 16;
    values[to] += values[from] * 3 + j;
  }
  u32 sum = 0;
  for (int j = 0; j < 16; ++j) sum = sum * 5 + values[(j * 7) % 16];
  out[i] = sum;
}

// One generic pointer per thread into one of three spaces, and its space tested.
extern "C" __global__ void generic_address(const u32* a, u32* out, int n) {
  __shared__ u32 shared[128];
  u32 local[4];
  const int i = threadIdx.x;
  shared[i] = a[i] + 1;
  for (int j = 0; j < 4; ++j) local[j] = a[i] * (j + 2);
  __syncthreads();
  const u32* pointer = i % 3 == 0 ? &shared[127 - i] : i % 3 == 1 ? &local[a[i] % 4] : &a[i];
  u32 spaces = 0;
#define SPACE(name, bit)                                                                                 \
  { u32 d; asm volatile("{ .reg .pred p; isspacep." name " p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(d) : "l"(pointer)); spaces |= d << bit; }
  SPACE("global", 0) SPACE("shared", 1) SPACE("local", 2)
  u32 value;
  asm volatile("ld.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  u32* target = i & 1 ? &shared[i] : &out[2 * n + i];
  __syncthreads();
  asm volatile("st.u32 [%0], %1;" ::"l"(target), "r"(value + 5) : "memory");
  asm volatile("{ .reg .u32 old; atom.add.u32 old, [%0], 3; }" ::"l"(target) : "memory");
  __syncthreads();
  out[i] = value;
  out[n + i] = spaces;
  if (i & 1) out[2 * n + i] = shared[i];
}

// Loads of every width with their extension, vectors, cache operators, predicates.
extern "C" __global__ void widths(const u8* a, u8* out) {
  const int i = threadIdx.x;
  const u8* p = a + 32 * i;
  u64 r[8];
  asm volatile("{ .reg .s16 h; ld.global.s8 h, [%1]; cvt.s64.s16 %0, h; }" : "=l"(r[0]) : "l"(p));
  asm volatile("{ .reg .u16 h; ld.global.u8 h, [%1+1]; cvt.u64.u16 %0, h; }" : "=l"(r[1]) : "l"(p));
  asm volatile("{ .reg .s32 w; ld.global.s16 w, [%1+2]; cvt.s64.s32 %0, w; }" : "=l"(r[2]) : "l"(p));
  asm volatile("{ .reg .u32 w; ld.global.nc.u16 w, [%1+4]; cvt.u64.u32 %0, w; }" : "=l"(r[3]) : "l"(p));
  asm volatile("ld.global.cg.s32 %0, [%1+8];" : "=l"(r[4]) : "l"(p));
  asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2+16];" : "=l"(r[5]), "=l"(r[6]) : "l"(p));
  asm volatile("ld.volatile.global.u32 %0, [%1+12];" : "=l"(r[7]) : "l"(p));
  u8* q = out + 64 * i;
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(q), "l"(r[0]), "l"(r[1]) : "memory");
  asm volatile("st.global.u64 [%0+16], %1;" ::"l"(q), "l"(r[2]) : "memory");
  asm volatile("st.global.cs.u64 [%0+24], %1;" ::"l"(q), "l"(r[3]) : "memory");
  asm volatile("st.global.wt.u32 [%0+32], %1;" ::"l"(q), "r"(u32(r[4])) : "memory");
  asm volatile("st.global.u16 [%0+36], %1;" ::"l"(q), "h"(u16(r[4] >> 32)) : "memory");
  asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, 60; @p st.global.u8 [%0+38], 7; @!p st.global.u8 [%0+39], 9; }" ::"l"(q), "r"(i) : "memory");
  u32 w0, w1, w2, w3;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w0), "=r"(w1), "=r"(w2), "=r"(w3) : "l"(p));
  asm volatile("st.global.v4.u32 [%0+48], {%1, %2, %3, %4};" ::"l"(q), "r"(w3), "r"(w2), "r"(w1), "r"(w0) : "memory");
  asm volatile("st.global.u64 [%0+40], %1;" ::"l"(q), "l"(r[5] ^ r[6] ^ r[7]) : "memory");
}

__constant__ u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ u32 counter[4] = {100, 200, 300, 400};

// Constant and device variables with initial values, static and dynamic shared memory, bytes in shared memory.
extern "C" __global__ void variables(const u32* a, u32* out, int n) {
  __shared__ u8 bytes[128];
  extern __shared__ u32 dynamic[];
  const int i = threadIdx.x;
  bytes[i] = u8(a[i]);
  dynamic[i] = a[i] ^ table[i % 8];
  __syncthreads();
  const u32 word = *reinterpret_cast<const u32*>(&bytes[i / 4 * 4]);
  out[i] = word + dynamic[127 - i];
  out[n + i] = counter[i % 4] + table[a[i] % 8];
}

__device__ __noinline__ u32 collatz(u32 value, int* steps) {
  while (value > 1 && *steps < 50) {
    value = value & 1 ? 3 * value + 1 : value / 2;
    ++*steps;
  }
  return value;
}

// A call, loops of different length per thread, a switch (brx.idx), early exits.
extern "C" __global__ void control_flow(const u32* a, u32* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i % 17 == 3) return;
  int steps = 0;
  u32 value = collatz(a[i] % 1000, &steps);
  u32 result = 0;
  switch (a[i] % 9) {
    case 0: result = value * 3; break;
    case 1: result = value ^ a[(i + 1) % n]; break;
    case 2: for (u32 j = 0; j < a[i] / 9 % 20; ++j) result = result * 7 + j; break;
    case 3: result = __popc(a[i]); break;
    case 4: result = a[i] > 0x80000000u ? a[i] / 3 : a[i] * 5; break;
    case 5: out[n + i] = 1; return;
    case 6: result = __clz(a[i]); break;
    case 7: result = 77; break;
    default: result = steps * 1000; break;
  }
  out[i] = result + steps;
  out[n + i] = a[i] % 9;
}

// Threads of one warp exit at different times and the rest still meets in barriers, 2-D block.
extern "C" __global__ void early_exit(const u32* a, u32* out) {
  __shared__ u32 sums[128];
  const int i = threadIdx.y * blockDim.x + threadIdx.x;
  sums[i] = a[i];
  __syncthreads();
  if (threadIdx.y == 7) return;  // half of the last warp
  u32 value = sums[(i * 5) % 128];
  out[i] = value + threadIdx.x * 1000 + threadIdx.y;
}

extern "C" int printf(const char*, ...);

// The text goes to the host; the result does not depend on it.
extern "C" __global__ void prints(const u32* a, u32* out) {
  const int i = threadIdx.x;
  if (i == 5) printf("thread %d has %u\n", i, a[i]);
  out[i] = a[i] + 1;
}

// The producer warpgroup gives registers to the consumer. ISA 9.7.19.5.
extern "C" __global__ void __launch_bounds__(256, 1) register_reallocation(const u32* a, u32* out) {
  __shared__ u32 values[128];
  const int i = threadIdx.x % 128;
  if (threadIdx.x < 128) {
    registers_decrease<40>();
    values[i] = a[i] * 3;
    named_barrier_arrive(1, 256);
  } else {
    registers_increase<200>();
    named_barrier_sync(1, 256);
    out[i] = values[127 - i] + 1;
  }
}
