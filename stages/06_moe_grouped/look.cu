// Stage 06, for looking: put behind gemm.cu, a kernel that writes down the tiles that its Scheduler finds.
//
// found (CTAs, most, 32, 9): what each lane of each CTA's one warp is given as its first, second ... tile, as in struct Tile. A
// CTA stops after `most` of them.
extern "C" __global__ void list_tiles(const int* begins, const int* ends, int* found, int x_rows, int y_rows, int k, int groups,
                                      int most) {
  const Arguments problem = {begins, ends, x_rows, y_rows, k, groups};
  Scheduler scheduler{problem};
  Tile tile;
  for (int i = 0; i < most && scheduler.next(tile); ++i) {
    int* mine = found + ((blockIdx.x * most + i) * 32 + threadIdx.x) * 9;
    mine[0] = tile.group, mine[1] = tile.x, mine[2] = tile.y, mine[3] = tile.x_end, mine[4] = tile.y_end;
    mine[5] = tile.k_block, mine[6] = tile.k_end, mine[7] = tile.split, mine[8] = tile.turned;
  }
}
