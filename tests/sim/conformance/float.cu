// Floating-point instructions that IEEE 754 or the PTX ISA defines to the bit, one per row of the output.

#include "hopper.cuh"

#define KERNEL(name, type)                                                                             \
  extern "C" __global__ void name(const type* a, const type* b, const type* c, type* out, int n)
#define OPERANDS                                     \
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \
  [[maybe_unused]] const auto x = a[i], y = b[i], z = c[i]; \
  int row = 0;
#define STORE(value) out[row++ * n + i] = (value)

// Bits travel as integers: the compiler's own moves never touch a NaN's payload.
#define UNARY(ptx) { u32 d; asm volatile("{ .reg .f32 d, x; mov.b32 x, %1; " ptx " d, x; mov.b32 %0, d; }" : "=r"(d) : "r"(x)); STORE(d); }
#define BINARY(ptx)                                                                                                          \
  { u32 d; asm volatile("{ .reg .f32 d, x, y; mov.b32 x, %1; mov.b32 y, %2; " ptx " d, x, y; mov.b32 %0, d; }"               \
                        : "=r"(d) : "r"(x), "r"(y)); STORE(d); }
#define TERNARY(ptx)                                                                                                         \
  { u32 d; asm volatile("{ .reg .f32 d, x, y, z; mov.b32 x, %1; mov.b32 y, %2; mov.b32 z, %3; " ptx " d, x, y, z; mov.b32 %0, d; }" \
                        : "=r"(d) : "r"(x), "r"(y), "r"(z)); STORE(d); }

KERNEL(float_add, u32) {
  OPERANDS
  BINARY("add.rn.f32") BINARY("add.rz.f32") BINARY("add.rm.f32") BINARY("add.rp.f32") BINARY("add.rn.sat.f32")
  BINARY("sub.rn.f32") BINARY("sub.rz.f32") BINARY("sub.rm.f32") BINARY("sub.rp.f32")
}

KERNEL(float_multiply, u32) {
  OPERANDS
  BINARY("mul.rn.f32") BINARY("mul.rz.f32") BINARY("mul.rm.f32") BINARY("mul.rp.f32") BINARY("mul.rn.sat.f32")
}

KERNEL(float_fma, u32) {
  OPERANDS
  TERNARY("fma.rn.f32") TERNARY("fma.rz.f32") TERNARY("fma.rm.f32") TERNARY("fma.rp.f32") TERNARY("fma.rn.sat.f32")
}

KERNEL(float_divide, u32) {
  OPERANDS
  BINARY("div.rn.f32") UNARY("rcp.rn.f32") UNARY("sqrt.rn.f32")
}

KERNEL(float_choose, u32) {
  OPERANDS
  BINARY("min.f32") BINARY("max.f32") BINARY("min.NaN.f32") BINARY("max.NaN.f32")
  UNARY("neg.f32") UNARY("abs.f32") BINARY("copysign.f32")
}

#define COMPARE(ptx)                                                                                                  \
  { u32 d, e; asm volatile("{ .reg .pred p, q, r; .reg .f32 x, y; mov.b32 x, %2; mov.b32 y, %3; setp.ne.u32 r, %4, 0;" \
                           " setp." ptx " p|q, x, y, r; selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q; }"                 \
                           : "=r"(d), "=r"(e) : "r"(x), "r"(y), "r"(z & 1)); STORE(d | e << 1); }
#define TEST(ptx)                                                                                         \
  { u32 d; asm volatile("{ .reg .pred p; .reg .f32 x; mov.b32 x, %1; testp." ptx " p, x; selp.u32 %0, 1, 0, p; }" \
                        : "=r"(d) : "r"(x)); STORE(d); }
KERNEL(float_choose_sign, u32) {
  OPERANDS
  BINARY("min.xorsign.abs.f32") BINARY("max.xorsign.abs.f32") BINARY("min.NaN.xorsign.abs.f32")
}

KERNEL(float_divide_directed, u32) {
  OPERANDS
  BINARY("div.rz.f32") BINARY("div.rm.f32") BINARY("div.rp.f32") UNARY("rcp.rz.f32") UNARY("rcp.rm.f32") UNARY("rcp.rp.f32")
  UNARY("sqrt.rz.f32") UNARY("sqrt.rm.f32") UNARY("sqrt.rp.f32")
}

// Subnormal operands and results become zeros of the same sign.
KERNEL(float_flush, u32) {
  OPERANDS
  BINARY("add.rn.ftz.f32") BINARY("add.rz.ftz.f32") BINARY("sub.rn.ftz.f32") BINARY("mul.rn.ftz.f32") BINARY("mul.rn.ftz.sat.f32")
  TERNARY("fma.rn.ftz.f32") TERNARY("fma.rp.ftz.f32") BINARY("div.rn.ftz.f32") UNARY("rcp.rn.ftz.f32") UNARY("sqrt.rn.ftz.f32")
  BINARY("min.ftz.f32") BINARY("max.ftz.f32") UNARY("neg.ftz.f32") UNARY("abs.ftz.f32")
}

KERNEL(float_compare, u32) {
  OPERANDS
  COMPARE("eq.and.f32") COMPARE("ne.and.f32") COMPARE("lt.or.f32") COMPARE("le.xor.f32") COMPARE("gt.and.f32") COMPARE("ge.or.f32")
  COMPARE("equ.and.f32") COMPARE("neu.and.f32") COMPARE("ltu.or.f32") COMPARE("leu.xor.f32") COMPARE("gtu.and.f32") COMPARE("geu.or.f32")
  COMPARE("num.and.f32") COMPARE("nan.xor.f32")
  TEST("finite.f32") TEST("infinite.f32") TEST("number.f32") TEST("notanumber.f32") TEST("normal.f32") TEST("subnormal.f32")
}

KERNEL(float_compare_flush, u32) {
  OPERANDS
  COMPARE("lt.and.ftz.f32") COMPARE("eq.and.ftz.f32") COMPARE("leu.or.ftz.f32")
}

#undef UNARY
#undef BINARY
#undef TERNARY
#define UNARY(ptx) { u64 d; asm volatile("{ .reg .f64 d, x; mov.b64 x, %1; " ptx " d, x; mov.b64 %0, d; }" : "=l"(d) : "l"(x)); STORE(d); }
#define BINARY(ptx)                                                                                                          \
  { u64 d; asm volatile("{ .reg .f64 d, x, y; mov.b64 x, %1; mov.b64 y, %2; " ptx " d, x, y; mov.b64 %0, d; }"               \
                        : "=l"(d) : "l"(x), "l"(y)); STORE(d); }
#define TERNARY(ptx)                                                                                                         \
  { u64 d; asm volatile("{ .reg .f64 d, x, y, z; mov.b64 x, %1; mov.b64 y, %2; mov.b64 z, %3; " ptx " d, x, y, z; mov.b64 %0, d; }" \
                        : "=l"(d) : "l"(x), "l"(y), "l"(z)); STORE(d); }
KERNEL(float_double, u64) {
  OPERANDS
  BINARY("add.rn.f64") BINARY("sub.rn.f64") BINARY("mul.rn.f64") TERNARY("fma.rn.f64") BINARY("div.rn.f64") UNARY("rcp.rn.f64")
  UNARY("sqrt.rn.f64") BINARY("min.f64") BINARY("max.f64") UNARY("neg.f64") UNARY("abs.f64")
}

// Directed rounding in double precision.
KERNEL(float_double_directed, u64) {
  OPERANDS
  BINARY("add.rz.f64") BINARY("add.rm.f64") BINARY("add.rp.f64") BINARY("mul.rz.f64") BINARY("mul.rm.f64") BINARY("mul.rp.f64")
  TERNARY("fma.rz.f64") TERNARY("fma.rm.f64") TERNARY("fma.rp.f64")
}

#undef UNARY
#undef BINARY
#undef TERNARY
#define UNARY(ptx) { u32 d; asm volatile(ptx " %0, %1;" : "=r"(d) : "r"(x)); STORE(d); }
#define BINARY(ptx) { u32 d; asm volatile(ptx " %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y)); STORE(d); }
#define TERNARY(ptx) { u32 d; asm volatile(ptx " %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z)); STORE(d); }
KERNEL(float_half2, u32) {
  OPERANDS
  BINARY("add.rn.f16x2") BINARY("sub.rn.f16x2") BINARY("mul.rn.f16x2")
  TERNARY("fma.rn.f16x2") TERNARY("fma.rn.relu.f16x2")
  BINARY("min.f16x2") BINARY("max.f16x2") BINARY("min.NaN.f16x2") BINARY("max.NaN.f16x2") UNARY("neg.f16x2") UNARY("abs.f16x2")
}
KERNEL(float_half2_rare, u32) {
  OPERANDS
  BINARY("add.rn.sat.f16x2") BINARY("mul.rn.ftz.f16x2") TERNARY("fma.rn.sat.f16x2") TERNARY("fma.rn.ftz.f16x2") BINARY("set.lt.f16x2.f16x2")
}
KERNEL(float_bfloat2, u32) {
  OPERANDS
  BINARY("add.rn.bf16x2") BINARY("sub.rn.bf16x2") BINARY("mul.rn.bf16x2")
  TERNARY("fma.rn.bf16x2") TERNARY("fma.rn.relu.bf16x2")
  BINARY("min.bf16x2") BINARY("max.bf16x2") BINARY("min.NaN.bf16x2") BINARY("max.NaN.bf16x2") UNARY("neg.bf16x2") UNARY("abs.bf16x2")
}

#undef UNARY
#undef BINARY
#undef TERNARY
#define BINARY(ptx) { u16 d; asm volatile(ptx " %0, %1, %2;" : "=h"(d) : "h"(x), "h"(y)); STORE(d); }
#define TERNARY(ptx) { u16 d; asm volatile(ptx " %0, %1, %2, %3;" : "=h"(d) : "h"(x), "h"(y), "h"(z)); STORE(d); }
#undef COMPARE
#define COMPARE(ptx)                                                                                                           \
  { u32 d; asm volatile("{ .reg .pred p; setp." ptx " p, %1, %2; selp.u32 %0, 1, 0, p; }" : "=r"(d) : "h"(x), "h"(y)); STORE(d); }
KERNEL(float_16, u16) {
  OPERANDS
  BINARY("add.rn.f16") BINARY("sub.rn.f16") BINARY("mul.rn.f16") TERNARY("fma.rn.f16") BINARY("min.f16") BINARY("max.f16")
  BINARY("add.rn.bf16") BINARY("sub.rn.bf16") BINARY("mul.rn.bf16") TERNARY("fma.rn.bf16") BINARY("min.bf16") BINARY("max.bf16")
  COMPARE("lt.f16") COMPARE("geu.f16") COMPARE("nan.f16") COMPARE("lt.bf16") COMPARE("neu.bf16")
}
