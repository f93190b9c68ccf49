// Warp-specialised FP8 GEMM with block scales: one producer thread, two consumer warpgroups, a ring of NUM_STAGES tiles.
//   D (M, N) bf16 = sum over k blocks of sa[m][k] * sb[n / 128][k] * A_k (M, 128) B_k (N, 128)^T
#include "hopper.cuh"
WGMMA_INSTANCE(128, e4m3, e4m3)

constexpr int BlockM = 128, BlockN = 128, BlockK = 128, Stages = NUM_STAGES;
constexpr int TileBytes = BlockM * BlockK, StageBytes = 2 * TileBytes;

extern "C" __global__ void __launch_bounds__(384, 1)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float* sa, const float* sb, u16* D,
     int M, int N, int K) {
  extern __shared__ __align__(1024) u8 tiles[];                  // Stages x (A tile, B tile)
  __shared__ u64 full[Stages], empty[Stages];
  const int warpgroup = threadIdx.x / 128, k_blocks = K / BlockK, tiles_n = N / BlockN, count = M / BlockM * tiles_n;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {                                          // producer
    registers_decrease<40>();
    if (threadIdx.x == 0) {
      int i = 0;
      for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const int m0 = tile / tiles_n * BlockM, n0 = tile % tiles_n * BlockN;
        for (int k = 0; k < k_blocks; ++k, ++i) {
          const int s = i % Stages, phase = i / Stages & 1;
          mbarrier_wait(&empty[s], phase ^ 1);
          mbarrier_arrive_expect_tx(&full[s], StageBytes);
          tma_load_2d(tiles + s * StageBytes, &map_a, &full[s], k * BlockK, m0);
          tma_load_2d(tiles + s * StageBytes + TileBytes, &map_b, &full[s], k * BlockK, n0);
        }
      }
    }
  } else {                                                       // two consumers, 64 rows each
    registers_increase<232>();
    const int consumer = warpgroup - 1, thread = threadIdx.x % 128;
    int i = 0;
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
      const int n0 = tile % tiles_n * BlockN;
      const int row = tile / tiles_n * BlockM + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
      float sum[64] = {}, part[64];
      for (int k = 0; k < k_blocks; ++k, ++i) {
        const int s = i % Stages, phase = i / Stages & 1;
        const float b_scale = sb[n0 / 128 * k_blocks + k];
        const float scale0 = sa[row * k_blocks + k] * b_scale, scale1 = sa[(row + 8) * k_blocks + k] * b_scale;
        mbarrier_wait(&full[s], phase);
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
        if (thread == 0) mbarrier_arrive(&empty[s]);
        for (int j = 0; j < 64; j += 4) {
          sum[j] = __fmaf_rn(scale0, part[j], sum[j]);
          sum[j + 1] = __fmaf_rn(scale0, part[j + 1], sum[j + 1]);
          sum[j + 2] = __fmaf_rn(scale1, part[j + 2], sum[j + 2]);
          sum[j + 3] = __fmaf_rn(scale1, part[j + 3], sum[j + 3]);
        }
      }
      for (int j = 0; j < 16; ++j) {
        const size_t column = n0 + j * 8 + thread % 4 * 2;
        *(u32*)&D[row * (size_t)N + column] = pack_bf16(sum[4 * j], sum[4 * j + 1]);
        *(u32*)&D[(row + 8) * (size_t)N + column] = pack_bf16(sum[4 * j + 2], sum[4 * j + 3]);
      }
    }
  }
}
