"""What the machine is: GPUs, switches, root ports, NUMA nodes, links, IOMMU, driver; from sysfs, /proc and NVML."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from sglang_sm120.fabric.machine import EdgeClass
from sglang_sm120.fabric.source import Source

PCI: Final = "/sys/bus/pci/devices"
NVIDIA: Final = "0x10de"
_BDF: Final = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_GTS_TO_GEN: Final = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_ACS_BITS: Final = ("SV", "TB", "RR", "CR", "UF", "EC", "DT")
_ACS_CAPABILITY: Final = 0x000D  # PCI Express extended capability id
REDIRECT: Final = frozenset({"RR", "CR", "UF"})  # bits that send peer traffic up to the CPU


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI bridge above a GPU.

    Attributes:
        bdf: its address; parent: the bridge above, "" for a root port.
        kind: "root port", "switch uplink" or "switch port".
        vendor, device: PCI ids.
        gen_now, gen_best, width_now, width_best: of the link above it (root port: below it); 0 unknown.
        acs: bits switched on; None when the configuration space could not be read.
        errors: uncorrectable PCIe errors since boot (advanced error reporting).
    """

    bdf: str
    parent: str
    kind: str
    vendor: str = ""
    device: str = ""
    gen_now: int = 0
    gen_best: int = 0
    width_now: int = 0
    width_best: int = 0
    acs: tuple[str, ...] | None = None
    errors: int = 0

    @property
    def redirects(self) -> bool:
        """Whether ACS sends peer-to-peer traffic up through this bridge to the CPU."""
        return self.acs is not None and bool(REDIRECT & set(self.acs))


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, in NVML's order (PCI order).

    Attributes:
        index: position; uuid: identity; bdf: PCI address; bridges: addresses from its parent up to the root port.
        numa: NUMA node, -1 when the firmware names none; domain: the host bridge ("pci0000:40").
        gen_*/width_*: of its link now, at best with this slot, and of the GPU itself; 0 unknown.
        idle: the link may be slower now only because the GPU sleeps.
        iommu: "", "identity", "DMA", "DMA-FQ"; iommu_group: number or "".
        socket: CPU package of the NUMA node; errors: uncorrectable PCIe errors since boot (advanced error reporting).
    """

    index: int
    uuid: str
    name: str
    bdf: str
    cc: str = ""
    memory_mib: int = 0
    bar1_mib: int = 0
    mig: bool = False
    nvlink: bool = False
    gen_now: int = 0
    gen_best: int = 0
    gen_gpu: int = 0
    width_now: int = 0
    width_best: int = 0
    idle: bool = True
    numa: int = -1
    domain: str = ""
    bridges: tuple[str, ...] = ()
    iommu: str = ""
    iommu_group: str = ""
    socket: int = 0
    errors: int = 0


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The whole machine as discovered.

    Attributes:
        iommu: "off", "identity" or "translated"; kernel_options: those of the command line that matter here.
        driver: version; driver_open: open kernel modules; driver_options: /proc/driver/nvidia/params.
        hmm_disabled: nvidia_uvm's uvm_disable_hmm, None when unknown.
        p2p: [kind][a][b] NVML status texts for "read", "write", "atomics"; empty without NVML.
        as_root: facts were read with root's rights; unknown: what root would add.
    """

    gpus: tuple[Gpu, ...]
    bridges: tuple[Bridge, ...] = ()
    cpu: str = ""
    sockets: int = 1
    kernel: str = ""
    kernel_options: tuple[str, ...] = ()
    iommu: str = "off"
    virtual: bool = False
    driver: str = ""
    driver_open: bool = False
    cuda: int = 0
    driver_options: dict[str, str] = {}
    hmm_disabled: bool | None = None
    p2p: dict[str, tuple[tuple[str, ...], ...]] = {}
    nvml_error: str = ""
    as_root: bool = False
    unknown: tuple[str, ...] = ()

    def bridge(self, bdf: str) -> Bridge:
        """The bridge at an address; KeyError when there is none."""
        for b in self.bridges:
            if b.bdf == bdf:
                return b
        raise KeyError(bdf)

    def common_bridge(self, a: int, b: int) -> str:
        """Address of the lowest switch uplink above both GPUs, "" when they meet in a CPU."""
        above = self.gpus[b].bridges
        for bdf in self.gpus[a].bridges:
            if bdf in above and self.bridge(bdf).kind == "switch uplink":
                return bdf
        return ""

    def can_p2p(self, a: int, b: int) -> bool | None:
        """Whether the driver offers peer writes between two GPUs; None when it was not asked."""
        write = self.p2p.get("write")
        return write[a][b] == "ok" if write else None

    def edge_class(self, a: int, b: int) -> EdgeClass:
        """The class of the edge between two GPUs, by their places in the tree."""
        if self.can_p2p(a, b) is False:
            return EdgeClass.HOST
        if self.common_bridge(a, b):
            return EdgeClass.SAME_SWITCH
        same = self.gpus[a].socket == self.gpus[b].socket
        return EdgeClass.SAME_ROOT if same else EdgeClass.CROSS_SOCKET

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """GPU indices by the switch above them, or by socket where they hang on root ports."""
        groups: dict[str, list[int]] = {}
        for g in self.gpus:
            ups = [b for b in g.bridges if self.bridge(b).kind == "switch uplink"]
            groups.setdefault(ups[0] if ups else f"socket{g.socket}", []).append(g.index)
        return tuple(tuple(v) for v in groups.values())

    @property
    def pcie_only(self) -> bool:
        """No NVLink on any GPU."""
        return not any(g.nvlink for g in self.gpus)


def discover(source: Source) -> Topology:
    """Read a machine; never raises for missing facts, only leaves them unknown."""
    nvml = source.nvml()
    listed = {g.get("bdf", ""): g for g in nvml.get("gpus", [])}
    addresses = [a for a in listed if a] or _sysfs_gpus(source)
    bridges: dict[str, Bridge] = {}
    gpus = []
    for index, bdf in enumerate(addresses):
        chain = _chain(source, bdf)
        path = ["", *chain, bdf]  # in a virtual machine a GPU may hang on the root bus itself
        for above, here, below in zip(path, chain, path[2:], strict=False):
            if here not in bridges:
                bridges[here] = _bridge(source, here, above, below, chain)
        gpus.append(_gpu(source, index, bdf, chain, listed.get(bdf, {})))
    options = source.text("/proc/cmdline").split()
    matter = (
        "iommu",
        "amd_iommu",
        "intel_iommu",
        "pci",
        "pcie_aspm",
        "pcie_port_pm",
        "pcie_acs_override",
    )
    cpuinfo = source.text("/proc/cpuinfo")
    version_text = source.text("/proc/driver/nvidia/version")
    unknown = []
    if bridges and all(b.acs is None for b in bridges.values()):
        unknown.append("ACS bits of the bridges (PCI configuration beyond 64 bytes)")
    if not version_text and not nvml.get("driver"):
        unknown.append("the NVIDIA driver (is it loaded, and visible in this container?)")
    hmm = source.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    return Topology(
        gpus=tuple(gpus),
        bridges=tuple(bridges.values()),
        cpu=_first(r"model name\s*:\s*(.+)", cpuinfo),
        sockets=len(set(re.findall(r"physical id\s*:\s*(\d+)", cpuinfo))) or 1,
        kernel=source.text("/proc/sys/kernel/osrelease"),
        kernel_options=tuple(o for o in options if o.split("=")[0] in matter),
        iommu=_iommu(gpus),
        virtual=bool(re.search(r"flags\s*:.*\bhypervisor\b", cpuinfo)),
        driver=nvml.get("driver") or _first(r"(\d{3}\.\d+(?:\.\d+)?)", version_text),
        driver_open="Open Kernel Module" in version_text,
        cuda=nvml.get("cuda") or 0,
        driver_options=_params(source.text("/proc/driver/nvidia/params")),
        hmm_disabled={"Y": True, "N": False}.get(hmm),
        p2p={k: tuple(tuple(r) for r in m) for k, m in nvml.get("p2p", {}).items()},
        nvml_error=nvml.get("error", ""),
        as_root=source.root(),
        unknown=tuple(unknown),
    )


def _sysfs_gpus(source: Source) -> list[str]:
    return [
        bdf
        for bdf in source.names(PCI)
        if source.text(f"{PCI}/{bdf}/vendor") == NVIDIA
        and source.text(f"{PCI}/{bdf}/class").startswith("0x03")
    ]


def _chain(source: Source, bdf: str) -> list[str]:
    """Bridges above a device, root port first, from the path that its link resolves to."""
    path = source.link(f"{PCI}/{bdf}") or ""
    return [part for part in path.split("/") if _BDF.match(part)][:-1]


def _bridge(source: Source, bdf: str, above: str, below: str, chain: list[str]) -> Bridge:
    # Below a root port, uplinks and ports of switches alternate; a root port's own link is the one below it.
    depth = chain.index(bdf)
    kind = "root port" if depth == 0 else "switch uplink" if depth % 2 else "switch port"
    folder = f"{PCI}/{bdf}"
    return Bridge(
        bdf=bdf,
        parent=above,
        kind=kind,
        vendor=source.text(f"{folder}/vendor"),
        device=source.text(f"{folder}/device"),
        gen_now=_gen(source.text(f"{folder}/current_link_speed")),
        gen_best=_gen(source.text(f"{folder}/max_link_speed")),
        width_now=max(0, source.number(f"{folder}/current_link_width", 0)),
        width_best=max(0, source.number(f"{folder}/max_link_width", 0)),
        acs=acs_bits(source.read(f"{folder}/config") or b""),
        errors=_errors(source, folder),
    )


def _gpu(source: Source, index: int, bdf: str, chain: list[str], facts: dict[str, Any]) -> Gpu:
    folder = f"{PCI}/{bdf}"
    info = source.text(f"/proc/driver/nvidia/gpus/{bdf}/information")
    group = source.link(f"{folder}/iommu_group") or ""
    numa = source.number(f"{folder}/numa_node", -1)
    path = source.link(f"{PCI}/{bdf}") or ""
    gpu_best = _gen(source.text(f"{folder}/max_link_speed"))
    return Gpu(
        index=index,
        uuid=facts.get("uuid") or _first(r"GPU UUID:\s*(\S+)", info),
        name=facts.get("name") or _first(r"Model:\s*(.+)", info),
        bdf=bdf,
        cc=facts.get("cc", ""),
        memory_mib=facts.get("memory_mib", 0),
        bar1_mib=facts.get("bar1_mib") or _bar_mib(source.text(f"{folder}/resource"), 1),
        mig=facts.get("mig", False),
        nvlink=facts.get("nvlink", False),
        gen_now=facts.get("gen_now") or _gen(source.text(f"{folder}/current_link_speed")),
        gen_best=facts.get("gen_best") or gpu_best,
        gen_gpu=facts.get("gen_gpu") or gpu_best,
        width_now=facts.get("width_now")
        or max(0, source.number(f"{folder}/current_link_width", 0)),
        width_best=facts.get("width_best") or max(0, source.number(f"{folder}/max_link_width", 0)),
        idle=facts.get("pstate", 8) > 2,
        numa=numa,
        domain=_first(r"(pci[0-9a-f]{4}:[0-9a-f]{2})", path),
        bridges=tuple(reversed(chain)),
        iommu=source.text(f"{folder}/iommu_group/type"),
        iommu_group=group.rsplit("/", 1)[-1],
        socket=_socket(source, numa),
        errors=_errors(source, folder),
    )


def _socket(source: Source, numa: int) -> int:
    """CPU package of a NUMA node: a package may have several nodes (NPS2, NPS4, sub-NUMA clusters)."""
    if numa < 0:
        return 0
    first = re.match(r"\d+", source.text(f"/sys/devices/system/node/node{numa}/cpulist"))
    if not first:
        return numa
    return source.number(
        f"/sys/devices/system/cpu/cpu{first[0]}/topology/physical_package_id", numa
    )


def _errors(source: Source, folder: str) -> int:
    """Uncorrectable errors of one device: fatal and non-fatal totals of its error counters."""
    total = 0
    for kind, name in (("fatal", "FATAL"), ("nonfatal", "NONFATAL")):
        counted = _first(rf"TOTAL_ERR_{name}\s+(\d+)", source.text(f"{folder}/aer_dev_{kind}"))
        total += int(counted or 0)
    return total


def _iommu(gpus: list[Gpu]) -> str:
    kinds = {g.iommu for g in gpus if g.iommu_group}
    if not kinds:
        return "off"
    return "identity" if kinds == {"identity"} else "translated"


def acs_bits(config: bytes) -> tuple[str, ...] | None:
    """ACS control bits that are on, from a bridge's configuration space.

    None when the space is cut off at 64 bytes (no root); () when there is no ACS capability or all bits are off.
    Layout: PCI Express Base Specification, extended capabilities from 0x100; the ACS control register is at +6.
    """
    if len(config) < 0x104:
        return None
    at = 0x100
    for _ in range(96):  # an extended capability has at least 8 bytes: more cannot be chained
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = int.from_bytes(config[at + 6 : at + 8], "little")
            return tuple(name for bit, name in enumerate(_ACS_BITS) if control >> bit & 1)
        at = header >> 20
        if at < 0x100 or at + 8 > len(config):
            return ()
    return ()


def _gen(speed: str) -> int:
    """ "32.0 GT/s PCIe" -> 5; 0 when unknown."""
    match = re.match(r"([\d.]+)\s*GT/s", speed)
    return _GTS_TO_GEN.get(float(match[1]), 0) if match else 0


def _bar_mib(resource: str, bar: int) -> int:
    """Size in MiB of a base address register, from sysfs' `resource` (start end flags per line)."""
    lines = resource.splitlines()
    if len(lines) <= bar:
        return 0
    start, end, _ = (int(x, 16) for x in lines[bar].split())
    return (end - start + 1) >> 20 if end > start else 0


def _params(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {k.strip(): v.strip().strip('"') for k, v in pairs}


def _first(expression: str, text: str) -> str:
    match = re.search(expression, text)
    return match[1].strip() if match else ""
