// Right kernels in other styles than the pipelined ones: what a race check must not complain about.
#include "hopper.cuh"
WGMMA_INSTANCE(64, e4m3, e4m3)

// No specialisation: thread 0 loads the next tile while all 128 threads multiply this one; one wgmma group stays in flight.
//   D (64, 64) f32 = A (64, K) B (64, K)^T, two buffers of 128 bytes of K
extern "C" __global__ void __launch_bounds__(128)
double_buffer(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* D, int K) {
  extern __shared__ __align__(1024) u8 tiles[];
  __shared__ u64 full[2];
  constexpr int Tile = 64 * 128, Stage = 2 * Tile;
  const int t = threadIdx.x, blocks = K / 128;
  if (t == 0) {
    mbarrier_init(&full[0], 1);
    mbarrier_init(&full[1], 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  auto load = [&](int k) {
    u8* tile = tiles + k % 2 * Stage;
    mbarrier_arrive_expect_tx(&full[k % 2], Stage);
    tma_load_2d(tile, &map_a, &full[k % 2], k * 128, 0);
    tma_load_2d(tile + Tile, &map_b, &full[k % 2], k * 128, 0);
  };
  if (t == 0) load(0);
  float d[32];
  for (int k = 0; k < blocks; ++k) {
    if (k > 0) wgmma_wait<0>();                                    // tile k - 1 has been read by this warpgroup, which is all
    __syncthreads();
    if (t == 0 && k + 1 < blocks) load(k + 1);
    mbarrier_wait(&full[k % 2], k / 2 & 1);
    wgmma_hold(d);
    wgmma_fence();
    const u32 a = shared_address(tiles + k % 2 * Stage), b = a + Tile;
    for (int step = 0; step < 4; ++step)
      wgmma<64, e4m3, e4m3>(d, matrix_descriptor(a + step * 32, Swizzle::Bytes128, 1024),
                            matrix_descriptor(b + step * 32, Swizzle::Bytes128, 1024), k + step);
    wgmma_commit();
  }
  wgmma_wait<0>();
  wgmma_hold(d);
  for (int i = 0; i < 32; ++i) D[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}

// Operands made in the kernel: ordinary stores with the swizzle by hand, a proxy fence, a barrier, then wgmma; in a loop.
extern "C" __global__ void __launch_bounds__(128) made_in_kernel(const float* A, const float* B, float* D, int K) {
  extern __shared__ __align__(1024) u8 tiles[];
  constexpr int Tile = 64 * 128;
  const int t = threadIdx.x;
  float d[32];
  for (int k0 = 0; k0 < K; k0 += 128) {
    for (int i = t; i < 64 * 64; i += 128) {
      const int row = i / 64, pair = i % 64, place = row * 128 + (pair / 8 ^ row % 8) * 16 + pair % 8 * 2;
      const float *a = A + row * K + k0 + pair * 2, *b = B + row * K + k0 + pair * 2;
      *(u16*)(tiles + place) = pack_e4m3(a[0], a[1]);
      *(u16*)(tiles + Tile + place) = pack_e4m3(b[0], b[1]);
    }
    fence_proxy_async_shared();
    __syncthreads();
    wgmma_hold(d);
    wgmma_fence();
    const u32 a = shared_address(tiles);
    for (int step = 0; step < 4; ++step)
      wgmma<64, e4m3, e4m3>(d, matrix_descriptor(a + step * 32, Swizzle::Bytes128, 1024),
                            matrix_descriptor(a + Tile + step * 32, Swizzle::Bytes128, 1024), k0 + step);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    __syncthreads();                                               // every thread's wgmma has read the tiles
  }
  for (int i = 0; i < 32; ++i) D[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}

// Two warps, three buffers of cp.async, ldmatrix and mma.sync: D (32, 8) = A (32, K) B (8, K)^T in bf16.
extern "C" __global__ void __launch_bounds__(64) ampere_style(const u16* A, const u16* B, float* D, int K) {
  __shared__ __align__(128) u16 tile_a[3][32 * 16], tile_b[3][8 * 16];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, steps = K / 16;
  auto load = [&](int k) {
    if (k < steps) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   ::"r"(shared_address(&tile_a[k % 3][t * 8])), "l"(A + t / 2 * K + k * 16 + t % 2 * 8) : "memory");
      if (t < 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     ::"r"(shared_address(&tile_b[k % 3][t * 8])), "l"(B + t / 2 * K + k * 16 + t % 2 * 8) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0);
  load(1);
  float d[4] = {};
  for (int k = 0; k < steps; ++k) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();                                               // tile k is there; tile k - 1 has been read
    load(k + 2);
    u32 a[4];
    load_matrix_x4(a, &tile_a[k % 3][(warp * 16 + lane % 16) * 16 + lane / 16 * 8]);
    const u32 b0 = *(u32*)&tile_b[k % 3][lane / 4 * 16 + lane % 4 * 2], b1 = *(u32*)&tile_b[k % 3][lane / 4 * 16 + lane % 4 * 2 + 8];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  for (int i = 0; i < 4; ++i) D[(warp * 16 + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

// Two staging tiles and TMA stores: a tile is written again once the store before last has read it.
extern "C" __global__ void __launch_bounds__(128) store_ring(const __grid_constant__ TensorMap map, const float* input, int tiles) {
  __shared__ __align__(1024) u8 staging[2][64 * 128];              // 64 rows of 32 floats, 128-byte swizzle
  const int t = threadIdx.x;
  for (int tile = 0; tile < tiles; ++tile) {
    if (t == 0) tma_store_wait_read<1>();
    __syncthreads();
    for (int i = t; i < 64 * 8; i += 128) {
      const int row = i / 8, piece = i % 8;
      *(float4*)(staging[tile % 2] + row * 128 + (piece ^ row % 8) * 16) = *(const float4*)(input + (tile * 64 + row) * 32 + piece * 4);
    }
    fence_proxy_async_shared();
    __syncthreads();
    if (t == 0) {
      tma_store_2d(&map, staging[tile % 2], 0, tile * 64);
      tma_store_commit();
    }
  }
  if (t == 0) tma_store_wait<0>();
}

// Scales as the library copies them: warp 1's cp.async run ahead as far as the ring has slots and arrive at its barriers themselves.
// Rows from `rows` on become zeros and are not read.  sums (32) = X (blocks, rows) added up over its blocks
extern "C" __global__ void __launch_bounds__(64) copied_ring(const float* X, float* sums, int rows, int blocks) {
  constexpr int Slots = 3;
  __shared__ float slots[Slots][32];
  __shared__ u64 full[Slots], empty[Slots];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Slots; ++s) mbarrier_init(&full[s], 32), mbarrier_init(&empty[s], 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  float sum = 0;
  for (int block = 0; block < blocks; ++block) {
    const int s = block % Slots, phase = block / Slots & 1;
    if (warp == 1) {
      mbarrier_wait(&empty[s], phase ^ 1);
      copy_async(&slots[s][lane], X + block * rows + lane, lane < rows);
      copy_async_arrive(&full[s]);
    } else {
      mbarrier_wait(&full[s], phase);
      sum += slots[s][lane];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[s]);
    }
  }
  if (warp == 0) sums[lane] = sum;
}

// Parts of a split K as the library adds them: the other CTAs leave theirs in the first one by st.async, and exit. Nobody waits at the
// cluster barrier but those that use what it guards; a third warp exits once it has arrived.
//   sums (64) of four floats = X (ranks, 64) added up in the order of ranks
extern "C" __global__ void __launch_bounds__(96) parts_to_first(const float4* X, float4* sums, int ranks) {
  __shared__ float4 parts[3][64];
  __shared__ u64 full;
  const int t = threadIdx.x;
  const u32 rank = cluster_rank();
  if (t == 0) {
    mbarrier_init(&full, 1);
    mbarrier_arrive_expect_tx(&full, (ranks - 1) * sizeof parts[0]);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_arrive();
  if (t >= 64) return;
  float4 sum = X[rank * 64 + t];
  cluster_wait();                                                  // the first CTA has its barrier
  if (rank > 0) {
    store_async(&parts[rank - 1][t], &full, 0, sum);
    return;
  }
  mbarrier_wait_cluster(&full, 0);
  for (int other = 1; other < ranks; ++other) {
    const float4 part = parts[other - 1][t];
    sum = float4{sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  sums[t] = sum;
}
