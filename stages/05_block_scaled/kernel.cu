// Stage 05, step 3: promotion costs the tensor core as little as it can. A consumer works on Rounds times 64 rows: one
// accumulator serves all of them in turn, so each block of K is waited for once and promoted Rounds times, and the tensor core
// has the other warpgroup's rounds to work on meanwhile. Everything else is done while a wgmma runs: scales are read, the next
// block's barrier is waited for, the next tile is found, and outputs are stored. A tile's first round is stored under the wgmma
// of its last one, its last round under the first wgmma of the next tile: the accumulator holds none of them by then.
//
//   D[m][n] = sum over blocks k' of (scale_a[m][k'] * scale_b[n / 128][k']) * sum over k in k' of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   scale_a is (K blocks, M), M-major: a block's scales lie side by side, as TMA wants them.   scale_b is (N / 128, K blocks).
//
//   grid (CTAs, at most one per SM), block (Threads). The grid is persistent. Warpgroup 0 loads, the other two multiply.
//   The host also has promotion's FFMAs issued more densely than the compiler would (hopperlab.sass).

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int Rounds = ROUNDS;             // wgmma tiles of 64 rows per consumer: 1 or 2
constexpr int BlockM = 128 * Rounds;       // outputs of a CTA's tile along m
constexpr int BlockN = BLOCK_N;            // along n: a multiple of 16. Registers hold (Rounds + 1) * BlockN / 2 sums: at most 192
constexpr int BlockK = 128;                // bytes of k in one slot of the ring
constexpr int Stages = NUM_STAGES;         // slots of the ring
constexpr int GroupM = GROUP_M;            // rows of tiles that are worked on together, so that L2 serves them
constexpr bool StoreByTma = STORE_BY_TMA;  // false where TMA cannot write D: rows that are not a multiple of 16 bytes
typedef OUTPUT Output;                     // bf16, fp16 or float

constexpr int Consumers = 2;
constexpr int Threads = 128 * (1 + Consumers);
constexpr int ProducerRegisters = 40, ConsumerRegisters = 232;         // 128 * (40 + 2 * 232) <= 65536
// A panel is what one warp stages for one TMA store: 16 rows of D, as wide as a swizzle span (128, 64 or 32 bytes) can be.
constexpr int RowBytes = BlockN * sizeof(Output);
constexpr int PanelBytes = RowBytes % 128 == 0 ? 128 : RowBytes % 64 == 0 ? 64 : 32;
constexpr int PanelColumns = PanelBytes / sizeof(Output);

// Columns in a row that surely have one scale of B: tiles start at multiples of BlockN, scales change at multiples of 128.
constexpr int Chunk = (BlockN & -BlockN) < 128 ? BlockN & -BlockN : 128;                // x & -x: the largest power of two in x
constexpr int ScaleBlocks = (128 - Chunk + BlockN - 1) / 128 + 1;     // blocks of B's scales that a tile can touch

// L2 keeps the tiles of A that the next columns of tiles read again, where it can hold those of a group of rows: 20 of its 50 MB.
constexpr long long KeptBytes = 20 << 20;

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Stages][BlockM * BlockK];
  u8 b[Stages][BlockN * BlockK];
  u8 out[4 * Consumers][16 * PanelBytes];  // one panel per warp
  float scale_a[Stages][BlockM];           // of the slot's block of K
  float scale_b[Stages][(ScaleBlocks + 3) / 4 * 4];                    // whole 16 bytes: the compiler reads them at once
  u64 full[Stages];                        // the slot is filled: one arrival with TMA's bytes, one when B's scales are there
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
        tma_store_2d(&map_d, panel, n0 + first, m0, L2EvictFirst);     // clips what lies outside of D, which nobody here reads
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
overlapped(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_scale_a,
           const __grid_constant__ TensorMap map_d, const float* __restrict__ scale_b, Output* __restrict__ D, int M, int N, int K) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // The shuffle tells the compiler that a warp's threads agree on it, so that descriptors stay in uniform registers.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int rows = (M + BlockM - 1) / BlockM, columns = (N + BlockN - 1) / BlockN;
  const int tiles = rows * columns, k_blocks = (K + BlockK - 1) / BlockK;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 2);
      mbarrier_init(&shared.empty[s], 4 * Consumers);
    }
    fence_mbarrier_init();
    tma_prefetch_map(&map_a), tma_prefetch_map(&map_b), tma_prefetch_map(&map_scale_a), tma_prefetch_map(&map_d);
  }
  __syncthreads();                                                     // the barriers exist

  if (warpgroup == 0) {
    // ---- producers: one thread fills the ring with tiles and A's scales, another with B's scales ---------------------
    registers_decrease<ProducerRegisters>();
    if (threadIdx.x == 0) {
      Ring ring;
      const u64 policy_a = (long long)GroupM * BlockM * K <= KeptBytes ? L2EvictLast : L2EvictNormal;
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int row, column;
        locate(tile, rows, columns, row, column);
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
          mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
          mbarrier_arrive_expect_tx(&shared.full[ring.slot], (BlockM + BlockN) * BlockK + BlockM * sizeof(float));
          tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], k_block * BlockK, row * BlockM, policy_a);
          tma_load_2d(shared.scale_a[ring.slot], &map_scale_a, &shared.full[ring.slot], row * BlockM, k_block);
          tma_load_2d(shared.b[ring.slot], &map_b, &shared.full[ring.slot], k_block * BlockK, column * BlockN, L2EvictFirst);
        }
      }
    } else if (threadIdx.x == 32) {
      // A row of B's scales need not begin at a multiple of 16 bytes, so they cannot come by TMA.
      const int scale_rows = (N + 127) / 128;
      Ring ring;
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int row, column;
        locate(tile, rows, columns, row, column);
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
          mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
#pragma unroll
          for (int i = 0; i < ScaleBlocks; ++i)
            copy_async(&shared.scale_b[ring.slot][i], &scale_b[(long long)min(column * BlockN / 128 + i, scale_rows - 1) * k_blocks + k_block], true);
          copy_async_arrive(&shared.full[ring.slot]);
        }
      }
    }
  } else {
    // ---- consumers: 64 rows of the tile each ------------------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const u64 a_first = matrix_descriptor(shared_address(shared.a[0]) + consumer * Rounds * 64 * BlockK, Swizzle::Bytes128, 8 * BlockK);
    const u64 b_first = matrix_descriptor(shared_address(shared.b[0]), Swizzle::Bytes128, 8 * BlockK);
    const int my_row = consumer * Rounds * 64 + warp * 16 + lane / 4;    // of the tile; the thread's other row is 8 further

    float total[Rounds][BlockN / 2], sum[BlockN / 2];                  // FP32 on CUDA cores; the tensor core's accumulator
    float scale[Rounds][2][ScaleBlocks];                               // of this thread's two rows in each round, times those of B
    auto multiply_scales = [&](int slot) {
#pragma unroll
      for (int round = 0; round < Rounds; ++round)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < ScaleBlocks; ++i) scale[round][half][i] = shared.scale_a[slot][my_row + 64 * round + 8 * half] * shared.scale_b[slot][i];
#pragma unroll
      for (int round = 0; round < Rounds; ++round) wgmma_hold(scale[round][0]), wgmma_hold(scale[round][1]);   // here, beside wgmma
    };
    auto store_round = [&](int round, int row, int column) {
      const int m0 = row * BlockM + consumer * Rounds * 64 + round * 64 + warp * 16;
      store_rows(total[round], map_d, D, shared.out[consumer * 4 + warp], m0, column * BlockN, M, N);
    };

    Ring ring;
    u64 a_slot = a_first, b_slot = b_first;                            // descriptors of the current slot
    int last_slot = -1;                                                // of the block before this one; none yet
    int row, column, last_row = 0, last_column = 0, next_row, next_column;               // of this tile, the one before, the next
    locate(min((int)blockIdx.x, tiles - 1), rows, columns, row, column);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int n0 = column * BlockN;
      // Of the products in s: those of the two rows with the block that tile column c, a multiple of Chunk, lies in.
      auto choose = [&](const float (&s)[2][ScaleBlocks], int c, float (&chosen)[2]) {
        chosen[0] = s[0][0], chosen[1] = s[1][0];
        // BLANK 1: where the tile straddles blocks of B's scales, take the product with block i of the ScaleBlocks it touches
        // The tile may begin inside a block: its column c is column n0 % 128 + c of the blocks that it touches.
#pragma unroll
        for (int i = 1; i < ScaleBlocks; ++i)
          if (n0 % 128 + c >= 128 * i) chosen[0] = s[0][i], chosen[1] = s[1][i];
        // END BLANK
      };
#pragma unroll
      for (int part = 0; part < 2; ++part) {                           // the first block apart: there is no total yet, but an old one
#pragma unroll 1
        for (int k_block = part; k_block < (part == 0 ? 1 : k_blocks); ++k_block) {
          if (part == 0) mbarrier_wait(&shared.full[ring.slot], ring.phase);
#pragma unroll
          for (int round = 0; round < Rounds; ++round) {
            // BLANK 2: multiply one block of K: four wgmma into sum, which starts from zero where the scale changes
            const u64 a_round = a_slot + round * (64 * BlockK / 16);
            wgmma_fence();
            for (int k = 0; k < BlockK; k += 32) wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, a_round + k / 16, b_slot + k / 16, k > 0);
            wgmma_commit();
            // END BLANK
            // The tensor core works: now there is time for everything else.
            if (round == 0 && last_slot >= 0) {
              // BLANK 3: give the last block's slot back: nobody in this warp still reads its tiles or its scales
              __syncwarp();
              if (lane == 0) mbarrier_arrive(&shared.empty[last_slot]);
              // END BLANK
            }
            if (round == 0) {
              last_slot = ring.slot;
              multiply_scales(ring.slot);
              if (part == 0) {
                if (tile != blockIdx.x) store_round(Rounds - 1, last_row, last_column);
                locate(min(tile + (int)gridDim.x, tiles - 1), rows, columns, next_row, next_column);
              }
            }
            if (round + 1 == Rounds) {
              ring.advance();
              a_slot = ring.slot == 0 ? a_first : a_slot + BlockM * BlockK / 16;
              b_slot = ring.slot == 0 ? b_first : b_slot + BlockN * BlockK / 16;
              if (round > 0 && k_block + 1 == k_blocks) store_round(0, row, column);
              if (k_block + 1 < k_blocks) mbarrier_wait(&shared.full[ring.slot], ring.phase);
            }
            wgmma_wait<0>();
            wgmma_hold(sum);
            if (part == 0)
#pragma unroll
              for (int i = 0; i < BlockN / 2; ++i) total[round][i] = 0.0f;
            // BLANK 4: promote: total = sum * scale + total in one fused multiply-add, chunk of columns by chunk of columns
            // sum[i] belongs to the thread's first row where i / 2 is even, to the row 8 further where it is odd.
#pragma unroll
            for (int c = 0; c < BlockN; c += Chunk) {
              float s[2];
              choose(scale[round], c, s);
#pragma unroll
              for (int i = c / 2; i < min(c + Chunk, BlockN) / 2; ++i) total[round][i] = __fmaf_rn(sum[i], s[i / 2 % 2], total[round][i]);
            }
            // END BLANK
          }
        }
      }
      last_row = row, last_column = column, row = next_row, column = next_column;
    }
    if (blockIdx.x < tiles) store_round(Rounds - 1, last_row, last_column);
    if (StoreByTma && lane == 0) tma_store_wait<0>();                  // D is written before the kernel ends
  }
}
