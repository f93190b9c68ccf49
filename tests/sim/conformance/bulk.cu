// Bulk copies without a tensor map. ISA 9.7.9.27.4. Addresses and sizes are multiples of 16 bytes.

#include "hopper.cuh"

// Global -> shared in pieces of different size, one barrier for all, then back out through the registers.
extern "C" __global__ void bulk_from_global(const u8* a, u32* out) {
  __shared__ alignas(128) u8 shared[1024];
  __shared__ u64 barrier;
  u32* words = reinterpret_cast<u32*>(shared);
  const int i = threadIdx.x;
  for (int j = i; j < 256; j += blockDim.x) words[j] = 0xCCCCCCCC;
  if (i == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async_shared();
  __syncthreads();
  if (i == 0) {
    mbarrier_arrive_expect_tx(&barrier, 16 + 48 + 512);
    bulk_load(shared, a, 16, &barrier);
    bulk_load(shared + 32, a + 128, 48, &barrier);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 256;" ::"l"(a + 256) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], 512, [%2], %3;"
                 ::"r"(shared_address(shared + 256)), "l"(a + 256), "r"(shared_address(&barrier)), "l"(L2EvictFirst) : "memory");
  }
  mbarrier_wait(&barrier, 0);
  for (int j = i; j < 256; j += blockDim.x) out[j] = words[j];
}

// Shared -> global in three groups; the staging buffer is reused after the first group has been read.
extern "C" __global__ void bulk_to_global(const u32* a, u8* out) {
  __shared__ alignas(128) u32 staging[2][64];
  const int i = threadIdx.x;  // 64 threads
  for (int step = 0; step < 3; ++step) {
    if (i == 0 && step >= 2) tma_store_wait_read<1>();
    __syncthreads();
    staging[step % 2][i] = a[step * 64 + i] + step;
    fence_proxy_async_shared();
    __syncthreads();
    if (i == 0) {
      bulk_store(out + 272 * step, staging[step % 2], 256 - 16 * step);
      tma_store_commit();
    }
  }
  if (i == 0) tma_store_wait<0>();
}

// Shared of this CTA -> shared of the next CTA of the cluster, completing on the receiver's barrier. 64 threads.
extern "C" __global__ void bulk_to_peer(const u32* a, u32* out) {
  __shared__ alignas(128) u32 source[64], target[64];
  __shared__ u64 barrier;
  const u32 i = threadIdx.x, rank = cluster_rank();
  u32 size, to, at;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  source[i] = a[blockIdx.x * 64 + i];
  target[i] = 0xCCCCCCCC;
  if (i == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&barrier, 192);
  }
  fence_proxy_async_shared();
  cluster_sync();
  if (i == 0) {
    const u32 next = (rank + 1) % size;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(target + 8)), "r"(next));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(&barrier)), "r"(next));
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 192, [%2];"
                 ::"r"(to), "r"(shared_address(source)), "r"(at) : "memory");
  }
  mbarrier_wait_cluster(&barrier, 0);
  out[blockIdx.x * 64 + i] = target[i];
  cluster_sync();
}

// Global -> the shared memory of the CTAs in the mask.
extern "C" __global__ void bulk_multicast(const u8* a, u32* out, int mask) {
  __shared__ alignas(128) u32 target[64];
  __shared__ u64 barrier;
  const u32 i = threadIdx.x, rank = cluster_rank();
  target[i] = 0xCCCCCCCC;
  if (i == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&barrier, mask >> rank & 1 ? 128 : 0);
  }
  fence_proxy_async_shared();
  cluster_sync();
  if (i == 0 && rank == 1)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 128, [%2], %3;"
                 ::"r"(shared_address(target + 16)), "l"(a), "r"(shared_address(&barrier)), "h"(u16(mask)) : "memory");
  mbarrier_wait_cluster(&barrier, 0);
  out[blockIdx.x * 64 + i] = target[i];
  cluster_sync();
}

// Shared of each CTA, added to the shared memory of CTA 0. 64 threads.
extern "C" __global__ void bulk_reduce_to_peer(const u32* a, u32* out) {
  __shared__ alignas(128) u32 source[64], sum[64];
  __shared__ u64 barrier;
  const u32 i = threadIdx.x, rank = cluster_rank();
  u32 size, to, at;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  source[i] = a[blockIdx.x * 64 + i];
  sum[i] = i;
  if (i == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&barrier, rank == 0 ? 256 * size : 0);
  }
  fence_proxy_async_shared();
  cluster_sync();
  if (i == 0) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(to) : "r"(shared_address(sum)));
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(at) : "r"(shared_address(&barrier)));
    asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 256, [%2];"
                 ::"r"(to), "r"(shared_address(source)), "r"(at) : "memory");
  }
  mbarrier_wait_cluster(&barrier, 0);
  out[blockIdx.x * 64 + i] = sum[i];
  cluster_sync();
}

// Shared, combined with global memory; out holds its initial values. 128 threads.
#define REDUCE(name, operation)                                                                        \
  extern "C" __global__ void name(const u32* a, u32* out) {                                            \
    __shared__ alignas(128) u32 staging[128];                                                          \
    const int i = threadIdx.x;                                                                         \
    staging[i] = a[i];                                                                                 \
    fence_proxy_async_shared();                                                                        \
    __syncthreads();                                                                                   \
    if (i == 0) {                                                                                      \
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." operation " [%0], [%1], 512;" \
                   ::"l"(out), "r"(shared_address(staging)) : "memory");                               \
      tma_store_commit();                                                                              \
      tma_store_wait<0>();                                                                             \
    }                                                                                                  \
  }
REDUCE(bulk_reduce_add_u32, "add.u32")
REDUCE(bulk_reduce_add_s32, "add.s32")
REDUCE(bulk_reduce_add_u64, "add.u64")
REDUCE(bulk_reduce_min_u32, "min.u32")
REDUCE(bulk_reduce_min_s32, "min.s32")
REDUCE(bulk_reduce_max_u32, "max.u32")
REDUCE(bulk_reduce_max_s32, "max.s32")
REDUCE(bulk_reduce_min_s64, "min.s64")
REDUCE(bulk_reduce_max_u64, "max.u64")
REDUCE(bulk_reduce_inc_u32, "inc.u32")
REDUCE(bulk_reduce_dec_u32, "dec.u32")
REDUCE(bulk_reduce_and_b32, "and.b32")
REDUCE(bulk_reduce_or_b32, "or.b32")
REDUCE(bulk_reduce_xor_b64, "xor.b64")
REDUCE(bulk_reduce_add_f32, "add.f32")
REDUCE(bulk_reduce_add_f64, "add.f64")
REDUCE(bulk_reduce_add_noftz_f16, "add.noftz.f16")
REDUCE(bulk_reduce_add_noftz_bf16, "add.noftz.bf16")
REDUCE(bulk_reduce_min_f16, "min.f16")
REDUCE(bulk_reduce_max_bf16, "max.bf16")
