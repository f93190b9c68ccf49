// D = A times B transposed, for every kind of problem of the library, from one persistent kernel.
//
//   D[m][n] = bias[n] + C[m][n] + sum over promotions p of (scale_a * scale_b) * sum over k in p of A[m][k] * B[n][k]
//
// Two operands meet in a tile: X, whose rows lie on the 64-row side of wgmma, and Y, whose rows are its columns. X is A and Y is
// B, or, swapped, X is B and Y is A: few tokens then cost a narrow wgmma instead of 64 rows of it. K is innermost in both.
//
//   Dense           X rows by Y rows, one group.
//   Contiguous      the tokens of group g are rows begins[g] to ends[g] of A; B is (groups, N, K).
//   Masked          A is (groups, rows, K), of which the first ends[g] rows of group g are tokens; B is (groups, N, K).
//   KGrouped        group g is k from begins[g], a multiple of 128, to ends[g] in both; D is (groups, M, N).
//
//   grid (CTAs, at most CtasPerSm for each SM), block (Threads). Warp 0 loads tiles by TMA, warps 1 to 3 scales, warpgroups 1
//   and up multiply. Where K is split: clusters of Splits CTAs, one cluster for every tile of D.
//   Where X is shared: clusters of Multicast CTAs with tiles side by side.

#include "hopper.cuh"

enum Kind { Dense, Contiguous, Masked, KGrouped };

// Constants from the host, bound once.
constexpr int Problem = KIND;              // a Kind
constexpr bool GroupsOfTokens = Problem == Contiguous || Problem == Masked;  // groups of tokens, each with weights of its own
constexpr bool Swapped = SWAPPED;          // X is B
constexpr int Consumers = CONSUMERS;       // warpgroups that multiply: 1 or 2
constexpr int Rounds = ROUNDS;             // wgmma tiles of 64 rows that each works on in turn: 1 or 2
constexpr int RoundRows = 64 * Consumers;  // rows of X that one round multiplies
constexpr int BlockX = RoundRows * Rounds;
constexpr int BlockY = BLOCK_Y;            // columns of a tile, a multiple of 8; of 16 where TMA stores D
constexpr int BlockK = 128;                // bytes of k in one slot of the ring
constexpr int Stages = NUM_STAGES;         // slots of the ring
constexpr int GroupX = GROUP_X;            // rows of tiles that are worked on together, so that L2 serves them
constexpr int Splits = SPLITS;             // parts that K is cut into, one for each CTA of a cluster; added up in order
constexpr int Multicast = MULTICAST;       // CTAs of a cluster, with tiles side by side, that share X: each loads a part of it for all. 1: none
constexpr int Interval = INTERVAL;         // blocks of k between promotions; 0: never, one accumulator over all of k
constexpr bool VectorY = VECTOR_Y;         // every row of Y has its own scale; else every 128 of them share one
constexpr bool Halves = HALVES;            // two rounds are stored in halves, see Late
constexpr bool Turns = TURNS;              // last rows in tiles on their side, see below: 2 rounds of promoted sums only
constexpr bool StoreByTma = STORE_BY_TMA;  // D's rows are multiples of 16 bytes, and X is A
constexpr bool Accumulate = ACCUMULATE;    // add to what D holds
constexpr bool Bias = BIAS;                // one FP32 number per n
typedef OUTPUT Output;                     // bf16, fp16 or float

constexpr int Threads = 128 * (1 + Consumers);
constexpr int CtasPerSm = CTAS_PER_SM;     // 2: small tiles, so that a CTA, or the next grid's, starts while another ends
// Registers per thread after the exchange; CtasPerSm * 128 * (producer + Consumers * consumer) <= 65536. Two rounds need every one
// they can get.
constexpr int ProducerRegisters = Rounds == 2 ? 40 : 56, ConsumerRegisters = CtasPerSm == 2 ? 192 : Rounds == 2 ? 232 : 224;
constexpr int Cluster = Splits * Multicast;  // CTAs; one of the two is 1
constexpr int WarpsForX = BlockX > 128 ? 2 : 1;  // that copy scales of X, at most 128 each
// Where K is split, each CTA of the cluster adds up and stores a piece of the columns, as long as there are pieces of 16 (8 where threads store).
constexpr int PieceUnit = StoreByTma ? 16 : 8;
constexpr int PieceY = (BlockY / PieceUnit + Splits - 1) / Splits * PieceUnit, Pieces = (BlockY + PieceY - 1) / PieceY;
// A panel is what one warp stages for one TMA store: 16 rows of D, as wide as a swizzle span (128, 64 or 32 bytes) can be.
constexpr int RowBytes = (BlockY | PieceY) * sizeof(Output);  // a power of two divides this if it divides both
constexpr int PanelBytes = !StoreByTma ? 16 : RowBytes % 128 == 0 ? 128 : RowBytes % 64 == 0 ? 64 : 32;
constexpr int PanelColumns = PanelBytes / sizeof(Output);
// Columns of a round that are stored together: where in halves, about half of them, in whole panels.
constexpr int StoredY = !Halves ? BlockY : StoreByTma ? (BlockY / PanelColumns + 1) / 2 * PanelColumns : BlockY / 16 * 8;
// Columns in a row that surely share a scale of Y, and blocks of scales that a tile can touch.
constexpr int Chunk = VectorY ? 8 : (BlockY & -BlockY) < 128 ? BlockY & -BlockY : 128;
constexpr int ScaleBlocks = VectorY ? 1 : (128 - Chunk + BlockY - 1) / 128 + 1;
constexpr int ScalesY = VectorY ? BlockY : (ScaleBlocks + 3) / 4 * 4;  // whole 16 bytes: the compiler reads them at once

// L2 keeps the operand that is read again soon, where that is no more than 20 of its 60 MB. Weights that only one tile reads are evicted
// first up to OnceBytes in a call: 0.5 to 4 % faster. With more of them it is up to 5 % slower, for a reason that is not known.
constexpr long long KeptBytes = 20 << 20, OnceBytes = Swapped ? 120 << 20 : KeptBytes;

// HBM has nothing to do from a kernel's last copy until the next kernel's first. Where a CTA of the next kernel finds room beside this one's
// last, it sends for so many blocks of its weights before it waits: 2 to 14 % of a call. (Sizes of groups may still be being written.)
constexpr int BlocksPrefetched = Problem == Dense && CtasPerSm == 2 ? 2 : 0;
// The next kernel should not be launched before this one has sent for all it needs, or it takes HBM's time from it: 2 to 10 %. But calls with
// less than LateBytes of weights end too soon for that: there a kernel's start is what takes long. And long calls, of two rounds, lose 0.5 %.
constexpr int LateBytes = 4 << 20;

// Outputs are stored while the tensor core works on what follows: the accumulator holds none of them, where sums are promoted.
constexpr bool Late = Interval > 0 && Splits == 1;

// Where one round holds the last rows of X, a tile lies on its side: both rounds multiply the same RoundRows rows of X, the second
// by the next BlockY rows of Y. A slot has room for that: where an upright tile has its second round of X, it has one more of Y.
static_assert(Multicast == 1 || (Splits == 1 && !Swapped && BlockX % (8 * Multicast) == 0));  // 8: rows of a swizzle's period
static_assert(!Halves || (Rounds == 2 && Late));
static_assert(!Turns || (Rounds == 2 && BlockY == RoundRows && Late && !Swapped && !VectorY && Problem != KGrouped));

// Where a slot's operands lie, and whether their places are kept as whole descriptors or as lower halves (the upper ones are all the same).
// Neither changes what is done; the compiler makes faster loops of it so: by 1 % for two upright rounds, by 1 to 5 % for one.
constexpr bool SideBySide = Rounds == 1 || Turns;
template <int> struct PlaceFor { typedef u64 type; };
template <> struct PlaceFor<1> { typedef u32 type; };
typedef PlaceFor<Rounds>::type Place;
constexpr int SlotX = (SideBySide ? BlockX + BlockY : BlockX) * BlockK, SlotY = SideBySide ? SlotX : BlockY * BlockK;
constexpr int FirstY = (SideBySide ? 1 : Stages) * BlockX * BlockK;    // bytes before Y of slot 0

// Where K is split, the other CTAs' sums of a CTA's piece (its parts) arrive in its ring: in the first slots, once those are empty. So the
// last block of k shall lie in the last slot, and the first one wherever that takes it.
constexpr int RingBytes = Stages * (BlockX + BlockY) * BlockK, PartsBytes = (Splits - 1) * BlockX * PieceY * sizeof(float);
constexpr int SlotsForParts = PartsBytes > Stages * SlotX ? Stages : (PartsBytes + SlotX - 1) / SlotX;

// What outputs are multiplied by is read, or picked, beside wgmma where registers allow, else after it: a factor for each of a thread's registers,
// or, where columns share scales, one for each of its two rows in every chunk of columns.
constexpr bool EarlyFactors = VectorY ? Rounds == 1 && BlockY <= 128 : ScaleBlocks > 1;
constexpr int Factors = !EarlyFactors ? 1 : VectorY ? BlockY / 2 : BlockY / Chunk * 2;
__device__ constexpr int factor_for(int i) { return VectorY ? i : i / (Chunk / 2) * 2 + i / 2 % 2; }      // of register i
__device__ constexpr int register_with(int f) { return VectorY ? f : f / 2 * (Chunk / 2) + f % 2 * 2; }  // the first with factor f

WGMMA_INSTANCE(BLOCK_Y, X_FORMAT, Y_FORMAT)

struct alignas(1024) Shared {              // 1024: the period of a 128-byte swizzle
  u8 operands[RingBytes > PartsBytes ? RingBytes : PartsBytes];  // of slot s: X at s * SlotX, Y at FirstY + s * SlotY
  u8 out[4 * Consumers][16 * PanelBytes];  // one panel per warp
  float scale_x[Stages][BlockX];           // of the slot's block of k
  float scale_y[Stages][ScalesY];
  u64 full[Stages];                        // the slot is filled: one arrival with the tiles' bytes, one per thread that copies scales
  u64 empty[Stages];                       // the slot may be overwritten: one arrival per consumer warp
  u64 parts_full[Consumers];               // splits: the parts for this consumer are there
  u64 parts_empty;                         // splits: the others have room for theirs, one arrival each
};

struct Ring {                              // a place in the ring, the same for everyone
  int slot = 0;
  u32 phase = 0;
  __device__ void advance() {
    if (++slot == Stages) slot = 0, phase ^= 1;
  }
};

struct Arguments {                         // what all warps need to find tiles
  const int *begins, *ends;                // of groups: in rows (Contiguous), in elements of k (KGrouped); Masked: ends only
  int x_rows, y_rows, k, groups;           // rows of X and Y (tokens: all of them, or per group where Masked); k in elements
};

// One tile: where its operands begin, where its rows end, which blocks of k it adds up, which of those side by side it is, whether it lies
// on its side.
struct Tile {
  int group, x, y, x_end, y_end, k_block, k_end, split, place, turned, x_step, y_step;
  __device__ int x_of(int round) const { return x + (round > 0 ? Turns ? x_step : RoundRows : 0); }
  __device__ int y_of(int round) const { return y + (round > 0 && Turns ? y_step : 0); }
  // Which of its blocks of k, counted modulo Stages, lie in slot 0. Splits: the last block lies in the last slot.
  __device__ int in_slot_0() const { return Splits > 1 ? (k_end - k_block) % Stages : 0; }
};

// The same for all lanes of a warp. They agree on it already; the shuffle tells the compiler, which then keeps it, loops over it and
// the descriptors that follow from those in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Finds a CTA's tiles, first to last. All lanes of a warp call it together: in the grouped kinds each of them counts the tiles of
// one group, 32 groups at a time, because the sizes of groups are known on the device only.
struct Scheduler {
  const Arguments& problem;
  int index = blockIdx.x / Cluster, chunk = 0, before = 0;             // next tile (or those side by side); groups being looked at; tiles in those before

  // Sizes are known on the device only, so wrong ones are found here: whatever they are, nothing outside of the tensors is touched.
  __device__ int begin(int group) const { return max(problem.begins[group], 0); }
  __device__ int tokens(int group) const {                             // rows of X or Y that the group has; Masked ones begin at 0
    if (group >= problem.groups) return 0;
    const int end = min(problem.ends[group], Swapped ? problem.y_rows : problem.x_rows);
    return max(end - (Problem == Contiguous ? begin(group) : 0), 0);
  }

  // Tiles of so many rows of X and of Y: upright ones, and those on their side.
  __device__ int columns(int y_rows) const { return (y_rows + Multicast * BlockY - 1) / (Multicast * BlockY); }
  __device__ int upright(int x_rows) const { return Turns ? (x_rows + RoundRows - 1) / BlockX : (x_rows + BlockX - 1) / BlockX; }
  __device__ int on_side(int x_rows) const { return Turns && upright(x_rows) * BlockX < x_rows; }
  __device__ int tiles_of(int x_rows, int y_rows) const {
    return upright(x_rows) * columns(y_rows) + on_side(x_rows) * ((columns(y_rows) + 1) / 2);
  }

  __device__ bool next(Tile& tile) {
    int within = index, x_rows = problem.x_rows, y_rows = problem.y_rows, size = 0;
    tile.group = 0;
    if constexpr (GroupsOfTokens) {
      for (;; chunk += 32) {
        if (chunk >= problem.groups) return false;
        const int lane = threadIdx.x % 32, mine = tokens(chunk + lane);
        const int tiles = Swapped ? tiles_of(x_rows, mine) : tiles_of(mine, y_rows);
        int sum = tiles;                                               // of this lane's group and those before it in the chunk
        // BLANK 1: add to sum the tiles of all lower lanes' groups
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(~0u, sum, step);
          if (lane >= step) sum += other;
        }
        // END BLANK
        const u32 beyond = __ballot_sync(~0u, before + sum > index);
        if (beyond == 0) {
          before += __shfl_sync(~0u, sum, 31);
          continue;
        }
        // BLANK 2: the tile's group, how many tokens the group has (size), which of the group's tiles this is (within)
        const int owner = __ffs(beyond) - 1;
        tile.group = chunk + owner;
        size = __shfl_sync(~0u, mine, owner);
        within = index - before - __shfl_sync(~0u, sum - tiles, owner);
        // END BLANK
        break;
      }
      (Swapped ? y_rows : x_rows) = size;
    } else {
      const int per_group = tiles_of(x_rows, y_rows);
      if (index >= per_group * problem.groups) return false;
      if constexpr (Problem == KGrouped) tile.group = index / per_group, within = index % per_group;
    }
    index += gridDim.x / Cluster;
    tile.split = blockIdx.x % Splits, tile.place = blockIdx.x % Multicast;  // the CTA's rank in its cluster
    const int x_tiles = upright(x_rows), y_tiles = columns(y_rows);
    tile.turned = Turns && within >= x_tiles * y_tiles;
    if (Turns && tile.turned) {
      tile.x = x_tiles * BlockX, tile.y = ((within - x_tiles * y_tiles) * Multicast + tile.place) * 2 * BlockY;
    } else {
      const int first = within / (GroupX * y_tiles) * GroupX;          // in groups of GroupX rows; within a group x runs fastest
      const int height = min(GroupX, x_tiles - first);
      within %= GroupX * y_tiles;
      tile.x = (first + within % height) * BlockX, tile.y = (within / height * Multicast + tile.place) * BlockY;
    }
    // TMA is slow with rows outside of a tensor (1.4 times at M = 137): the last rows move up. Those that the tile before has, too, are
    // stored twice, with the same bits.
    if constexpr (Problem == Dense && !Accumulate) tile.x = max(min(tile.x, x_rows - (tile.turned ? RoundRows : BlockX)), 0);
    tile.x_end = problem.x_rows, tile.y_end = problem.y_rows;
    // BLANK 3: where the group's tokens lie: move a Contiguous tile to them; end Contiguous and Masked tiles where they end
    if constexpr (Problem == Contiguous) {
      const int start = begin(tile.group);
      if (Swapped) tile.y += start, tile.y_end = start + size; else tile.x += start, tile.x_end = start + size;
    }
    if constexpr (Problem == Masked) (Swapped ? tile.y_end : tile.x_end) = size;
    // END BLANK
    const int k_blocks = (problem.k + BlockK - 1) / BlockK;
    constexpr int Unit = Interval > 1 ? Interval : 1;                  // splits begin at promotions
    const int units = (k_blocks + Unit - 1) / Unit;
    tile.k_block = tile.split * units / Splits * Unit, tile.k_end = min((tile.split + 1) * units / Splits * Unit, k_blocks);
    if constexpr (Problem == KGrouped)
      tile.k_block = begin(tile.group) / BlockK, tile.k_end = min((problem.ends[tile.group] + BlockK - 1) / BlockK, k_blocks);
    tile.x_step = tile.turned ? 0 : RoundRows, tile.y_step = tile.turned ? BlockY : 0;
    if constexpr (Turns) tile.turned = uniform(tile.turned), tile.x_step = uniform(tile.x_step), tile.y_step = uniform(tile.y_step);
    if constexpr (Splits > 1 || Problem == KGrouped) tile.k_block = uniform(tile.k_block), tile.k_end = uniform(tile.k_end);
    return true;
  }
};

// Which group coordinate an operand's tensor map takes: tokens have one only where Masked, weights wherever there are groups.
__device__ int map_group(const Tile& tile, bool tokens) {
  return Problem == Masked || (Problem == Contiguous && !tokens) ? tile.group : 0;
}

// Scales in any layout: of row r and block b of k at scale[group * group_stride + (r >> shift) * row_stride + b * k_stride].
struct Scales {
  const float* scale;
  int group_stride, shift, row_stride, k_stride;                       // in floats: scales are few enough for 32 bits
  __device__ const float* of_group(int group) const { return scale + (long long)group * group_stride; }
};

// One warp copies scales of every slot's block of k into shared memory, from whatever layout they have: those of Count rows of X or
// Y from row `first` of the tile on, or of blocks of 128 rows. The copies are asynchronous and arrive at the slot's barrier
// themselves, so that as many blocks are on their way as the ring has slots. Rows beyond the end are not read and get zero.
template <bool OfX, int Count>
__device__ __forceinline__ void supply_scales(Shared& shared, const Arguments& problem, const Scales& scales, int first) {
  constexpr int Step = OfX || VectorY ? 1 : 128;
  const int lane = threadIdx.x % 32;
  Ring ring;
  Tile tile;
  Scheduler scheduler{problem};
  while (scheduler.next(tile)) {
    const float* scale = scales.of_group(map_group(tile, OfX != Swapped)) + (long long)tile.k_block * scales.k_stride;
    const int row_end = OfX ? tile.x_end : tile.y_end;
    const int row = (OfX ? tile.x + first : VectorY ? tile.y : tile.y / 128 * 128) + lane * Step;
#pragma unroll 1
    for (int k_block = tile.k_block; k_block < tile.k_end; ++k_block, ring.advance()) {
      float* slot = OfX ? &shared.scale_x[ring.slot][first] : shared.scale_y[ring.slot];
      mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
#pragma unroll
      for (int i = 0; i < Count; i += 32) {
        const int r = row + i * Step;
        if (Count % 32 == 0 || i + lane < Count) copy_async(&slot[i + lane], scale + (r >> scales.shift) * scales.row_stride, r < row_end);
      }
      if (lane < Count) copy_async_arrive(&shared.full[ring.slot]);
      scale += scales.k_stride;
    }
  }
}

// One output: x and y are rows of X and Y.
struct Destination {
  Output* D;
  const float* bias;
  int rows, row_length;                    // of one group of D
  __device__ void store_one(const Tile& tile, int x, int y, float value) const {
    if (x >= tile.x_end || y >= tile.y_end) return;
    const int m = Swapped ? y : x, n = Swapped ? x : y, group = Problem == Masked || Problem == KGrouped ? tile.group : 0;
    Output& d = D[((long long)group * rows + m) * row_length + n];
    if (Bias) value += bias[n];
    if (Accumulate) value += load(&d);
    store(&d, value);
  }
};

// A warp stores 16 rows of the tile from row x on, columns y + from to y + until. total: what a wgmma leaves in a thread's registers;
// inlined, it stays there.
__device__ __forceinline__ void store_rows(const float (&total)[BlockY / 2], const TensorMap& map_d, const Destination& to, u8* panel,
                                           const Tile& tile, int x, int y, int from, int until) {
  const int lane = threadIdx.x % 32;
  if constexpr (StoreByTma) {
#pragma unroll                                                           // total must be indexed by constants to stay in registers
    for (int first = 0; first < BlockY; first += PanelColumns) {
      if (first < from || first >= until) continue;
      if (lane == 0) tma_store_wait_read<0>();                         // the panel's last store has read it
      __syncwarp();
      // Byte b of row r lies at r * PanelBytes + b, its 16-byte chunk xored with the row as the map's swizzle has it.
      auto place = [&](int row, int byte) {
        const int offset = row * PanelBytes + byte;
        return panel + (offset ^ (offset >> 3 & (PanelBytes - 16)));
      };
#pragma unroll
      for (int n = 0; n < PanelColumns; n += 16) {                     // 8 registers: 16 columns of two rows, 2 per step of 8
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int column = y + first + n + i / 4 * 8 + lane % 4 * 2 + i % 2;
          v[i] = total[(first + n) / 2 + i];
          if (Bias && column < tile.y_end) v[i] += to.bias[column];
        }
        if constexpr (sizeof(Output) == 2) {
          store_matrix_x4(place(lane % 16, n * 2 + lane / 16 * 16), pack<Output>(v[0], v[1]), pack<Output>(v[2], v[3]),
                          pack<Output>(v[4], v[5]), pack<Output>(v[6], v[7]));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            *reinterpret_cast<float2*>(place(lane / 4 + i % 2 * 8, (n + i / 2 * 8 + lane % 4 * 2) * 4)) =
                make_float2(v[2 * i], v[2 * i + 1]);
        }
      }
      const int group = Problem == Masked || Problem == KGrouped ? tile.group : 0;
      // TMA clips at the end of D. Where D goes on after the tile's last row, the rows before that end are copied one by one.
      if (GroupsOfTokens && x + 16 > tile.x_end) {
        __syncwarp();
        constexpr int Chunks = PanelBytes / 16, Elements = 16 / sizeof(Output);   // 16 bytes each
#pragma unroll 1
        for (int i = lane; i < 16 * Chunks; i += 32) {
          const int row = i / Chunks, column = y + first + i % Chunks * Elements;
          if (x + row >= tile.x_end || column >= tile.y_end) continue;
          int4* there = reinterpret_cast<int4*>(&to.D[((long long)group * to.rows + x + row) * to.row_length + column]);
          if constexpr (Accumulate) {                                  // FP32
            const float4 here = *reinterpret_cast<const float4*>(place(row, i % Chunks * 16));
            float4* d = reinterpret_cast<float4*>(there);
            *d = make_float4(d->x + here.x, d->y + here.y, d->z + here.z, d->w + here.w);
          } else {
            *there = *reinterpret_cast<const int4*>(place(row, i % Chunks * 16));
          }
        }
        continue;
      }
      fence_proxy_async_shared();                                      // the stores above become visible to TMA
      __syncwarp();
      if (lane == 0) {
        // Every element is added to once, so the sum does not depend on timing. The host sets both only for FP32.
        if constexpr (Accumulate) tma_reduce_add_3d(&map_d, panel, y + first, x, group);
        else tma_store_3d(&map_d, panel, y + first, x, group, L2EvictFirst);
        tma_store_commit();
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < BlockY / 2; ++i)
      if (i * 2 >= from && i * 2 < until)
        to.store_one(tile, x + lane / 4 + i / 2 % 2 * 8, y + i / 4 * 8 + lane % 4 * 2 + i % 2, total[i]);
  }
}

extern "C" __global__ void __launch_bounds__(Threads, CtasPerSm)
gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_y, const __grid_constant__ TensorMap map_d,
     const float* scale_x, const float* scale_y, const float* bias, const int* begins, const int* ends,
     Output* D, int x_rows, int y_rows, int k, int groups, int d_rows, int d_row_length,
     int scale_x_group_stride, int scale_x_shift, int scale_x_row_stride, int scale_x_k_stride,
     int scale_y_group_stride, int scale_y_shift, int scale_y_row_stride, int scale_y_k_stride) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32;
  const Arguments problem = {begins, ends, x_rows, y_rows, k, groups};
  const Scales of_x = {scale_x, scale_x_group_stride, scale_x_shift, scale_x_row_stride, scale_x_k_stride};
  const Scales of_y = {scale_y, scale_y_group_stride, scale_y_shift, scale_y_row_stride, scale_y_k_stride};

  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(&shared.full[s], 1 + 32 * WarpsForX + min(32, ScalesY));
      mbarrier_init(&shared.empty[s], 4 * Consumers * Multicast);
    }
    if constexpr (Splits > 1) {
      const int rank = blockIdx.x % Splits, columns = min(PieceY, BlockY - rank * PieceY);  // of the piece; none if not positive
      for (int c = 0; c < Consumers; ++c) {
        mbarrier_init(&shared.parts_full[c], 1);
        if (columns > 0) mbarrier_arrive_expect_tx(&shared.parts_full[c], (Splits - 1) * Rounds * 64 * columns * sizeof(float));
      }
      mbarrier_init(&shared.parts_empty, max(Pieces - (rank < Pieces), 1));
    }
    fence_mbarrier_init();
    tma_prefetch_map(&map_x), tma_prefetch_map(&map_y);
  }
  __syncthreads();                                                     // the barriers exist
  if constexpr (Cluster > 1) cluster_arrive();                         // for the other CTAs too; waited for before they are used
  if (BlocksPrefetched > 0 && threadIdx.x < 32) {
    Tile tile;
    Scheduler scheduler{problem};
    if (scheduler.next(tile) && lane == 0)
      for (int k_block = tile.k_block; k_block < min(tile.k_block + BlocksPrefetched, tile.k_end); ++k_block)
        tma_prefetch_3d(Swapped ? &map_x : &map_y, k_block * BlockK, Swapped ? tile.x : tile.y, 0);
  }
  // Up to here nothing was read that an earlier kernel writes, so that this may overlap with that kernel's end.
  wait_for_previous_grid();
  auto weights_of = [&](int groups) { return (long long)(Swapped ? problem.x_rows : problem.y_rows) * problem.k * groups; };  // bytes
  const int all_groups = Problem == KGrouped ? 1 : problem.groups;  // k of KGrouped is all groups' already
  const bool launches_late = Rounds == 1 && weights_of(all_groups) >= LateBytes;
  if (!launches_late) launch_next_grid();
  if constexpr (Multicast > 1) cluster_wait();

  if (warpgroup == 0) {
    registers_decrease<ProducerRegisters>();
    if (warp == 0) {
      // ---- tiles: one thread fills the ring ---------------------------------------------------------------------------
      // X's rows are read again for the next column of tiles: L2 keeps them, if it can keep those of GroupX rows of tiles. Y's are read by
      // GroupX tiles at about the same time, and then not before the next GroupX rows of tiles. In a dense product they make room for X,
      // unless they can stay until then. Tiles of groups are not so much in step: there Y is not evicted first, which is 1 to 5 % faster.
      // Swapped, there is one column of tiles, and each of them reads Y again. Weights that only one tile reads are evicted first where a
      // call has few of them.
      const bool fits = (long long)(Swapped ? BlockY : GroupX * BlockX) * problem.k <= KeptBytes;
      const int x_rows_of_group = problem.x_rows / (Problem == Contiguous ? problem.groups : Problem == Masked ? 2 : 1);  // or so
      const bool few = weights_of(all_groups) <= OnceBytes;
      const bool stays = x_rows_of_group > GroupX * BlockX && weights_of(1) <= KeptBytes;
      const u64 policy_x = Swapped ? (few ? L2EvictFirst : L2EvictNormal) : fits ? L2EvictLast : L2EvictNormal;
      const bool first = !Swapped && (x_rows_of_group > BlockX ? fits && !stays && !GroupsOfTokens : few);
      const u64 policy_y = Swapped && fits ? L2EvictLast : first ? L2EvictFirst : L2EvictNormal;
      Ring ring;
      Tile tile;
      Scheduler scheduler{problem};
      while (scheduler.next(tile)) {
        const int group_x = map_group(tile, !Swapped), group_y = map_group(tile, Swapped);
        const int in_slot_0 = tile.in_slot_0();
#pragma unroll 1
        for (int k_block = tile.k_block; k_block < tile.k_end; ++k_block, ring.advance()) {
          if (lane == 0) {
            mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
            mbarrier_arrive_expect_tx(&shared.full[ring.slot], (BlockX + BlockY) * BlockK);
            const int slot = ring.slot - in_slot_0 + (ring.slot < in_slot_0 ? Stages : 0);
            u8 *x = shared.operands + slot * SlotX, *second = x + RoundRows * BlockK, *y = shared.operands + FirstY + slot * SlotY;
            if constexpr (Multicast > 1) {
              // X crosses from L2 once for all. On its side a tile has as many rows of X as one CTA loads: the first does.
              constexpr int Share = BlockX / Multicast;
              if (!Turns || !tile.turned || tile.place == 0)
                tma_load_multicast_3d(x + tile.place * Share * BlockK, &map_x, &shared.full[ring.slot], (1 << Multicast) - 1, k_block * BlockK,
                                      tile.x + tile.place * Share, group_x, policy_x);
            } else {
              tma_load_3d(x, &map_x, &shared.full[ring.slot], k_block * BlockK, tile.x, group_x, policy_x);
            }
            if (Turns && tile.turned)
              tma_load_3d(second, &map_y, &shared.full[ring.slot], k_block * BlockK, tile.y_of(1), group_y, policy_y);
            else if (Turns && Multicast == 1)
              tma_load_3d(second, &map_x, &shared.full[ring.slot], k_block * BlockK, tile.x_of(1), group_x, policy_x);
            tma_load_3d(y, &map_y, &shared.full[ring.slot], k_block * BlockK, tile.y, group_y, policy_y);
          }
          __syncwarp();
        }
        if (Splits > 1 && tile.split < Pieces) {
          cluster_wait();                                              // the others have their barriers
          // The parts get the slots that more blocks would get: they wait for those to be empty just so.
          if (lane == 0) {
            for (int i = 0; i < SlotsForParts; ++i, ring.advance()) mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);
            for (int cta = 0; cta < Splits; ++cta)
              if (cta != tile.split) mbarrier_arrive_remote(&shared.parts_empty, cta);
          }
        }
      }
      if (launches_late) launch_next_grid();
    } else if (warp <= WarpsForX) {
      supply_scales<true, BlockX / WarpsForX>(shared, problem, of_x, (warp - 1) * 128);
    } else if (warp == 3) {
      supply_scales<false, ScalesY>(shared, problem, of_y, 0);
    }
  } else {
    // ---- consumers: Rounds times 64 rows of the tile each ---------------------------------------------------------------
    registers_increase<ConsumerRegisters>();
    const int consumer = warpgroup - 1;
    int my_row = consumer * 64 + warp * 16 + lane / 4;                   // of a round; the thread's other row is 8 further
    if constexpr (Rounds == 1) asm("" : "+r"(my_row));                   // or the compiler makes it anew for every block of k
    const u64 first_slot = matrix_descriptor(shared_address(shared.operands), Swizzle::Bytes128, 8 * BlockK);
    const Place x_first = first_slot + consumer * (64 * BlockK / 16), y_first = first_slot + FirstY / 16;
    const Destination to = {D, bias, d_rows, d_row_length};
    Ring ring;
    Place x_slot = x_first, y_slot = y_first;                          // descriptors of the current slot
    int in_slot_0 = 0;
    int last_slot = -1;                                                // of the block before this one, which was not given back yet
    Scheduler scheduler{problem};
    Tile tile, following, before;                                      // this one, the next, the last
    float total[Rounds][BlockY / 2], sum[BlockY / 2];                  // FP32 on CUDA cores; the tensor core's accumulator
    auto clear = [&]() {
#pragma unroll
      for (int round = 0; round < Rounds; ++round)
#pragma unroll
        for (int i = 0; i < BlockY / 2; ++i) total[round][i] = 0.0f;
    };
    auto store = [&](int round, const Tile& there, int from = 0, int until = BlockY) {
      const int x = there.x_of(round) + consumer * 64 + warp * 16;
      store_rows(total[round], map_d, to, shared.out[consumer * 4 + warp], there, x, there.y_of(round), from, until);
    };
    // Late: a tile's last round is stored under the next tile's first wgmma, and a first of two under the tile's last one. In halves: one
    // under the tile's last wgmma, two under the next tile's first, one under its second. A warp has room for one panel; so TMA mostly
    // has read it when the next comes.
    bool waits = false;                                                // the last round of `before`, or its last three halves
    auto store_late = [&]() {
      if (waits && Halves) store(0, before, StoredY, BlockY);
      if (waits) store(Rounds - 1, before);
      waits = false;
    };
    auto give_back = [&](int slot) {
      __syncwarp();                                                    // all lanes have read their scales
      if constexpr (Multicast > 1) {
        if (lane < Multicast) mbarrier_arrive_remote(&shared.empty[slot], lane);  // each of these CTAs loads into it
      } else {
        if (lane == 0) mbarrier_arrive(&shared.empty[slot]);
      }
    };
    auto advance = [&]() {
      ring.advance();
      x_slot = ring.slot == in_slot_0 ? x_first : x_slot + SlotX / 16;
      y_slot = ring.slot == in_slot_0 ? y_first : y_slot + SlotY / 16;
    };
    auto multiply = [&](float (&sum)[BlockY / 2], int round, bool accumulate) {
      // On its side, a tile's second round has the same rows of X, and its rows of Y where those of X are else.
      const u32 step = round * RoundRows * BlockK / 16, turned_step = Turns && round > 0 ? tile.x_step * (BlockK / 16) : step;
      const Place x = x_slot + turned_step, y = y_slot + turned_step - step;
      auto descriptor = [&](Place place) { return sizeof(Place) == 8 ? place : first_slot >> 32 << 32 | place; };
      wgmma_fence();
      for (int k = 0; k < BlockK; k += 32)
        wgmma<BlockY, X_FORMAT, Y_FORMAT>(sum, descriptor(x + k / 16), descriptor(y + k / 16), accumulate || k > 0);
      wgmma_commit();
    };
    bool more = scheduler.next(tile);
    if (Splits > 1 && more) {
      in_slot_0 = tile.in_slot_0();
      const int first = in_slot_0 > 0 ? Stages - in_slot_0 : 0;
      x_slot += first * (SlotX / 16), y_slot += first * (SlotY / 16);
    }
    while (more) {
      // Scales of a slot's block: of this thread's two rows in each round, times those of the blocks that the tile touches.
      float scale[Rounds][2][ScaleBlocks];
      auto read_scales = [&](int slot) {
#pragma unroll
        for (int round = 0; round < Rounds; ++round)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < ScaleBlocks; ++i) {
              scale[round][half][i] = shared.scale_x[slot][my_row + tile.x_of(round) - tile.x + 8 * half];
              if constexpr (!VectorY) scale[round][half][i] *= shared.scale_y[slot][(u32)(tile.y_of(round) - tile.y) / 128 + i];
            }
#pragma unroll
        for (int round = 0; round < Rounds; ++round) wgmma_hold(scale[round][0]), wgmma_hold(scale[round][1]);  // beside wgmma
      };
      // What register i of a round is multiplied by.
      auto factor_of = [&](int round, int i, int slot) {
        const int column = i / 4 * 8;
        if constexpr (VectorY) return scale[round][i / 2 % 2][0] * shared.scale_y[slot][column + lane % 4 * 2 + i % 2];
        float factor = scale[round][i / 2 % 2][0];
#pragma unroll
        for (int block = 1; block < ScaleBlocks; ++block)
          if ((u32)tile.y % 128 + column / Chunk * Chunk >= 128 * block) factor = scale[round][i / 2 % 2][block];
        return factor;
      };

      if constexpr (Interval == 0) {
        clear();
        // One accumulator over all of k: the next block's wgmma is issued before this one's is waited for.
#pragma unroll 1
        for (int k_block = tile.k_block; k_block < tile.k_end; ++k_block) {
          mbarrier_wait(&shared.full[ring.slot], ring.phase);
#pragma unroll
          for (int round = 0; round < Rounds; ++round) multiply(total[round], round, k_block > tile.k_block);
          wgmma_wait<Rounds>();
          if (k_block > tile.k_block) give_back(last_slot);
          last_slot = ring.slot;
          advance();
        }
        if (tile.k_block < tile.k_end && Splits == 1) read_scales(last_slot);  // they do not depend on k
        wgmma_wait<0>();
#pragma unroll
        for (int round = 0; round < Rounds; ++round) {
          wgmma_hold(total[round]);
          if (tile.k_block < tile.k_end && Splits == 1)
#pragma unroll
            for (int i = 0; i < BlockY / 2; ++i) total[round][i] *= factor_of(round, i, last_slot);
        }
        if (tile.k_block < tile.k_end) give_back(last_slot);
      } else if (Problem != KGrouped || tile.k_block < tile.k_end) {    // the host gives the others at least one block
#pragma unroll
        for (int part = 0; part < 2; ++part) {                         // the first block apart: there is no total yet
#pragma unroll 1
          for (int k_block = tile.k_block + part; k_block < (part == 0 ? tile.k_block + 1 : tile.k_end); ++k_block) {
            const int slot = ring.slot, in_interval = part == 0 ? 0 : (k_block - tile.k_block) % Interval;
            const bool ends = k_block + 1 == tile.k_end, promotes = Interval == 1 || in_interval + 1 == Interval || ends;
            if (part == 0) mbarrier_wait(&shared.full[slot], ring.phase);
#pragma unroll
            for (int round = 0; round < Rounds; ++round) {
              multiply(sum, round, Interval > 1 && in_interval > 0);
              // While the tensor core works: the last block's slot is given back, this block's scales, the next block's barrier.
              if (round == 0) {
                if (last_slot >= 0) give_back(last_slot);
                last_slot = slot;
                read_scales(slot);
              }
              float factors[Factors];
              if constexpr (EarlyFactors) {
#pragma unroll
                for (int f = 0; f < Factors; ++f) factors[f] = factor_of(round, register_with(f), slot);
                wgmma_hold(factors);
              }
              if (part == 0 && round == 0) {                           // and, once for each tile, the last one's outputs and the next tile
                if (Late && !Halves) store_late();
                if (Halves && waits) store(0, before, StoredY, BlockY);
                more = scheduler.next(following);
                if (Halves && waits) store(1, before, 0, StoredY);
              }
              if (round + 1 == Rounds) {
                advance();
                if (Halves && part == 0) {
                  if (waits) store(1, before, StoredY, BlockY);
                  waits = false;
                }
                if (Late && round > 0 && ends) store(0, tile, 0, StoredY);
                if (!ends) mbarrier_wait(&shared.full[ring.slot], ring.phase);
              }
              wgmma_wait<0>();
              wgmma_hold(sum);
#pragma unroll
              for (int i = 0; i < BlockY / 2; ++i) {
                const float so_far = part == 0 ? 0.0f : total[round][i];
                if (promotes) total[round][i] = __fmaf_rn(sum[i], EarlyFactors ? factors[factor_for(i)] : factor_of(round, i, slot), so_far);
                else total[round][i] = so_far;
              }
            }
          }
        }
      } else {
        if (Late) store_late();
        clear();
        if (Late && Rounds > 1) store(0, tile, 0, StoredY);
      }
      if (Interval == 0 || (Problem == KGrouped && tile.k_block >= tile.k_end)) more = scheduler.next(following);

      if constexpr (Splits > 1) {
        // Each CTA leaves its sums in the ring of the one whose piece they are of. That one adds them up in the order of the splits: timing
        // changes nothing. There is one tile for each cluster, so nothing there is overwritten too early.
        constexpr int Stride = 128 * Consumers;                        // threads that leave sums side by side
        float4* parts = reinterpret_cast<float4*>(shared.operands) + threadIdx.x - 128;  // of this thread
        // Register i of a round belongs to a piece. Where a split's part of it lies there, as one of four registers of all threads side by side:
        auto piece_of = [&](int i) { return i / (PieceY / 2); };
        auto part = [&](int split, int piece, int round, int i) {
          return (((split - (split > piece)) * Rounds + round) * PieceY / 2 + i % (PieceY / 2)) / 4 * Stride;
        };
        if (Interval > 0) give_back(last_slot);                        // else it is given back already
        if (Pieces > 1 || tile.split > 0) mbarrier_wait(&shared.parts_empty, 0);
#pragma unroll
        for (int round = 0; round < Rounds; ++round)
#pragma unroll
          for (int i = 0; i < BlockY / 2; i += 4)
            if (piece_of(i) != tile.split)
              store_async(&parts[part(tile.split, piece_of(i), round, i)], &shared.parts_full[consumer], piece_of(i),
                          make_float4(total[round][i], total[round][i + 1], total[round][i + 2], total[round][i + 3]));
        if (tile.split >= Pieces) break;
        mbarrier_wait_cluster(&shared.parts_full[consumer], 0);
#pragma unroll
        for (int round = 0; round < Rounds; ++round)
#pragma unroll
          for (int i = 0; i < BlockY / 2; ++i)
            if (piece_of(i) == tile.split) {
              float value = 0.0f;
              // BLANK 4: add up register i of all splits in the order of the splits: this CTA's own, and those that the others left
#pragma unroll
              for (int split = 0; split < Splits; ++split) {
                const float* four = reinterpret_cast<const float*>(&parts[part(split, piece_of(i), round, i)]);
                const float sum = split == piece_of(i) ? total[round][i] : four[i % 4];
                value = split == 0 ? sum : value + sum;
              }
              // END BLANK
              if constexpr (Interval == 0) {
                // The scales of this split's slot are gone; they do not depend on k.
                const int x = tile.x_of(round) + my_row + i / 2 % 2 * 8, y = tile.y + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (x < tile.x_end && y < tile.y_end)
                  value *= scale_x[(x >> of_x.shift) * of_x.row_stride] * scale_y[(y >> of_y.shift) * of_y.row_stride];
              }
              total[round][i] = value;
            }
        store(0, tile, tile.split * PieceY, (tile.split + 1) * PieceY);
        if constexpr (Rounds == 2) store(1, tile, tile.split * PieceY, (tile.split + 1) * PieceY);
        break;
      }
      if constexpr (Late) {
        before = tile, waits = true;
      } else {
        store(0, tile);                                                // not a loop: the compiler would not unroll one of this size
        if constexpr (Rounds == 2) store(1, tile);
      }
      tile = following;
    }
    if (Late) store_late();
    if (StoreByTma && lane == 0) tma_store_wait<0>();                  // D is written before the kernel ends
  }
  if constexpr (Multicast > 1) cluster_sync();                         // no CTA leaves while another may still load into it
}
