"""What the benchmark refuses before anything is timed. What it measures needs a GPU."""

import pytest

from hopperlab import bench, capability


def test_refuses_nothing_to_time():
    with pytest.raises(ValueError, match="candidates is empty; .* at least one name"):
        bench.measure({})
    with pytest.raises(ValueError, match="candidates has no call for 'b'; .* at least one call"):
        bench.measure({"a": [lambda: None], "b": []})


@pytest.mark.parametrize("call", [lambda: bench.measure({"a": [lambda: None]}), lambda: bench.input_sets(8, 8, 8)])
def test_says_what_is_missing_without_a_gpu(monkeypatch, call):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError) as caught:
        call()
    assert str(caught.value) == f"kernels are timed on a GPU. {capability.hopper().sentence()}"
