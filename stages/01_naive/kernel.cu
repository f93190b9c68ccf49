// Stage 01, step 2: tiles of A and B are decoded once into shared memory, and each thread keeps several outputs.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), one FP8 byte per element, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (tiles_m * tiles_n), block (Threads): a block computes BLOCK_M x BLOCK_N outputs, a thread THREAD_M x THREAD_N.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// Constants from the host, bound once.
constexpr int BlockM = BLOCK_M;              // outputs of a block along m
constexpr int BlockN = BLOCK_N;              // outputs of a block along n
constexpr int BlockK = BLOCK_K;              // k range held in shared memory at a time
constexpr int ThreadM = THREAD_M;            // outputs of a thread along m
constexpr int ThreadN = THREAD_N;            // outputs of a thread along n
constexpr int MantissaA = A_MANTISSA_BITS;   // 3: e4m3, 2: e5m2
constexpr int MantissaB = B_MANTISSA_BITS;
typedef OUTPUT Output;                       // bf16, fp16 or float

constexpr int ThreadsN = BlockN / ThreadN;   // threads along n
constexpr int Threads = BlockM / ThreadM * ThreadsN;
// A row of a tile in shared memory is one float longer than the tile. Without it, the rows that the threads of a warp
// store into lie a multiple of 32 floats apart, in one and the same memory bank.
constexpr int Pad = 1;

// One FP8 byte -> float, exactly. An FP8 byte is sign | exponent | mantissa, like an FP32 word but narrower.
template <int Mantissa>
__device__ float decode(u32 byte) {
  constexpr int Bias = (1 << (6 - Mantissa)) - 1;                      // e4m3: 7, e5m2: 15
  constexpr u32 MaxFinite = Mantissa == 3 ? 0x7e : 0x7b;               // 448 and 57344
  const u32 sign = (byte & 0x80) << 24;
  const u32 magnitude = byte & 0x7f;
  float value = 0.0f;
  // BLANK 1: the value of `magnitude`, for codes up to MaxFinite
  // Line the mantissa up with FP32's. Read as FP32 the exponent is now too small by 127 - Bias, and one multiplication
  // by a power of two puts that right. Subnormals come out right too: FP8's become FP32's, which the multiply makes normal.
  value = __uint_as_float(magnitude << (23 - Mantissa)) * __uint_as_float((127 + 127 - Bias) << 23);
  // END BLANK
  if (magnitude > MaxFinite)                                           // e4m3: NaN. e5m2: infinity (0x7c) or NaN
    value = __uint_as_float(Mantissa == 2 && magnitude == 0x7c ? 0x7f800000 : 0x7fffffff);
  return __uint_as_float(__float_as_uint(value) | sign);
}

// Round to nearest even into the output format.
__device__ void store(float* d, float x) { *d = x; }
__device__ void store(bf16* d, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d->bits) : "f"(x)); }
__device__ void store(fp16* d, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d->bits) : "f"(x)); }

// Decode a tile of Rows x BlockK bytes into shared memory, transposed: tile[k][row].
//   source is (rows, K); the tile starts at (row0, k0). What lies outside the matrix is zero and adds nothing to a sum.
template <int Mantissa, int Rows>
__device__ void load_tile(float (&tile)[BlockK][Rows + Pad], const u8* source, int row0, int k0, int rows, int K) {
  for (int i = threadIdx.x; i < Rows * BlockK; i += Threads) {
    const int row = i / BlockK, k = i % BlockK;                        // neighbouring threads read neighbouring bytes
    float value = 0.0f;
    // BLANK 2: read and decode element (row0 + row, k0 + k) if it lies inside the matrix
    if (row0 + row < rows && k0 + k < K)
      value = decode<Mantissa>(source[(i64)(row0 + row) * K + k0 + k]);
    // END BLANK
    tile[k][row] = value;
  }
}

extern "C" __global__ void __launch_bounds__(Threads)
tiled(const u8* A, const u8* B, const float* scale_a, const float* scale_b, Output* D,
      int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  __shared__ float tile_a[BlockK][BlockM + Pad];
  __shared__ float tile_b[BlockK][BlockN + Pad];

  const int tiles_n = (N + BlockN - 1) / BlockN;
  const int m0 = blockIdx.x / tiles_n * BlockM;                        // first row and column of this block's tile
  const int n0 = blockIdx.x % tiles_n * BlockN;
  // Outputs of a thread lie StrideM and StrideN apart, not side by side: a warp then reads neighbouring floats of a tile.
  const int thread_m = threadIdx.x / ThreadsN, thread_n = threadIdx.x % ThreadsN;
  constexpr int StrideM = BlockM / ThreadM, StrideN = BlockN / ThreadN;

  float sum[ThreadM][ThreadN] = {};
  for (int k0 = 0; k0 < K; k0 += BlockK) {
    load_tile<MantissaA, BlockM>(tile_a, A, m0, k0, M, K);
    load_tile<MantissaB, BlockN>(tile_b, B, n0, k0, N, K);
    __syncthreads();                                                   // the tiles are complete
    for (int k = 0; k < BlockK; ++k) {
      // BLANK 3: add this k's products to the thread's ThreadM x ThreadN sums, one fmaf each
      float a[ThreadM], b[ThreadN];
      for (int i = 0; i < ThreadM; ++i) a[i] = tile_a[k][thread_m + i * StrideM];
      for (int j = 0; j < ThreadN; ++j) b[j] = tile_b[k][thread_n + j * StrideN];
      for (int i = 0; i < ThreadM; ++i)
        for (int j = 0; j < ThreadN; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
      // END BLANK
    }
    __syncthreads();                                                   // everyone is done with them: they may be overwritten
  }

  for (int i = 0; i < ThreadM; ++i) {
    for (int j = 0; j < ThreadN; ++j) {
      const int m = m0 + thread_m + i * StrideM, n = n0 + thread_n + j * StrideN;
      // BLANK 4: scale the sum and store it, if (m, n) lies inside D
      if (m < M && n < N) {
        const float scale = scale_a[(i64)m * scale_a_stride] * scale_b[(i64)n * scale_b_stride];
        store(&D[(i64)m * N + n], scale * sum[i][j]);
      }
      // END BLANK
    }
  }
}
