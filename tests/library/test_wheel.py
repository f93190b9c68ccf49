"""The wheel holds all the library needs: alone beside its declared dependencies, without this repository, it works."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hopperlab import stage

BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "common", "stages/06_moe_grouped")
COURSE = ("IPython", "jupyterlab", "matplotlib", "nbclient", "nbformat", "ipykernel", "pytest", "hypothesis", "mmasim", "mmaemu",
          "typer", "rich", "fp8_gemm.bench", "hopperlab.cli", "hopperlab.exercise", "hopperlab.lesson", "hopperlab.sim",
          "hopperlab.stage")  # fmt: skip

# Runs in an environment that holds the wheel and its dependencies alone. argv: its site-packages, COURSE.
PROGRAM = """
import importlib.util, json, sys, time
course = sys.argv[2].split(",")
start = time.perf_counter()
import fp8_gemm
found = {"import": time.perf_counter() - start, "file": fp8_gemm.__file__}
found["at import"] = [name for name in course if name in sys.modules]

import torch
from fp8_gemm import __main__ as program
found["smoke"] = program.main(["smoke", "--device", "cpu"])
for name in ("deep_gemm", "monitor", "nn", "parallel"):
    getattr(fp8_gemm, name)
found["in use"] = [name for name in course if name in sys.modules]

a, b = fp8_gemm.quantize(torch.randn(8, 256)), fp8_gemm.quantize(torch.randn(16, 256), "128x128")
simulated = fp8_gemm.gemm(a, b, out_dtype=torch.float32, backend="simulator")
found["simulator"] = torch.equal(simulated, fp8_gemm.gemm(a, b, out_dtype=torch.float32, backend="reference", exact=True))
found["outside"] = sorted({module.__file__ for name, module in sys.modules.items()
                           if name.split(".")[0] in ("fp8_gemm", "hopperlab") and not module.__file__.startswith(sys.argv[1])})
found["visible"] = [name for name in ("pytest", "matplotlib", "mmasim") if importlib.util.find_spec(name)]
print(json.dumps(found))
"""


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def declared(requirements: list[str], extra: str = "") -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that these requirements name, and all that those need."""
    found: dict[str, importlib.metadata.Distribution] = {}

    def add(requirement: Requirement, extras: set[str]):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            return
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            return
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return  # wanted by a dependency for what is not used here, such as CUDA libraries beside a CPU build of torch
        for needed in found[name].requires or []:
            add(Requirement(needed), requirement.extras)

    for text in requirements:
        add(Requirement(text), set())
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools writes beside what it builds
    for name in BUILT_FROM:
        path, copy = stage.root() / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, copy)
    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hopperlab", "fp8_gemm"}
    assert {Path(name).suffix for name in names if ".dist-info/" not in name} == {".py", ".cu", ".cuh"}
    for package, root in (("hopperlab", "common"), ("fp8_gemm", "stages/06_moe_grouped")):
        sources = {path.relative_to(stage.root() / root).as_posix() for path in (stage.root() / root / package).rglob("*")
                   if path.suffix in (".py", ".cu", ".cuh")}  # fmt: skip
        assert sources == {name for name in names if name.startswith(f"{package}/")}


def test_the_wheel_works_without_the_repository(wheel, tmp_path):
    """It may use what it declares, and imports no part of the course unless asked."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    target = Path(run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "install", wheel, "--no-deps", "--no-index", "--no-compile", "--target", target)
    (installed,) = importlib.metadata.distributions(path=[str(target)])
    needed = declared(installed.requires)
    assert {"torch", "triton", "numpy"} <= set(needed) and not {"matplotlib", "pytest", "jupyterlab"} & set(needed)
    for distribution in needed.values():  # links: torch is large
        for name in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__", "bin")}:
            if not (target / name).exists():
                (target / name).symlink_to(Path(distribution.locate_file(name)).resolve())

    # -I: no environment variables of Python, no working directory, no packages of the user.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FP8_GEMM_", "TRITON_"))}
    output = run(python, "-I", "-c", PROGRAM, target, ",".join(COURSE), cwd=tmp_path, env=environment)
    found = json.loads(output.splitlines()[-1])
    print(f"import fp8_gemm took {found['import']:.1f} s")
    assert found["file"].startswith(str(target)) and found["outside"] == []
    assert found["visible"] == []  # the environment holds what is declared and no more
    assert found["at import"] == [] and found["in use"] == []
    assert found["smoke"] == 0, output
    assert found["simulator"]
