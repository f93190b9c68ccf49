// Stage 01, step 1: one thread computes one output, on CUDA cores. FP8 is decoded by hand.
//
//   D[m][n] = (scale_a[m] * scale_b[n]) * sum over k of A[m][k] * B[n][k]
//
//   A is (M, K) and B is (N, K), one FP8 byte per element, K innermost.   D is (M, N).
//   A scale stride is 1 for one scale per row of A (or B), 0 for one scale for the whole tensor.
//
//   grid (tiles_m * tiles_n), block (BLOCK_N, BLOCK_M): threadIdx.x runs along n, so a warp stores neighbouring outputs.

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// Constants from the host, bound once.
constexpr int BlockM = BLOCK_M;              // outputs of a block along m
constexpr int BlockN = BLOCK_N;              // outputs of a block along n
constexpr int MantissaA = A_MANTISSA_BITS;   // 3: e4m3, 2: e5m2
constexpr int MantissaB = B_MANTISSA_BITS;
typedef OUTPUT Output;                       // bf16, fp16 or float

// One FP8 byte -> float, exactly. An FP8 byte is sign | exponent | mantissa, like an FP32 word but narrower.
template <int Mantissa>
__device__ float decode(u32 byte) {
  constexpr int Bias = (1 << (6 - Mantissa)) - 1;                      // e4m3: 7, e5m2: 15
  constexpr u32 MaxFinite = Mantissa == 3 ? 0x7e : 0x7b;               // 448 and 57344
  const u32 sign = (byte & 0x80) << 24;
  const u32 magnitude = byte & 0x7f;
  // Line the mantissa up with FP32's. Read as FP32 the exponent is now too small by 127 - Bias, and one multiplication
  // by a power of two puts that right. Subnormals come out right too: FP8's become FP32's, which the multiply makes normal.
  float value = __uint_as_float(magnitude << (23 - Mantissa)) * __uint_as_float((127 + 127 - Bias) << 23);
  if (magnitude > MaxFinite)                                           // e4m3: NaN. e5m2: infinity (0x7c) or NaN
    value = __uint_as_float(Mantissa == 2 && magnitude == 0x7c ? 0x7f800000 : 0x7fffffff);
  return __uint_as_float(__float_as_uint(value) | sign);
}

// Round to nearest even into the output format.
__device__ void store(float* d, float x) { *d = x; }
__device__ void store(bf16* d, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d->bits) : "f"(x)); }
__device__ void store(fp16* d, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d->bits) : "f"(x)); }

extern "C" __global__ void __launch_bounds__(BlockM * BlockN)
naive(const u8* A, const u8* B, const float* scale_a, const float* scale_b, Output* D,
      int M, int N, int K, int scale_a_stride, int scale_b_stride) {
  const int tiles_n = (N + BlockN - 1) / BlockN;
  const int m = blockIdx.x / tiles_n * BlockM + threadIdx.y;
  const int n = blockIdx.x % tiles_n * BlockN + threadIdx.x;
  if (m >= M || n >= N) return;                                        // the last tiles of a ragged M or N

  // 64-bit offsets: M * K may pass 2^31.
  const u8* a = A + (i64)m * K;
  const u8* b = B + (i64)n * K;
  float sum = 0.0f;
  for (int k = 0; k < K; ++k)
    sum = fmaf(decode<MantissaA>(a[k]), decode<MantissaB>(b[k]), sum);

  const float scale = scale_a[(i64)m * scale_a_stride] * scale_b[(i64)n * scale_b_stride];
  store(&D[(i64)m * N + n], scale * sum);
}
