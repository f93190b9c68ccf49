// Stage 05, step 4: the weight gradient. Both operands are gradients or activations, so both have scales per 1x128, and the
// result is FP32, added to what was accumulated before. Each product costs an FMUL beside its FFMA, and a quarter of them is done
// while wgmma runs: more at a time gained nothing. And where the last wave of tiles would leave half of the SMs without work, its
// tiles are cut in two, and it takes half as long.
//
//   D[m][n] = C[m][n] + sum over blocks k' of (scale_a[m][k'] * scale_b[n][k']) * sum over k in k' of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N), FP32; C is what D held before where Accumulate is set.
//   scale_a is (K blocks, M) and scale_b is (K blocks, N), M-major: a block's scales lie side by side, as TMA wants them.
//
//   grid (CTAs, at most one per SM), block (Threads). The grid is persistent. Warpgroup 0 loads, the other two multiply.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int Rounds = ROUNDS;             // wgmma tiles of 64 rows per consumer: 1 or 2
constexpr int RoundRows = 128;             // rows of a tile that one round multiplies, 64 for each consumer
constexpr int BlockM = RoundRows * Rounds; // outputs of a CTA's tile along m
constexpr int BlockN = BLOCK_N;            // along n: a multiple of 16. Registers hold (Rounds + 1) * BlockN / 2 sums: at most 192
constexpr int BlockK = 128;                // bytes of k in one slot of the ring
constexpr int Stages = NUM_STAGES;         // slots of the ring
constexpr int GroupM = GROUP_M;            // rows of tiles that are worked on together, so that L2 serves them
constexpr bool StoreByTma = STORE_BY_TMA;  // false where TMA cannot write D: rows that are not a multiple of 16 bytes
constexpr bool Accumulate = ACCUMULATE;    // add to what D holds
typedef float Output;

// Factors that are made while wgmma runs. 8 gained less and 24 no more: the sums take 192 of a consumer's 232 registers.
constexpr int Early = BlockN < 32 ? BlockN / 2 : 16;

constexpr int Consumers = 2;
constexpr int Threads = 128 * (1 + Consumers);
constexpr int ProducerRegisters = 40, ConsumerRegisters = 232;         // 128 * (40 + 2 * 232) <= 65536
// A panel is what one warp stages for one TMA store: 16 rows of D, as wide as a swizzle span (128, 64 or 32 bytes) can be.
constexpr int RowBytes = BlockN * sizeof(Output);
constexpr int PanelBytes = RowBytes % 128 == 0 ? 128 : RowBytes % 64 == 0 ? 64 : 32;
constexpr int PanelColumns = PanelBytes / sizeof(Output);

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Stages][BlockM * BlockK];
  u8 b[Stages][BlockN * BlockK];
  u8 out[4 * Consumers][16 * PanelBytes];  // one panel per warp
  float scale_a[Stages][BlockM];           // of the slot's block of K
  float scale_b[Stages][(BlockN + 31) / 32 * 32];                      // 128-byte aligned, as TMA writes them
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

struct Work {                              // a tile, or a half of one: its first output, and how many rounds of rows it has
  int m, n, rounds;
};

// The tiles that fill whole waves come first, whole; those of the last wave in halves, if each CTA then has at most one of them.
struct Schedule {
  int rows, columns, whole, items;
  bool halves;
  __device__ Schedule(int M, int N) : rows((M + BlockM - 1) / BlockM), columns((N + BlockN - 1) / BlockN) {
    const int tiles = rows * columns, ctas = gridDim.x, rest = tiles % ctas;
    halves = Rounds == 2 && 2 * rest <= ctas;
    whole = halves ? tiles - rest : tiles;
    items = whole + 2 * (tiles - whole);
  }
  __device__ Work operator[](int item) const {
    const bool half = item >= whole;
    const int index = half ? whole + (item - whole) / 2 : item;
    const int first = index / (GroupM * columns) * GroupM;               // in groups of GroupM rows: within a group m runs fastest
    const int height = min(GroupM, rows - first), within = index % (GroupM * columns);
    return {(first + within % height) * BlockM + (half ? (item - whole) % 2 * RoundRows : 0), within / height * BlockN, half ? 1 : Rounds};
  }
};

// One warp writes 16 rows of D, from row m0 and column n0. total: what a wgmma leaves in a thread's registers.
__device__ void store_rows(const float (&total)[BlockN / 2], const TensorMap& map_d, Output* __restrict__ D, u8* panel, int m0, int n0, int M, int N) {
  const int lane = threadIdx.x % 32;
  if constexpr (StoreByTma) {
#pragma unroll                                                           // total must be indexed by constants to stay in registers
    for (int first = 0; first < BlockN; first += PanelColumns) {
      if (lane == 0) tma_store_wait_read<0>();                         // the panel's last store has read it
      __syncwarp();
      // Byte b of row r lies at r * PanelBytes + b, its 16-byte chunk xored with the row as the map's swizzle has it.
      auto place = [&](int row, int byte) {
        const int offset = row * PanelBytes + byte;
        return panel + (offset ^ (offset >> 3 & (PanelBytes - 16)));
      };
#pragma unroll
      for (int n = 0; n < PanelColumns; n += 16) {                     // 8 registers: 16 columns of two rows, 2 per step of 8
        const float* x = total + (first + n) / 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *reinterpret_cast<float2*>(place(lane / 4 + i % 2 * 8, (n + i / 2 * 8 + lane % 4 * 2) * 4)) = make_float2(x[2 * i], x[2 * i + 1]);
      }
      fence_proxy_async_shared();                                      // the stores above become visible to TMA
      __syncwarp();
      if (lane == 0) {
        // Both clip what lies outside of D. Every element is added to once, so the sum does not depend on timing.
        if constexpr (Accumulate) tma_reduce_add_2d(&map_d, panel, n0 + first, m0);
        else tma_store_2d(&map_d, panel, n0 + first, m0);
        tma_store_commit();
      }
    }
  } else {
    const int m = m0 + lane / 4;
#pragma unroll
    for (int j = 0; j < BlockN / 8; ++j) {
      const int n = n0 + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (m + 8 * half < M && n + i < N) {
            float& d = D[(long long)(m + 8 * half) * N + n + i];
            d = Accumulate ? d + total[4 * j + 2 * half + i] : total[4 * j + 2 * half + i];
          }
    }
  }
}

extern "C" __global__ void __launch_bounds__(Threads, 1)
wgrad(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_scale_a,
      const __grid_constant__ TensorMap map_scale_b, const __grid_constant__ TensorMap map_d, Output* __restrict__ D, int M, int N, int K) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // The shuffle tells the compiler that a warp's threads agree on it, so that descriptors stay in uniform registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const Schedule schedule(M, N);
  const int k_blocks = (K + BlockK - 1) / BlockK;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], 4 * Consumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();                                                     // the barriers exist

  if (warpgroup == 0) {
    // ---- producer: one thread fills the ring ------------------------------------------------------------------------
    registers_decrease<ProducerRegisters>();
    if (threadIdx.x == 0) {
      Ring ring;
      for (int item = blockIdx.x; item < schedule.items; item += gridDim.x) {
        const Work work = schedule[item];
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
          u64* full = &shared.full[ring.slot];
          mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
          mbarrier_arrive_expect_tx(full, (work.rounds * RoundRows + BlockN) * (BlockK + sizeof(float)));
          for (int round = 0; round < work.rounds; ++round) {
            const int first = round * RoundRows;
            tma_load_2d(shared.a[ring.slot] + first * BlockK, &map_a, full, k_block * BlockK, work.m + first);
            tma_load_2d(shared.scale_a[ring.slot] + first, &map_scale_a, full, work.m + first, k_block);
          }
          tma_load_2d(shared.scale_b[ring.slot], &map_scale_b, full, work.n, k_block);
          tma_load_2d(shared.b[ring.slot], &map_b, full, k_block * BlockK, work.n);
        }
      }
    }
  } else {
    // ---- consumers: 64 rows of each round -----------------------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const u64 a_first = matrix_descriptor(shared_address(shared.a[0]) + consumer * 64 * BlockK, Swizzle::Bytes128, 8 * BlockK);
    const u64 b_first = matrix_descriptor(shared_address(shared.b[0]), Swizzle::Bytes128, 8 * BlockK);
    const int my_row = consumer * 64 + warp * 16 + lane / 4;           // of a round; the thread's other row is 8 further
    Ring ring;
    u64 a_slot = a_first, b_slot = b_first;                            // descriptors of the current slot
    for (int item = blockIdx.x; item < schedule.items; item += gridDim.x) {
      const Work work = schedule[item];
      // Compiled for a half and for a whole tile: so there is no branch around a wgmma.
#pragma unroll
      for (int known = 1; known <= Rounds; ++known) {
        if (work.rounds != known) continue;
        float total[Rounds][BlockN / 2], sum[BlockN / 2];              // FP32 on CUDA cores; the tensor core's accumulator
#pragma unroll
        for (int round = 0; round < known; ++round)
#pragma unroll
          for (int i = 0; i < BlockN / 2; ++i) total[round][i] = 0.0f;

#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
          mbarrier_wait(&shared.full[ring.slot], ring.phase);
#pragma unroll
          for (int round = 0; round < known; ++round) {
            const u64 a_round = a_slot + round * (RoundRows * BlockK / 16);
            wgmma_fence();
            for (int k = 0; k < BlockK; k += 32) wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, a_round + k / 16, b_slot + k / 16, k > 0);
            wgmma_commit();
            const float scale_a[2] = {shared.scale_a[ring.slot][my_row + round * RoundRows], shared.scale_a[ring.slot][my_row + round * RoundRows + 8]};
            // What register i is multiplied by: its row's scale times its column's. The first ones while the tensor core works.
            auto factor_of = [&](int i) { return scale_a[i / 2 % 2] * shared.scale_b[ring.slot][i / 4 * 8 + lane % 4 * 2 + i % 2]; };
            float early[Early];
#pragma unroll
            for (int i = 0; i < Early; ++i) early[i] = factor_of(i);
            wgmma_hold(early);
            wgmma_wait<0>();
            wgmma_hold(sum);
#pragma unroll
            for (int i = 0; i < BlockN / 2; ++i)
              total[round][i] = __fmaf_rn(sum[i], i < Early ? early[i % Early] : factor_of(i), total[round][i]);
          }
          __syncwarp();                                                // all lanes have read their scales
          if (lane == 0) mbarrier_arrive(&shared.empty[ring.slot]);
          ring.advance();
          a_slot = ring.slot == 0 ? a_first : a_slot + BlockM * BlockK / 16;
          b_slot = ring.slot == 0 ? b_first : b_slot + BlockN * BlockK / 16;
        }
#pragma unroll
        for (int round = 0; round < known; ++round)
          store_rows(total[round], map_d, D, shared.out[consumer * 4 + warp], work.m + round * RoundRows + consumer * 64 + warp * 16, work.n, M, N);
      }
    }
    if (StoreByTma && lane == 0) tma_store_wait<0>();                  // D is written before the kernel ends
  }
}
