// Thin wrappers over the PTX instructions of Hopper (sm_90a) that CUDA C++ has no name for.
//
// One wrapper, one instruction. Each says which section of the PTX ISA describes it, the unit of its arguments, and
// what breaks if it is wrong. No other header is needed: no CUDA toolkit, no CUTLASS.
//
// "ISA: x" is the section of the PTX ISA that is titled x (https://docs.nvidia.com/cuda/parallel-thread-execution); its
// number differs between versions.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- addresses and indices ------------------------------------------------------------------------------------------

// A TMA tensor map: 128 opaque bytes that the host encodes. ISA: Tensor-map. Pass it as a parameter of type
// `const __grid_constant__ TensorMap`: without __grid_constant__ the compiler copies it to local memory, where the copy
// engine cannot read it.
struct alignas(64) TensorMap {
  u8 opaque[128];
};

// Address inside the shared window of this CTA, in bytes; what every instruction below that takes a u32 address wants.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ u32 lane_id() {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Rank of this CTA in its cluster. ISA: %cluster_ctarank. 0 when the kernel is launched without clusters.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in exactly one thread of a converged warp. ISA: elect.sync. Cheaper than `lane == 0`: the compiler then knows
// that one thread runs the branch. Called by a diverged warp it hangs.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// ---- ISA: mbarrier --------------------------------------------------------------------------------------------------
// A 64-bit object in shared memory, 8-byte aligned. A phase completes when `count` arrivals were made and every byte
// that was announced has landed. Waiting names the parity of the phase that must have completed: 0 for the first, 1 for
// the second, and so on. A fresh barrier counts as having completed a phase of parity 1, so that a producer's first
// wait for an empty slot, with parity 1, passes at once.

// Once, by one thread. Everyone else may touch the barrier only after fence_mbarrier_init() and a barrier of the CTA
// (or of the cluster, if other CTAs or multicasts arrive on it). count: arrivals per phase. ISA: mbarrier.init.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine and to other CTAs of the cluster. ISA: fence.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival of the calling thread. Every thread that calls it counts: let as many call it as `count` says.
// ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival on the barrier at the same place in CTA `rank` of the cluster. ISA: mapa finds its address. The scope stays
// this CTA's on purpose: .release.cluster costs a fence of all of memory (MEMBAR.ALL.GPU, and CCTL.IVALL at the acquiring
// wait), about 1000 cycles each time. It is enough for a ring, whose bytes only TMA and wgmma touch. Ordinary stores that the
// peer shall see need cluster_sync.
__device__ __forceinline__ void mbarrier_arrive_remote(u64* barrier, u32 rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// One arrival, and `bytes` more to wait for in this phase. Must be the exact sum of what the copies of the phase
// deliver to this CTA: too few and the phase ends before the data is there, too many and it never ends. Bytes out of
// bounds of the tensor count too: a box always delivers all of its bytes. ISA: mbarrier.arrive, expect_tx.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
      ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Is the phase of this parity complete? Does not wait. ISA: mbarrier.test_wait.
__device__ __forceinline__ bool mbarrier_test(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

// Wait until the phase of this parity is complete. try_wait may give up after a while, hence the loop. The wrong parity
// passes at once (stale data) or never (deadlock). ISA: mbarrier.try_wait.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\nwait:\n mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done,"
      " [%0], %1;\n @!done bra wait;\n}"
      ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The same where other CTAs arrive or multicast: their writes become visible too.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\nwait:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done,"
      " [%0], %1;\n @!done bra wait;\n}"
      ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// ---- fences and barriers --------------------------------------------------------------------------------------------

// Ordinary stores of this thread to shared memory become visible to TMA and wgmma, which read through another proxy.
// Each writing thread calls it, then a barrier, then the copy. Without it stale bytes are read. ISA: fence, Proxies.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory: ordinary global stores, then TMA loads of them.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Barrier of `threads` threads (a multiple of 32) with number 1 to 15; 0 is __syncthreads. ISA: bar.
// The wrong count hangs, or lets threads go on too early.
__device__ __forceinline__ void named_barrier_sync(u32 number, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, and whether `value` held in any of the threads. ISA: bar (.red).
__device__ __forceinline__ bool named_barrier_or(u32 number, u32 threads, bool value) {
  u32 any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any) : "r"(number), "r"(threads), "r"(u32(value)) : "memory");
  return any;
}
// Count as arrived without waiting; `threads` includes those that wait.
__device__ __forceinline__ void named_barrier_arrive(u32 number, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Barrier of all threads of the cluster, in two halves. ISA: barrier.cluster. Needed after mbarrier_init and before a
// CTA exits whose shared memory a peer may still write or arrive on.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// ---- TMA. ISA: cp.async.bulk.tensor ---------------------------------------------------------------------------------
// One thread issues one copy of a whole box. Coordinates are in elements, innermost first, and may lie outside of the
// tensor: loads fill with zeros, stores skip. The innermost one, times the element size, must be a multiple of 16
// bytes, out of bounds too: otherwise an H200 stops with "illegal instruction". The shared address must be 128-byte
// aligned, and 1024-byte aligned for a 128-byte swizzle whose tiles a wgmma descriptor addresses. If all threads of a
// warp issue it, it copies 32 times.

__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box set on its way to L2, no further. Right before wait_for_previous_grid too: all SMs write through the same L2, so that what an earlier
// kernel writes after this is what a later copy reads. ISA: cp.async.bulk.prefetch.tensor.
__device__ __forceinline__ void tma_prefetch_3d(const TensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}

// How long L2 keeps what a copy touches: the cache policies that createpolicy would make. ISA: createpolicy.
constexpr u64 L2EvictNormal = 0x1000000000000000ull;
constexpr u64 L2EvictFirst = 0x12F0000000000000ull;   // read once: do not push out what others reuse
constexpr u64 L2EvictLast = 0x14F0000000000000ull;    // reused by many CTAs: keep

// Global -> shared memory of this CTA. Delivers the box's bytes to `barrier`.
__device__ __forceinline__ void tma_load_1d(void* destination, const TensorMap* map, u64* barrier, int x) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x) : "memory");
}
__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap* map, u64* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap* map, u64* barrier, int x, int y,
    int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap* map, u64* barrier, int x, int y, int z,
    int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(void* destination, const TensorMap* map, u64* barrier, int x, int y, int z,
    int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// The same with an L2 policy.
__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap* map, u64* barrier, int x, int y,
    u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5}], [%2], %3;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap* map, u64* barrier, int x, int y, int z,
    u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Global -> the same place in the shared memory of every CTA of the cluster whose bit is set in `mask`; each of them
// gets the bytes on its own barrier at the same place, so each must expect them. A CTA missing in the mask waits for
// ever.
__device__ __forceinline__ void tma_load_multicast_1d(void* destination, const TensorMap* map, u64* barrier, u16 mask,
    int x) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4}], [%2], %3;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "h"(mask), "r"(x) : "memory");
}
__device__ __forceinline__ void tma_load_multicast_2d(void* destination, const TensorMap* map, u64* barrier, u16 mask,
    int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5}], [%2], %3;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "h"(mask), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_load_multicast_3d(void* destination, const TensorMap* map, u64* barrier, u16 mask,
    int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "h"(mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast_2d(void* destination, const TensorMap* map, u64* barrier, u16 mask,
    int x, int y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%5, %6}], [%2], %3, %4;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "h"(mask), "l"(policy), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast_3d(void* destination, const TensorMap* map, u64* barrier, u16 mask,
    int x, int y, int z, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%5, %6, %7}], [%2], %3, %4;"
      ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "h"(mask), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Shared -> global. Joins the thread's current bulk group. Before it: fence_proxy_async_shared() by every thread that
// wrote the tile, then a barrier with the issuing thread.
// Coordinates must not be negative: an H200 answers with "illegal instruction". A box may reach past the far end of the
// tensor, where it is clipped: in rows and planes exactly, along x only to whole 16-byte pieces. A row that ends inside
// such a piece gets the rest of it written as well, into its padding.
__device__ __forceinline__ void tma_store_1d(const TensorMap* map, const void* source, int x) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x) : "memory");
}
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* source, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* source, int x, int y, int z, int w,
    int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
}

// The same with an L2 policy.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* source, int x, int y, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "l"(policy) : "memory");
}
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* source, int x, int y, int z, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z), "l"(policy) : "memory");
}

// Shared, added to global, element by element in the map's element type. The order in which CTAs add is not defined, so
// float results can differ from run to run. Coordinates and clipping as for stores. ISA: cp.reduce.async.bulk.tensor.
__device__ __forceinline__ void tma_reduce_add_1d(const TensorMap* map, const void* source, int x) {
  asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%2}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x) : "memory");
}
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* source, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tma_reduce_add_3d(const TensorMap* map, const void* source, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
               ::"l"(map), "r"(shared_address(source)), "r"(x), "r"(y), "r"(z) : "memory");
}

// Plain bytes, no tensor map: addresses and size are multiples of 16. ISA: cp.async.bulk.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(destination)), "l"(__cvta_generic_to_global(source)), "r"(bytes),
        "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* destination, const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(__cvta_generic_to_global(destination)), "r"(shared_address(source)), "r"(bytes) : "memory");
}

// One float, global -> shared memory, without a register and without waiting; where `valid` is false a zero, and nothing is
// read. An ordinary store as far as proxies go, but one that nobody may read before it has arrived. ISA: cp.async.
__device__ __forceinline__ void copy_async(float* destination, const float* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               ::"r"(shared_address(destination)), "l"(__cvta_generic_to_global(source)), "r"(valid ? 4 : 0) : "memory");
}
// One arrival of the calling thread at `barrier`, made when all of its copy_async so far are done; it counts as one of those
// that mbarrier_init was told of. ISA: cp.async.mbarrier.arrive (noinc).
__device__ __forceinline__ void copy_async_arrive(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Four floats from registers to the shared memory of CTA `rank` of the cluster, at the place that `destination` has here. Their 16
// bytes are delivered to the barrier at the place of `barrier` there, so they need no fence. ISA: st.async.
__device__ __forceinline__ void store_async(float4* destination, u64* barrier, u32 rank, float4 value) {
  asm volatile(
      "{\n .reg .b32 there, arrived;\n mapa.shared::cluster.u32 there, %0, %2;\n mapa.shared::cluster.u32 arrived, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [arrived];\n}"
      ::"r"(shared_address(destination)), "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z),
        "f"(value.w) : "memory");
}

// Bulk groups belong to one thread: the thread that stored must commit and wait.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most `Pending` of the thread's newest groups still read their shared memory: older tiles may be overwritten.
template <int Pending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// At most `Pending` of the newest groups are not yet written: wait for 0 before the kernel ends.
template <int Pending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- registers and launches -----------------------------------------------------------------------------------------

// Registers per thread of the calling warpgroup, a multiple of 8 from 24 to 256. All four warps execute it. The sum
// over the CTA's warpgroups must fit what the launch got, or the increase waits for ever. ISA: setmaxnreg.
template <int Registers>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Programmatic dependent launch: wait for the grids before this one, let the next one start. ISA: griddepcontrol.
__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- formats --------------------------------------------------------------------------------------------------------

// Two floats -> two bf16 (or half) in one register, `low` in the low half; round to nearest even. ISA: cvt.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Output types. store() rounds one float, pack<T>() two into a register.
struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};
__device__ __forceinline__ void store(float* d, float x) { *d = x; }
__device__ __forceinline__ void store(bf16* d, float x) { d->bits = pack_bf16(x, x) & 0xffff; }
__device__ __forceinline__ void store(fp16* d, float x) { d->bits = pack_f16(x, x) & 0xffff; }
template <typename T>
__device__ u32 pack(float low, float high);
template <>
__device__ __forceinline__ u32 pack<bf16>(float low, float high) {
  return pack_bf16(low, high);
}
template <>
__device__ __forceinline__ u32 pack<fp16>(float low, float high) {
  return pack_f16(low, high);
}

// Two neighbouring outputs, in one store where `whole`: both exist and d is aligned for a pair. `left`: outputs up to the end
// of the row. Half as many instructions, and twice the bytes in each.
template <typename T>
__device__ __forceinline__ void store_pair(T* d, float x, float y, int left, bool whole) {
  if (whole) {
    *reinterpret_cast<u32*>(d) = pack<T>(x, y);
  } else {
    if (left > 0) store(d, x);
    if (left > 1) store(d + 1, y);
  }
}
__device__ __forceinline__ void store_pair(float* d, float x, float y, int left, bool whole) {
  if (whole) {
    *reinterpret_cast<float2*>(d) = make_float2(x, y);
  } else {
    if (left > 0) store(d, x);
    if (left > 1) store(d + 1, y);
  }
}

// Two floats -> two FP8 in 16 bits, round to nearest even; beyond the range becomes the largest finite value, NaN stays
// NaN.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ u16 pack_e5m2(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two FP8 -> two half, exact.
__device__ __forceinline__ u32 unpack_e4m3(u16 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}
__device__ __forceinline__ u32 unpack_e5m2(u16 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(packed));
  return halves;
}

__device__ __forceinline__ float half_to_float(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Output types again: what store() wrote, as a float, exact.
__device__ __forceinline__ float load(const float* d) { return *d; }
__device__ __forceinline__ float load(const bf16* d) { return bf16_to_float(d->bits); }
__device__ __forceinline__ float load(const fp16* d) { return half_to_float(d->bits); }

// ---- matrices through shared memory. ISA: ldmatrix, stmatrix --------------------------------------------------------
// 8x8 matrices of 16-bit elements. Lane 8i + r gives the address of row r (16 bytes, 16-byte aligned) of matrix i; each
// lane holds two neighbouring elements of row lane / 4 per matrix. Rows in the same banks conflict: swizzle or pad.

__device__ __forceinline__ void load_matrix_x4(u32 (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void store_matrix_x4(void* row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
__device__ __forceinline__ void store_matrix_x2(void* row, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               ::"r"(shared_address(row)), "r"(r0), "r"(r1) : "memory");
}
__device__ __forceinline__ void store_matrix_x4_transposed(void* row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// The two FP8 formats, as the types that mma_sync and wgmma take.
struct e4m3 {};
struct e5m2 {};

// mma_sync<A, B>(d, a, b): D (16x8) = A (16x32) B (32x8) + D on one warp, operands in registers. ISA: mma.
// Lane l holds rows l / 4 (a[0], a[2]; d[0], d[1]) and l / 4 + 8 (a[1], a[3]; d[2], d[3]) and column l / 4 of B; of k, bytes
// l % 4 * 4 to + 3 (a[0], a[1], b[0]) and 16 further (a[2], a[3], b[1]); of D, columns l % 4 * 2 and the next.
// On Hopper FP8 operands are widened to half first: right, but at half the rate of wgmma or less, and rounded in another way.
template <typename A, typename B>
__device__ void mma_sync(float (&d)[4], const u32 (&a)[4], const u32* b);
#define MMA_SYNC_INSTANCE(A, B)                                                                                       \
  template <>                                                                                                         \
  __device__ __forceinline__ void mma_sync<A, B>(float (&d)[4], const u32 (&a)[4], const u32* b) {                    \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." #A "." #B ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"        \
                 " {%8, %9}, {%0, %1, %2, %3};"                                                                       \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                 \
  }
MMA_SYNC_INSTANCE(e4m3, e4m3)
MMA_SYNC_INSTANCE(e4m3, e5m2)
MMA_SYNC_INSTANCE(e5m2, e4m3)
MMA_SYNC_INSTANCE(e5m2, e5m2)

// ---- ISA: wgmma.mma_async -------------------------------------------------------------------------------------------
// D (64 x N, in registers of a warpgroup) = A (64 x K, shared) times B (N x K, shared) + D, with K = 32 bytes,
// asynchronously. Order: wgmma_fence, one or more wgmma, wgmma_commit, wgmma_wait. Until the wait the registers of D
// belong to the tensor core; the compiler warns (C7514 and others) if other code touches them in between.

enum class Swizzle : u32 { None = 0, Bytes128 = 1, Bytes64 = 2, Bytes32 = 3 };   // bits 62-63 of a descriptor

// Describes one operand tile in shared memory; all offsets in bytes. ISA: Matrix Descriptor Format (of wgmma).
//   address   of the tile's first element, 16-byte aligned. The tile itself must start at a multiple of the swizzle's
//             period (1024, 512 or 256 bytes); stepping along K inside it adds 32 bytes to the address.
//   stride    from one group of 8 rows to the next: 8 * row length, 1024 for 128-byte rows.
//   leading   K-major with swizzle: not used. Without swizzle: from one 16-byte column of 8 rows to the next.
// The swizzle must be the one that the tensor map wrote with: a wrong one permutes 16-byte pieces, silently.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, Swizzle swizzle, u32 stride, u32 leading = 16) {
  return u64((address & 0x3FFFF) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(swizzle) << 62;
}

// Registers written by ordinary code before are seen by the next wgmma. Needed before the first wgmma and whenever
// other code has touched D (or A in registers) since. ISA: wgmma.fence.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `Pending` of the newest groups are unfinished. Then D may be read and the operands overwritten.
// ISA: wgmma.wait_group.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Tell the compiler that D changes here, so that it moves no use of it across a wait.
template <int Count>
__device__ __forceinline__ void wgmma_hold(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma<N, A, B>(d, a, b, accumulate): A and B are e4m3 or e5m2. Thread t of the warpgroup holds row
// t / 32 * 16 + t % 32 / 4 (d[4j], d[4j + 1]) and the row 8 further (d[4j + 2], d[4j + 3]), columns 8j + t % 4 * 2 and
// the next. accumulate = 0 starts from zero and ignores D. ISA: Register Fragments (of wgmma).
template <int N, typename A, typename B>
__device__ void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate);

// Text and constraints of 4, 8, 12 ... registers; an asm statement cannot loop.
#define WGMMA_TEXT_8 "%0, %1, %2, %3"
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %4, %5, %6, %7"
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ", %8, %9, %10, %11"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ", %12, %13, %14, %15"
#define WGMMA_TEXT_40 WGMMA_TEXT_32 ", %16, %17, %18, %19"
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ", %20, %21, %22, %23"
#define WGMMA_TEXT_56 WGMMA_TEXT_48 ", %24, %25, %26, %27"
#define WGMMA_TEXT_64 WGMMA_TEXT_56 ", %28, %29, %30, %31"
#define WGMMA_TEXT_72 WGMMA_TEXT_64 ", %32, %33, %34, %35"
#define WGMMA_TEXT_80 WGMMA_TEXT_72 ", %36, %37, %38, %39"
#define WGMMA_TEXT_88 WGMMA_TEXT_80 ", %40, %41, %42, %43"
#define WGMMA_TEXT_96 WGMMA_TEXT_88 ", %44, %45, %46, %47"
#define WGMMA_TEXT_104 WGMMA_TEXT_96 ", %48, %49, %50, %51"
#define WGMMA_TEXT_112 WGMMA_TEXT_104 ", %52, %53, %54, %55"
#define WGMMA_TEXT_120 WGMMA_TEXT_112 ", %56, %57, %58, %59"
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ", %60, %61, %62, %63"
#define WGMMA_TEXT_136 WGMMA_TEXT_128 ", %64, %65, %66, %67"
#define WGMMA_TEXT_144 WGMMA_TEXT_136 ", %68, %69, %70, %71"
#define WGMMA_TEXT_152 WGMMA_TEXT_144 ", %72, %73, %74, %75"
#define WGMMA_TEXT_160 WGMMA_TEXT_152 ", %76, %77, %78, %79"
#define WGMMA_TEXT_168 WGMMA_TEXT_160 ", %80, %81, %82, %83"
#define WGMMA_TEXT_176 WGMMA_TEXT_168 ", %84, %85, %86, %87"
#define WGMMA_TEXT_184 WGMMA_TEXT_176 ", %88, %89, %90, %91"
#define WGMMA_TEXT_192 WGMMA_TEXT_184 ", %92, %93, %94, %95"
#define WGMMA_TEXT_200 WGMMA_TEXT_192 ", %96, %97, %98, %99"
#define WGMMA_TEXT_208 WGMMA_TEXT_200 ", %100, %101, %102, %103"
#define WGMMA_TEXT_216 WGMMA_TEXT_208 ", %104, %105, %106, %107"
#define WGMMA_TEXT_224 WGMMA_TEXT_216 ", %108, %109, %110, %111"
#define WGMMA_TEXT_232 WGMMA_TEXT_224 ", %112, %113, %114, %115"
#define WGMMA_TEXT_240 WGMMA_TEXT_232 ", %116, %117, %118, %119"
#define WGMMA_TEXT_248 WGMMA_TEXT_240 ", %120, %121, %122, %123"
#define WGMMA_TEXT_256 WGMMA_TEXT_248 ", %124, %125, %126, %127"
#define WGMMA_REGISTERS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_REGISTERS_24 WGMMA_REGISTERS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_REGISTERS_32 WGMMA_REGISTERS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_REGISTERS_40 WGMMA_REGISTERS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_REGISTERS_48 WGMMA_REGISTERS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_REGISTERS_56 WGMMA_REGISTERS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_REGISTERS_64 WGMMA_REGISTERS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_REGISTERS_72 WGMMA_REGISTERS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_REGISTERS_80 WGMMA_REGISTERS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_REGISTERS_88 WGMMA_REGISTERS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_REGISTERS_96 WGMMA_REGISTERS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_REGISTERS_104 WGMMA_REGISTERS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_REGISTERS_112 WGMMA_REGISTERS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_REGISTERS_120 WGMMA_REGISTERS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_REGISTERS_128 WGMMA_REGISTERS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_REGISTERS_136 WGMMA_REGISTERS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_REGISTERS_144 WGMMA_REGISTERS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_REGISTERS_152 WGMMA_REGISTERS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_REGISTERS_160 WGMMA_REGISTERS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_REGISTERS_168 WGMMA_REGISTERS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_REGISTERS_176 WGMMA_REGISTERS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_REGISTERS_184 WGMMA_REGISTERS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_REGISTERS_192 WGMMA_REGISTERS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_REGISTERS_200 WGMMA_REGISTERS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_REGISTERS_208 WGMMA_REGISTERS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_REGISTERS_216 WGMMA_REGISTERS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_REGISTERS_224 WGMMA_REGISTERS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_REGISTERS_232 WGMMA_REGISTERS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_REGISTERS_240 WGMMA_REGISTERS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_REGISTERS_248 WGMMA_REGISTERS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_REGISTERS_256 WGMMA_REGISTERS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define WGMMA_PREDICATE_8 "%6"
#define WGMMA_INPUTS_8 "%4, %5, p"
#define WGMMA_PREDICATE_16 "%10"
#define WGMMA_INPUTS_16 "%8, %9, p"
#define WGMMA_PREDICATE_24 "%14"
#define WGMMA_INPUTS_24 "%12, %13, p"
#define WGMMA_PREDICATE_32 "%18"
#define WGMMA_INPUTS_32 "%16, %17, p"
#define WGMMA_PREDICATE_40 "%22"
#define WGMMA_INPUTS_40 "%20, %21, p"
#define WGMMA_PREDICATE_48 "%26"
#define WGMMA_INPUTS_48 "%24, %25, p"
#define WGMMA_PREDICATE_56 "%30"
#define WGMMA_INPUTS_56 "%28, %29, p"
#define WGMMA_PREDICATE_64 "%34"
#define WGMMA_INPUTS_64 "%32, %33, p"
#define WGMMA_PREDICATE_72 "%38"
#define WGMMA_INPUTS_72 "%36, %37, p"
#define WGMMA_PREDICATE_80 "%42"
#define WGMMA_INPUTS_80 "%40, %41, p"
#define WGMMA_PREDICATE_88 "%46"
#define WGMMA_INPUTS_88 "%44, %45, p"
#define WGMMA_PREDICATE_96 "%50"
#define WGMMA_INPUTS_96 "%48, %49, p"
#define WGMMA_PREDICATE_104 "%54"
#define WGMMA_INPUTS_104 "%52, %53, p"
#define WGMMA_PREDICATE_112 "%58"
#define WGMMA_INPUTS_112 "%56, %57, p"
#define WGMMA_PREDICATE_120 "%62"
#define WGMMA_INPUTS_120 "%60, %61, p"
#define WGMMA_PREDICATE_128 "%66"
#define WGMMA_INPUTS_128 "%64, %65, p"
#define WGMMA_PREDICATE_136 "%70"
#define WGMMA_INPUTS_136 "%68, %69, p"
#define WGMMA_PREDICATE_144 "%74"
#define WGMMA_INPUTS_144 "%72, %73, p"
#define WGMMA_PREDICATE_152 "%78"
#define WGMMA_INPUTS_152 "%76, %77, p"
#define WGMMA_PREDICATE_160 "%82"
#define WGMMA_INPUTS_160 "%80, %81, p"
#define WGMMA_PREDICATE_168 "%86"
#define WGMMA_INPUTS_168 "%84, %85, p"
#define WGMMA_PREDICATE_176 "%90"
#define WGMMA_INPUTS_176 "%88, %89, p"
#define WGMMA_PREDICATE_184 "%94"
#define WGMMA_INPUTS_184 "%92, %93, p"
#define WGMMA_PREDICATE_192 "%98"
#define WGMMA_INPUTS_192 "%96, %97, p"
#define WGMMA_PREDICATE_200 "%102"
#define WGMMA_INPUTS_200 "%100, %101, p"
#define WGMMA_PREDICATE_208 "%106"
#define WGMMA_INPUTS_208 "%104, %105, p"
#define WGMMA_PREDICATE_216 "%110"
#define WGMMA_INPUTS_216 "%108, %109, p"
#define WGMMA_PREDICATE_224 "%114"
#define WGMMA_INPUTS_224 "%112, %113, p"
#define WGMMA_PREDICATE_232 "%118"
#define WGMMA_INPUTS_232 "%116, %117, p"
#define WGMMA_PREDICATE_240 "%122"
#define WGMMA_INPUTS_240 "%120, %121, p"
#define WGMMA_PREDICATE_248 "%126"
#define WGMMA_INPUTS_248 "%124, %125, p"
#define WGMMA_PREDICATE_256 "%130"
#define WGMMA_INPUTS_256 "%128, %129, p"

// Makes wgmma<N, A, B>. Write one line per shape that the kernel uses, after the include; N is a number or a macro for
// one. (All shapes at once would take a second to compile.)
#define WGMMA_INSTANCE(N, A, B) WGMMA_INSTANCE_EXPANDED(N, A, B)
#define WGMMA_INSTANCE_EXPANDED(N, A, B)                                                                    \
  template <>                                                                                               \
  __device__ __forceinline__ void wgmma<N, A, B>(float (&d)[N / 2], u64 a, u64 b, int accumulate) {         \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " WGMMA_PREDICATE_##N ", 0;\n"                         \
                 " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." #A "." #B " {" WGMMA_TEXT_##N "},"      \
                 " " WGMMA_INPUTS_##N ", 1, 1;\n}"                                                          \
                 : WGMMA_REGISTERS_##N                                                                      \
                 : "l"(a), "l"(b), "r"(accumulate));                                                        \
  }
