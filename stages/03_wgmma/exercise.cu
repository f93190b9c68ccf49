// Stage 03, step 2: a ring of tiles. While the tensor cores work on one slot, TMA fills the others.
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
constexpr int Stages = NUM_STAGES;         // slots of the ring
static_assert(Stages >= 2, "with one slot, the block that everyone waits for is only asked for after the wait: a deadlock");
typedef OUTPUT Output;                     // bf16, fp16 or float
constexpr int Threads = 256;

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Stages][BlockM * BlockK];
  u8 b[Stages][BlockN * BlockK];
  u64 full[Stages];                        // the slot's bytes have landed: one arrival and its bytes
  u64 empty[Stages];                       // the slot may be overwritten: one arrival per warp
};

extern "C" __global__ void __launch_bounds__(Threads)
ring(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float* __restrict__ scale_a, const float* __restrict__ scale_b,
     Output* __restrict__ D, int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int columns = (N + BlockN - 1) / BlockN, k_blocks = (K + BlockK - 1) / BlockK;
  const int m0 = blockIdx.x / columns * BlockM, n0 = blockIdx.x % columns * BlockN;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], Threads / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();                                                     // the barriers exist

  // Thread 0 fills slots. Block i goes to slot i % Stages, as the (i / Stages)-th use of it.
  auto load = [&](int k_block) {
    const int slot = k_block % Stages;
    // BLANK 1: announce the bytes of both tiles on the slot's full barrier, and start their copies  (about 3 lines; stuck? hopperlab hint 03 1)
    // END BLANK
  };
  if (threadIdx.x == 0)
    for (int k_block = 0; k_block < min(Stages, k_blocks); ++k_block) load(k_block);

  float sum[BlockN / 2];
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const int slot = k_block % Stages;
    const u32 a = shared_address(shared.a[slot]) + warpgroup * 64 * BlockK, b = shared_address(shared.b[slot]);
    // BLANK 2: wait until the slot's bytes of this use have landed  (about 1 line; stuck? hopperlab hint 03 2)
    // END BLANK
    wgmma_fence();
    for (int k = 0; k < BlockK; k += 32) {
      // BLANK 3: multiply 32 of k: describe both tiles, and start from zero at the very first step  (about 2 lines; stuck? hopperlab hint 03 3)
      // END BLANK
    }
    wgmma_commit();
    wgmma_wait<1>();                                                   // the block before is done, this one may still run
    if (k_block > 0) {
      const int last = k_block - 1, last_slot = last % Stages;
      // BLANK 4: say that this warp is done with the last slot; thread 0 refills it when every warp is  (about 5 lines; stuck? hopperlab hint 03 4)
      // END BLANK
      __syncwarp();                                                    // wgmma wants the warp together again
    }
  }
  wgmma_wait<0>();
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
