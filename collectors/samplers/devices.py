"""NVIDIA GPUs of this host through NVML; one row of table `devices` a GPU and sample.

In: the driver's library, where there is one. Out: mappings in the words of `schema`; a value that a
GPU does not report is None. Without a driver `open_devices` says why, and nothing is sampled.
"""

from __future__ import annotations

import time
from typing import Any

THROTTLES = {
    0x2: "applications-clocks",
    0x4: "power-cap",
    0x8: "hardware-slowdown",
    0x10: "sync-boost",
    0x20: "thermal-software",
    0x40: "thermal-hardware",
    0x80: "power-brake",
    0x100: "display-clocks",
}
"""Bits of nvmlClocksEventReasons* (nvml.h) that hold the clock down; idle (0x1) is no throttle."""


class DeviceSampler:
    """Samples of all GPUs; made by `open_devices`."""

    def __init__(self, nvml: Any, host: str) -> None:
        self._nvml = nvml
        self._host = host
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

    def sample(self) -> list[dict[str, Any]]:
        """One row of table `devices` for each GPU."""
        return [self._one(index, handle) for index, handle in enumerate(self._handles)]

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, call)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None  # this GPU, or this driver, does not tell

    def _one(self, index: int, handle: Any) -> dict[str, Any]:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        heat = self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        clock = self._ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM)
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        names = None
        if bits is not None:
            names = ",".join(name for bit, name in THROTTLES.items() if bits & bit)
        return {
            "host": self._host,
            "device": index,
            "time_ns": time.time_ns(),
            "utilisation": None if rates is None else rates.gpu / 100,
            "memory_used": None if memory is None else int(memory.used),
            "memory_total": None if memory is None else int(memory.total),
            "power": None if power is None else power / 1000,
            "temperature": None if heat is None else float(heat),
            "sm_clock": None if clock is None else float(clock),
            "throttle": names,
        }


def open_devices(host: str) -> tuple[DeviceSampler | None, str | None]:
    """(sampler, None), or (None, why there is none)."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        return DeviceSampler(pynvml, host), None
    except pynvml.NVMLError as wrong:
        return None, f"NVML: {wrong}"
