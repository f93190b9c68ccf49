// The same GEMM on clusters of two CTAs: each loads its A tile and half of the shared B tile for both (multicast). The bf16
// result goes through a swizzled staging tile (stmatrix) and TMA stores.
#include "hopper.cuh"
WGMMA_INSTANCE(128, e4m3, e4m3)

constexpr int BlockM = 128, BlockN = 128, BlockK = 128, Stages = NUM_STAGES, Cluster = 2;
constexpr int TileBytes = BlockM * BlockK, StageBytes = 2 * TileBytes, StagingBytes = 64 * BlockN * 2;

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(288, 1)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_d,
     const float* sa, const float* sb, int M, int N, int K) {
  extern __shared__ __align__(1024) u8 tiles[];                  // Stages x (A tile, B tile), two staging tiles
  __shared__ u64 full[Stages], empty[Stages];
  const int warp = threadIdx.x / 32, k_blocks = K / BlockK, tiles_n = N / BlockN, count = M / BlockM * tiles_n;
  const u32 rank = cluster_rank();

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 2 * Cluster);                     // two consumers in each CTA read what is multicast
    }
    fence_mbarrier_init();
  }
  cluster_sync();                                                // peers arrive on these barriers

  if (warp == 8) {                                               // producer
    if (elect_one()) {
      int i = 0;
      for (int pair = blockIdx.x / Cluster; pair < count / Cluster; pair += gridDim.x / Cluster) {
        const int m0 = (pair / tiles_n * Cluster + rank) * BlockM, n0 = pair % tiles_n * BlockN;
        for (int k = 0; k < k_blocks; ++k, ++i) {
          const int s = i % Stages, phase = i / Stages & 1;
          u8* a = tiles + s * StageBytes;
          mbarrier_wait_cluster(&empty[s], phase ^ 1);
          mbarrier_arrive_expect_tx(&full[s], StageBytes);
          tma_load_2d(a, &map_a, &full[s], k * BlockK, m0);
          tma_load_multicast_2d(a + TileBytes + rank * (TileBytes / 2), &map_b, &full[s], 3, k * BlockK, n0 + rank * (BlockN / 2));
        }
      }
    }
  } else {                                                       // two consumers, 64 rows each
    const int consumer = warp / 4, thread = threadIdx.x % 128, lane = thread % 32;
    u8* staging = tiles + Stages * StageBytes + consumer * StagingBytes;   // two 64 x 64 halves of 128-byte rows
    int i = 0;
    for (int pair = blockIdx.x / Cluster; pair < count / Cluster; pair += gridDim.x / Cluster) {
      const int m0 = (pair / tiles_n * Cluster + rank) * BlockM + consumer * 64, n0 = pair % tiles_n * BlockN;
      const int row = m0 + thread / 32 * 16 + lane / 4;
      float sum[64] = {}, part[64];
      for (int k = 0; k < k_blocks; ++k, ++i) {
        const int s = i % Stages, phase = i / Stages & 1;
        const float b_scale = sb[n0 / 128 * k_blocks + k];
        const float scale0 = sa[row * k_blocks + k] * b_scale, scale1 = sa[(row + 8) * k_blocks + k] * b_scale;
        mbarrier_wait_cluster(&full[s], phase);
        const u32 a = shared_address(tiles + s * StageBytes + consumer * 64 * BlockK);
        const u32 b = shared_address(tiles + s * StageBytes + TileBytes);
        wgmma_hold(part);
        wgmma_fence();
        for (int step = 0; step < 4; ++step)
          wgmma<128, e4m3, e4m3>(part, matrix_descriptor(a + step * 32, Swizzle::Bytes128, 1024),
                                 matrix_descriptor(b + step * 32, Swizzle::Bytes128, 1024), step);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(part);
        if (thread < Cluster) mbarrier_arrive_remote(&empty[s], thread);
        for (int j = 0; j < 64; j += 4) {
          sum[j] = __fmaf_rn(scale0, part[j], sum[j]);
          sum[j + 1] = __fmaf_rn(scale0, part[j + 1], sum[j + 1]);
          sum[j + 2] = __fmaf_rn(scale1, part[j + 2], sum[j + 2]);
          sum[j + 3] = __fmaf_rn(scale1, part[j + 3], sum[j + 3]);
        }
      }
      if (thread == 0) tma_store_wait_read<0>();                 // the last tile has left the staging buffer
      named_barrier_sync(consumer + 1, 128);
      for (int j = 0; j < 8; ++j) {                              // 16 columns at a time
        const int tile_row = thread / 32 * 16 + lane % 16, column = j * 2 + lane / 16;   // in pieces of 16 bytes
        u8* place = staging + column / 8 * (64 * 128) + tile_row * 128 + ((column % 8 ^ tile_row % 8) * 16);
        store_matrix_x4(place, pack_bf16(sum[8 * j], sum[8 * j + 1]), pack_bf16(sum[8 * j + 2], sum[8 * j + 3]),
                        pack_bf16(sum[8 * j + 4], sum[8 * j + 5]), pack_bf16(sum[8 * j + 6], sum[8 * j + 7]));
      }
      fence_proxy_async_shared();
      named_barrier_sync(consumer + 1, 128);
      if (thread == 0) {
        for (int half = 0; half < 2; ++half) tma_store_2d(&map_d, staging + half * 64 * 128, n0 + half * 64, m0);
        tma_store_commit();
      }
    }
    if (thread == 0) tma_store_wait<0>();
  }
  cluster_sync();                                                // nobody leaves while a peer may still write here
}
