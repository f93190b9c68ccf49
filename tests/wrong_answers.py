"""Answers a learner may well write: wrong, but plausible. Each must fail its blank's test with a message that points at the mistake.

Each: stage, text of the solution, what they wrote instead, the test that must fail, a pattern of its message.
"""

WRONG_01 = [
    # one shift for both formats
    ("01", "magnitude << (23 - Mantissa)", "magnitude << 20", "test_blank_1", r"e5m2 byte 0x01 \(subnormal\)"),
    # the bias forgotten
    ("01", " * __uint_as_float((127 + 127 - Bias) << 23)", "", "test_blank_1", r"a factor of 7.52316e-37"),
    # one off in the bias
    ("01", "(127 + 127 - Bias) << 23", "(127 + 128 - Bias) << 23", "test_blank_1", r"a factor of 2\. "),
    # no guard along k: reads into the next row
    ("01", "if (row0 + row < rows && k0 + k < K)", "if (row0 + row < rows)", "test_blank_2",
     r"BLANK 2, the tile at .* holds that address: look at the bounds check"),
    # no guard along the rows: reads past the end
    ("01", "if (row0 + row < rows && k0 + k < K)", "if (k0 + k < K)", "test_blank_2", r"BLANK 2, the tile at .* bounds"),
    # the tile's origin forgotten
    ("01", "source[(i64)(row0 + row) * K + k0 + k]", "source[(i64)(row0 + row) * K + k]", "test_blank_2", r"BLANK 2: the tile at row 64, k 64 of a 100x70 matrix holds"),
    # rows of a thread side by side, as the store does not expect them
    ("01", "tile_a[k][thread_m + i * StrideM]", "tile_a[k][thread_m * ThreadM + i]", "test_blank_3", r"holds the values of row"),
    # only the last k kept
    ("01", "fmaf(a[i], b[j], sum[i][j])", "a[i] * b[j]", "test_blank_3", "BLANK 3"),
    # no guard on the store
    ("01", "if (m < M && n < N) {", "{", "test_blank_4", r"BLANK 4, .* bounds check"),
    # a guard in one direction only: the last column runs into the next row
    ("01", "if (m < M && n < N) {", "if (m < M) {", "test_blank_4", r"BLANK 4, "),
    # the stride ignored: per-tensor scales are read as if there were one per row
    ("01", "scale_a[(i64)m * scale_a_stride]", "scale_a[m]", "test_blank_4", r"BLANK 4, .* bounds check"),
    # scales multiplied in another order
    ("01", "store(&D[(i64)m * N + n], scale * sum[i][j]);", "store(&D[(i64)m * N + n], scale_a[(i64)m * scale_a_stride] * sum[i][j] * "
     "scale_b[(i64)n * scale_b_stride]);", "test_blank_4", "right but for rounding"),
]  # fmt: skip

WRONG_02 = [
    # no swizzle at all: as if the tile lay row by row
    ("02", "((k / 16 ^ row % 8) * 16 + k % 16)", "k", "test_blank_1",
     r"BLANK 1: byte k = 0 of row 1 \(chunk 0\) is sought at offset 128, where TMA put byte 16 of row 1\. It lies at offset 144"),
    # the row not taken modulo 8: leaves the row from row 8 on
    ("02", "k / 16 ^ row % 8", "k / 16 ^ row", "test_blank_1", r"byte k = 0 of row 8 .* where TMA put byte 16 of row 9"),
    # rotated instead of exchanged
    ("02", "(k / 16 ^ row % 8) * 16", "(k / 16 + row) % 8 * 16", "test_blank_1",
     r"byte k = 16 of row 1 \(chunk 1\) is sought at offset 160, where TMA put byte 48 of row 1"),
    # the place within the chunk forgotten
    ("02", " * 16 + k % 16)", " * 16)", "test_blank_1", r"byte k = 1 of row 0 .* at offset 0, where TMA put byte 0 of row 0"),
    # A's pattern for B: rows first, then k
    ("02", "swizzled(tile_b, 16 * j + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 16)",
     "swizzled(tile_b, 16 * j + lane % 16, k + lane / 16 * 16)", "test_blank_2",
     r"column 8 of D multiplies A at k 0 to 15 with row 0 of B at k 16 to 31\. It must be row 8"),
    # 8 rows per fragment, not 16
    ("02", "swizzled(tile_b, 16 * j + lane % 8", "swizzled(tile_b, 8 * j + lane % 8", "test_blank_2",
     r"column 16 of D .* row 8 of B at k 0 to 15\. It must be row 16"),
    # only one of the two fragments
    ("02", "for (int j = 0; j < WarpN / 16; ++j) load_matrix_x4(b[j]", "for (int j = 0; j < 1; ++j) load_matrix_x4(b[j]", "test_blank_2",
     r"BLANK 2: column 16 of D"),
    # the bytes of one tile only
    ("02", "&shared.full[buffer], (BlockM + BlockN) * BlockK)", "&shared.full[buffer], BlockM * BlockK)", "test_blank_3",
     r"reads b\[0\], which nothing has written yet.* both boxes are announced together"),
    # the bytes that exist, not those that a box delivers
    ("02", "&shared.full[buffer], (BlockM + BlockN) * BlockK)",
     "&shared.full[buffer], (min(BlockM, M - m0) + min(BlockN, N - n0)) * BlockK)", "test_blank_3",
     r"deliver 32768 bytes to full\[0\], but expect_tx announced 21504"),
    # the bytes of both buffers
    ("02", "&shared.full[buffer], (BlockM + BlockN) * BlockK)", "&shared.full[buffer], sizeof(shared.a) + sizeof(shared.b))", "test_blank_3",
     r"deadlock: (.|\n)*32768 of 65536 expected bytes"),
    # announced once per copy: two arrivals where one is counted
    ("02", "    mbarrier_arrive_expect_tx(&shared.full[buffer], (BlockM + BlockN) * BlockK);\n",
     "    mbarrier_arrive_expect_tx(&shared.full[buffer], BlockM * BlockK);\n"
     "    mbarrier_arrive_expect_tx(&shared.full[buffer], BlockN * BlockK);\n", "test_blank_3",
     r"arrives on full\[0\] again .* announced together, once per block"),
    # the number of the block instead of its first byte
    ("02", "&map_a, &shared.full[buffer], k_block * BlockK, m0", "&map_a, &shared.full[buffer], k_block, m0", "test_blank_3",
     r"innermost coordinate of the TMA load is 1, .* multiple of 16 bytes"),
    # rows first
    ("02", "&map_b, &shared.full[buffer], k_block * BlockK, n0", "&map_b, &shared.full[buffer], n0, k_block * BlockK", "test_blank_3",
     r"CTA 0 asks for boxes at \(k, row\) = \[\(0, 0\), \(0, 0\), \(128, 0\), \(0, 128\)\]\. It needs"),
    # both tiles from the rows of A's
    ("02", "&map_b, &shared.full[buffer], k_block * BlockK, n0", "&map_b, &shared.full[buffer], k_block * BlockK, m0", "test_blank_3",
     r"CTA 1 asks for boxes .* one of B, at row n0 = 128"),
    # always the first buffer
    ("02", "tma_load_2d(shared.b[buffer]", "tma_load_2d(shared.b[0]", "test_blank_3", r"race on b\[0\]: .* both copies go there"),
    # the parity of a single buffer
    ("02", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)", "mbarrier_wait(&shared.full[buffer], k_block & 1)", "test_blank_4",
     r"reads a\[1\].*, which nothing has written yet.* Which phase"),
    # the parity never flips
    ("02", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)", "mbarrier_wait(&shared.full[buffer], 0)", "test_blank_4",
     r"race on a\[0\].*: .*without having waited for full\[0\].* Which phase"),
    # a producer's first parity
    ("02", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1 ^ 1)", "test_blank_4",
     r"reads a\[0\].*, which nothing has written yet.* Which phase"),
    # the next block's barrier
    ("02", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)", "mbarrier_wait(&shared.full[buffer ^ 1], k_block / 2 & 1)", "test_blank_4",
     r"race on a\[0\]: .*without having waited for full\[0\]"),
    # one thread waits, the others read at once
    ("02", "mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)", "if (threadIdx.x == 0) mbarrier_wait(&shared.full[buffer], k_block / 2 & 1)",
     "test_blank_4", r"reads a\[0\].*, which nothing has written yet.* does every thread wait"),
]  # fmt: skip

WRONG_03 = [
    # only A's bytes announced
    ("03", "(BlockM + BlockN) * BlockK);", "BlockM * BlockK);", "test_blank_1", r"BLANK 1: for one K block \[16384\] bytes are announced; .* are 32768"),
    # an arrival that announces nothing
    ("03", "mbarrier_arrive_expect_tx(&shared.full[slot], (BlockM + BlockN) * BlockK);", "mbarrier_arrive(&shared.full[slot]);",
     "test_blank_1", "BLANK 1: for one K block no bytes are announced"),
    # counts only what lies inside the matrices
    ("03", "(BlockM + BlockN) * BlockK);", "(min(BlockM, M - m0) + min(BlockN, N - n0)) * BlockK);", "test_blank_1",
     r"BLANK 1: 100x125x144 .* deliver 32768 bytes to full\[0\], but expect_tx announced 28800"),
    # x and y exchanged
    ("03", "&map_b, &shared.full[slot], k_block * BlockK, n0", "&map_b, &shared.full[slot], n0, k_block * BlockK", "test_blank_1",
     r"BLANK 1: the CTA with m0 = 0 and n0 = 0 copies a box at \(k, row\) = \(0, 128\)"),
    # the block's number for its place along k
    ("03", "&map_a, &shared.full[slot], k_block * BlockK, m0", "&map_a, &shared.full[slot], k_block, m0", "test_blank_1",
     "BLANK 1: .* innermost coordinate of the TMA load is 1, .* multiple of 16 bytes"),
    # always the same slot
    ("03", "tma_load_2d(shared.a[slot], &map_a", "tma_load_2d(shared.a[0], &map_a", "test_blank_1", r"BLANK 1: .* race on a\[0\]: .* second TMA load"),
    # the parity of the block, not of the slot's use
    ("03", "mbarrier_wait(&shared.full[slot], k_block / Stages & 1);", "mbarrier_wait(&shared.full[slot], k_block & 1);", "test_blank_2",
     r"BLANK 2: .* without having waited for full\[1\] \(phase 0\)"),
    # never flips
    ("03", "mbarrier_wait(&shared.full[slot], k_block / Stages & 1);", "mbarrier_wait(&shared.full[slot], 0);", "test_blank_2",
     r"BLANK 2: .* without having waited for full\[0\] \(phase 1\).* flips each time"),
    # a producer's parity: passes at once
    ("03", "mbarrier_wait(&shared.full[slot], k_block / Stages & 1);", "mbarrier_wait(&shared.full[slot], (k_block / Stages & 1) ^ 1);",
     "test_blank_2", "BLANK 2: .* The wait let it through before the copies were even issued"),
    # another swizzle than the tensor map's
    ("03", "matrix_descriptor(a + k, Swizzle::Bytes128,", "matrix_descriptor(a + k, Swizzle::Bytes64,", "test_blank_3",
     "BLANK 3: .* descriptor of operand A says a 64-byte swizzle, but the tile was written with a 128-byte swizzle"),
    # the stride of one row, not of eight
    ("03", "matrix_descriptor(a + k, Swizzle::Bytes128, 8 * BlockK)", "matrix_descriptor(a + k, Swizzle::Bytes128, BlockK)", "test_blank_3",
     "BLANK 3: .* steps 128 bytes from one group of 8 rows to the next .* must be 8 x 128 = 1024"),
    # only A's start moves along k
    ("03", "matrix_descriptor(b + k,", "matrix_descriptor(b,", "test_blank_3", "BLANK 3: .* the start of B's descriptor must move by k too"),
    # always adds: right on a machine whose registers happen to be zero
    ("03", "k_block > 0 || k > 0);", "1);", "test_blank_3", "BLANK 3: the result depends on what was in the registers of sum before"),
    # every block starts from zero
    ("03", "k_block > 0 || k > 0);", "k > 0);", "test_blank_3", "BLANK 3: .* the output holds only the last K block"),
    # all of the first block starts from zero
    ("03", "k_block > 0 || k > 0);", "k_block > 0);", "test_blank_3", "BLANK 3: .* the first K block counts only with its last 32 of k"),
    # every thread arrives
    ("03", "if (lane == 0) mbarrier_arrive", "mbarrier_arrive", "test_blank_4",
     r"BLANK 4: .* 128 arrivals on empty\[0\], but its phase 0 lacks only 8.* Let one thread arrive"),
    # one thread of the CTA arrives
    ("03", "if (lane == 0) mbarrier_arrive", "if (threadIdx.x == 0) mbarrier_arrive", "test_blank_4",
     r"(?s)BLANK 4: .* empty\[0\] \(initialised .*phase 0 lacks 7 of 8 arrivals"),
    # does not wait for the other warps
    ("03", "        mbarrier_wait(&shared.empty[last_slot], last / Stages & 1);\n", "", "test_blank_4",
     r"BLANK 4: .* race on a\[0\]: .*(released too early, or the producer does not wait for empty|still reads it)"),
    # one block too far
    ("03", "load(last + Stages);", "load(k_block + Stages);", "test_blank_4", r"BLANK 4: .* race on a\[1\]: .* still reads it"),
    # no end: boxes beyond K
    ("03", "if (threadIdx.x == 0 && last + Stages < k_blocks)", "if (threadIdx.x == 0)", "test_blank_4",
     r"BLANK 4: with 2 K blocks and 3 slots, the blocks \[0, 1, 3\] are copied"),
]  # fmt: skip

WRONG_04 = [
    # the consumers' parity for the producer: its first wait never ends
    ("04", "mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);", "mbarrier_wait(&shared.empty[ring.slot], ring.phase);",
     "test_blank_1", r"(?s)BLANK 1, .*deadlock: .*thread 0 of block \(0, 0, 0\) .* waits for parity 0 of empty\[0\].*it must use parity 1"),
    # a parity that never flips: right in the first round only
    ("04", "mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);", "mbarrier_wait(&shared.empty[ring.slot], 1);",
     "test_blank_1", r"BLANK 1, .*(before it reuses the slot|with the wrong parity)"),
    # the wrong one of the two barriers
    ("04", "mbarrier_wait(&shared.empty[ring.slot], ring.phase ^ 1);", "mbarrier_wait(&shared.full[ring.slot], ring.phase ^ 1);",
     "test_blank_1", r"BLANK 1, .*race on b\[0\] .*must wait for the slot to be empty"),
    # expecting only the bytes that this CTA's own copies load
    ("04", "(BlockM + BlockN) * BlockK);", "(BlockM + BlockN / Cluster) * BlockK);",
     "test_blank_2", r"BLANK 2, .*reads b\[0\].*nothing has written yet.*every CTA's share of B"),
    # the other CTA's bit left out of the mask, or only one bit set
    ("04", "(1 << Cluster) - 1", "1 << rank", "test_blank_2", r"(?s)BLANK 2, .*8192 of 32768 expected bytes"),
    # the number of CTAs instead of a bit for each
    ("04", "(1 << Cluster) - 1", "Cluster", "test_blank_2", r"(?s)BLANK 2, .*full\[0\] .*expected bytes"),
    # both shares to the same place
    ("04", "u8* b = shared.b[ring.slot] + rank * Share * BlockK;", "u8* b = shared.b[ring.slot];", "test_blank_2",
     r"BLANK 2, .*race on b\[0\].*different places in the tile"),
    # the same rows of B twice
    ("04", "k_block * BlockK, n + rank * Share);", "k_block * BlockK, n);", "test_blank_2",
     r"BLANK 2, .*Column 64 of this tile holds the values of column 0"),
    # coordinates swapped
    ("04", "tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], k_block * BlockK, m);",
     "tma_load_2d(shared.a[ring.slot], &map_a, &shared.full[ring.slot], m, k_block * BlockK);", "test_blank_2", r"BLANK 2, .*Coordinates are \(k, row\)"),
    # only the own producer is told: the other overwrites what is still read, or waits for ever
    ("04", "if (lane < Cluster) mbarrier_arrive_remote(&shared.empty[slot], lane);", "if (lane == 0) mbarrier_arrive(&shared.empty[slot]);",
     "test_blank_3", r"(?s)BLANK 3, .*empty\[0\].*lacks 8 of 16 arrivals"),
    # every lane arrives
    ("04", "if (lane < Cluster) mbarrier_arrive_remote(&shared.empty[slot], lane);",
     "for (int r = 0; r < Cluster; ++r) mbarrier_arrive_remote(&shared.empty[slot], r);",
     "test_blank_3", r"BLANK 3, .*128 arrivals on empty\[0\].*lacks only 16.*Phases end too early"),
    # all arrivals to CTA 0
    ("04", "if (lane < Cluster) mbarrier_arrive_remote(&shared.empty[slot], lane);",
     "if (lane < Cluster) mbarrier_arrive_remote(&shared.empty[slot], 0);", "test_blank_3", r"BLANK 3, .*arrives once on empty\[slot\] of each CTA"),
    # no swizzle
    ("04", "(chunk ^ r % 8) * 8", "chunk * 8", "test_blank_4", r"BLANK 4, .*128-byte swizzle, but .*without it\. XOR the 16-byte column"),
    # the swizzle of 64 bytes
    ("04", "(chunk ^ r % 8) * 8", "(chunk ^ r / 2 % 4) * 8", "test_blank_4", r"BLANK 4, .*at row 1, columns 0 to 7 belong to row 1, columns 8 to 15"),
    # lanes name matrices as if the second lay to the right of the first
    ("04", "const int r = warp * 16 + lane % 16, chunk = j + lane / 16;", "const int r = warp * 16 + lane % 8 + lane / 16 * 8, chunk = j + lane / 8 % 2;",
     "test_blank_4", r"BLANK 4, .*columns 8 to 15 belong to row 8, columns 0 to 7"),
    # the warp's rows forgotten: four warps store into the same sixteen
    ("04", "const int r = warp * 16 + lane % 16,", "const int r = lane % 16,", "test_blank_4",
     r"BLANK 4, .*race on out\[0\]\[0\] .*: .* store into the same row with the stmatrix at .* does the row depend on the warp"),
    # no fence between proxies
    ("04", "          fence_proxy_async_shared();                                  // the stores above become visible to TMA\n", "",
     "test_blank_5", r"BLANK 5, .*fence_proxy_async_shared"),
    # the fence without the barrier: other warps may still be storing
    ("04", "          named_barrier_sync(1 + consumer, 128);\n          if (leader) {\n", "          if (leader) {\n", "test_blank_5",
     r"BLANK 5, .*race on out\[0\].*All writers must pass a barrier"),
    # a barrier of the whole CTA, where the other warpgroups never come
    ("04", "          named_barrier_sync(1 + consumer, 128);\n          if (leader) {\n", "          __syncthreads();\n          if (leader) {\n",
     "test_blank_5", r"(?s)BLANK 5, .*deadlock.*wait at barrier 0: 256 of 384 threads"),
    # every panel to the tile's first columns
    # one barrier for both warpgroups: it counts any 128 threads
    ("04", "          named_barrier_sync(1 + consumer, 128);\n          if (leader) {\n", "          named_barrier_sync(1, 128);\n          if (leader) {\n",
     "test_blank_5", r"BLANK 5, .*race on barrier 1 .*Give each group of threads a barrier number of its own"),
    ("04", "n0 + panel * PanelColumns, m0);", "n0, m0);", "test_blank_5", r"BLANK 5, .*never written\. Column 0 of this tile holds the values of column 64"),
    # not committed: the waits count groups, and there are none
    ("04", "            tma_store_commit();\n", "", "test_blank_5", r"BLANK 5, .*TMA store .* may still read it"),
    # all threads store
    ("04", "          if (leader) {\n            tma_store_2d", "          {\n            tma_store_2d", "test_blank_5", r"BLANK 5, .*issue the same TMA store"),
]  # fmt: skip

WRONG_05 = [
    # the start of the tile forgotten
    ("05", "if (n0 % 128 + c >= 128 * i) chosen", "if (c >= 128 * i) chosen", "test_blank_1",
     r"BLANK 1, .*D\[0\]\[128\], in the tile that starts at column 96, .* B's of block 0: right are row 0 and block 1\. Column c of the tile"),
    # counted from column 0 of the matrix
    ("05", "if (n0 % 128 + c >= 128 * i) chosen", "if (n0 + c >= 128 * i) chosen", "test_blank_1",
     r"BLANK 1, .*in the tile that starts at column 192, .* B's of block 2: right are row 0 and block 1"),
    # one chunk too late
    ("05", "if (n0 % 128 + c >= 128 * i) chosen", "if (n0 % 128 + c > 128 * i) chosen", "test_blank_1",
     r"BLANK 1, .*D\[0\]\[128\], in the tile that starts at column 96, .* B's of block 0: right are row 0 and block 1"),
    # one of the thread's two rows forgotten
    ("05", "chosen[0] = s[0][i], chosen[1] = s[1][i];", "chosen[0] = s[0][i];", "test_blank_1",
     r"BLANK 1, .*D\[8\]\[128\], .* A's scale of row 8 and B's of block 0: right are row 8 and block 1\..*Both rows of the thread"),
    # one sum over all of K, as where one scale holds for a whole row
    ("05", "b_slot + k / 16, k > 0);", "b_slot + k / 16, k_block > 0 || k > 0);", "test_blank_2",
     r"BLANK 2, .*must be 384 and is 3200: sums that were promoted before are in it again\. .*starts from zero, in every block and every round"),
    # an interval of 256
    ("05", "b_slot + k / 16, k > 0);", "b_slot + k / 16, k_block % 2 > 0 || k > 0);", "test_blank_2",
     r"BLANK 2, .*sums that were promoted before are in it again"),
    # every step from zero
    ("05", "b_slot + k / 16, k > 0);", "b_slot + k / 16, false);", "test_blank_2", r"BLANK 2, .*must be 384 and is 96\."),
    # the same rows of A in each round
    ("05", "(sum, a_round + k / 16,", "(sum, a_slot + k / 16,", "test_blank_2", r"BLANK 2, .*must be 2688 and is 384, the sum of rows 0 to 63\."),
    # bytes, where a descriptor counts units of 16
    ("05", "a_round + k / 16, b_slot + k / 16, k > 0);", "a_round + k, b_slot + k, k > 0);", "test_blank_2", r"BLANK 2, .*in four steps of 32 along k"),
    # not committed: the wait has no group to wait for
    ("05", "k > 0);\n            wgmma_commit();", "k > 0);", "test_blank_2", r"BLANK 2, .*still belongs to an asynchronous wgmma"),
    # no fence, although promotion has read the registers
    ("05", "            wgmma_fence();\n", "", "test_blank_2", r"BLANK 2, .*no wgmma\.fence"),
    # the slot that is being multiplied
    ("05", "mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "mbarrier_arrive(&shared.empty[ring.slot]);\n              // END BLANK", "test_blank_3",
     r"(?s)BLANK 3, "),
    # one lane speaks for the others, which may still read their scales
    ("05", "              __syncwarp();\n              if (lane == 0) mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK",
     "              if (lane == 0) mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "test_blank_3",
     r"BLANK 3, .*nothing orders that after the read at .*one lane stands for its whole warp only after a __syncwarp\(\)"),
    # every lane arrives
    ("05", "if (lane == 0) mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "test_blank_3",
     r"BLANK 3, .*128 arrivals on .*lacks only 8 .*Phases end too early"),
    # one arrival for a whole warpgroup
    ("05", "if (lane == 0) mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK",
     "if (threadIdx.x % 128 == 0) mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "test_blank_3",
     r"(?s)BLANK 3, .*deadlock.*lacks 6 of 8 arrivals.*one arrival of each consumer warp"),
    # the wrong one of the two barriers
    ("05", "mbarrier_arrive(&shared.empty[last_slot]);\n              // END BLANK", "mbarrier_arrive(&shared.full[last_slot]);\n              // END BLANK", "test_blank_3",
     r"BLANK 3, .*lacks only 2 .*Phases end too early"),
    # the first round's scales for both
    ("05", "choose(scale[round], c, s);", "choose(scale[0], c, s);", "test_blank_4",
     r"BLANK 4, .*was given A's scale of row 0 and B's of block 0: right are row 64 and block 0"),
    # rows taken for columns: neighbouring registers are one row's
    ("05", "s[i / 2 % 2]", "s[i % 2]", "test_blank_4", r"BLANK 4, .*D\[0\]\[1\], .*was given A's scale of row 8 .*right are row 0 and block 0"),
    # the tile's first scale for all of its columns
    ("05", "choose(scale[round], c, s);", "choose(scale[round], 0, s);", "test_blank_4", r"BLANK 4, .*B's of block 0: right are row 0 and block 1"),
    # two roundings
    ("05", "__fmaf_rn(sum[i], s[i / 2 % 2], total[round][i])", "__fadd_rn(__fmul_rn(sum[i], s[i / 2 % 2]), total[round][i])", "test_blank_4",
     r"BLANK 4, .*right but for rounding.*rounded once"),
    # the first round's total under the second round's sums
    ("05", "total[round][i] = __fmaf_rn(sum[i], s[i / 2 % 2], total[round][i])", "total[round][i] = __fmaf_rn(sum[i], s[i / 2 % 2], total[0][i])",
     "test_blank_4", r"BLANK 4, .*The first is D\[64\]\[0\].*its own round's total"),
]  # fmt: skip

WRONG_06 = [
    # lanes below step get their own number back, and add it
    ("06", "if (lane >= step) sum += other;", "sum += other;", "test_blank_1",
     r"BLANK 1, Contiguous, .*tile 0, number 0 of CTA 0 .* is given as group 0, X from row -1984, .*lane l's sum counts"),
    # one lane too few
    ("06", "if (lane >= step) sum += other;", "if (lane > step) sum += other;", "test_blank_1",
     r"BLANK 1, .*tile 3, number 1 of CTA 0 .*Right is: group 2, X from row 9, ending at 84"),
    # the last step forgotten
    ("06", "for (int step = 1; step < 32; step *= 2) {", "for (int step = 1; step < 16; step *= 2) {", "test_blank_1",
     r"BLANK 1, .*tile 57, .* is given as group 20, .*Right is: group 17"),
    # steps of one, with sums that have grown
    ("06", "for (int step = 1; step < 32; step *= 2) {", "for (int step = 1; step < 32; ++step) {", "test_blank_1",
     r"BLANK 1, .*tile 9, .*Right is: group 3"),
    # the shuffle where only some lanes come
    ("06", "const int other = __shfl_up_sync(~0u, sum, step);\n          if (lane >= step) sum += other;",
     "if (lane >= step) sum += __shfl_up_sync(~0u, sum, step);", "test_blank_1", r"(?s)BLANK 1, deadlock: .*they have diverged"),
    # __ffs counts from 1
    ("06", "const int owner = __ffs(beyond) - 1;", "const int owner = __ffs(beyond);", "test_blank_2",
     r"BLANK 2, .*after the end of 'begins'.*the first group whose sum goes beyond"),
    # the highest bit: the last group whose sum is beyond
    ("06", "const int owner = __ffs(beyond) - 1;", "const int owner = 31 - __clz(beyond);", "test_blank_2",
     r"BLANK 2, .*after the end of 'begins'.*the first group whose sum goes beyond"),
    # groups counted from the chunk
    ("06", "tile.group = chunk + owner;", "tile.group = owner;", "test_blank_2",
     r"BLANK 2, .*tile 108, .* is given as group 0, .*Right is: group 32"),
    # each lane its own group's size
    ("06", "size = __shfl_sync(~0u, mine, owner);", "size = mine;", "test_blank_2",
     r"BLANK 2, .*lanes disagree on tile 0, .*All lanes take the group, its size"),
    # the owner's own tiles counted as those before it
    ("06", "__shfl_sync(~0u, sum - tiles, owner);", "__shfl_sync(~0u, sum, owner);", "test_blank_2",
     r"BLANK 2, .*tile 0, .* Y from row -96, .*tiles before it"),
    # earlier chunks forgotten
    ("06", "within = index - before - ", "within = index - ", "test_blank_2",
     r"BLANK 2, .*tile 108, .* is given as group 32, X from row 4010, .*Right is: group 32, X from row 1706"),
    # the end counted from the group's first row
    ("06", "tile.x_end = start + size;", "tile.x_end = size;", "test_blank_3",
     r"BLANK 3, Contiguous, groups.* X from row 9, ending at 75, .*Right is: group 2, X from row 9, ending at 84"),
    # the tile not moved
    ("06", "else tile.x += start, tile.x_end", "else tile.x_end", "test_blank_3",
     r"BLANK 3, Contiguous, groups.* X from row 0, ending at 84, .*Right is: group 2, X from row 9, ending at 84"),
    # tokens are always X
    ("06", "if (Swapped) tile.y += start, tile.y_end = start + size; else tile.x", "tile.x", "test_blank_3",
     r"BLANK 3, Contiguous, swapped, .*Right is: group 0, X from row 0, ending at 72, Y from row 0, ending at 1\. Tokens are rows of X, or of Y where Swapped"),
    # the same for a buffer
    ("06", "(Swapped ? tile.y_end : tile.x_end) = size;", "tile.x_end = size;", "test_blank_3",
     r"BLANK 3, Masked, swapped, .*Y from row 0, ending at 149\. Right is: .*ending at 72, Y from row 0, ending at 1\."),
    # both kinds as one: begins says nothing of masked groups
    ("06", "    if constexpr (Problem == Contiguous) {\n      const int start = begin(tile.group);\n      if (Swapped) tile.y",
     "    if constexpr (Problem == Contiguous || Problem == Masked) {\n      const int start = begin(tile.group);\n      if (Swapped) tile.y", "test_blank_3",
     r"BLANK 3, Masked"),
    # masked groups end where the buffer does
    ("06", "    if constexpr (Problem == Masked) (Swapped ? tile.y_end : tile.x_end) = size;\n", "", "test_blank_3",
     r"BLANK 3, Masked, groups.*ending at 149, .*Right is: group 0, X from row 0, ending at 1, .*Masked: rows 0 to size"),
    # the other way round
    ("06", "for (int split = 0; split < Splits; ++split) {\n                const float* four", "for (int split = Splits - 1; split >= 0; --split) {\n"
     "                if (split == Splits - 1) value = -0.0f;\n                const float* four", "test_blank_4",
     r"BLANK 4, .*1, 0, 0, 0 times; each must be there once"),
    # from the last split to the first
    ("06", "&parts[part(split, piece_of(i), round, i)]);\n                const float sum = split == piece_of(i)",
     "&parts[part(Splits - 1 - split, piece_of(i), round, i)]);\n                const float sum = Splits - 1 - split == piece_of(i)", "test_blank_4",
     r"BLANK 4, .*in the result once, but the bits are not those of adding them in order"),
    # the same split each time
    ("06", "&parts[part(split, piece_of(i), round, i)]", "&parts[part(1, piece_of(i), round, i)]", "test_blank_4",
     r"BLANK 4, .*the piece of split 0, hold the four parts 1, 3, 0, 0 times; each must be there once"),
    # the last forgotten
    ("06", "for (int split = 0; split < Splits; ++split) {\n                const float* four",
     "for (int split = 0; split < Splits - 1; ++split) {\n                const float* four", "test_blank_4",
     r"BLANK 4, .* 1, 1, 1, 0 times"),
    # its own sum forgotten
    ("06", "split == piece_of(i) ? total[round][i] : four[i % 4];", "split == piece_of(i) ? 0.0f : four[i % 4];", "test_blank_4",
     r"BLANK 4, .*the piece of split 0, hold the four parts 0, 1, 1, 1 times"),
    # its own sum taken for split 0's, whoever it is
    ("06", "split == piece_of(i) ? total[round][i] : four[i % 4];", "split == 0 ? total[round][i] : four[i % 4];", "test_blank_4",
     r"BLANK 4, .*the piece of split 1, hold the four parts 0, 1, 2, 1 times"),
    # the first of four registers for all of them
    ("06", "total[round][i] : four[i % 4];", "total[round][i] : four[0];", "test_blank_4",
     r"BLANK 4, .*no sums of the four parts of their own element.*the four that begin at parts"),
]  # fmt: skip

WRONG = WRONG_01 + WRONG_02 + WRONG_03 + WRONG_04 + WRONG_05 + WRONG_06
