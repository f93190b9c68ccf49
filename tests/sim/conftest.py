"""Helpers of the simulator's tests: compile a snippet, run it, with arrays as arguments."""

import pytest
from hopperlab import sim
from hopperlab.compile import compile_source

PRELUDE = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef signed char s8; typedef short s16; typedef int s32; typedef long long s64; typedef float f32; typedef double f64;
#define PTX(...) asm volatile(__VA_ARGS__)
#line 1
"""


def run(text, *args, entry="k", grid=1, block=32, prelude=PRELUDE, constants=None, **options):
    """Compile CUDA source and launch its kernel k on the simulator; returns the report."""
    ptx = compile_source(prelude + text, "kernel.cu", constants).ptx
    return sim.launch(ptx, entry, list(args), grid=grid, block=block, **options)


@pytest.fixture(name="run")
def run_fixture():
    return run
