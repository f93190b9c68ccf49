"""Members of a struct in dynamic shared memory: the compiler's offsets, names in reports, silence where in doubt."""

import numpy as np
import pytest

from hopperlab import sim
from hopperlab.compile import compile_source
from hopperlab.sim import layout

HEAD = '#include "hopper.cuh"\nconstexpr int Stages = NUM_STAGES, Wide = (BLOCK_N + 1) / 2 * Stages;\n#define ROWS 64\n'
KERNEL = """
extern "C" __global__ void k(u64* o) {
  extern __shared__ u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  BODY
}
"""
CONSTANTS = {"NUM_STAGES": 3, "BLOCK_N": 65, "BIG": "double"}
STRUCTS = {
    "a b full empty":
        "struct alignas(1024) Shared { u8 a[Stages][ROWS * 128], b[Stages][BLOCK_N]; u64 full[Stages]; u64 empty[Stages]; };",
    "a full c d e f g": "struct Shared { u8 a[7]; u64 full; u16 c[3]; float d; double e; u8 f; float4 g; };",
    "a b c d e f": "struct Shared { u8 a; alignas(128) u8 b[5]; __align__(16) float c[3]; unsigned long long d[2]; bool e; float2 f; };",
    "a b c d": """/* { */ struct __align__(16) Shared { // ;
      u8 a[Wide << 1]; unsigned int b[Stages % 2 + 10 - 3 * 2]; char c[0x10u]; long long d; };""",
    "a b c d e f g h": """typedef BIG Output; constexpr bool Odd = BLOCK_N % 2 == 1, Even = !Odd; constexpr int Row = BLOCK_N * sizeof(Output);
      constexpr int Panel = Even ? 16 : Row % 128 == 0 ? 128 : Row % 64 == 0 ? 64 : 32, Two = (BLOCK_N - 1 & -(BLOCK_N - 1)) < 128 ? 5 : 6;
      struct Shared { u8 a[Stages > 2 ? 16 : 8]; u8 b[sizeof(u64)]; Output c[3]; u8 d[Panel]; float4 e[Odd && Stages > 1 ? (Stages - 1) * 4 / 2 : 1];
      u8 f[(Odd ? Two : 1) * 3]; u8 g[Even || Stages != 3 ? 7 : (2 + 3) / 4 * 4]; u64 h; };""",
}  # fmt: skip


def members(struct, body="", constants=CONSTANTS, head=HEAD):
    return layout.shared_members(head + struct + KERNEL.replace("BODY", body), "k", "raw", constants)


@pytest.mark.parametrize("names", STRUCTS)
def test_offsets_are_the_compilers(names):
    struct = STRUCTS[names]
    found = members(struct)
    assert " ".join(member.name for member in found) == names
    body = "".join(f"*o++ = (u8*)&shared.{m.name} - (u8*)&shared; *o++ = sizeof shared.{m.name};" for m in found)
    out = np.zeros((len(found), 2), np.uint64)
    ptx = compile_source(HEAD + struct + KERNEL.replace("BODY", body), "layout.cu", CONSTANTS).ptx
    sim.launch(ptx, "k", [out], grid=1, block=1, shared_bytes=1024)
    assert [[m.offset, m.end - m.offset] for m in found] == out.tolist()


PLAIN = "struct Shared { u8 a[Stages][128]; u64 full[Stages]; };"


@pytest.mark.parametrize("change", [
    dict(constants={"BLOCK_N": 65}),  # a macro that nobody told
    dict(constants=CONSTANTS | {"NUM_STAGES": "2 + 1"}),  # text, whose meaning depends on its surroundings
    dict(constants=CONSTANTS | {"raw": "other"}),
    dict(head=HEAD + "#if BLOCK_N > 64\n#define MORE\n#endif\n"),
    dict(head=HEAD + "#define NUM_STAGES 5\n"),
    dict(head=HEAD + "typedef u64 u8;\n"),
    dict(struct="struct Shared { Tile a[Stages]; u64 full[Stages]; };"),
    dict(struct="struct Shared { union { u8 a[4]; u64 b; }; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[Stages & 1 == 1]; u64 full[Stages]; };"),  # == binds closer in C
    dict(struct="struct Shared { u8 a[sizeof(Tile)]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[(int)Stages]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[largest(Stages, 4)]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[-7 / 2 + 9]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[!Stages == 0 ? 8 : 4]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[1 < Stages < 3 ? 8 : 4]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8 a[Stages > 2 ? 16]; u64 full[Stages]; };"),
    dict(struct="struct Shared { u8* a; u64 full[Stages]; };"),
    dict(struct="struct Shared { u32 a : 3; u64 full[Stages]; };"),
    dict(struct="struct Base { u8 x; }; struct Shared : Base { u64 full[Stages]; };"),
    dict(struct="template <int N> struct Shared { u64 full[N]; };"),
    dict(struct="namespace tiles { struct Shared { u64 full[Stages]; }; }"),
    dict(body="raw[0] = 1;"),  # the bytes are used in another way too
    dict(body="float* b = reinterpret_cast<float*>(raw);"),
])  # fmt: skip
def test_nothing_is_named_where_the_source_leaves_a_doubt(change):
    assert [m.name for m in members(PLAIN)] == ["a", "full"]
    assert members(change.pop("struct", PLAIN), **change) == []


def test_places_have_indices():
    a, full = members("struct Shared { u16 a[2][3][64]; u64 full[Stages]; };")
    assert a.place(0) == ("a[0][0]", 0) and a.place(128 * 5 + 6) == ("a[1][2]", 6)
    assert full.place(full.offset + 16) == ("full[2]", 0) and full.place(full.offset + 17) == ("full[2]", 1)
    padded = members("struct Shared { u8 a; u64 full; };")
    assert layout.find(padded, 1) is None and layout.find(padded, 16) is None


RING = PLAIN + KERNEL.replace("BODY", """
  if (threadIdx.x == 0) for (int s = 0; s < Stages; ++s) mbarrier_init(&shared.full[s], 2);
  __syncthreads();
  if (threadIdx.x < 2) mbarrier_arrive(&shared.full[1]);
  if (threadIdx.x == 0) mbarrier_arrive(&shared.full[2]);
  if (threadIdx.x == 0) o[0] = READ;
  mbarrier_wait(&shared.full[1], 0);
  mbarrier_wait(&shared.full[2], 0);
""")  # fmt: skip


@pytest.mark.parametrize("read, error, message", [
    ("0", sim.Deadlock, r"waits? for parity 0 of full\[2\].*full\[2\] \(initialised at line 9 .*\): phase 0 lacks 1 of 2 arrivals"),
    ("shared.a[1][5]", sim.Hazard, r"reads a\[1\] \+ 5, which nothing has written"),
    ("shared.a[2][0]", sim.Hazard, r"reads a\[2\], which nothing has written"),
])  # fmt: skip
def test_reports_name_members(read, error, message, tmp_path):
    path = tmp_path / "ring.cu"
    path.write_text(HEAD + RING.replace("READ", read))
    launch = dict(grid=1, block=32, shared_bytes=1024, source=path)
    ptx = compile_source(path.read_text(), path.name, CONSTANTS).ptx
    with pytest.raises(error, match=f"(?s){message}"):
        sim.launch(ptx, "k", [np.zeros(1, np.uint64)], constants=CONSTANTS, **launch)
    with pytest.raises(error, match=r"the mbarrier at shared 0x|reads raw \+ \d+ \(shared 0x"):  # without the macros: the address
        sim.launch(ptx, "k", [np.zeros(1, np.uint64)], **launch)


def test_traces_name_members(tmp_path):
    path = tmp_path / "ring.cu"
    path.write_text((HEAD + RING).replace("READ", "0").replace("full[s], 2", "full[s], s == 1 ? 2 : 1"))
    ptx = compile_source(path.read_text(), path.name, CONSTANTS).ptx
    out = np.zeros(1, np.uint64)
    report = sim.launch(ptx, "k", [out], grid=1, block=32, shared_bytes=1024, source=path, constants=CONSTANTS, trace=True)
    assert {span.track for span in report.trace if span.kind == "phase"} == {"barrier full[1]", "barrier full[2]"}
