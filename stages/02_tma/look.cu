// Stage 02, for looking: two small kernels that the lesson runs to show what TMA writes to shared memory, and what ldmatrix
// reads from it.

#include "hopper.cuh"

constexpr int BlockK = 128;                // bytes in a row of the box, as in the kernels

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 tile[ROWS * BlockK];
  u64 full;                                // the tile's bytes have landed
};

// One box, at coordinates (x, y), whole.
__device__ void load(Shared& shared, const TensorMap* map, int x, int y) {
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&shared.full, ROWS * BlockK);
    tma_load_2d(shared.tile, map, &shared.full, x, y);
  }
  __syncthreads();                         // the barrier exists
  mbarrier_wait(&shared.full, 0);
}

// out (ROWS, BlockK): the tile, byte by byte in the order of its addresses.
extern "C" __global__ void show_tile(const __grid_constant__ TensorMap map, u8* out, int x, int y) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  load(shared, &map, x, y);
  for (int i = threadIdx.x; i < ROWS * BlockK; i += blockDim.x) out[i] = shared.tile[i];
}

// out (32 lanes, 4 registers): one ldmatrix.x4, each lane naming the row that starts `offset[lane]` bytes into the tile.
extern "C" __global__ void show_fragment(const __grid_constant__ TensorMap map, const int* offset, u32* out) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  load(shared, &map, 0, 0);
  u32 registers[4];
  load_matrix_x4(registers, shared.tile + offset[threadIdx.x]);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = registers[i];
}
