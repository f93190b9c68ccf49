// Stage 05, step 1: partial sums leave the tensor core. Its accumulator keeps 14 bits; every Interval blocks of K it starts
// from zero, and its value is added to an FP32 sum in ordinary registers: promotion.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (CTAs, at most one per SM), block (Threads). The grid is persistent. Warpgroup 0 loads, the other two multiply.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int BlockM = 128;                // outputs of a CTA's tile along m: 64 per consumer warpgroup
constexpr int BlockN = BLOCK_N;            // along n: a multiple of 16, at most 192: sum and total are both in registers
constexpr int BlockK = 128;                // bytes of k in one slot of the ring
constexpr int Stages = NUM_STAGES;         // slots of the ring
constexpr int GroupM = GROUP_M;            // rows of tiles that are worked on together, so that L2 serves them
constexpr int Interval = INTERVAL;         // blocks of k between promotions; 0 for never
constexpr float Threshold = THRESHOLD;     // promote as soon as a sum is larger in magnitude; 0 for no such rule
constexpr bool StoreByTma = STORE_BY_TMA;  // false where TMA cannot write D: rows that are not a multiple of 16 bytes
typedef OUTPUT Output;                     // bf16, fp16 or float

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

// Tile `index` -> its row and column, in groups of GroupM rows: within a group m runs fastest.
__device__ void locate(int index, int rows, int columns, int& row, int& column) {
  const int first = index / (GroupM * columns) * GroupM;
  const int height = min(GroupM, rows - first);
  const int within = index % (GroupM * columns);
  row = first + within % height;
  column = within / height;
}

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
        if constexpr (sizeof(Output) == 2) {
          store_matrix_x4(place(lane % 16, n * 2 + lane / 16 * 16), pack<Output>(x[0], x[1]), pack<Output>(x[2], x[3]),
                          pack<Output>(x[4], x[5]), pack<Output>(x[6], x[7]));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            *reinterpret_cast<float2*>(place(lane / 4 + i % 2 * 8, (n + i / 2 * 8 + lane % 4 * 2) * 4)) = make_float2(x[2 * i], x[2 * i + 1]);
        }
      }
      fence_proxy_async_shared();                                      // the stores above become visible to TMA
      __syncwarp();
      if (lane == 0) {
        tma_store_2d(&map_d, panel, n0 + first, m0);                   // clips what lies outside of D
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
        if (m + 8 * half < M)
          store_pair(&D[(long long)(m + 8 * half) * N + n], total[4 * j + 2 * half], total[4 * j + 2 * half + 1], N - n, n + 1 < N && N % 2 == 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Threads, 1)
promoted(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_d,
         const float* __restrict__ scale_a, const float* __restrict__ scale_b, Output* __restrict__ D, int M, int N, int K,
         int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // The shuffle tells the compiler that a warp's threads agree on it, so that descriptors stay in uniform registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int rows = (M + BlockM - 1) / BlockM, columns = (N + BlockN - 1) / BlockN;
  const int tiles = rows * columns, k_blocks = (K + BlockK - 1) / BlockK;

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
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int row, column;
        locate(tile, rows, columns, row, column);
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
          mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
          mbarrier_arrive_expect_tx(&shared.full[ring.slot], (BlockM + BlockN) * BlockK);
          tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], k_block * BlockK, row * BlockM);
          tma_load_2d(shared.b[ring.slot], &map_b, &shared.full[ring.slot], k_block * BlockK, column * BlockN);
        }
      }
    }
  } else {
    // ---- consumers: 64 rows of the tile each ------------------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const u64 a_first = matrix_descriptor(shared_address(shared.a[0]) + consumer * 64 * BlockK, Swizzle::Bytes128, 8 * BlockK);
    const u64 b_first = matrix_descriptor(shared_address(shared.b[0]), Swizzle::Bytes128, 8 * BlockK);
    Ring ring;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      int row, column;
      locate(tile, rows, columns, row, column);
      const int m0 = row * BlockM + consumer * 64 + warp * 16, n0 = column * BlockN;   // of this warp

      float total[BlockN / 2], sum[BlockN / 2];                        // FP32 on CUDA cores; the tensor core's accumulator
#pragma unroll
      for (int i = 0; i < BlockN / 2; ++i) total[i] = 0.0f;
      int blocks = 0;                                                  // in sum
#pragma unroll 1
      for (int k_block = 0; k_block < k_blocks; ++k_block) {
        mbarrier_wait(&shared.full[ring.slot], ring.phase);
        const u64 a = a_first + ring.slot * (BlockM * BlockK / 16), b = b_first + ring.slot * (BlockN * BlockK / 16);
        wgmma_fence();
        for (int k = 0; k < BlockK; k += 32) wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, a + k / 16, b + k / 16, blocks > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(sum);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[ring.slot]);
        ring.advance();
        // `blocks` counts what sum holds; wgmma ignores the old sum where blocks is 0.
        ++blocks;
        bool due = blocks == Interval || k_block + 1 == k_blocks;
        if constexpr (Threshold > 0) {                                 // one decision for the warpgroup, whose wgmma it is
          float largest = 0;
#pragma unroll
          for (int i = 0; i < BlockN / 2; ++i) largest = fmaxf(largest, fabsf(sum[i]));
          due |= named_barrier_or(1 + consumer, 128, largest > Threshold);
        }
        if (due) {
#pragma unroll
          for (int i = 0; i < BlockN / 2; ++i) total[i] += sum[i];
          blocks = 0;
        }
      }

      // A thread holds rows lane / 4 and 8 further, columns 8j + lane % 4 * 2 and the next.
      float row_scale[2];
      for (int half = 0; half < 2; ++half) {
        const int m = m0 + lane / 4 + 8 * half;
        row_scale[half] = m < M ? scale_a[(long long)m * scale_a_stride] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < BlockN / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int n = n0 + 8 * j + lane % 4 * 2 + i;
          const float column_scale = n < N ? scale_b[(long long)n * scale_b_stride] : 0.0f;
          total[4 * j + i] *= row_scale[0] * column_scale;
          total[4 * j + 2 + i] *= row_scale[1] * column_scale;
        }
      store_rows(total, map_d, D, shared.out[consumer * 4 + warp], m0, n0, M, N);
    }
    if (StoreByTma && lane == 0) tma_store_wait<0>();                  // D is written before the kernel ends
  }
}
