"""Tests share one compile cache of their own, so that they neither need nor touch the user's."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("HOPPERLAB_CACHE", str(Path(tempfile.gettempdir()) / f"hopperlab-test-cache-{os.getuid()}"))
os.environ["FP8_GEMM_BACKGROUND"] = "0"  # tests count what is compiled

import pytest  # noqa: E402
import torch  # noqa: E402

from hopperlab import capability  # noqa: E402

capability.use_triton_interpreter_without_gpu()
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one process per core: threads of their own would only fight


@pytest.fixture
def device():
    """The device whose tensors run kernels on the best machine there is."""
    return capability.device()
