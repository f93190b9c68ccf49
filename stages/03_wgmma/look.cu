// Stage 03, for looking: two small kernels that the lesson runs to show what a descriptor says, and which thread gets which
// element of a wgmma's result.

#include "hopper.cuh"

constexpr int BlockK = 128;                // bytes in a row of both tiles, as in the kernels
constexpr int Rows = 64;                   // rows of A: wgmma's M
constexpr int Columns = COLUMNS;           // rows of B: wgmma's N

WGMMA_INSTANCE(COLUMNS, e4m3, e4m3)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 a[Rows * BlockK];
  u8 b[Columns * BlockK];
  u64 full;                                // the tiles' bytes have landed
};

// out (4): the descriptors of the four steps along k of a tile at `address` in shared memory.
extern "C" __global__ void describe(u64* out, u32 address) {
  for (int step = 0; step < 4; ++step) out[step] = matrix_descriptor(address + 32 * step, Swizzle::Bytes128, 8 * BlockK);
}

// out (Columns / 2, 128): the registers of one wgmma over 32 of k, by register and thread. One block of one warpgroup.
extern "C" __global__ void __launch_bounds__(128)
one_wgmma(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* out, int k) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&shared.full, (Rows + Columns) * BlockK);
    tma_load_2d(shared.a, &map_a, &shared.full, 0, 0);
    tma_load_2d(shared.b, &map_b, &shared.full, 0, 0);
  }
  __syncthreads();                         // the barrier exists
  mbarrier_wait(&shared.full, 0);
  float d[Columns / 2];
  wgmma_fence();
  wgmma<Columns, e4m3, e4m3>(d, matrix_descriptor(shared_address(shared.a) + k, Swizzle::Bytes128, 8 * BlockK),
                             matrix_descriptor(shared_address(shared.b) + k, Swizzle::Bytes128, 8 * BlockK), 0);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll                             // d must be indexed by constants to stay in registers
  for (int i = 0; i < Columns / 2; ++i) out[i * 128 + threadIdx.x] = d[i];
}
