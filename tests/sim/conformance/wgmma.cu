// wgmma on raw shared-memory images: the host supplies the bytes and the descriptors, so every layout is a matter of inputs.
// ISA 9.7.15. Launch with one warpgroup.
//
// INSTRUCTION: opcode after "wgmma.mma_async.sync.aligned." ; TAIL: what follows scale-d (", 1, 1" or ", 1, 1, 0, 0" or nothing).
// D_WORDS: registers of D. A_AT, B_AT, SCALE_AT: the numbers of the operands that follow D's registers in the asm statement.
// A_IN_REGISTERS: A comes from four registers per thread. IN_FLIGHT: which of the two kernels to compile.

#include "hopper.cuh"

#define TEXT(...) #__VA_ARGS__
#define EXPANDED(...) TEXT(__VA_ARGS__)
#define PASTED(a, b) a##b
#define JOINED(a, b) PASTED(a, b)

constexpr int Words = D_WORDS;

// D's registers: TEXT and constraints of as many 32-bit words; WIDTH = 2 * D_WORDS selects hopper.cuh's lists.
#define D_TEXT JOINED(WGMMA_TEXT_, WIDTH)
#if INTEGER_D
typedef u32 Word;
#define W4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#if D_WORDS == 4
#define D_REGISTERS W4(0)
#elif D_WORDS == 8
#define D_REGISTERS W4(0), W4(4)
#elif D_WORDS == 16
#define D_REGISTERS W4(0), W4(4), W4(8), W4(12)
#endif
#else
typedef float Word;
#define D_REGISTERS JOINED(WGMMA_REGISTERS_, WIDTH)
#endif

__device__ __forceinline__ void multiply(Word (&d)[Words], const u32 (&registers)[4], u64 a, u64 b, u32 accumulate) {
#if A_IN_REGISTERS
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " EXPANDED(SCALE_AT) ", 0;\n"
               " wgmma.mma_async.sync.aligned." EXPANDED(INSTRUCTION) " {" D_TEXT "}, {" EXPANDED(A_AT) "}, " EXPANDED(B_AT)
               ", p" EXPANDED(TAIL) "; }"
               : D_REGISTERS
               : "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3]), "l"(b), "r"(accumulate));
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " EXPANDED(SCALE_AT) ", 0;\n"
               " wgmma.mma_async.sync.aligned." EXPANDED(INSTRUCTION) " {" D_TEXT "}, " EXPANDED(A_AT) ", " EXPANDED(B_AT)
               ", p" EXPANDED(TAIL) "; }"
               : D_REGISTERS
               : "l"(a), "l"(b), "r"(accumulate));
#endif
}

__device__ __forceinline__ void hold(Word (&d)[Words]) {
#pragma unroll
#if INTEGER_D
  for (int i = 0; i < Words; ++i) asm volatile("" : "+r"(d[i])::"memory");
#else
  for (int i = 0; i < Words; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

#if !IN_FLIGHT
// image: bytes of shared memory, from a multiple of 1024 on. a, b: descriptors without address; a_start, b_start: where the
// operands start in the image; a_step, b_step: added per step of K. c: D before; scale_first = 0 ignores it.
// a_words: A's registers, 4 per thread and step.
extern "C" __global__ void __launch_bounds__(128)
wgmma_image(const u32* image, int image_bytes, const u32* a_words, u64 a, int a_start, int a_step, u64 b, int b_start, int b_step,
            int steps, int scale_first, const Word* c, Word* out) {
  extern __shared__ u8 raw[];
  u8* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const int i = threadIdx.x;
  for (int j = i; j < image_bytes / 4; j += 128) reinterpret_cast<u32*>(shared)[j] = image[j];
  fence_proxy_async_shared();
  __syncthreads();
  Word d[Words];
  u32 registers[4] = {};
#pragma unroll
  for (int j = 0; j < Words; ++j) d[j] = c[j * 128 + i];
  const u32 base = shared_address(shared);
  for (int step = 0; step < steps; ++step) {
#if A_IN_REGISTERS
    for (int j = 0; j < 4; ++j) registers[j] = a_words[(step * 4 + j) * 128 + i];
#endif
    wgmma_fence();
    multiply(d, registers, a | ((base + a_start + step * a_step) & 0x3FFFF) >> 4, b | ((base + b_start + step * b_step) & 0x3FFFF) >> 4,
             step ? 1 : scale_first);
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
  }
#pragma unroll
  for (int j = 0; j < Words; ++j) out[j * 128 + i] = d[j];
}
#endif

#if IN_FLIGHT
// The same with all steps in one group, and a second accumulator in flight while the first is read.
extern "C" __global__ void __launch_bounds__(128)
wgmma_in_flight(const u32* image, int image_bytes, u64 a, int a_start, int a_step, u64 b, int b_start, int b_step, Word* out) {
  extern __shared__ u8 raw[];
  u8* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const int i = threadIdx.x;
  for (int j = i; j < image_bytes / 4; j += 128) reinterpret_cast<u32*>(shared)[j] = image[j];
  fence_proxy_async_shared();
  __syncthreads();
  Word first[Words], second[Words];
  const u32 registers[4] = {};
#pragma unroll
  for (int j = 0; j < Words; ++j) first[j] = second[j] = 1;
  const u32 base = shared_address(shared);
  hold(first);
  hold(second);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    multiply(first, registers, a | ((base + a_start + step * a_step) & 0x3FFFF) >> 4, b | ((base + b_start + step * b_step) & 0x3FFFF) >> 4, step);
  wgmma_commit();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    multiply(second, registers, a | ((base + a_start + step * a_step) & 0x3FFFF) >> 4,
             b | ((base + b_start + (3 - step) * b_step) & 0x3FFFF) >> 4, 1);
  wgmma_commit();
  wgmma_wait<1>();
  hold(first);
#pragma unroll
  for (int j = 0; j < Words; ++j) out[j * 128 + i] = first[j];
  wgmma_wait<0>();
  hold(second);
#pragma unroll
  for (int j = 0; j < Words; ++j) out[(Words + j) * 128 + i] = second[j];
}
#endif
