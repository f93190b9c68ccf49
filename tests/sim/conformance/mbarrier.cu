// mbarrier objects: phases, arrivals, bytes. ISA 9.7.13.15. The state that arrive returns is opaque and is not stored.

#include "hopper.cuh"

__device__ bool test_parity(u64* barrier, u32 parity) { return mbarrier_test(barrier, parity); }

__device__ bool test_state(u64* barrier, u64 state) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(shared_address(barrier)), "l"(state) : "memory");
  return done;
}
__device__ u64 arrive(u64* barrier) {
  u64 state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(barrier)) : "memory");
  return state;
}
__device__ u64 arrive_count(u64* barrier, u32 count) {
  u64 state;
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1], %2;" : "=l"(state) : "r"(shared_address(barrier)), "r"(count) : "memory");
  return state;
}
__device__ u32 pending(u64 state) {
  u32 count;
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
  return count;
}

#define STORE(value) out[row++] = (value)
#define PARITIES STORE(test_parity(&barrier, 0) | test_parity(&barrier, 1) << 1)

// One thread walks a barrier through its states; what a test says is certain at every point.
extern "C" __global__ void mbarrier_arrivals(u32* out) {
  __shared__ u64 barrier;
  int row = 0;
  mbarrier_init(&barrier, 3);
  PARITIES;  // a fresh barrier counts as having completed a phase of parity 1
  const u64 first = arrive(&barrier);
  STORE(test_state(&barrier, first)); PARITIES;
  const u64 second = arrive_count(&barrier, 1);
  PARITIES;
  const u64 third = arrive(&barrier);
  STORE(test_state(&barrier, first)); STORE(test_state(&barrier, third)); PARITIES;
  const u64 fourth = arrive_count(&barrier, 3);  // the whole second phase
  STORE(test_state(&barrier, fourth)); PARITIES;
  const u64 fifth = arrive_count(&barrier, 2);
  STORE(test_state(&barrier, fourth)); STORE(test_state(&barrier, fifth)); PARITIES;
  mbarrier_wait(&barrier, 1);
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
  mbarrier_init(&barrier, 1);
  PARITIES;
  mbarrier_arrive(&barrier);
  PARITIES;
}

// arrive_drop also lowers the count of the phases to come; arrive.noComplete promises not to complete one.
extern "C" __global__ void mbarrier_drop(u32* out) {
  __shared__ u64 barrier;
  int row = 0;
  u64 state;
  mbarrier_init(&barrier, 4);
  asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  PARITIES;
  asm volatile("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  PARITIES;
  state = arrive(&barrier);
  PARITIES;  // phase 0 is complete, phase 1 wants three
  state = arrive_count(&barrier, 2);
  PARITIES;
  asm volatile("mbarrier.arrive_drop.release.cta.shared::cta.b64 %0, [%1], 1;" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  PARITIES;  // phase 1 is complete, phase 2 wants two
  state = arrive(&barrier);
  PARITIES;
  state = arrive(&barrier);
  PARITIES;
}

// How many arrivals a phase still wants, from the state that arrive returned: the count before that arrival.
extern "C" __global__ void mbarrier_pending(u32* out) {
  __shared__ u64 barrier;
  int row = 0;
  u64 state;
  mbarrier_init(&barrier, 5);
  STORE(pending(arrive(&barrier)));
  STORE(pending(arrive_count(&barrier, 2)));
  asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  STORE(pending(state));
  STORE(pending(arrive(&barrier)));
  STORE(pending(arrive(&barrier)));  // the second phase: four
  STORE(pending(arrive(&barrier)));
}

// Bytes: announced with and without an arrival, completed by hand.
extern "C" __global__ void mbarrier_bytes(u32* out) {
  __shared__ u64 barrier;
  int row = 0;
  u64 state;
#define EXPECT(bytes) asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory")
#define COMPLETE(bytes) asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory")
  mbarrier_init(&barrier, 1);
  EXPECT(96);
  PARITIES;
  mbarrier_arrive(&barrier);
  PARITIES;  // arrived, 96 bytes missing
  COMPLETE(64);
  PARITIES;
  COMPLETE(32);
  PARITIES;  // phase 0 complete
  mbarrier_arrive_expect_tx(&barrier, 1048575);  // the largest count
  PARITIES;
  COMPLETE(1048575);
  PARITIES;
  // Bytes that land before they are announced: the count goes below zero and comes back.
  COMPLETE(48);
  PARITIES;
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %0, [%1], 48;" : "=l"(state) : "r"(shared_address(&barrier)) : "memory");
  PARITIES;
  mbarrier_arrive_expect_tx(&barrier, 0);
  PARITIES;
}

// A ring of two slots: 32 producers and 32 consumers, predicated arrivals, test_wait polled.
extern "C" __global__ void mbarrier_ring(const u32* a, u32* out) {
  __shared__ u32 slots[2][32];
  __shared__ u64 full[2], empty[2];
  const int i = threadIdx.x, lane = i % 32;
  if (i < 2) {
    mbarrier_init(&full[i], 32);
    mbarrier_init(&empty[i], 16);
  }
  __syncthreads();
  if (i < 32) {
    for (int step = 0; step < 7; ++step) {
      const int slot = step % 2;
      mbarrier_wait(&empty[slot], (step / 2 & 1) ^ 1);
      slots[slot][lane] = a[lane] + step * 1000;
      mbarrier_arrive(&full[slot]);
    }
  } else {
    u32 sum = 0;
    for (int step = 0; step < 7; ++step) {
      const int slot = step % 2;
      while (!mbarrier_test(&full[slot], step / 2 & 1)) {}
      sum = sum * 3 + slots[slot][31 - lane];
      __syncwarp();
      asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 16; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                   ::"r"(shared_address(&empty[slot])), "r"(lane) : "memory");
    }
    out[lane] = sum;
  }
}

// try_wait on a state, with a time limit, and the wait of a whole CTA on one arrival per thread.
extern "C" __global__ void mbarrier_state(const u32* a, u32* out) {
  __shared__ u32 values[128];
  __shared__ u64 barrier;
  const int i = threadIdx.x;
  if (i == 0) mbarrier_init(&barrier, 128);
  __syncthreads();
  u32 sum = 0;
  for (int round = 0; round < 3; ++round) {
    values[i] = a[i] + round;
    u64 state = arrive(&barrier);
    asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.shared::cta.b64 p, [%0], %1, 100000;\n @!p bra again; }"
                 ::"r"(shared_address(&barrier)), "l"(state) : "memory");
    sum = sum * 7 + values[(i * 3 + round) % 128];
    __syncthreads();
  }
  out[i] = sum;
}
