// Tensor copies. ISA 5.5, 9.7.9.27.5. Shared memory is filled with a mark first and read back raw afterwards, so that the
// recorded bytes show layout, swizzle, fill and what was left alone.
//
// RANK: dimensions of the map. bytes: of one box, which the barrier expects. window: read back, from a multiple of 1024 on.
// offset: where in the window the box starts.

#include "hopper.cuh"

constexpr int Threads = 128;

#if RANK == 1
#define LOAD(to, barrier) tma_load_1d(to, &map, barrier, x)
#define STORE(from) tma_store_1d(&map, from, x)
#elif RANK == 2
#define LOAD(to, barrier) tma_load_2d(to, &map, barrier, x, y)
#define STORE(from) tma_store_2d(&map, from, x, y)
#elif RANK == 3
#define LOAD(to, barrier) tma_load_3d(to, &map, barrier, x, y, z)
#define STORE(from) tma_store_3d(&map, from, x, y, z)
#elif RANK == 4
#define LOAD(to, barrier) tma_load_4d(to, &map, barrier, x, y, z, w)
#define STORE(from) tma_store_4d(&map, from, x, y, z, w)
#else
#define LOAD(to, barrier) tma_load_5d(to, &map, barrier, x, y, z, w, v)
#define STORE(from) tma_store_5d(&map, from, x, y, z, w, v)
#endif

// The start of dynamic shared memory, rounded up to 1024 bytes, the period of the widest swizzle.
__device__ u8* aligned(u8* raw) { return raw + (1024 - shared_address(raw) % 1024) % 1024; }

__device__ void fill(u8* tile, int window) {
  for (int j = threadIdx.x; j < window / 4; j += Threads) reinterpret_cast<u32*>(tile)[j] = 0xCCCCCCCC;
  fence_proxy_async_shared();
}

#ifndef OPERATION
extern "C" __global__ void tma_load(const __grid_constant__ TensorMap map, u32* out, int bytes, int window, int offset, int x, int y, int z, int w, int v) {
  extern __shared__ u8 raw[];
  __shared__ u64 barrier;
  u8* tile = aligned(raw);
  fill(tile, window);
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    tma_prefetch_map(&map);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&barrier, bytes);
    LOAD(tile + offset, &barrier);
  }
  mbarrier_wait(&barrier, 0);
  for (int j = threadIdx.x; j < window / 4; j += Threads) out[j] = reinterpret_cast<u32*>(tile)[j];
}

// The tile is written by the threads as plain bytes; the store un-swizzles it.
extern "C" __global__ void tma_store(const __grid_constant__ TensorMap map, const u32* a, int bytes, int offset, int x, int y, int z, int w, int v) {
  extern __shared__ u8 raw[];
  u8* tile = aligned(raw) + offset;
  for (int j = threadIdx.x; j < bytes / 4; j += Threads) reinterpret_cast<u32*>(tile)[j] = a[j];
  fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    STORE(tile);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

#endif

#if RANK == 2
// OPERATION: add, min, max, inc, dec, and, or, xor, in the type of the map.
#ifdef OPERATION
#define TEXT(x) #x
#define EXPANDED(x) TEXT(x)
extern "C" __global__ void tma_reduce(const __grid_constant__ TensorMap map, const u32* a, int bytes, int x, int y) {
  extern __shared__ u8 raw[];
  u8* tile = aligned(raw);
  for (int j = threadIdx.x; j < bytes / 4; j += Threads) reinterpret_cast<u32*>(tile)[j] = a[j];
  fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." EXPANDED(OPERATION) ".tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(shared_address(tile)), "r"(x), "r"(y) : "memory");
    tma_store_commit();
    tma_store_wait<0>();
  }
}
#else

// Every CTA of the cluster loads one box and sends it to the CTAs of its mask, boxes side by side in their shared memory.
// masks: 4 bits per rank. Each CTA expects the boxes of the ranks whose mask holds its bit.
extern "C" __global__ void tma_multicast(const __grid_constant__ TensorMap map, u32* out, int bytes, int masks) {
  extern __shared__ u8 raw[];
  __shared__ u64 barrier;
  u8* tile = aligned(raw);
  const u32 rank = cluster_rank();
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  for (int j = threadIdx.x; j < size * bytes / 4; j += Threads) reinterpret_cast<u32*>(tile)[j] = 0xCCCCCCCC;
  fence_proxy_async_shared();
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    u32 boxes = 0;
    for (u32 peer = 0; peer < size; ++peer) boxes += masks >> (4 * peer + rank) & 1;
    mbarrier_arrive_expect_tx(&barrier, boxes * bytes);
  }
  cluster_sync();
  const u16 mask = masks >> (4 * rank) & 15;
  if (threadIdx.x == 0 && mask) tma_load_multicast_2d(tile + rank * bytes, &map, &barrier, mask, 0, 8 * rank);
  mbarrier_wait_cluster(&barrier, 0);
  for (int j = threadIdx.x; j < size * bytes / 4; j += Threads) out[blockIdx.x * size * bytes / 4 + j] = reinterpret_cast<u32*>(tile)[j];
  cluster_sync();
}

// A ring of two slots with phases: five boxes down a column, predicated issue, cache hint and prefetch on the way.
extern "C" __global__ void tma_pipeline(const __grid_constant__ TensorMap map, u32* out, int bytes) {
  extern __shared__ u8 raw[];
  __shared__ u64 full[2];
  u8* tile = aligned(raw);
  const int i = threadIdx.x;
  if (i < 2) {
    mbarrier_init(&full[i], 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  u32 sum = 0;
  for (int step = 0; step < 6; ++step) {
    if (step < 5 && i == 0) {
      mbarrier_arrive_expect_tx(&full[step % 2], bytes);
      tma_load_2d(tile + step % 2 * bytes, &map, &full[step % 2], 0, 8 * step, L2EvictLast);
      asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(0), "r"(8 * step + 8) : "memory");
    }
    if (step) {
      const int slot = (step - 1) % 2;
      mbarrier_wait(&full[slot], (step - 1) / 2 & 1);
      sum = sum * 31 + reinterpret_cast<const u32*>(tile + slot * bytes)[i];
    }
    __syncthreads();
  }
  out[i] = sum;
}

// The instruction itself under a predicate that only thread 3 has.
extern "C" __global__ void tma_predicated(const __grid_constant__ TensorMap map, u32* out, int bytes) {
  extern __shared__ u8 raw[];
  __shared__ u64 barrier;
  u8* tile = aligned(raw);
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %3, 3;\n"
      " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%2], %4;\n"
      " @p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%5, %5}], [%2]; }"
      ::"r"(shared_address(tile)), "l"(&map), "r"(shared_address(&barrier)), "r"(threadIdx.x), "r"(bytes), "r"(0) : "memory");
  mbarrier_wait(&barrier, 0);
  for (int j = threadIdx.x; j < bytes / 4; j += Threads) out[j] = reinterpret_cast<u32*>(tile)[j];
}
#endif
#endif
