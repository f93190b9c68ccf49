// Stage 03, step 1: wgmma multiplies straight from the tiles that TMA leaves in shared memory. One buffer: load, wait,
// multiply, wait.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (tiles_m * tiles_n), block (Threads): two warpgroups, each computes 64 rows of the CTA's BlockM x BlockN tile.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int BlockM = 128;                // outputs of a CTA along m: 64, wgmma's M, per warpgroup
constexpr int BlockN = BLOCK_N;            // along n: wgmma's N, a multiple of 8 up to 256
constexpr int BlockK = 128;                // bytes of k in a tile: one row of it is one span of the 128-byte swizzle
typedef OUTPUT Output;                     // bf16, fp16 or float
constexpr int Threads = 256;

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[BlockM * BlockK];
  u8 b[BlockN * BlockK];
  u64 full;                                // the tiles' bytes have landed
};

extern "C" __global__ void __launch_bounds__(Threads)
one_buffer(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float* __restrict__ scale_a, const float* __restrict__ scale_b,
           Output* __restrict__ D, int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int columns = (N + BlockN - 1) / BlockN, k_blocks = (K + BlockK - 1) / BlockK;
  const int m0 = blockIdx.x / columns * BlockM, n0 = blockIdx.x % columns * BlockN;

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();                                                     // the barrier exists

  // A tile in shared memory is rows of 128 bytes. Eight rows, 1024 bytes, are one swizzle period: the stride between groups
  // of eight rows that a descriptor needs. A step of 32 along k moves the start by 32 bytes inside the row.
  const u32 a = shared_address(shared.a) + warpgroup * 64 * BlockK, b = shared_address(shared.b);
  float sum[BlockN / 2];
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    if (threadIdx.x == 0) {
      // A whole box is delivered also where it reaches past the tensor: the bytes never depend on M, N or K.
      mbarrier_arrive_expect_tx(&shared.full, (BlockM + BlockN) * BlockK);
      tma_load_2d(shared.a, &map_a, &shared.full, k_block * BlockK, m0);
      tma_load_2d(shared.b, &map_b, &shared.full, k_block * BlockK, n0);
    }
    mbarrier_wait(&shared.full, k_block & 1);                          // the barrier's phase flips with every block
    wgmma_fence();
    for (int k = 0; k < BlockK; k += 32)
      wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, matrix_descriptor(a + k, Swizzle::Bytes128, 8 * BlockK),
                                        matrix_descriptor(b + k, Swizzle::Bytes128, 8 * BlockK), k_block > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();                                                   // both warpgroups are done with the tiles
  }
  wgmma_hold(sum);

  // Epilogue. Thread t of a warp holds rows t / 4 and t / 4 + 8 of the warp's 16, columns 8j + t % 4 * 2 and the next.
#pragma unroll                                                         // sum must be indexed by constants to stay in registers
  for (int j = 0; j < BlockN / 8; ++j) {
    const int n = n0 + 8 * j + lane % 4 * 2;
    const float left = n < N ? scale_b[(long long)n * scale_b_stride] : 0.0f;
    const float right = n + 1 < N ? scale_b[(long long)(n + 1) * scale_b_stride] : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + warpgroup * 64 + warp * 16 + lane / 4 + 8 * half;
      if (m >= M) continue;
      const float scale = scale_a[(long long)m * scale_a_stride];
      store_pair(&D[(long long)m * N + n], scale * left * sum[4 * j + 2 * half], scale * right * sum[4 * j + 2 * half + 1], N - n,
                 n + 1 < N && N % 2 == 0);
    }
  }
}
