// Stage 04, step 3: clusters share tiles of B by multicast, and the epilogue leaves through shared memory and TMA stores
// while the other warpgroup still multiplies.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), FP8, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (a multiple of Cluster, at most one CTA per SM), block (Threads). The grid is persistent: a cluster works through
//   tiles until none is left. Warpgroup 0 loads, the other two multiply; they meet only at the barriers of the ring.

#include "hopper.cuh"

// Constants from the host, bound once.
constexpr int BlockM = 128;                // outputs of a CTA's tile along m: 64 per consumer warpgroup
constexpr int BlockN = BLOCK_N;            // along n: a multiple of 64
constexpr int BlockK = 128;                // bytes of k in one slot of the ring: the widest swizzle, four wgmma steps of 32
constexpr int Stages = NUM_STAGES;         // slots of the ring
constexpr int Cluster = CLUSTER;           // CTAs one above the other along m that share each tile of B: 1 or 2
constexpr int GroupM = GROUP_M;            // rows of cluster tiles that are worked on together, so that L2 serves them
constexpr bool StoreByTma = STORE_BY_TMA;  // false where TMA cannot write D: rows not a multiple of 16 bytes, or FP32
typedef OUTPUT Output;                     // bf16, fp16 or float
typedef STAGED Staged;                     // what panels hold: Output, or bf16 where they are not used

constexpr int Consumers = 2;
constexpr int Threads = 128 * (1 + Consumers);
// Registers per thread after the exchange. 128 * (40 + 2 * 232) = 64512 of the SM's 65536: the producer needs few, a
// consumer holds BlockN / 2 accumulators.
constexpr int ProducerRegisters = 40, ConsumerRegisters = 232;
constexpr int PanelColumns = 64;           // columns of D staged together: 128 bytes of a row, one swizzle span
constexpr int ColumnsPerThread = (BlockN + 127) / 128;                 // column scales that a thread fetches for its warpgroup
constexpr int PanelsHeld = 2;              // panels per warpgroup in shared memory: one is filled while the other is stored

WGMMA_INSTANCE(BLOCK_N, A_FORMAT, B_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Stages][BlockM * BlockK];
  u8 b[Stages][BlockN * BlockK];
  u16 out[Consumers][PanelsHeld][64 * PanelColumns];
  float scale_b[Consumers][BlockN];        // the tile's column scales
  u64 full[Stages];                        // the slot's bytes have landed: one arrival (the producer's) and its bytes
  u64 empty[Stages];                       // the slot may be overwritten: one arrival per consumer warp of the cluster
};

struct Ring {                              // a place in the ring, the same for the producer and each consumer
  int slot = 0;
  u32 phase = 0;
  __device__ void advance() {
    if (++slot == Stages) slot = 0, phase ^= 1;
  }
};

// Cluster tile `index` -> its row and column, in groups of GroupM rows: within a group m runs fastest, so that CTAs
// working side by side in time read few different tiles of A and B.
__device__ void locate(int index, int rows, int columns, int& row, int& column) {
  const int first = index / (GroupM * columns) * GroupM;
  const int height = min(GroupM, rows - first);
  const int within = index % (GroupM * columns);
  row = first + within % height;
  column = within / height;
}

extern "C" __global__ void __launch_bounds__(Threads, 1)
overlapped(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_d,
           const float* __restrict__ scale_a, const float* __restrict__ scale_b, Output* __restrict__ D, int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // The shuffle tells the compiler that a warp's threads agree on it: addresses made from it stay in uniform registers, where
  // wgmma's descriptors must be.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int rank = Cluster > 1 ? cluster_rank() : 0;

  const int rows = (M + BlockM * Cluster - 1) / (BlockM * Cluster);    // of cluster tiles
  const int columns = (N + BlockN - 1) / BlockN;
  const int tiles = rows * columns, k_blocks = (K + BlockK - 1) / BlockK;
  const int first_tile = blockIdx.x / Cluster, tile_stride = gridDim.x / Cluster;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], 4 * Consumers * Cluster);
    }
    fence_mbarrier_init();
    tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b);
  }
  if (Cluster > 1) cluster_sync(); else __syncthreads();               // the barriers exist, in every CTA of the cluster

  if (warpgroup == 0) {
    // ---- producer: one thread fills the ring ------------------------------------------------------------------------
    registers_decrease<ProducerRegisters>();
    if (threadIdx.x == 0) {
      Ring ring;
      for (int tile = first_tile; tile < tiles; tile += tile_stride) {
        int row, column;
        locate(tile, rows, columns, row, column);
        const int m = (row * Cluster + rank) * BlockM, n = column * BlockN;
        for (int k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
          // BLANK 1: wait until the slot may be overwritten; the first round through the ring must not wait
          mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
          // END BLANK
          // BLANK 2: announce all bytes that will land in this CTA's slot; load A's tile, multicast this CTA's share of B
          // A whole box is delivered also where it reaches past the tensor: the bytes never depend on M, N or K.
          mbarrier_arrive_expect_tx(&shared.full[ring.slot], (BlockM + BlockN) * BlockK);
          tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], k_block * BlockK, m);
          // Each CTA loads its share of B's rows and sends it to all: B crosses from L2 once per cluster.
          constexpr int Share = BlockN / Cluster;
          u8* b = shared.b[ring.slot] + rank * Share * BlockK;
          if (Cluster > 1)
            tma_load_multicast_2d(b, &map_b, &shared.full[ring.slot], (1 << Cluster) - 1, k_block * BlockK, n + rank * Share);
          else
            tma_load_2d(b, &map_b, &shared.full[ring.slot], k_block * BlockK, n);
          // END BLANK
        }
      }
    }
  } else {
    // ---- consumers: 64 rows of the tile each ------------------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    Ring ring;
    float sum[BlockN / 2];
    // Descriptors of the first slot. Their low bits hold the address in units of 16 bytes, so stepping is one addition.
    const u64 a_first = matrix_descriptor(shared_address(shared.a[0]) + consumer * 64 * BlockK, Swizzle::Bytes128, 8 * BlockK);
    const u64 b_first = matrix_descriptor(shared_address(shared.b[0]), Swizzle::Bytes128, 8 * BlockK);
    for (int tile = first_tile; tile < tiles; tile += tile_stride) {
      int row, column;
      locate(tile, rows, columns, row, column);
      const int m0 = (row * Cluster + rank) * BlockM + consumer * 64, n0 = column * BlockN;

      // Scales are fetched before the multiplication and used after it: their latency hides behind it.
      const int m = m0 + warp * 16 + lane / 4;
      float row_scale[2], column_scale[ColumnsPerThread];
      for (int half = 0; half < 2; ++half)
        row_scale[half] = m + 8 * half < M ? scale_a[(long long)(m + 8 * half) * scale_a_stride] : 0.0f;
      for (int i = 0; i < ColumnsPerThread; ++i) {
        const int n = n0 + thread + 128 * i;
        column_scale[i] = n < N ? scale_b[(long long)n * scale_b_stride] : 0.0f;
      }

      auto release = [&](int slot) {                                   // this warp is done with a slot
        // BLANK 3: tell every producer that writes into this slot: one arrival of this warp on each one's empty barrier
        // Every CTA of the cluster multicasts into it: lane r arrives in CTA r.
        if (lane < Cluster) mbarrier_arrive_remote(&shared.empty[slot], lane);
        // END BLANK
      };
      int last_slot = 0;
#pragma unroll 1
      for (int k_block = 0; k_block < k_blocks; ++k_block) {
        mbarrier_wait(&shared.full[ring.slot], ring.phase);
        const u64 a = a_first + ring.slot * (BlockM * BlockK / 16), b = b_first + ring.slot * (BlockN * BlockK / 16);
        wgmma_fence();
        for (int k = 0; k < BlockK; k += 32)
          wgmma<BlockN, A_FORMAT, B_FORMAT>(sum, a + k / 16, b + k / 16, k_block > 0 || k > 0);
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
#pragma unroll
      for (int i = 0; i < ColumnsPerThread; ++i)
        if (thread + 128 * i < BlockN) shared.scale_b[consumer][thread + 128 * i] = column_scale[i];
      auto scaled = [&](int j, float (&x)[4]) {                         // the thread's four outputs of columns 8j to 8j + 7
        const float2 scale = *reinterpret_cast<const float2*>(&shared.scale_b[consumer][8 * j + lane % 4 * 2]);
        x[0] = row_scale[0] * scale.x * sum[4 * j], x[1] = row_scale[0] * scale.y * sum[4 * j + 1];
        x[2] = row_scale[1] * scale.x * sum[4 * j + 2], x[3] = row_scale[1] * scale.y * sum[4 * j + 3];
      };
      if constexpr (StoreByTma) {
        const bool leader = warp == 0 && lane == 0;                    // of the warpgroup: its bulk groups are counted
#pragma unroll                                                           // sum must be indexed by constants to stay in registers
        for (int panel = 0; panel < BlockN / PanelColumns; ++panel) {
          u16* out = shared.out[consumer][panel % PanelsHeld];
          // The store that last read this panel was issued PanelsHeld panels ago, maybe in the tile before: by now it is done.
          if (leader) tma_store_wait_read<PanelsHeld - 1>();
          named_barrier_sync(1 + consumer, 128);
#pragma unroll
          for (int j = 0; j < PanelColumns / 8; j += 2) {
            float x[4], y[4];
            scaled(panel * (PanelColumns / 8) + j, x);
            scaled(panel * (PanelColumns / 8) + j + 1, y);
            // BLANK 4: stmatrix the warp's 16 rows of the panel's columns 8j to 8j + 15 into out, swizzled as map_d expects
            // Four 8x8 matrices: rows 0-7 and 8-15 of columns 8j, then of 8j + 8. Lane l names row l % 8 of matrix l / 8.
            // 16-byte chunk c of row r lies at chunk c ^ (r % 8): the 128-byte swizzle that map_d undoes.
            const int r = warp * 16 + lane % 16, chunk = j + lane / 16;
            store_matrix_x4(out + r * PanelColumns + (chunk ^ r % 8) * 8, pack<Staged>(x[0], x[1]), pack<Staged>(x[2], x[3]),
                            pack<Staged>(y[0], y[1]), pack<Staged>(y[2], y[3]));
            // END BLANK
          }
          // BLANK 5: hand the panel to TMA: make the warpgroup's stores visible to it, then let the leader store and commit
          fence_proxy_async_shared();                                  // the stores above become visible to TMA
          named_barrier_sync(1 + consumer, 128);
          if (leader) {
            tma_store_2d(&map_d, out, n0 + panel * PanelColumns, m0);  // clips what lies outside of D
            tma_store_commit();
          }
          // END BLANK
        }
      } else {
        named_barrier_sync(1 + consumer, 128);                         // the column scales are complete
#pragma unroll
        for (int j = 0; j < BlockN / 8; ++j) {
          float x[4];
          scaled(j, x);
          const int n = n0 + 8 * j + lane % 4 * 2;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (m + 8 * half < M)
              store_pair(&D[(long long)(m + 8 * half) * N + n], x[2 * half], x[2 * half + 1], N - n, n + 1 < N && N % 2 == 0);
        }
        named_barrier_sync(1 + consumer, 128);                         // and read: the next tile may replace them
      }
    }
    if (StoreByTma && warp == 0 && lane == 0) tma_store_wait<0>();     // D is written before the kernel ends
  }
  if (Cluster > 1) cluster_sync();                                     // no CTA leaves while another may still arrive on its barriers
}
