"""The NVIDIA driver's answers (NVML) as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read_nvml() -> dict[str, Any]:
    """What the driver says, as plain data.

    Returns:
        {"driver", "cuda", "gpus": [{index, uuid, name, bdf, cc, memory_mib, bar1_mib, mig, pstate, gen_now, gen_best,
        gen_gpu, width_now, width_best, nvlink}], "p2p": {"read"|"write"|"atomics": [[status]]}} with statuses "ok",
        "chipset not supported", ...; or {"error": text}. A fact that the driver does not answer is absent.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, no driver, no permission: all mean "ask nobody"
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        return _Reader(pynvml).read()
    finally:
        pynvml.nvmlShutdown()


class _Reader:
    """Questions to an initialised NVML module."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> dict[str, Any]:
        n = self.nvml
        return {
            "driver": self.ask(n.nvmlSystemGetDriverVersion),
            "cuda": self.ask(n.nvmlSystemGetCudaDriverVersion),
            "gpus": [self.gpu(i) for i in range(len(self.handles))],
            "p2p": {
                "read": self.matrix(n.NVML_P2P_CAPS_INDEX_READ),
                "write": self.matrix(n.NVML_P2P_CAPS_INDEX_WRITE),
                "atomics": self.matrix(n.NVML_P2P_CAPS_INDEX_ATOMICS),
            },
        }

    def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None when this driver or GPU has none."""
        try:
            value = call(*args)
        except self.nvml.NVMLError:
            return None
        return value.decode() if isinstance(value, bytes) else value

    def gpu(self, index: int) -> dict[str, Any]:
        n, h = self.nvml, self.handles[index]
        cc = self.ask(n.nvmlDeviceGetCudaComputeCapability, h)
        mig = self.ask(n.nvmlDeviceGetMigMode, h)
        pci = self.ask(n.nvmlDeviceGetPciInfo, h)
        memory = self.ask(n.nvmlDeviceGetMemoryInfo, h)
        bar1 = self.ask(n.nvmlDeviceGetBAR1MemoryInfo, h)
        facts = {
            "index": index,
            "uuid": self.ask(n.nvmlDeviceGetUUID, h),
            "name": self.ask(n.nvmlDeviceGetName, h),
            "bdf": _bdf(pci.busId) if pci else None,
            "cc": ".".join(map(str, cc)) if cc else None,
            "memory_mib": memory.total >> 20 if memory else None,
            "bar1_mib": bar1.bar1Total >> 20 if bar1 else None,
            "mig": bool(mig[0]) if mig else None,
            "pstate": self.ask(n.nvmlDeviceGetPerformanceState, h),
            "gen_now": self.ask(n.nvmlDeviceGetCurrPcieLinkGeneration, h),
            "gen_best": self.ask(n.nvmlDeviceGetMaxPcieLinkGeneration, h),
            "gen_gpu": self.ask(n.nvmlDeviceGetGpuMaxPcieLinkGeneration, h),
            "width_now": self.ask(n.nvmlDeviceGetCurrPcieLinkWidth, h),
            "width_best": self.ask(n.nvmlDeviceGetMaxPcieLinkWidth, h),
            "nvlink": bool(self.ask(n.nvmlDeviceGetNvLinkState, h, 0)),
        }
        return {k: v for k, v in facts.items() if v is not None}

    def matrix(self, kind: int) -> list[list[str]]:
        """P2P status texts of all ordered pairs."""
        n = self.nvml
        names = {
            n.NVML_P2P_STATUS_OK: "ok",
            n.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "chipset not supported",
            n.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "GPU not supported",
            n.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "topology not supported",
            n.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "disabled by registry key",
            n.NVML_P2P_STATUS_NOT_SUPPORTED: "not supported",
        }
        out = []
        for a in self.handles:
            row = []
            for b in self.handles:
                status = self.ask(n.nvmlDeviceGetP2PStatus, a, b, kind) if a is not b else None
                row.append("self" if a is b else names.get(status, "unknown"))
            out.append(row)
        return out


def _bdf(bus_id: str | bytes) -> str:
    """NVML's "00000000:C1:00.0" as sysfs spells it: "0000:c1:00.0"."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, rest = text.lower().split(":", 1)
    return f"{domain[-4:]}:{rest}"
