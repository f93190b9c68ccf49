// Instructions whose last bits only the hardware defines (".approx", ".full"): recorded to learn how an H200 rounds them.

#include "hopper.cuh"

#define KERNEL(name) extern "C" __global__ void name(const u32* a, const u32* b, u32* out, int n)
#define OPERANDS                                     \
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \
  [[maybe_unused]] const u32 x = a[i], y = b[i];     \
  int row = 0;
#define STORE(value) out[row++ * n + i] = (value)
#define UNARY(ptx) { u32 d; asm volatile("{ .reg .f32 d, x; mov.b32 x, %1; " ptx " d, x; mov.b32 %0, d; }" : "=r"(d) : "r"(x)); STORE(d); }
#define BINARY(ptx)                                                                                                          \
  { u32 d; asm volatile("{ .reg .f32 d, x, y; mov.b32 x, %1; mov.b32 y, %2; " ptx " d, x, y; mov.b32 %0, d; }"               \
                        : "=r"(d) : "r"(x), "r"(y)); STORE(d); }
#define PACKED(ptx) { u32 d; asm volatile(ptx " %0, %1;" : "=r"(d) : "r"(x)); STORE(d); }

KERNEL(approx_reciprocal) {
  OPERANDS
  UNARY("rcp.approx.f32") UNARY("sqrt.approx.f32")
  UNARY("rsqrt.approx.f32")
}
KERNEL(approx_divide) {
  OPERANDS
  BINARY("div.approx.f32") BINARY("div.full.f32")
}
KERNEL(approx_exponential) {
  OPERANDS
  UNARY("ex2.approx.f32") UNARY("lg2.approx.f32")
}
KERNEL(approx_trigonometry) {
  OPERANDS
  UNARY("sin.approx.f32") UNARY("cos.approx.f32") UNARY("tanh.approx.f32")
}
KERNEL(approx_packed) {
  OPERANDS
  PACKED("tanh.approx.f16x2") PACKED("tanh.approx.bf16x2") PACKED("ex2.approx.f16x2") PACKED("ex2.approx.ftz.bf16x2")
}
KERNEL(approx_flush) {
  OPERANDS
  UNARY("rcp.approx.ftz.f32") UNARY("sqrt.approx.ftz.f32") UNARY("rsqrt.approx.ftz.f32") BINARY("div.approx.ftz.f32")
  BINARY("div.full.ftz.f32") UNARY("ex2.approx.ftz.f32") UNARY("lg2.approx.ftz.f32") UNARY("sin.approx.ftz.f32") UNARY("cos.approx.ftz.f32")
}
