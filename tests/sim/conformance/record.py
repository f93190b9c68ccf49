"""Record what a Hopper GPU computes for every conformance case.

    PYTHONPATH=common python tests/sim/conformance/record.py [--only NAME] [--save FOLDER]

Each case runs twice on the GPU and must give the same bits twice. A worker process runs the cases one after another; when
one hangs, faults or crashes, the worker is replaced and the other cases go on. Writes recorded.json beside this file:
per result the SHA-256 of its bytes and its first words, or all of an approximate instruction's. Exits with 1 if a case failed; its old record is removed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from cases import CASES
from suite import FOLDER, RECORD, recorded, run

from hopperlab import compile as compiler

FIRST_CASE_SECONDS = 60  # starting CUDA included
CASE_SECONDS = 8


def work(names: list[str], save: str | None, pipe) -> None:
    """Worker: runs the named cases and sends (name, results or error text, fatal) for each."""
    import torch

    selected = {case.name: case for case in CASES}
    for name in names:
        try:
            first, second = run(selected[name], "cuda"), run(selected[name], "cuda")
            differing = [label for label in first if first[label].sha256 != second[label].sha256]
            if differing:
                raise RuntimeError(f"two runs differ in {differing}")
            if save:
                np.savez(Path(save) / (name.replace("/", "_") + ".npz"), **{label.replace("/", "_"): r.data for label, r in first.items()})
            pipe.send((name, {label: recorded(label, r) for label, r in first.items()}, False))
        except Exception as error:
            # After an illegal address or a trap the CUDA context is lost, and every later call fails.
            try:
                torch.cuda.synchronize()
                fatal = False
            except Exception:
                fatal = True
            pipe.send((name, f"{type(error).__name__}: {error}", fatal))
            if fatal:
                return
    pipe.send(None)


def record(names: list[str], save: str | None) -> tuple[dict, dict]:
    """Run the cases. Returns (name -> results, name -> error)."""
    results: dict[str, dict] = {}
    errors: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    left = list(names)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(left, save, sender))
        worker.start()
        sender.close()
        limit = FIRST_CASE_SECONDS
        while left:
            try:
                message = receiver.recv() if receiver.poll(limit) else "hang"
            except EOFError:
                message = "died"
            limit = CASE_SECONDS
            if message is None:
                break
            if isinstance(message, str):
                reason = f"no result after {limit} s: it hangs" if message == "hang" else "the process died"
                message = (left[0], reason, True)
            name, outcome, fatal = message
            left.remove(name)
            (results if isinstance(outcome, dict) else errors)[name] = outcome
            if fatal:
                break
        worker.kill() if left else worker.join(10)
        worker.join()
    return results, errors


def _compile(job) -> None:
    compiler.compile_file(*job)


def compile_all(cases) -> None:
    """Fill the compile cache in parallel; errors show when the case runs."""
    jobs = {(case.file, tuple(sorted(case.constants.items()))): (FOLDER / case.file, case.constants) for case in cases}
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count()), mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_compile, job) for job in jobs.values()]:
            future.exception()


def machine() -> dict:
    """The card and the versions that the record belongs to."""
    import torch

    from hopperlab import telemetry

    return {
        "card": torch.cuda.get_device_name(),
        "driver": telemetry.card()["driver"],
        "torch": torch.__version__,
        "nvrtc": ".".join(map(str, compiler.nvrtc_version())),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="only cases whose name contains NAME; the others keep their record")
    parser.add_argument("--save", metavar="FOLDER", help="also keep whole results there, one .npz per case")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only is None or options.only in case.name]
    if not chosen:
        print(f"--only: no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("recording needs a Hopper GPU (compute capability 9.0)", file=sys.stderr)
        return 2
    if options.save:
        Path(options.save).mkdir(parents=True, exist_ok=True)
    recorded_on = machine()
    start = time.perf_counter()
    compile_all(chosen)
    compiled = time.perf_counter()
    results, errors = record([case.name for case in chosen], options.save)
    old = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
    kept = {case.name: old[case.name] for case in CASES if case.name in old and case not in chosen}
    cases = {case.name: (kept | results)[case.name] for case in CASES if case.name in kept | results}
    RECORD.write_text(json.dumps({"machine": recorded_on, "cases": cases}, indent=1) + "\n")
    print(f"{len(results)} of {len(chosen)} cases recorded; compiled in {compiled - start:.1f} s, run in {time.perf_counter() - compiled:.1f} s")
    for name, error in errors.items():
        print(f"FAILED {name}: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
