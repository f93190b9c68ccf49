// Stage 02, step 2: two buffers. While every warp multiplies one pair of tiles, TMA brings the next.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (tiles_m * tiles_n), block (Threads): eight warps, 2 along m and 4 along n, each computes 64 x 32 outputs.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int BlockM = 128, BlockN = 128;  // outputs of a CTA
constexpr int BlockK = 128;                // bytes of k in a tile: one row of it is one span of the 128-byte swizzle
constexpr int WarpM = 64, WarpN = 32;      // outputs of a warp
typedef OUTPUT Output;                     // bf16, fp16 or float
constexpr int Threads = 256;

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[2][BlockM * BlockK];
  u8 b[2][BlockN * BlockK];
  u64 full[2];                             // a buffer's bytes have landed
};

// Where byte k of row `row` lies in a tile that TMA wrote with a 128-byte swizzle: the 16-byte chunk number is XORed with the
// row. Eight rows of the same chunk then lie in eight different groups of banks, and ldmatrix reads them in one pass.
__device__ __forceinline__ const u8* swizzled(const u8* tile, int row, int k) {
  // BLANK 1: the address, with the chunk where the swizzle put it  (about 1 line; stuck? hopperlab hint 02 1)
  // END BLANK
}

// Multiply one pair of tiles into the warp's sums.
__device__ __forceinline__ void multiply(float (&sum)[WarpM / 16][WarpN / 8][4], const u8* tile_a, const u8* tile_b, int lane) {
#pragma unroll 1                                                       // unrolled, the next steps' fragments would cost registers
  for (int k = 0; k < BlockK; k += 32) {
    u32 a[WarpM / 16][4], b[WarpN / 16][4];
    // One ldmatrix.x4 reads 16 rows x 32 bytes. Lane l names row l % 8 of its piece l / 8. For A the pieces are rows 0-7 and
    // 8-15 at k, then at k + 16; for B rows 0-7 at k and k + 16, then rows 8-15: the order mma_sync wants them in.
#pragma unroll
    for (int i = 0; i < WarpM / 16; ++i) load_matrix_x4(a[i], swizzled(tile_a, 16 * i + lane % 16, k + lane / 16 * 16));
    // BLANK 2: the fragments of B: each lane names the row of its piece  (about 2 lines; stuck? hopperlab hint 02 2)
    // END BLANK
#pragma unroll
    for (int i = 0; i < WarpM / 16; ++i)
#pragma unroll
      for (int j = 0; j < WarpN / 8; ++j) mma_sync<A_FORMAT, B_FORMAT>(sum[i][j], a[i], &b[j / 2][j % 2 * 2]);
  }
}

extern "C" __global__ void __launch_bounds__(Threads, 2)               // two CTAs per SM: at most 128 registers per thread
two_buffers(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float* __restrict__ scale_a, const float* __restrict__ scale_b,
            Output* __restrict__ D, int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp / 4 * WarpM, warp_n = warp % 4 * WarpN;
  const int columns = (N + BlockN - 1) / BlockN, k_blocks = (K + BlockK - 1) / BlockK;
  const int m0 = blockIdx.x / columns * BlockM, n0 = blockIdx.x % columns * BlockN;

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full[0], 1);
    mbarrier_init(&shared.full[1], 1);
    fence_mbarrier_init();
  }
  __syncthreads();                                                     // the barriers exist

  auto load = [&](int k_block) {                                       // by thread 0: block i goes to buffer i % 2
    const int buffer = k_block % 2;
    // BLANK 3: announce the bytes of both tiles on the buffer's barrier, and start their copies  (about 3 lines; stuck? hopperlab hint 02 3)
    // END BLANK
  };
  if (threadIdx.x == 0 && k_blocks > 0) load(0);

  float sum[WarpM / 16][WarpN / 8][4] = {};
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const int buffer = k_block % 2;
    if (threadIdx.x == 0 && k_block + 1 < k_blocks) load(k_block + 1); // the other buffer: free since the last __syncthreads
    // BLANK 4: wait for this block's bytes  (about 1 line; stuck? hopperlab hint 02 4)
    // END BLANK
    multiply(sum, shared.a[buffer] + warp_m * BlockK, shared.b[buffer] + warp_n * BlockK, lane);
    __syncthreads();                                                   // every warp is done with this buffer
  }

  // Epilogue. Lane l holds rows l / 4 and l / 4 + 8 of each 16, columns l % 4 * 2 and the next of each 8.
#pragma unroll
  for (int j = 0; j < WarpN / 8; ++j) {
    const int n = n0 + warp_n + 8 * j + lane % 4 * 2;
    const float left = n < N ? scale_b[(long long)n * scale_b_stride] : 0.0f;
    const float right = n + 1 < N ? scale_b[(long long)(n + 1) * scale_b_stride] : 0.0f;
#pragma unroll
    for (int i = 0; i < WarpM / 8; ++i) {                              // rows 8i to 8i + 7: half of a 16-row fragment
      const int m = m0 + warp_m + 8 * i + lane / 4;
      if (m >= M) continue;
      const float scale = scale_a[(long long)m * scale_a_stride];
      const float* x = &sum[i / 2][j][i % 2 * 2];
      store_pair(&D[(long long)m * N + n], scale * left * x[0], scale * right * x[1], N - n, n + 1 < N && N % 2 == 0);
    }
  }
}
