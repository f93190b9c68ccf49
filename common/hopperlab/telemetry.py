"""What the card was doing while it was measured: clocks, power, temperature, utilisation, through NVML."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


def card(index: int = 0) -> dict:
    """Name, driver, memory and power limit of one GPU. Raises RuntimeError when NVML or the GPU is missing."""
    nvml, handle = _open(index)
    text = lambda value: value.decode() if isinstance(value, bytes) else value  # noqa: E731 - by version of nvidia-ml-py
    return {
        "name": text(nvml.nvmlDeviceGetName(handle)),
        "driver": text(nvml.nvmlSystemGetDriverVersion()),
        "memory_gib": round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "max_sm_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
    }


def sample(index: int = 0) -> dict:
    """One reading: SM and memory clock (MHz), power (W), temperature (°C), SM utilisation (%), memory in use (GiB)."""
    nvml, handle = _open(index)
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "utilisation_percent": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_used_gib": round(nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30, 2),
    }


@dataclass
class Recorder:
    """Samples the card in a thread while the ``with`` block runs.

        with Recorder() as recorder: ...
        recorder.summary()  ->  {"sm_clock_mhz": {"min": …, "median": …, "max": …}, …, "samples": n}
    """

    index: int = 0
    period_s: float = 0.02
    samples: list[dict] = field(default_factory=list)

    def __enter__(self):
        self.samples.append(sample(self.index))  # raises here, not in the thread, when NVML is missing
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self):
        while not self._stop.wait(self.period_s):
            self.samples.append(sample(self.index))

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict:
        def spread(values):
            ordered = sorted(values)
            return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}

        return {key: spread([s[key] for s in self.samples]) for key in self.samples[0]} | {"samples": len(self.samples)}


def _open(index: int):
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # ImportError, or an NVMLError class that only the import would give
        raise RuntimeError(f"NVML cannot be read ({error}); it needs an NVIDIA driver and: pip install nvidia-ml-py") from error


def now() -> str:
    """UTC time of a record, ISO 8601 to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
