// Stage 05: bf16, fp16 or FP32 to FP8 and its scales, to the bit what hopperlab.quantize.quantize gives.
//
//   amax = max |x| of the block, NaN and infinities left out
//   scale = max(amax / largest, 2^-126), rounded up to a power of two if asked; 1 for a block of zeros
//   data = x / scale, rounded to nearest even; NaN where x is NaN or infinite
//
//   X is (rows, K), K innermost, row_stride elements from row to row.   Q is (rows, K) FP8, without gaps.
//
// These kernels live on memory bandwidth: 2 bytes in and 1 out per element of bf16. To keep up, an SM must finish about 6
// elements a cycle, each in about 20 instructions. So: every byte is read once, 16 bytes a load, eight loads in flight per
// thread; and the division by the scale, about 10 instructions, is made of 3.
//
// Each may start while the kernel before it in the stream ends, and lets the next one do so; nothing in global memory is touched
// before previous_grid_done(). X is not __restrict__: the compiler would then read it by ld.global.nc, as data that nobody writes
// while this kernel runs, and the kernel before may still be writing it.

#include "hopper.cuh"

// Constants from the host, bound once.
typedef INPUT Input;                       // bf16, fp16 or float
typedef FORMAT Format;                     // e4m3 or e5m2
constexpr int LoadBytes = LOAD_BYTES;      // of one load: 16, or 8, 4, 2 where rows are not aligned for more

constexpr int Block = 128;                 // edge of a scaling block
constexpr int Vector = 16 / sizeof(Input); // elements that a thread holds side by side: 8, or 4 of FP32
constexpr int Piece = LoadBytes / sizeof(Input);   // elements of one load; a row's end falls between two of them
constexpr int Lanes = Block / Vector;      // threads side by side on a K block: 16, or 32 for FP32
constexpr int Rows = 8;                    // loads in flight per thread. 8 scales side by side are one 32-byte sector
constexpr u32 AllLanes = 0xffffffff;
constexpr float SmallestScale = 0x1p-126f; // the smallest normal FP32

// To be called before anything in global memory is read or written.
__device__ __forceinline__ void previous_grid_done() {
  wait_for_previous_grid();
  launch_next_grid();
}

// ---- 16 bytes of the input ------------------------------------------------------------------------------------------

// Elements k to k + Vector - 1 of a row of K elements, zeros past its end.
__device__ __forceinline__ void load(u32 (&raw)[4], const Input* row, long long k, long long K) {
#pragma unroll
  for (int i = 0; i < 4; ++i) raw[i] = 0;
#pragma unroll
  for (int i = 0; i < Vector; i += Piece) {
    if (k + i >= K) continue;
    const int word = i * int(sizeof(Input)) / 4;
    if constexpr (LoadBytes == 16) {
      const uint4 read = *reinterpret_cast<const uint4*>(row + k);
      raw[0] = read.x, raw[1] = read.y, raw[2] = read.z, raw[3] = read.w;
    } else if constexpr (LoadBytes == 8) {
      const uint2 read = *reinterpret_cast<const uint2*>(row + k + i);
      raw[word] = read.x, raw[word + 1] = read.y;
    } else if constexpr (LoadBytes == 4) {
      raw[word] = *reinterpret_cast<const u32*>(row + k + i);
    } else {
      raw[word] |= u32(*reinterpret_cast<const u16*>(row + k + i)) << i % 2 * 16;
    }
  }
}

// Element i of them, as FP32, which is exact.
__device__ __forceinline__ float element(const u32 (&raw)[4], int i, float) { return __uint_as_float(raw[i]); }
__device__ __forceinline__ float element(const u32 (&raw)[4], int i, bf16) {
  return __uint_as_float(i % 2 ? raw[i / 2] & 0xffff0000 : raw[i / 2] << 16);
}
__device__ __forceinline__ float element(const u32 (&raw)[4], int i, fp16) { return half_to_float(raw[i / 2] >> i % 2 * 16); }

// Hides from the compiler that the bits are still the same. It would keep the FP32 values from finding amax to the division, 8
// registers for every 4; unpacking twice costs an instruction per element and lets twice as many CTAs share an SM.
__device__ __forceinline__ void keep_packed(u32 (&raw)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(raw[i]));
}

// ---- the arithmetic -------------------------------------------------------------------------------------------------

// max(amax, |x|), without NaN and infinities: infinity times 0 is NaN, and fmaxf drops NaN.
__device__ __forceinline__ float larger(float amax, float x) { return fmaxf(amax, fabsf(fmaf(x, 0.0f, x))); }
__device__ __forceinline__ float vector_amax(const u32 (&raw)[4], float amax) {
#pragma unroll
  for (int i = 0; i < Vector; ++i) amax = larger(amax, element(raw, i, Input()));
  return amax;
}

template <int Width>                       // over Width neighbouring lanes
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(AllLanes, x, step));
  return x;
}

// Over all threads of the CTA; each gets it.
template <int Threads>
__device__ __forceinline__ float cta_max(float x) {
  __shared__ float of_warp[Threads / 32];
  x = lanes_max<32>(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return lanes_max<32>(threadIdx.x % 32 < Threads / 32 ? of_warp[threadIdx.x % 32] : 0.0f);
}

// largest: the format's largest value, times 2^-margin. The division is IEEE's: nothing here is compiled with fast-math.
__device__ __forceinline__ float scale_of(float amax, float largest, bool power_of_two) {
  float scale = fmaxf(amax / largest, SmallestScale);
  // Add just under one binade, drop the mantissa: the next power of two, and a power of two stays what it is.
  if (power_of_two) scale = __uint_as_float((__float_as_uint(scale) + 0x007fffff) & 0x7f800000);
  return amax == 0.0f ? 1.0f : scale;
}

__device__ __forceinline__ u16 pack(float low, float high, e4m3) { return pack_e4m3(low, high); }
__device__ __forceinline__ u16 pack(float low, float high, e5m2) { return pack_e5m2(low, high); }

// What turns x into x / scale. A scale beyond 2^64 or 2^-64 is brought back by `factor`, a power of two, and x with it: below,
// nothing that matters then over- or underflows.
struct Divisor {
  float scale, reciprocal, factor;
};
__device__ __forceinline__ Divisor divisor_of(float scale) {
  const float factor = scale < 0x1p-64f ? 0x1p64f : scale > 0x1p64f ? 0x1p-64f : 1.0f;
  return {scale * factor, 1.0f / (scale * factor), factor};
}

// That of one lane in each group of Lanes.
__device__ __forceinline__ Divisor from_lane(const Divisor& by, int lane) {
  return {__shfl_sync(AllLanes, by.scale, lane, Lanes), __shfl_sync(AllLanes, by.reciprocal, lane, Lanes),
          __shfl_sync(AllLanes, by.factor, lane, Lanes)};
}

// x / scale -> FP8, elements k to k + Vector - 1 of row q.
//
// The quotient is needed only as exactly as its rounding to FP8 can tell. A product with the reciprocal, corrected once by its
// remainder, is within 2^-46 of x / scale in relative terms. Rounded to FP32 it may still differ from the IEEE quotient, but not
// across a midpoint of two FP8 values: those have at most 5 significant bits, which leaves so few scales and x that could be
// that close that all of them can be tried. tests/test_quantize_kernels.py has the argument and tries them.
// The signs are chosen so that -0 stays -0, and an infinity minus itself becomes the NaN it has to be.
__device__ __forceinline__ void quantize_floats(float (&x)[Vector], const Divisor& by, u8* __restrict__ q, long long k,
                                                long long K) {
  if (by.factor != 1.0f) {
#pragma unroll
    for (int i = 0; i < Vector; ++i) x[i] *= by.factor;
  }
#pragma unroll
  for (int i = 0; i < Vector; ++i) {
    const float quotient = x[i] * by.reciprocal;
    x[i] = fmaf(-fmaf(quotient, by.scale, -x[i]), by.reciprocal, quotient);
  }
  u32 packed[Vector / 4];
#pragma unroll
  for (int i = 0; i < Vector / 4; ++i)
    packed[i] = pack(x[4 * i], x[4 * i + 1], Format()) | u32(pack(x[4 * i + 2], x[4 * i + 3], Format())) << 16;
#pragma unroll
  for (int i = 0; i < Vector; i += Piece) {
    if (k + i >= K) continue;
    if constexpr (Piece == 8) *reinterpret_cast<uint2*>(q + k) = make_uint2(packed[0], packed[1]);
    else if constexpr (Piece == 4) *reinterpret_cast<u32*>(q + k + i) = packed[i / 4];
    else if constexpr (Piece == 2) *reinterpret_cast<u16*>(q + k + i) = packed[i / 4] >> i % 4 * 8;
    else q[k + i] = packed[i / 4] >> i % 4 * 8;
  }
}

__device__ __forceinline__ void quantize_vector(const u32 (&raw)[4], const Divisor& by, u8* __restrict__ q, long long k,
                                                long long K) {
  float x[Vector];
#pragma unroll
  for (int i = 0; i < Vector; ++i) x[i] = element(raw, i, Input());
  quantize_floats(x, by, q, k, K);
}

// ---- one scale per 1x128 --------------------------------------------------------------------------------------------
// grid (ceil(rows / 8) * ceil(K blocks / groups)), block (128). A group of `Lanes` threads works on 8 rows of one K block; the
// groups of a CTA lie side by side along k, and so do CTAs in order of their number.
//   scale is (rows, K blocks); m_major: (K blocks, padded), padded = rows rounded up to 4; the padding becomes zero.

constexpr int ThreadsOf1x128 = 128;

// From the amax of `Count` rows, which every lane of the group has, to their scales. Lane i finds and writes the scale of row i:
// once, and side by side with the others. Returns the lane's divisor; its neighbours take it by from_lane.
template <int Count>
__device__ __forceinline__ Divisor scales_1x128(const float (&amax)[Count], int lane, int row0, int k_block, int rows, int K,
    float* __restrict__ scale, float largest, bool power_of_two, bool m_major) {
  float of_lane = 0.0f;
#pragma unroll
  for (int i = 0; i < Count; ++i)
    if (lane == i) of_lane = amax[i];
  const float mine = scale_of(of_lane, largest, power_of_two);
  const int m = row0 + lane, k_blocks = (K + Block - 1) / Block;
  if (lane < Count && k_block < k_blocks) {
    const int padded = (rows + 3) / 4 * 4;
    if (m_major && m < padded) scale[(long long)k_block * padded + m] = m < rows ? mine : 0.0f;
    if (!m_major && m < rows) scale[(long long)m * k_blocks + k_block] = mine;
  }
  return divisor_of(mine);
}

// Which part of the tensor a group of lanes has.
struct Place {
  int lane, k_block, row0;
  __device__ Place(int K, int rows_of_group) {
    constexpr int Groups = ThreadsOf1x128 / Lanes;
    const int columns = ((K + Block - 1) / Block + Groups - 1) / Groups;
    lane = threadIdx.x % Lanes;
    k_block = blockIdx.x % columns * Groups + threadIdx.x / Lanes;
    row0 = blockIdx.x / columns * rows_of_group;
  }
  __device__ int k() const { return k_block * Block + lane * Vector; }
};

extern "C" __global__ void __launch_bounds__(ThreadsOf1x128)
blocks_1x128(const Input* X, u8* __restrict__ Q, float* __restrict__ scale, int rows, int K, long long row_stride, float largest,
             int power_of_two, int m_major) {
  previous_grid_done();
  const Place at(K, Rows);
  const Input* row = X + at.row0 * row_stride;
  u32 raw[Rows][4];
#pragma unroll
  for (int i = 0; i < Rows; ++i, row += row_stride) load(raw[i], row, at.k(), at.row0 + i < rows ? K : 0);
  float amax[Rows];
#pragma unroll
  for (int i = 0; i < Rows; ++i) amax[i] = lanes_max<Lanes>(vector_amax(raw[i], 0.0f));
  const Divisor by = scales_1x128(amax, at.lane, at.row0, at.k_block, rows, K, scale, largest, power_of_two, m_major);
  u8* q = Q + (long long)at.row0 * K;
#pragma unroll
  for (int i = 0; i < Rows; ++i, q += K) quantize_vector(raw[i], from_lane(by, i), q, at.k(), at.row0 + i < rows ? K : 0);
}

// ---- SwiGLU, then one scale per 1x128 -------------------------------------------------------------------------------
// X is (rows, 2 K): K gates, then the K values `up` they let through. Q is (rows, K), quantised from
// gate * (1 / (1 + exp(-gate))) * up in FP32. It saves writing and reading the product between two linear layers. Grid as above,
// but 4 rows instead of 8.

// exp(x) for -20 <= x <= 88, within 3 units in the last place. No special instruction: its last bits differ between machines.
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by its series; times 2^n by adding n to the exponent.
__device__ __forceinline__ float exponential(float x) {
  const float shifted = fmaf(x, 0x1.715476p0f, 0x1.8p23f);             // 1 / ln 2; n is left in the lowest bits
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));    // ln 2 in two parts
  float sum = 1.0f / 720;
  sum = fmaf(sum, r, 1.0f / 120);
  sum = fmaf(sum, r, 1.0f / 24);
  sum = fmaf(sum, r, 1.0f / 6);
  sum = fmaf(sum, r, 0.5f);
  sum = fmaf(sum, r, 1.0f);
  sum = fmaf(sum, r, 1.0f);
  return __uint_as_float(__float_as_uint(sum) + (__float_as_uint(shifted) << 23));
}

// Below -20 the sum with 1 is 1; beyond 88 silu is taken as 0.
__device__ __forceinline__ float swiglu(float gate, float up) {
  const float power = -gate > 88.0f ? __uint_as_float(0x7f800000) : exponential(fmaxf(-gate, -20.0f));
  return gate * (1.0f / (1.0f + power)) * up;
}

constexpr int RowsOfSwiglu = 4;            // two loads each

extern "C" __global__ void __launch_bounds__(ThreadsOf1x128)
swiglu_1x128(const Input* X, u8* __restrict__ Q, float* __restrict__ scale, int rows, int K, long long row_stride, float largest,
             int power_of_two, int m_major) {
  previous_grid_done();
  const Place at(K, RowsOfSwiglu);
  const Input* row = X + at.row0 * row_stride;
  u32 gate[RowsOfSwiglu][4], up[RowsOfSwiglu][4];
#pragma unroll
  for (int i = 0; i < RowsOfSwiglu; ++i, row += row_stride) {
    load(gate[i], row, at.k(), at.row0 + i < rows ? K : 0);
    load(up[i], row + K, at.k(), at.row0 + i < rows ? K : 0);
  }
  float x[RowsOfSwiglu][Vector], amax[RowsOfSwiglu];
#pragma unroll
  for (int i = 0; i < RowsOfSwiglu; ++i) {
    amax[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < Vector; ++j) {
      x[i][j] = swiglu(element(gate[i], j, Input()), element(up[i], j, Input()));
      amax[i] = larger(amax[i], x[i][j]);
    }
    amax[i] = lanes_max<Lanes>(amax[i]);
  }
  const Divisor by = scales_1x128(amax, at.lane, at.row0, at.k_block, rows, K, scale, largest, power_of_two, m_major);
  u8* q = Q + (long long)at.row0 * K;
#pragma unroll
  for (int i = 0; i < RowsOfSwiglu; ++i, q += K)
    quantize_floats(x[i], from_lane(by, i), q, at.k(), at.row0 + i < rows ? K : 0);
}

// ---- one scale per 128x128 ------------------------------------------------------------------------------------------
// grid (row blocks * K blocks), block (Threads): a CTA holds its block in registers, 8 rows per thread.

constexpr int ThreadsOf128x128 = Lanes * Block / Rows;

// At least 1024 threads on an SM: while a CTA waits at its barrier, others keep the memory busy. (Loads of 2 bytes need more
// registers.)
extern "C" __global__ void __launch_bounds__(ThreadsOf128x128, LoadBytes > 2 ? 1024 / ThreadsOf128x128 : 1)
blocks_128x128(const Input* X, u8* __restrict__ Q, float* __restrict__ scale, int rows, int K, long long row_stride,
               float largest, int power_of_two) {
  previous_grid_done();
  const int k_blocks = (K + Block - 1) / Block;
  const int k = blockIdx.x % k_blocks * Block + threadIdx.x % Lanes * Vector;
  const int row0 = blockIdx.x / k_blocks * Block + threadIdx.x / Lanes * Rows;

  const Input* row = X + row0 * row_stride;
  u32 raw[Rows][4];
#pragma unroll
  for (int i = 0; i < Rows; ++i, row += row_stride) load(raw[i], row, k, row0 + i < rows ? K : 0);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < Rows; ++i) amax = vector_amax(raw[i], amax);
  const float s = scale_of(cta_max<ThreadsOf128x128>(amax), largest, power_of_two);
  const Divisor by = divisor_of(s);
  u8* q = Q + (long long)row0 * K;
#pragma unroll
  for (int i = 0; i < Rows; ++i, q += K) {
    keep_packed(raw[i]);
    quantize_vector(raw[i], by, q, k, row0 + i < rows ? K : 0);
  }
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
}

// ---- one scale per row ----------------------------------------------------------------------------------------------
// grid (rows), block (256). A row of up to Threads * Vector * Held elements stays in registers; a longer one is read twice.

constexpr int ThreadsOfRow = 256;
constexpr int Held = HELD;                 // vectors per thread: as many as the row needs, at most 8

extern "C" __global__ void __launch_bounds__(ThreadsOfRow, 1024 / ThreadsOfRow)
whole_rows(const Input* X, u8* __restrict__ Q, float* __restrict__ scale, int K, long long row_stride, float largest,
           int power_of_two) {
  previous_grid_done();
  constexpr int Step = ThreadsOfRow * Vector;
  const Input* row = X + blockIdx.x * row_stride;
  u8* q = Q + (long long)blockIdx.x * K;
  const bool once = K <= Step * Held;

  u32 raw[Held][4];
  float amax = 0.0f;
  for (long long k = threadIdx.x * Vector; k < K; k += Step * Held) {
#pragma unroll
    for (int i = 0; i < Held; ++i) load(raw[i], row, k + i * Step, K);
#pragma unroll
    for (int i = 0; i < Held; ++i) amax = vector_amax(raw[i], amax);
  }
  const float s = scale_of(cta_max<ThreadsOfRow>(amax), largest, power_of_two);
  const Divisor by = divisor_of(s);
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
  for (long long k = threadIdx.x * Vector; k < K; k += Step * Held) {
    if (!once) {
#pragma unroll
      for (int i = 0; i < Held; ++i) load(raw[i], row, k + i * Step, K);
    }
#pragma unroll
    for (int i = 0; i < Held; ++i) {
      keep_packed(raw[i]);
      quantize_vector(raw[i], by, q, k + i * Step, K);
    }
  }
}

// ---- one scale per tensor: two kernels, over `count` elements without gaps -------------------------------------------
// grid (ceil(count / (256 * Vector * 8))), block (256). amax is one float, zero before the first kernel.

constexpr int ThreadsOfTensor = 256;
constexpr int Chunk = ThreadsOfTensor * Vector * Rows;                 // elements of a CTA

extern "C" __global__ void __launch_bounds__(ThreadsOfTensor)
tensor_amax(const Input* X, u32* __restrict__ amax, long long count) {
  previous_grid_done();
  const long long first = (long long)blockIdx.x * Chunk + threadIdx.x * Vector;
  u32 raw[Rows][4];
#pragma unroll
  for (int i = 0; i < Rows; ++i) load(raw[i], X, first + i * ThreadsOfTensor * Vector, count);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < Rows; ++i) largest = vector_amax(raw[i], largest);
  largest = cta_max<ThreadsOfTensor>(largest);
  // Floats that are not negative are ordered as their bits are, so the integer maximum serves; in any order it is the same.
  if (threadIdx.x == 0) atomicMax(amax, __float_as_uint(largest));
}

extern "C" __global__ void __launch_bounds__(ThreadsOfTensor)
tensor_cast(const Input* X, u8* __restrict__ Q, const float* amax, float* __restrict__ scale,
            long long count, float largest, int power_of_two) {
  previous_grid_done();
  // Backwards: what the first kernel read last may still be in L2.
  const long long first = (long long)(gridDim.x - 1 - blockIdx.x) * Chunk + threadIdx.x * Vector;
  u32 raw[Rows][4];
#pragma unroll
  for (int i = 0; i < Rows; ++i) load(raw[i], X, first + i * ThreadsOfTensor * Vector, count);
  const float s = scale_of(*amax, largest, power_of_two);
  const Divisor by = divisor_of(s);
#pragma unroll
  for (int i = 0; i < Rows; ++i) quantize_vector(raw[i], by, Q, first + i * ThreadsOfTensor * Vector, count);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = s;
}
