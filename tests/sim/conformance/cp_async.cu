// cp.async, the copies of Ampere: each thread copies 4, 8 or 16 bytes from global to shared memory. ISA 9.7.9.25.
// Launch with one CTA of 64 threads.

#include "hopper.cuh"

constexpr int Threads = 64;

__device__ void fill(u32* shared, int words) {
  for (int j = threadIdx.x; j < words; j += Threads) shared[j] = 0xCCCCCCCC;
  __syncthreads();
}

// Every size, then zero fill with fewer source bytes, then an ignored source.
extern "C" __global__ void cp_async_sizes(const u8* a, u32* out) {
  __shared__ alignas(16) u32 shared[7 * Threads * 4];
  fill(shared, 7 * Threads * 4);
  const int i = threadIdx.x;
#define TARGET(part) "r"(shared_address(&shared[(part * Threads + i) * 4]))
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::TARGET(0), "l"(a + 16 * i) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::TARGET(1), "l"(a + 16 * i + 8) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::TARGET(2), "l"(a + 16 * i) : "memory");
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::TARGET(3), "l"(a + 16 * (Threads - 1 - i)) : "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::TARGET(4), "l"(a + 16 * i), "r"(i % 17) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::TARGET(5), "l"(a + 16 * i), "r"(i % 9) : "memory");
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %2, 20; cp.async.ca.shared.global [%0], [%1], 4, p; }"
               ::TARGET(6), "l"(a + 16 * i), "r"(i) : "memory");
  asm volatile("{ .reg .pred p; setp.gt.s32 p, %2, 50; @p cp.async.ca.shared.global [%0+4], [%1], 4; }"
               ::TARGET(6), "l"(a + 16 * i), "r"(i) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int j = i; j < 7 * Threads * 4; j += Threads) out[j] = shared[j];
}

// A pipeline of three groups: the oldest is read while two are in flight.
extern "C" __global__ void cp_async_groups(const u32* a, u32* out) {
  __shared__ alignas(16) u32 shared[3][Threads];
  const int i = threadIdx.x;
  u32 sum = 0;
  for (int step = 0; step < 8; ++step) {
    if (step >= 2) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      sum = sum * 31 + shared[(step - 2) % 3][Threads - 1 - i];
    }
    if (step < 6)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&shared[step % 3][i])), "l"(a + step * Threads + i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  out[i] = sum;
}

// Completion on an mbarrier: .noinc takes one of the expected arrivals, the other form raises the pending count first,
// so that the thread still arrives by itself.
template <bool Increments>
__device__ __forceinline__ void arrive_after_copy(const u32* a, u32* out) {
  __shared__ alignas(16) u32 shared[Threads];
  __shared__ u64 barrier;
  const int i = threadIdx.x;
  if (i == 0) mbarrier_init(&barrier, Threads);
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&shared[i])), "l"(a + i) : "memory");
  if (Increments) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
    mbarrier_arrive(&barrier);
  } else {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
  }
  mbarrier_wait(&barrier, 0);
  out[i] = shared[Threads - 1 - i];
}
extern "C" __global__ void cp_async_mbarrier_noinc(const u32* a, u32* out) { arrive_after_copy<false>(a, out); }
extern "C" __global__ void cp_async_mbarrier(const u32* a, u32* out) { arrive_after_copy<true>(a, out); }
