"""Processes that form a torch.distributed group over gloo, kept alive between calls so that torch is imported once."""

import datetime
import os
import queue
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ANSWER_SECONDS = 60  # no call takes near as long: a hang fails the test instead of stopping it


class Ranks:
    """run(function, *arguments) calls function(rank, size, *arguments) on every rank and returns their results by rank."""

    def __init__(self, size: int, folder, timeout_seconds: float = 60):
        context = multiprocessing.get_context("spawn")
        self.usable = True  # False once a rank failed: the others may still wait for it
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(size)]
        shared = (size, f"file://{folder}/store", timeout_seconds, self.results)
        self.processes = [context.Process(target=_serve, args=(rank, tasks, *shared), daemon=True)
                          for rank, tasks in enumerate(self.tasks)]  # fmt: skip
        for process in self.processes:
            process.start()

    def run(self, function, *arguments, expect: int | None = None) -> list:
        """Raises AssertionError with the traceback of the first rank that failed. expect: how many ranks will answer."""
        self.usable = False
        for tasks in self.tasks:
            tasks.put((function, arguments))
        results = [None] * len(self.tasks)
        for _ in range(expect or len(self.tasks)):
            try:
                rank, result, failure = self.results.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                raise AssertionError(f"a rank gave no answer to {function.__name__} within {ANSWER_SECONDS} s") from None
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = result
        self.usable = expect in (None, len(self.tasks))
        return results

    def close(self):
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(10 if self.usable else 0)
            if process.is_alive():
                process.terminate()


def _serve(rank, tasks, size, store, timeout_seconds, results):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=timeout_seconds))  # fmt: skip
    while (task := tasks.get()) is not None:
        function, arguments = task
        try:
            results.put((rank, function(rank, size, *arguments), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
