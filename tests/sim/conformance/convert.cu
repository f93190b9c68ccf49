// cvt, PTX ISA 9.7.9.22: one conversion per row of the output, results as 64-bit words.

#include "hopper.cuh"

#define KERNEL(name, type) extern "C" __global__ void name(const type* a, u64* out, int n)
#define OPERAND                                      \
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \
  const auto x = a[i];                               \
  int row = 0;
#define STORE(value) out[row++ * n + i] = (value)

// Operands go through registers of the instruction's own types; `D` and `S` name them.
#define TO_64(ptx, D) \
  { u64 d; asm volatile("{ .reg ." D " d; .reg .f32 x; mov.b32 x, %1; " ptx " d, x; mov.b64 %0, d; }" : "=l"(d) : "r"(x)); STORE(d); }
#define TO_32(ptx, D) \
  { u32 d; asm volatile("{ .reg ." D " d; .reg .f32 x; mov.b32 x, %1; " ptx " d, x; mov.b32 %0, d; }" : "=r"(d) : "r"(x)); STORE(d); }
#define TO_16(ptx) \
  { u16 d; asm volatile("{ .reg .f32 x; mov.b32 x, %1; " ptx " %0, x; }" : "=h"(d) : "r"(x)); STORE(d); }

KERNEL(convert_float_to_integer, u32) {
  OPERAND
  TO_32("cvt.rni.s32.f32", "s32") TO_32("cvt.rzi.s32.f32", "s32") TO_32("cvt.rmi.s32.f32", "s32") TO_32("cvt.rpi.s32.f32", "s32")
  TO_32("cvt.rni.u32.f32", "u32") TO_32("cvt.rzi.u32.f32", "u32") TO_32("cvt.rmi.u32.f32", "u32") TO_32("cvt.rpi.u32.f32", "u32")
  TO_64("cvt.rni.s64.f32", "s64") TO_64("cvt.rzi.s64.f32", "s64") TO_64("cvt.rmi.u64.f32", "u64") TO_64("cvt.rpi.u64.f32", "u64")
  TO_16("cvt.rni.s16.f32") TO_16("cvt.rzi.u16.f32")
  TO_16("cvt.rni.sat.s8.f32") TO_16("cvt.rzi.sat.u8.f32")
}
KERNEL(convert_float_to_float, u32) {
  OPERAND
  TO_32("cvt.rni.f32.f32", "f32") TO_32("cvt.rzi.f32.f32", "f32") TO_32("cvt.rmi.f32.f32", "f32") TO_32("cvt.rpi.f32.f32", "f32")
  TO_32("cvt.sat.f32.f32", "f32") TO_64("cvt.f64.f32", "f64")
  TO_16("cvt.rn.f16.f32") TO_16("cvt.rz.f16.f32")
  TO_16("cvt.rn.bf16.f32") TO_16("cvt.rz.bf16.f32")
}

KERNEL(convert_float_rare, u32) {
  OPERAND
  TO_32("cvt.rni.ftz.s32.f32", "s32") TO_32("cvt.rpi.ftz.u32.f32", "u32") TO_32("cvt.rni.ftz.f32.f32", "f32") TO_32("cvt.ftz.f32.f32", "f32")
  TO_16("cvt.rn.ftz.f16.f32") TO_16("cvt.rn.sat.f16.f32") TO_16("cvt.rn.relu.f16.f32") TO_16("cvt.rn.relu.bf16.f32")
}

KERNEL(convert_float_to_tf32, u32) {
  OPERAND
  TO_32("cvt.rna.tf32.f32", "b32") TO_32("cvt.rn.tf32.f32", "b32") TO_32("cvt.rz.tf32.f32", "b32") TO_32("cvt.rn.relu.tf32.f32", "b32")
}

#define PAIR_32(ptx)                                                                                          \
  { u32 d; asm volatile("{ .reg .f32 x, y; mov.b32 x, %1; mov.b32 y, %2; " ptx " %0, x, y; }" : "=r"(d) : "r"(x), "r"(y)); STORE(d); }
#define PAIR_16(ptx)                                                                                          \
  { u16 d; asm volatile("{ .reg .f32 x, y; mov.b32 x, %1; mov.b32 y, %2; " ptx " %0, x, y; }" : "=h"(d) : "r"(x), "r"(y)); STORE(d); }
KERNEL(convert_pairs, u32) {
  OPERAND
  const u32 y = a[n - 1 - i];
  PAIR_32("cvt.rn.f16x2.f32")
  PAIR_32("cvt.rn.bf16x2.f32")
  PAIR_16("cvt.rn.satfinite.e4m3x2.f32")
  PAIR_16("cvt.rn.satfinite.e5m2x2.f32")
}

KERNEL(convert_pairs_rare, u32) {
  OPERAND
  const u32 y = a[n - 1 - i];
  PAIR_32("cvt.rz.f16x2.f32") PAIR_32("cvt.rz.bf16x2.f32") PAIR_32("cvt.rn.relu.f16x2.f32") PAIR_32("cvt.rn.relu.bf16x2.f32")
  PAIR_16("cvt.rn.satfinite.relu.e4m3x2.f32") PAIR_16("cvt.rn.satfinite.relu.e5m2x2.f32")
}

#define FROM(ptx, D, S) \
  { u32 d; asm volatile("{ .reg ." D " d; " ptx " d, %1; mov.b32 %0, d; }" : "=r"(d) : S(x)); STORE(d); }
#define FROM_64(ptx, S) { u64 d; asm volatile("{ .reg .f64 d; " ptx " d, %1; mov.b64 %0, d; }" : "=l"(d) : S(x)); STORE(d); }
#define FROM_16(ptx, S) { u16 d; asm volatile(ptx " %0, %1;" : "=h"(d) : S(x)); STORE(d); }
#define NARROW(ptx, S) { u32 d; asm volatile(ptx " %0, %1;" : "=r"(d) : S(x)); STORE(d); }
#define WIDEN(ptx, S) { u64 d; asm volatile(ptx " %0, %1;" : "=l"(d) : S(x)); STORE(d); }
KERNEL(convert_from_32, u32) {
  OPERAND
  FROM("cvt.rn.f32.s32", "f32", "r") FROM("cvt.rz.f32.s32", "f32", "r") FROM("cvt.rm.f32.s32", "f32", "r") FROM("cvt.rp.f32.s32", "f32", "r")
  FROM("cvt.rn.f32.u32", "f32", "r") FROM("cvt.rz.f32.u32", "f32", "r") FROM("cvt.rm.f32.u32", "f32", "r") FROM("cvt.rp.f32.u32", "f32", "r")
  FROM_64("cvt.rn.f64.s32", "r") FROM_64("cvt.rn.f64.u32", "r") FROM_16("cvt.rn.f16.s32", "r")
  NARROW("cvt.sat.s32.u32", "r") NARROW("cvt.sat.u32.s32", "r") NARROW("cvt.sat.s8.s32", "r") NARROW("cvt.sat.u8.s32", "r")
  NARROW("cvt.s8.s32", "r") NARROW("cvt.u8.s32", "r") NARROW("cvt.s16.s32", "r") NARROW("cvt.sat.s16.u32", "r")
  WIDEN("cvt.s64.s32", "r") WIDEN("cvt.u64.u32", "r") WIDEN("cvt.u64.s32", "r") WIDEN("cvt.sat.u64.s32", "r")
}
KERNEL(convert_from_64, u64) {
  OPERAND
  FROM("cvt.rn.f32.s64", "f32", "l") FROM("cvt.rz.f32.u64", "f32", "l") FROM("cvt.rm.f32.s64", "f32", "l") FROM("cvt.rp.f32.u64", "f32", "l")
  FROM_64("cvt.rn.f64.s64", "l") FROM_64("cvt.rz.f64.u64", "l") FROM_64("cvt.rm.f64.s64", "l") FROM_64("cvt.rp.f64.u64", "l")
  NARROW("cvt.u32.u64", "l") NARROW("cvt.sat.s32.s64", "l") NARROW("cvt.sat.u32.s64", "l") NARROW("cvt.sat.u32.u64", "l")
}

#define DOUBLE_32(ptx, D) \
  { u32 d; asm volatile("{ .reg ." D " d; .reg .f64 x; mov.b64 x, %1; " ptx " d, x; mov.b32 %0, d; }" : "=r"(d) : "l"(x)); STORE(d); }
#define DOUBLE_64(ptx, D) \
  { u64 d; asm volatile("{ .reg ." D " d; .reg .f64 x; mov.b64 x, %1; " ptx " d, x; mov.b64 %0, d; }" : "=l"(d) : "l"(x)); STORE(d); }
KERNEL(convert_from_double, u64) {
  OPERAND
  DOUBLE_32("cvt.rn.f32.f64", "f32") DOUBLE_32("cvt.rz.f32.f64", "f32") DOUBLE_32("cvt.rm.f32.f64", "f32") DOUBLE_32("cvt.rp.f32.f64", "f32")
  DOUBLE_32("cvt.rni.s32.f64", "s32") DOUBLE_32("cvt.rzi.u32.f64", "u32") DOUBLE_32("cvt.rmi.s32.f64", "s32") DOUBLE_32("cvt.rpi.u32.f64", "u32")
  DOUBLE_64("cvt.rni.s64.f64", "s64") DOUBLE_64("cvt.rzi.u64.f64", "u64") DOUBLE_64("cvt.rmi.s64.f64", "s64")
  DOUBLE_64("cvt.rni.f64.f64", "f64") DOUBLE_64("cvt.rzi.f64.f64", "f64") DOUBLE_64("cvt.rmi.f64.f64", "f64") DOUBLE_64("cvt.rpi.f64.f64", "f64")
}

// All 65536 patterns of 16 bits.
KERNEL(convert_from_16, u16) {
  OPERAND
  FROM("cvt.f32.f16", "f32", "h") FROM("cvt.f32.bf16", "f32", "h") FROM_64("cvt.f64.f16", "h")
  FROM_16("cvt.rni.f16.f16", "h") FROM_16("cvt.rzi.f16.f16", "h") FROM_16("cvt.rni.s16.f16", "h") FROM_16("cvt.rzi.u16.f16", "h")
  NARROW("cvt.rni.s32.f16", "h") FROM_16("cvt.rn.f16.s16", "h") FROM_16("cvt.rn.f16.u16", "h") FROM("cvt.rn.f32.s16", "f32", "h")
  NARROW("cvt.rn.f16x2.e4m3x2", "h") NARROW("cvt.rn.f16x2.e5m2x2", "h")
  NARROW("cvt.s32.s8", "h") NARROW("cvt.u32.u8", "h")
}

// Every half value in both halves.
KERNEL(convert_halves_to_fp8, u32) {
  OPERAND
  FROM_16("cvt.rn.satfinite.e4m3x2.f16x2", "r") FROM_16("cvt.rn.satfinite.e5m2x2.f16x2", "r")
}
KERNEL(convert_halves_to_fp8_relu, u32) {
  OPERAND
  FROM_16("cvt.rn.satfinite.relu.e4m3x2.f16x2", "r") FROM_16("cvt.rn.satfinite.relu.e5m2x2.f16x2", "r")
}
