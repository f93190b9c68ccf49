// One warp and matrices: ldmatrix, stmatrix (ISA 9.7.14.5.15, .16), movmatrix, mma.sync (9.7.14.5.14).

#include "hopper.cuh"

#ifndef INSTRUCTION
#define PREPARE                                                               \
  __shared__ alignas(16) u32 tile[256]; /* four 8x8 matrices of 16 bits */    \
  const int lane = threadIdx.x;                                               \
  for (int j = lane; j < 256; j += 32) tile[j] = a[j];                        \
  __syncwarp();                                                               \
  /* rows in a scrambled order: the address counts, not the lane */           \
  const u32 row = shared_address(tile) + 16 * ((lane * 5 + 3) % 32) + 512 * (lane % 2); \
  u32 r[4] = {0, 0, 0, 0};                                                    \
  int at = 0;
#define KEEP for (int j = 0; j < 4; ++j) out[at++ * 32 + lane] = r[j], r[j] = 0;

extern "C" __global__ void load_matrix(const u32* a, u32* out) {
  PREPARE
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
  KEEP
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
  KEEP
  load_matrix_x4(r, reinterpret_cast<const u8*>(tile) + (row - shared_address(tile)));
  KEEP
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
  KEEP
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
  KEEP
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
  KEEP
}

extern "C" __global__ void store_matrix(const u32* a, u32* out) {
  PREPARE
  // The rows of one stmatrix must not overlap: lane l owns row l, scrambled.
  const u32 mine = shared_address(tile) + 16 * ((lane * 5 + 3) % 32);
#define RESET __syncwarp(); for (int j = lane; j < 128; j += 32) tile[j] = 0xCCCCCCCC; __syncwarp();
#define DUMP __syncwarp(); for (int j = lane; j < 128; j += 32) out[at++ * 32 + lane] = tile[j];
  for (int j = 0; j < 4; ++j) r[j] = a[32 * j + lane];
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(mine), "r"(r[0]) : "memory"); DUMP
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(mine), "r"(r[0]), "r"(r[1]) : "memory"); DUMP
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); DUMP
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(mine), "r"(r[0]) : "memory"); DUMP
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(mine), "r"(r[0]), "r"(r[1]) : "memory"); DUMP
  RESET asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); DUMP
}

extern "C" __global__ void move_matrix(const u32* a, u32* out) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a[threadIdx.x]));
  out[threadIdx.x] = d;
}

// D = A B + C, STEPS times with new A and B, registers straight from memory. INSTRUCTION is the opcode after
// "mma.sync.aligned."; A_REGISTERS, B_REGISTERS and D_REGISTERS say how many; FLOAT_D whether D is f32 or packed.
#else
#define TEXT(...) #__VA_ARGS__
#define EXPANDED(...) TEXT(__VA_ARGS__)
extern "C" __global__ void multiply(const u32* a, const u32* b, const u32* c, u32* out, int steps) {
  const int lane = threadIdx.x;
  u32 x[4] = {}, y[2] = {}, d[4] = {};
  for (int j = 0; j < D_REGISTERS; ++j) d[j] = c[32 * j + lane];
  for (int step = 0; step < steps; ++step) {
    for (int j = 0; j < A_REGISTERS; ++j) x[j] = a[32 * (step * A_REGISTERS + j) + lane];
    for (int j = 0; j < B_REGISTERS; ++j) y[j] = b[32 * (step * B_REGISTERS + j) + lane];
#if A_REGISTERS == 4
#define A "{%4, %5, %6, %7}"
#elif A_REGISTERS == 2
#define A "{%4, %5}"
#endif
#if B_REGISTERS == 2
#define B "{%8, %9}"
#else
#define B "{%8}"
#endif
#if D_REGISTERS == 2
    asm volatile("mma.sync.aligned." EXPANDED(INSTRUCTION) " {%0, %1}, " A ", " B ", {%0, %1};"
#elif FLOAT_D
    asm volatile("{ .reg .f32 d<4>; mov.b32 d0, %0; mov.b32 d1, %1; mov.b32 d2, %2; mov.b32 d3, %3;\n"
                 " mma.sync.aligned." EXPANDED(INSTRUCTION) " {d0, d1, d2, d3}, " A ", " B ", {d0, d1, d2, d3};\n"
                 " mov.b32 %0, d0; mov.b32 %1, d1; mov.b32 %2, d2; mov.b32 %3, d3; }"
#else
    asm volatile("mma.sync.aligned." EXPANDED(INSTRUCTION) " {%0, %1, %2, %3}, " A ", " B ", {%0, %1, %2, %3};"
#endif
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  }
  for (int j = 0; j < D_REGISTERS; ++j) out[32 * j + lane] = d[j];
}
#endif
