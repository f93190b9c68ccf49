// Integer instructions, one per row of the output: the row's label is the instruction. Inputs cross all corner values.
// Inline PTX is not folded by the compiler, so the machine executes exactly what is written here.

#include "hopper.cuh"

#define KERNEL(name, type)                                                                             \
  extern "C" __global__ void name(const type* a, const type* b, const type* c, type* out, int n)
#define OPERANDS                                     \
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \
  [[maybe_unused]] const auto x = a[i], y = b[i], z = c[i]; \
  int row = 0;
#define STORE(value) out[row++ * n + i] = (value)

#define UNARY(ptx) { u32 d; asm volatile(ptx " %0, %1;" : "=r"(d) : "r"(x)); STORE(d); }
#define BINARY(ptx) { u32 d; asm volatile(ptx " %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y)); STORE(d); }
#define TERNARY(ptx) { u32 d; asm volatile(ptx " %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z)); STORE(d); }
#define QUATERNARY(ptx) \
  { u32 d; asm volatile(ptx " %0, %1, %2, %3, %4;" : "=r"(d) : "r"(x), "r"(y), "r"(z), "r"(x ^ z)); STORE(d); }
#define IMMEDIATE(ptx, value) \
  { u32 d; asm volatile(ptx " %0, %1, %2, %3, " value ";" : "=r"(d) : "r"(x), "r"(y), "r"(z)); STORE(d); }

KERNEL(integer_unary, u32) {
  OPERANDS
  UNARY("not.b32") UNARY("neg.s32") UNARY("abs.s32") UNARY("cnot.b32") UNARY("clz.b32") UNARY("popc.b32") UNARY("brev.b32")
  UNARY("bfind.u32") UNARY("bfind.s32") UNARY("bfind.shiftamt.u32") UNARY("bfind.shiftamt.s32")
}

KERNEL(integer_binary, u32) {
  OPERANDS
  BINARY("add.u32") BINARY("sub.u32") BINARY("add.sat.s32") BINARY("sub.sat.s32")
  BINARY("mul.lo.u32") BINARY("mul.hi.u32") BINARY("mul.hi.s32")
  BINARY("min.u32") BINARY("max.u32") BINARY("min.s32") BINARY("max.s32")
  BINARY("and.b32") BINARY("or.b32") BINARY("xor.b32")
  BINARY("shl.b32") BINARY("shr.u32") BINARY("shr.s32")
}

// The divisor is never zero: PTX leaves that undefined.
KERNEL(integer_division, u32) {
  OPERANDS
  BINARY("div.u32") BINARY("div.s32") BINARY("rem.u32") BINARY("rem.s32")
}

KERNEL(integer_ternary, u32) {
  OPERANDS
  TERNARY("mad.lo.u32") TERNARY("mad.hi.u32") TERNARY("mad.hi.s32")
  TERNARY("sad.u32") TERNARY("sad.s32")
  TERNARY("dp4a.u32.u32") TERNARY("dp4a.s32.s32") TERNARY("dp4a.u32.s32") TERNARY("dp4a.s32.u32")
  TERNARY("slct.u32.s32")
}

KERNEL(integer_24, u32) {
  OPERANDS
  BINARY("mul24.lo.u32") BINARY("mul24.lo.s32") TERNARY("mad24.lo.u32") TERNARY("mad24.lo.s32")
}

// Rarely met: high halves of 24-bit products, saturation, fields by mask, packed 16-bit halves with relu.
KERNEL(integer_rare, u32) {
  OPERANDS
  BINARY("mul24.hi.u32") BINARY("mul24.hi.s32") TERNARY("mad24.hi.u32") TERNARY("mad24.hi.s32") TERNARY("mad.hi.sat.s32")
  BINARY("bmsk.clamp.b32") BINARY("bmsk.wrap.b32")
  BINARY("szext.clamp.u32") BINARY("szext.wrap.u32") BINARY("szext.clamp.s32") BINARY("szext.wrap.s32")
  BINARY("min.relu.s32") BINARY("max.relu.s32") BINARY("min.relu.s16x2") BINARY("max.relu.s16x2")
}

KERNEL(integer_packed, u32) {
  OPERANDS
  BINARY("add.u16x2") BINARY("add.s16x2") BINARY("min.u16x2") BINARY("max.u16x2") BINARY("min.s16x2") BINARY("max.s16x2")
  TERNARY("dp2a.lo.u32.u32") TERNARY("dp2a.hi.u32.u32") TERNARY("dp2a.lo.s32.s32") TERNARY("dp2a.hi.s32.s32")
  TERNARY("dp2a.lo.s32.u32") TERNARY("dp2a.hi.u32.s32")
}

KERNEL(integer_bits, u32) {
  OPERANDS
  TERNARY("shf.l.clamp.b32") TERNARY("shf.l.wrap.b32") TERNARY("shf.r.clamp.b32") TERNARY("shf.r.wrap.b32")
  TERNARY("bfe.u32") TERNARY("bfe.s32") QUATERNARY("bfi.b32")
  TERNARY("prmt.b32") TERNARY("prmt.b32.f4e") TERNARY("prmt.b32.b4e") TERNARY("prmt.b32.rc8") TERNARY("prmt.b32.ecl")
  TERNARY("prmt.b32.ecr") TERNARY("prmt.b32.rc16")
  IMMEDIATE("lop3.b32", "0x80") IMMEDIATE("lop3.b32", "0xFE") IMMEDIATE("lop3.b32", "0x96") IMMEDIATE("lop3.b32", "0xCA")
  IMMEDIATE("lop3.b32", "0xE8") IMMEDIATE("lop3.b32", "0x1D") IMMEDIATE("lop3.b32", "0x6A") IMMEDIATE("lop3.b32", "0x01")
}

// Carry chains: three words of a sum, a difference and a product; PTX ISA 9.7.2.
#define CARRY(label, ptx)                                                                                      \
  { u32 d, e, f; asm volatile("{" ptx "}" : "=r"(d), "=r"(e), "=r"(f) : "r"(x), "r"(y), "r"(z), "r"(x ^ y), "r"(y + z)); \
    STORE(d); STORE(e); STORE(f); }
KERNEL(integer_carry, u32) {
  OPERANDS
  CARRY("add", "add.cc.u32 %0, %3, %4; addc.cc.u32 %1, %5, %6; addc.u32 %2, %7, %3;")
  CARRY("sub", "sub.cc.u32 %0, %3, %4; subc.cc.u32 %1, %5, %6; subc.u32 %2, %7, %3;")
  CARRY("mad", "mad.lo.cc.u32 %0, %3, %4, %5; madc.hi.cc.u32 %1, %3, %4, %6; addc.u32 %2, %7, 0;")
  CARRY("add.s32", "add.cc.s32 %0, %3, %4; addc.cc.s32 %1, %5, %6; addc.s32 %2, %7, 0;")
}

#define COMPARE(ptx)                                                                                                \
  { u32 d, e; asm volatile("{ .reg .pred p, q, r; setp.ne.u32 r, %4, 0; setp." ptx " p|q, %2, %3, r;"               \
                           " selp.u32 %0, 1, 0, p; selp.u32 %1, 1, 0, q; }" : "=r"(d), "=r"(e) : "r"(x), "r"(y), "r"(z & 1)); \
    STORE(d | e << 1); }
KERNEL(integer_compare, u32) {
  OPERANDS
  COMPARE("eq.and.u32") COMPARE("ne.or.s32") COMPARE("lt.xor.s32") COMPARE("le.and.s32") COMPARE("gt.or.s32") COMPARE("ge.xor.s32")
  COMPARE("lo.and.u32") COMPARE("ls.or.u32") COMPARE("hi.xor.u32") COMPARE("hs.and.u32") COMPARE("lt.and.u32")
  BINARY("set.lt.u32.s32") BINARY("set.hi.u32.u32") BINARY("set.ge.s32.s32")
}

#undef UNARY
#undef BINARY
#undef TERNARY
#define UNARY(ptx) { u64 d; asm volatile(ptx " %0, %1;" : "=l"(d) : "l"(x)); STORE(d); }
#define COUNT(ptx) { u32 d; asm volatile(ptx " %0, %1;" : "=r"(d) : "l"(x)); STORE(d); }
#define BINARY(ptx) { u64 d; asm volatile(ptx " %0, %1, %2;" : "=l"(d) : "l"(x), "l"(y)); STORE(d); }
#define TERNARY(ptx) { u64 d; asm volatile(ptx " %0, %1, %2, %3;" : "=l"(d) : "l"(x), "l"(y), "l"(z)); STORE(d); }
#define SHIFT(ptx) { u64 d; asm volatile(ptx " %0, %1, %2;" : "=l"(d) : "l"(x), "r"(u32(y))); STORE(d); }
#define WIDE(ptx) { u64 d; asm volatile(ptx " %0, %1, %2;" : "=l"(d) : "r"(u32(x)), "r"(u32(y))); STORE(d); }
#define WIDE_ADD(ptx) { u64 d; asm volatile(ptx " %0, %1, %2, %3;" : "=l"(d) : "r"(u32(x)), "r"(u32(y)), "l"(z)); STORE(d); }
#define FIELD(ptx) { u64 d; asm volatile(ptx " %0, %1, %2, %3;" : "=l"(d) : "l"(x), "r"(u32(y)), "r"(u32(z))); STORE(d); }
#define INSERT(ptx) \
  { u64 d; asm volatile(ptx " %0, %1, %2, %3, %4;" : "=l"(d) : "l"(x), "l"(z), "r"(u32(y)), "r"(u32(y >> 32))); STORE(d); }
KERNEL(integer_64, u64) {
  OPERANDS
  UNARY("not.b64") UNARY("neg.s64") UNARY("abs.s64") UNARY("brev.b64") COUNT("clz.b64") COUNT("popc.b64")
  COUNT("bfind.u64") COUNT("bfind.s64") COUNT("bfind.shiftamt.u64")
  BINARY("add.u64") BINARY("sub.u64") BINARY("mul.lo.u64") BINARY("mul.hi.u64") BINARY("mul.hi.s64")
  BINARY("min.u64") BINARY("max.u64") BINARY("min.s64") BINARY("max.s64") BINARY("xor.b64")
  SHIFT("shl.b64") SHIFT("shr.u64") SHIFT("shr.s64")
  TERNARY("mad.lo.u64") TERNARY("mad.hi.u64") TERNARY("mad.hi.s64") TERNARY("sad.u64") TERNARY("sad.s64")
  WIDE("mul.wide.u32") WIDE("mul.wide.s32") WIDE_ADD("mad.wide.u32") WIDE_ADD("mad.wide.s32")
  FIELD("bfe.u64") FIELD("bfe.s64") INSERT("bfi.b64")
}

KERNEL(integer_64_division, u64) {
  OPERANDS
  BINARY("div.u64") BINARY("div.s64") BINARY("rem.u64") BINARY("rem.s64")
}

#undef UNARY
#undef BINARY
#undef TERNARY
#undef SHIFT
#define UNARY(ptx) { u16 d; asm volatile(ptx " %0, %1;" : "=h"(d) : "h"(x)); STORE(d); }
#define BINARY(ptx) { u16 d; asm volatile(ptx " %0, %1, %2;" : "=h"(d) : "h"(x), "h"(y)); STORE(d); }
#define TERNARY(ptx) { u16 d; asm volatile(ptx " %0, %1, %2, %3;" : "=h"(d) : "h"(x), "h"(y), "h"(z)); STORE(d); }
#define SHIFT(ptx) { u16 d; asm volatile(ptx " %0, %1, %2;" : "=h"(d) : "h"(x), "r"(u32(y))); STORE(d); }
KERNEL(integer_16, u16) {
  OPERANDS
  UNARY("not.b16") UNARY("neg.s16") UNARY("abs.s16") UNARY("cnot.b16")
  BINARY("add.u16") BINARY("sub.u16") BINARY("mul.lo.u16") BINARY("mul.hi.u16") BINARY("mul.hi.s16")
  BINARY("min.u16") BINARY("max.u16") BINARY("min.s16") BINARY("max.s16")
  SHIFT("shl.b16") SHIFT("shr.u16") SHIFT("shr.s16")
  TERNARY("mad.lo.u16") TERNARY("mad.hi.u16") TERNARY("mad.hi.s16") TERNARY("sad.u16") TERNARY("sad.s16")
}
