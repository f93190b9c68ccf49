// Stage 04, step 1: warpgroups with one job each. A producer warpgroup keeps the ring full; two consumers multiply and never
// wait for an address or a copy to be issued. setmaxnreg moves registers from the one to the others.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (tiles_m * tiles_n), block (Threads): warpgroup 0 loads, the other two multiply; they meet only at the barriers
//   of the ring.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int BlockM = 128;                // outputs of a CTA's tile along m: 64 per consumer warpgroup
constexpr int BlockN = BLOCK_N;            // along n: wgmma's N, a multiple of 8 up to 256
constexpr int BlockK = 128;                // bytes of k in one slot of the ring: the widest swizzle, four wgmma steps of 32
constexpr int Stages = NUM_STAGES;         // slots of the ring
typedef OUTPUT Output;                     // bf16, fp16 or float

constexpr int Consumers = 2;
constexpr int Threads = 128 * (1 + Consumers);
// Registers per thread after the exchange. 128 * (40 + 2 * 232) = 64512 of the SM's 65536: the producer needs few, a
// consumer holds BlockN / 2 accumulators.
constexpr int ProducerRegisters = 40, ConsumerRegisters = 232;

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Stages][BlockM * BlockK];
  u8 b[Stages][BlockN * BlockK];
  u64 full[Stages];                        // the slot's bytes have landed: one arrival (the producer's) and its bytes
  u64 empty[Stages];                       // the slot may be overwritten: one arrival per consumer warp
};

struct Ring {                              // a place in the ring, the same for the producer and each consumer
  int slot = 0;
  u32 phase = 0;
  __device__ void advance() {
    if (++slot == Stages) slot = 0, phase ^= 1;
  }
};

extern "C" __global__ void __launch_bounds__(Threads, 1)
specialized(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float* __restrict__ scale_a, const float* __restrict__ scale_b,
            Output* __restrict__ D, int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int columns = (N + BlockN - 1) / BlockN, k_blocks = (K + BlockK - 1) / BlockK;
  const int m0 = blockIdx.x / columns * BlockM, n0 = blockIdx.x % columns * BlockN;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], 4 * Consumers);
    }
    fence_mbarrier_init();
    tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b);
  }
  __syncthreads();                                                     // the barriers exist

  if (warpgroup == 0) {
    // ---- producer: one thread fills the ring ------------------------------------------------------------------------
    registers_decrease<ProducerRegisters>();
    if (threadIdx.x == 0) {
      Ring ring;
      for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
        mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
        // A whole box is delivered also where it reaches past the tensor: the bytes never depend on M, N or K.
        mbarrier_arrive_expect_tx(&shared.full[ring.slot], (BlockM + BlockN) * BlockK);
        tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], k_block * BlockK, m0);
        tma_load_2d(shared.b[ring.slot], &map_b, &shared.full[ring.slot], k_block * BlockK, n0);
      }
    }
  } else {
    // ---- consumers: 64 rows of the tile each ------------------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    Ring ring;
    float sum[BlockN / 2];
    auto release = [&](int slot) {                                   // this warp is done with a slot
      if (lane == 0) mbarrier_arrive(&shared.empty[slot]);
    };
    int last_slot = 0;
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      mbarrier_wait(&shared.full[ring.slot], ring.phase);
      const u32 a = shared_address(shared.a[ring.slot]) + consumer * 64 * BlockK, b = shared_address(shared.b[ring.slot]);
      wgmma_fence();
      for (int k = 0; k < BlockK; k += 32)
        wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, matrix_descriptor(a + k, Swizzle::Bytes128, 8 * BlockK),
                                          matrix_descriptor(b + k, Swizzle::Bytes128, 8 * BlockK), k_block > 0 || k > 0);
      wgmma_commit();
      wgmma_wait<1>();                                               // all but the four just issued are done
      if (k_block > 0) release(last_slot);
      last_slot = ring.slot;
      ring.advance();
    }
    wgmma_wait<0>();
    wgmma_hold(sum);
    release(last_slot);

    // Epilogue. Thread t holds rows t / 4 and t / 4 + 8 of its warp's 16, columns 8j + t % 4 * 2 and the next.
#pragma unroll                                                         // sum must be indexed by constants to stay in registers
    for (int j = 0; j < BlockN / 8; ++j) {
      const int n = n0 + 8 * j + lane % 4 * 2;
      const float left = n < N ? scale_b[(long long)n * scale_b_stride] : 0.0f;
      const float right = n + 1 < N ? scale_b[(long long)(n + 1) * scale_b_stride] : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = m0 + consumer * 64 + warp * 16 + lane / 4 + 8 * half;
        if (m >= M) continue;
        const float scale = scale_a[(long long)m * scale_a_stride];
        store_pair(&D[(long long)m * N + n], scale * left * sum[4 * j + 2 * half], scale * right * sum[4 * j + 2 * half + 1], N - n,
                   n + 1 < N && N % 2 == 0);
      }
    }
  }
}
