// Clusters: distributed shared memory, remote barriers, cluster barriers. ISA 9.7.13.3, 9.7.9.24. Launch with clusters of
// 2 or 4 CTAs of 64 threads; every kernel ends with a cluster barrier, since peers use its shared memory.

#include "hopper.cuh"

constexpr int Threads = 64;

__device__ u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ u32 remote(const void* pointer, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

extern "C" __global__ void cluster_registers(u32* out) {
  if (threadIdx.x == 0) {
    u32* row = out + 16 * (blockIdx.x + gridDim.x * blockIdx.y);
    u32 d;
    int j = 0;
#define SPECIAL(name) asm volatile("mov.u32 %0, %%" name ";" : "=r"(d)); row[j++] = d;
    SPECIAL("cluster_ctarank") SPECIAL("cluster_nctarank") SPECIAL("cluster_ctaid.x") SPECIAL("cluster_ctaid.y") SPECIAL("cluster_ctaid.z")
    SPECIAL("cluster_nctaid.x") SPECIAL("cluster_nctaid.y") SPECIAL("clusterid.x") SPECIAL("clusterid.y") SPECIAL("nclusterid.x")
    SPECIAL("nclusterid.y") SPECIAL("ctaid.x") SPECIAL("ctaid.y")
  }
}

// Loads, stores and atomics in a peer's shared memory.
extern "C" __global__ void cluster_memory(const u32* a, u32* out) {
  __shared__ u32 values[Threads], inbox[Threads], sums[4];
  const u32 i = threadIdx.x, rank = cluster_rank(), size = cluster_size(), id = blockIdx.x * Threads + i, next = (rank + 1) % size;
  values[i] = a[id];
  if (i < 4) sums[i] = 0;
  cluster_sync();
  u32 value, home;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote(&values[Threads - 1 - i], next)) : "memory");
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote(&inbox[i], next)), "r"(value * 3 + rank) : "memory");
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(home) : "r"(remote(values, next)));
  for (u32 peer = 0; peer < size; ++peer) {
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(remote(&sums[0], peer)), "r"(value) : "memory");
    asm volatile("{ .reg .u32 old; atom.shared::cluster.max.u32 old, [%0], %1; }" ::"r"(remote(&sums[1], peer)), "r"(value) : "memory");
  }
  u32 ticket;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(ticket) : "r"(remote(&sums[2], 0)) : "memory");
  cluster_sync();
  out[id * 4] = inbox[i];
  out[id * 4 + 1] = sums[i % 2];
  out[id * 4 + 2] = home * 10 + (ticket < Threads * size);
  out[id * 4 + 3] = sums[2];
}

// Generic addresses of a peer's memory: mapped from one's own, and converted.
extern "C" __global__ void cluster_generic(const u32* a, u32* out) {
  __shared__ u32 values[Threads];
  const u32 i = threadIdx.x, rank = cluster_rank(), size = cluster_size(), id = blockIdx.x * Threads + i, next = (rank + 1) % size;
  values[i] = a[id];
  cluster_sync();
  u32 mapped, converted;
  asm volatile("{ .reg .u64 g; mapa.u64 g, %1, %2; ld.u32 %0, [g]; }" : "=r"(mapped) : "l"(&values[Threads - 1 - i]), "r"(next) : "memory");
  asm volatile("{ .reg .u64 g; cvta.shared::cluster.u64 g, %1; ld.u32 %0, [g+4]; }"
               : "=r"(converted) : "l"(u64(remote(&values[i & ~1u], next))) : "memory");
  out[2 * id] = mapped;
  out[2 * id + 1] = converted;
  cluster_sync();
}

// The barrier in halves: relaxed for control only, release and acquire for data, work in between.
extern "C" __global__ void cluster_barrier(const u32* a, u32* out) {
  __shared__ u32 values[2][Threads];
  const u32 i = threadIdx.x, rank = cluster_rank(), size = cluster_size(), id = blockIdx.x * Threads + i;
  u32 sum = 0;
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  values[0][i] = a[id];
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every CTA of the cluster has started
  for (u32 round = 0; round < 4; ++round) {
    values[round % 2][i] = a[id] + round * 100;
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    sum *= 3;  // work that needs no peer
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(remote(&values[round % 2][(i + round) % Threads], (rank + round) % size)) : "memory");
    sum += value;
  }
  cluster_sync();
  out[id] = sum;
}

// The same without .aligned, from diverged code: each half of a warp arrives on its own.
extern "C" __global__ void cluster_barrier_unaligned(const u32* a, u32* out) {
  __shared__ u32 values[Threads];
  const u32 i = threadIdx.x, size = cluster_size(), id = blockIdx.x * Threads + i;
  if (i % 32 < 16) {
    values[i] = a[id];
    asm volatile("barrier.cluster.arrive;" ::: "memory");
  } else {
    values[i] = a[id] * 2;
    asm volatile("barrier.cluster.arrive;" ::: "memory");
  }
  asm volatile("barrier.cluster.wait;" ::: "memory");
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote(&values[Threads - 1 - i], size - 1)) : "memory");
  out[id] = value;
  cluster_sync();
}

// Each CTA writes into its neighbour's slot, arrives remotely, and the neighbour answers on the empty barrier.
extern "C" __global__ void cluster_remote_arrive(const u32* a, u32* out) {
  __shared__ u32 slot[32];
  __shared__ u64 full, empty;
  const u32 i = threadIdx.x, lane = i % 32, rank = cluster_rank(), size = cluster_size();
  const u32 next = (rank + 1) % size, previous = (rank + size - 1) % size;
  if (i == 0) {
    mbarrier_init(&full, 32);
    mbarrier_init(&empty, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (i < 32) {
    for (u32 step = 0; step < 5; ++step) {
      mbarrier_wait_cluster(&empty, (step & 1) ^ 1);
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote(&slot[lane], next)), "r"(a[blockIdx.x * 32 + lane] + step) : "memory");
      mbarrier_arrive_remote(&full, next);
    }
  } else {
    u32 sum = 0;
    for (u32 step = 0; step < 5; ++step) {
      mbarrier_wait_cluster(&full, step & 1);
      sum = sum * 5 + slot[31 - lane];
      __syncwarp();
      if (lane == 0) mbarrier_arrive_remote(&empty, previous);
    }
    out[blockIdx.x * 32 + lane] = sum;
  }
  cluster_sync();
}

// Remote arrivals with a count, and remote bytes.
extern "C" __global__ void cluster_remote_bytes(u32* out) {
  __shared__ u64 barrier;
  const u32 rank = cluster_rank(), size = cluster_size();
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 2 * size);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x == 0) {
    for (u32 peer = 0; peer < size; ++peer) {
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], 1;" ::"r"(remote(&barrier, peer)) : "memory");
      asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], 32;" ::"r"(remote(&barrier, peer)) : "memory");
      asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 32;" ::"r"(remote(&barrier, peer)) : "memory");
    }
    mbarrier_wait_cluster(&barrier, 0);
    out[rank] = mbarrier_test(&barrier, 0) | mbarrier_test(&barrier, 1) << 1;
  }
  cluster_sync();
}

// st.async and red.async: stores to a peer that complete bytes on the peer's barrier. ISA 9.7.9.12, 9.7.13.8.
extern "C" __global__ void cluster_store_async(const u32* a, u32* out) {
  __shared__ alignas(16) u32 inbox[4 * 32];
  __shared__ u32 total[2];
  __shared__ u64 barrier;
  const u32 i = threadIdx.x, rank = cluster_rank(), size = cluster_size(), next = (rank + 1) % size, id = blockIdx.x * 32 + i;
  if (i < 2) total[i] = 7;
  if (i == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&barrier, 32 * (4 + 8 + 4 + 4));
  }
  cluster_sync();
  if (i < 32) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(remote(&inbox[i], next)), "r"(a[id]), "r"(remote(&barrier, next)) : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                 ::"r"(remote(&inbox[32 + 2 * i], next)), "r"(a[id] + 1), "r"(a[id] + 2), "r"(remote(&barrier, next)) : "memory");
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
                 ::"r"(remote(&total[0], next)), "r"(a[id]), "r"(remote(&barrier, next)) : "memory");
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.xor.b32 [%0], %1, [%2];"
                 ::"r"(remote(&total[1], next)), "r"(a[id]), "r"(remote(&barrier, next)) : "memory");
    mbarrier_wait_cluster(&barrier, 0);
    for (int j = 0; j < 3; ++j) out[blockIdx.x * 128 + 32 * j + i] = inbox[32 * j + i];
    out[blockIdx.x * 128 + 96 + i] = total[i % 2];
  }
  cluster_sync();
}
