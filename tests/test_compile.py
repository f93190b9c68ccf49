"""NVRTC, its errors, and a disk cache that many processes, damage and read-only directories cannot break."""

import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from hopperlab import compile as compiler

SOURCE = """
extern "C" __global__ void scale(float* x, float s, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * s + OFFSET;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def forbid_nvrtc(monkeypatch):
    def refuse(*_):
        raise AssertionError("compiled again instead of reading the cache")

    monkeypatch.setattr(compiler, "_nvrtc", refuse)


def test_one_call_gives_ptx_cubin_and_resources(cache):
    compiled = compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": "1.0f"})
    assert ".target sm_90a" in compiled.ptx and ".entry scale" in compiled.ptx
    assert compiled.cubin[:4] == b"\x7fELF"
    use = compiled.resources["scale"]
    assert 4 <= use.registers <= 32 and (use.shared_bytes, use.spill_bytes, use.stack_bytes) == (0, 0, 0)
    assert compiled.problems == []


def test_what_is_written_is_what_is_computed(cache):
    """x * s + c stays two roundings: no contraction into fma."""
    ptx = compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": "1.0f"}).ptx
    assert "fma." not in ptx and "mul.rn.f32" in ptx and "add.rn.f32" in ptx


def test_the_same_bytes_wherever_a_process_stands(cache, tmp_path, monkeypatch):
    """One process's cubin is another's cache entry, and lessons run beside their kernel.cu: no directory, no date of a file."""
    source = '#include "hopper.cuh"\nextern "C" __global__ void f(unsigned* x) { *x = shared_address(x); }'
    (beside := tmp_path / "beside").mkdir()
    (beside / "f.cu").write_text(source)
    (beside / "hopper.cuh").write_text("not the header that is meant")
    outputs = []
    for directory in (tmp_path, beside):
        monkeypatch.chdir(directory)
        monkeypatch.setenv("HOPPERLAB_CACHE", str(directory / "cache"))
        outputs.append(compiler.compile_source(source, "f.cu"))
    assert outputs[0] == outputs[1]
    assert '"f.cu"' in outputs[0].ptx and '"hopper.cuh"' in outputs[0].ptx and str(tmp_path).encode() not in outputs[0].cubin


def test_the_second_time_comes_from_disk(cache, monkeypatch):
    first = compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1})
    forbid_nvrtc(monkeypatch)
    assert compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}) == first
    with pytest.raises(AssertionError):
        compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 2})
    with pytest.raises(AssertionError):
        compiler.compile_source(SOURCE + "\n", "scale.cu", {"OFFSET": 1})


def test_other_hints_are_a_new_key(cache, monkeypatch):
    compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}, dense_ffma=True)
    forbid_nvrtc(monkeypatch)
    compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}, dense_ffma=True)
    with pytest.raises(AssertionError):
        compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1})
    monkeypatch.setattr(compiler.sass, "RULES", "changed")
    with pytest.raises(AssertionError):
        compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}, dense_ffma=True)


def test_a_changed_header_is_a_new_key(cache, tmp_path, monkeypatch):
    include = tmp_path / "include"
    include.mkdir()
    (include / "extra.cuh").write_text("#define EXTRA 1\n")
    monkeypatch.setattr(compiler, "INCLUDE_DIRECTORY", include)
    source = '#include "extra.cuh"\nextern "C" __global__ void f(int* x) { *x = EXTRA; }'
    first = compiler.compile_source(source, "f.cu").ptx
    (include / "extra.cuh").write_text("#define EXTRA 2\n")
    assert compiler.compile_source(source, "f.cu").ptx != first


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b"", lambda b: b[:200] + b"\0" * 50 + b[250:], lambda b: b + b"x"])
def test_a_damaged_entry_is_compiled_again(cache, damage):
    first = compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1})
    (entry,) = entries(cache)
    entry.write_bytes(damage(entry.read_bytes()))
    assert compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}) == first


def test_a_cache_that_cannot_be_made_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOPPERLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="HOPPERLAB_CACHE"):
        assert compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1}).cubin


def test_a_cache_that_cannot_be_written_costs_a_warning(cache, monkeypatch):
    compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1})

    class Full:
        def get(self, key):
            return None

        def __setitem__(self, key, value):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_cache", lambda directory: Full())
    with pytest.warns(UserWarning, match="No space left"):
        assert compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 2}).cubin


def _compile_many(directory, start, results):
    os.environ["HOPPERLAB_CACHE"] = directory
    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results.put([len(compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": i}).cubin) for i in range(3)])


def test_sixteen_processes_on_one_empty_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_compile_many, args=(str(tmp_path / "cache"), start, results)) for _ in range(16)]
    for process in processes:
        process.start()
    start.set()
    sizes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 16
    assert all(size == sizes[0] for size in sizes)
    assert len([path for path in entries(tmp_path / "cache") if "tmp" not in path.parts[-2]]) == 3


def test_a_compile_error_shows_file_line_and_source(cache):
    with pytest.raises(compiler.CompileError) as error:
        compiler.compile_source('extern "C" __global__ void f() {\n  undefined_name(3);\n}', "wrong.cu")
    assert "wrong.cu does not compile for sm_90a" in str(error.value)
    assert "\nwrong.cu(2): error" in str(error.value) and "undefined_name(3);" in str(error.value)


def test_spills_are_a_problem(cache):
    """More live values than registers: ptxas spills, and a finished kernel must not."""
    loads = "\n".join(f"float v{i} = x[{i} * 64 + threadIdx.x];" for i in range(128))
    total = "\n".join(f"x[{i} * 64 + threadIdx.x] = v{127 - i} * v{i};" for i in range(128))
    source = f'extern "C" __global__ void __launch_bounds__(1024) f(volatile float* x) {{ {loads}\n __syncthreads();\n {total} }}'
    compiled = compiler.compile_source(source, "spill.cu")
    assert compiled.resources["f"].spill_bytes > 0
    assert any("spills" in problem for problem in compiled.problems)


def test_constants_of_other_types_are_refused(cache):
    with pytest.raises(TypeError, match=r"constants\['OFFSET'\]: got float"):
        compiler.compile_source(SOURCE, "scale.cu", {"OFFSET": 1.5})
