"""The doctor's checks of a topology: each is a function from the machine to findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sglang_sm120.fabric.findings import Finding, Severity
from sglang_sm120.fabric.machine import EdgeClass
from sglang_sm120.fabric.report import P2P_OPTIONS
from sglang_sm120.fabric.topology import REDIRECT, Gpu, Topology

MODPROBE: Final = "/etc/modprobe.d/nvidia-p2p.conf"
# Usable GB/s per direction of one link: 94.5 % of the raw rate, as measured for Gen5 x16 (56.3 of 63.0, with
# payloads of 256 bytes); generation -> GB/s per lane.
LANE_GBPS: Final = {1: 0.22, 2: 0.44, 3: 0.88, 4: 1.76, 5: 3.52, 6: 7.04}


def link_gbps(gen: int, width: int) -> float:
    """Usable GB/s per direction of a PCIe link."""
    return LANE_GBPS.get(gen, 0.0) * width


def _pairs(topology: Topology) -> list[tuple[int, int]]:
    n = len(topology.gpus)
    return [(a, b) for a in range(n) for b in range(a + 1, n)]


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.bdf})"


def _driver(t: Topology) -> list[Finding]:
    if t.gpus and not t.nvml_error:
        return []
    what = (
        f"no answer from the NVIDIA driver: {t.nvml_error}"
        if t.nvml_error
        else "no NVIDIA GPU found"
    )
    return [
        Finding(
            id="no-driver",
            severity=Severity.ERROR,
            what=what,
            cost="nothing of this plugin runs on GPUs",
            fix=("nvidia-smi", "containers: run with --gpus all"),
        )
    ]


def _iommu(t: Topology) -> list[Finding]:
    if t.iommu != "translated":
        return []
    maker = (
        "amd_iommu=off"
        if "AMD" in t.cpu
        else "intel_iommu=off"
        if "Intel" in t.cpu
        else "iommu=off"
    )
    return [
        Finding(
            id="iommu-translated",
            severity=Severity.ERROR,
            what="the IOMMU translates the GPUs' addresses"
            + (f" ({', '.join(t.kernel_options)})" if t.kernel_options else ""),
            cost="peer writes get lost or corrupted, the first collective hangs (nccl issue 1999, vllm issue 33041); "
            "where it works, 15 % of every flow",
            fix=(
                f"kernel parameter: {maker} (or iommu=pt), in GRUB_CMDLINE_LINUX of /etc/default/grub, then update-grub",
                "BIOS: IOMMU / VT-d / AMD-Vi disabled",
            ),
            where=tuple(_name(g) for g in t.gpus if g.iommu.startswith("DMA")),
        )
    ]


def _acs(t: Topology) -> list[Finding]:
    redirecting = [b for b in t.bridges if b.redirects and b.kind != "switch uplink"]
    if redirecting:
        bits = sorted({bit for b in redirecting for bit in b.acs or () if bit in REDIRECT})
        return [
            Finding(
                id="acs-redirect",
                severity=Severity.ERROR,
                what=f"ACS redirect ({', '.join(bits)}) is on at {len(redirecting)} bridges: traffic between GPUs "
                "climbs to the CPU and back",
                cost="50 instead of 103 GB/s both ways inside a switch, 16 instead of 55 behind a root port; "
                "deadlocks (nccl issue 2079)",
                fix=(
                    *(f"setpci -s {b.bdf} ECAP_ACS+0x6.w=0000" for b in redirecting),
                    "BIOS: ACS disabled (setpci lasts until the next boot)",
                ),
                where=tuple(b.bdf for b in redirecting),
            )
        ]
    groups = [g.iommu_group for g in t.gpus if g.iommu_group]
    same_switch = [(a, b) for a, b in _pairs(t) if t.common_bridge(a, b)]
    apart = [(a, b) for a, b in same_switch if t.gpus[a].iommu_group != t.gpus[b].iommu_group]
    if groups and apart and any(b.acs is None for b in t.bridges):
        a, b = apart[0]
        return [
            Finding(
                id="acs-suspected",
                severity=Severity.WARNING,
                what=f"GPU {a} and GPU {b} share a switch but not an IOMMU group: ACS is on between them",
                cost="50 instead of 103 GB/s both ways inside a switch",
                fix=("sudo sglang-sm120 doctor   # reads the bits and prints the setpci lines",),
            )
        ]
    return []


def _p2p(t: Topology) -> list[Finding]:
    denied = [(a, b) for a, b in _pairs(t) if t.can_p2p(a, b) is False]
    if not denied:
        return []
    status = sorted({t.p2p["write"][a][b] for a, b in denied})
    pairs = ", ".join(f"{a}-{b}" for a, b in denied[:6]) + (" ..." if len(denied) > 6 else "")
    every = len(denied) == len(_pairs(t))
    return [
        Finding(
            id="no-p2p",
            severity=Severity.WARNING if every else Severity.ERROR,
            what=f"the driver offers no peer access for {'any pair' if every else f'pairs {pairs}'} "
            f"({', '.join(status)})",
            cost="about 14 us one way through host memory instead of about 1; the mailbox backend (pinned host "
            "memory) serves"
            + ("" if every else "; some pairs only: every rank falls back together"),
            fix=(
                f"{MODPROBE}: {P2P_OPTIONS}   # where the GPU and driver support it",
                "GeForce: NVIDIA's driver does not offer it; use --sm120-backend mailbox",
            ),
        )
    ]


def _staged(t: Topology) -> list[Finding]:
    direct = [(a, b) for a, b in _pairs(t) if t.can_p2p(a, b) and not t.common_bridge(a, b)]
    if not direct or "ForceP2P" in t.driver_options.get("RegistryDwords", ""):
        return []
    return [
        Finding(
            id="p2p-may-be-staged",
            severity=Severity.WARNING,
            what=f"{len(direct)} pairs meet in a CPU and the driver has no ForceP2P keys: it may stage peer traffic "
            "through system memory",
            cost="114 KB all-reduce 242 instead of 17 us; decode 28.9 instead of 73.3 tok/s (community measurement)",
            fix=(
                "sglang-sm120 probe   # one way above 5 us means staged",
                f"{MODPROBE}: {P2P_OPTIONS}",
            ),
        )
    ]


def _links(t: Topology) -> list[Finding]:
    out: list[Finding] = []
    for g in t.gpus:
        if g.width_now and g.width_best and g.width_now < g.width_best:
            have, want = link_gbps(g.gen_best, g.width_now), link_gbps(g.gen_best, g.width_best)
            out.append(
                Finding(
                    id="narrow-link",
                    severity=Severity.WARNING,
                    what=f"{_name(g)} runs on {g.width_now} of {g.width_best} lanes",
                    cost=f"about {have:.0f} instead of {want:.0f} GB/s each way, and every sum waits for it",
                    fix=("reseat the card or riser; BIOS: bifurcation of the slot x16",),
                    where=(g.bdf,),
                )
            )
        if g.gen_best and g.gen_best < g.gen_gpu:
            have, want = link_gbps(g.gen_best, g.width_best), link_gbps(g.gen_gpu, g.width_best)
            out.append(
                Finding(
                    id="slow-slot",
                    severity=Severity.WARNING,
                    what=f"{_name(g)} could do Gen{g.gen_gpu}, its slot does Gen{g.gen_best}",
                    cost=f"about {have:.0f} instead of {want:.0f} GB/s each way",
                    fix=(
                        "use another slot; BIOS: link speed of the slot Auto or Gen5, check riser and cable",
                    ),
                    where=(g.bdf,),
                )
            )
        elif not g.idle and g.gen_now and g.gen_now < g.gen_best:
            out.append(
                Finding(
                    id="link-trained-down",
                    severity=Severity.WARNING,
                    what=f"{_name(g)} is busy and runs Gen{g.gen_now} of Gen{g.gen_best}",
                    cost=f"about {link_gbps(g.gen_now, g.width_now):.0f} instead of "
                    f"{link_gbps(g.gen_best, g.width_now):.0f} GB/s each way",
                    fix=(
                        "check riser and cable; BIOS: link speed Gen5; kernel parameter: pcie_aspm=off",
                    ),
                    where=(g.bdf,),
                )
            )
    rates = {
        round(link_gbps(g.gen_best, g.width_now)) for g in t.gpus if g.gen_best and g.width_now
    }
    if len(rates) > 1:
        out.append(
            Finding(
                id="mixed-links",
                severity=Severity.WARNING,
                what=f"GPU links differ: {', '.join(f'{r} GB/s' for r in sorted(rates))}",
                cost="a sum is as slow as the slowest link: Gen5 x16 beside Gen4 x4 cut prefill from 9k to 1k tok/s "
                "(community report)",
                fix=(
                    "put all GPUs of one group on equal links, or leave the slow one out of the group",
                ),
            )
        )
    for b in t.bridges:
        if b.kind == "switch uplink" and b.width_now and b.width_now < b.width_best:
            out.append(
                Finding(
                    id="narrow-uplink",
                    severity=Severity.WARNING,
                    what=f"the uplink of switch {b.bdf} runs on {b.width_now} of {b.width_best} lanes",
                    cost="all GPUs of that switch share it",
                    fix=("check the cable and the slot's bifurcation",),
                    where=(b.bdf,),
                )
            )
    return out


def _errors(t: Topology) -> list[Finding]:
    devices = [(b.bdf, b.errors) for b in t.bridges if b.errors]
    devices += [(g.bdf, g.errors) for g in t.gpus if g.errors]
    if not devices:
        return []
    return [
        Finding(
            id="pcie-errors",
            severity=Severity.ERROR,
            what="uncorrectable PCIe errors since boot: "
            + ", ".join(f"{b} {n}" for b, n in devices),
            cost="lost or repeated packets; GPUs that fall off the bus",
            fix=(
                "reseat the card, shorten or replace the riser; kernel parameters: pcie_aspm=off pcie_port_pm=off",
            ),
            where=tuple(b for b, _ in devices),
        )
    ]


def _bar1(t: Topology) -> list[Finding]:
    small = [g for g in t.gpus if g.bar1_mib and g.memory_mib and g.bar1_mib < g.memory_mib]
    if not small:
        return []
    g = small[0]
    return [
        Finding(
            id="small-bar1",
            severity=Severity.WARNING,
            what=f"BAR1 of {len(small)} GPUs is {g.bar1_mib} MiB for {g.memory_mib} MiB of memory",
            cost="peers reach only that window, and peer access over BAR1 may be refused",
            fix=("BIOS: Above 4G Decoding and Resizable BAR enabled",),
            where=tuple(_name(g) for g in small),
        )
    ]


def _mig(t: Topology) -> list[Finding]:
    split = [g for g in t.gpus if g.mig]
    if not split:
        return []
    return [
        Finding(
            id="mig",
            severity=Severity.ERROR,
            what=f"MIG is on: {', '.join(_name(g) for g in split)}",
            cost="MIG instances have no peer access",
            fix=tuple(f"nvidia-smi -i {g.index} -mig 0" for g in split),
        )
    ]


def _order(t: Topology) -> list[Finding]:
    islands = t.islands()
    order = [g for island in islands for g in island]
    if len(islands) < 2 or order == sorted(order):
        return []
    return [
        Finding(
            id="interleaved-order",
            severity=Severity.WARNING,
            what="neighbouring GPU numbers sit behind different switches or sockets: islands "
            + " ".join("{" + ",".join(map(str, i)) + "}" for i in islands),
            cost="NCCL's rings and smaller groups cross the CPU at every step; overlapped collectives were 1.6 to 8 "
            "times slower (community measurement)",
            fix=(
                "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="
                + ",".join(map(str, order)),
            ),
        )
    ]


def _hygiene(t: Topology) -> list[Finding]:
    out: list[Finding] = []
    if t.hmm_disabled is False:
        out.append(
            Finding(
                id="hmm",
                severity=Severity.NOTICE,
                what="heterogeneous memory management is on in nvidia_uvm",
                cost="named in reports of NCCL hangs on machines like this",
                fix=("/etc/modprobe.d/nvidia-uvm.conf: options nvidia_uvm uvm_disable_hmm=1",),
            )
        )
    if t.bridges and not any(o.startswith("pcie_aspm=off") for o in t.kernel_options):
        out.append(
            Finding(
                id="link-power",
                severity=Severity.NOTICE,
                what="PCIe link power saving is not switched off",
                cost="waking a link adds latency; reports of surprise link-down behind switches",
                fix=("kernel parameters: pcie_aspm=off pcie_port_pm=off",),
            )
        )
    return out


def _shape(t: Topology) -> list[Finding]:
    out: list[Finding] = []
    classes = {t.edge_class(a, b) for a, b in _pairs(t)}
    if len(t.gpus) > 8:
        out.append(
            Finding(
                id="more-than-eight",
                severity=Severity.NOTICE,
                what=f"{len(t.gpus)} GPUs: CUDA maps at most 8 peers",
                cost="only island schedules are used",
            )
        )
    if EdgeClass.CROSS_SOCKET in classes:
        out.append(
            Finding(
                id="cross-socket",
                severity=Severity.NOTICE,
                what="GPUs hang on more than one CPU socket",
                cost="36 to 51 GB/s and 0.5 us more per crossing; island schedules cross once",
            )
        )
    roots = {g.bridges[-1] for g in t.gpus if g.bridges}
    broadcom = [b for b in t.bridges if b.vendor == "0x1000" and b.kind == "switch uplink"]
    if len(roots) > 1 and broadcom and "AMD" in t.cpu:
        out.append(
            Finding(
                id="collapse-risk",
                severity=Severity.WARNING,
                what=f"{len(broadcom)} Broadcom switches on several AMD root ports",
                cost="on such machines two GPUs of one switch writing to two root ports fell from 37 to 2.7 GB/s",
                fix=("sglang-sm120 probe   # measures it; the plan avoids patterns that collapse",),
                where=tuple(b.bdf for b in broadcom),
            )
        )
    if any(g.nvlink for g in t.gpus):
        out.append(
            Finding(
                id="nvlink",
                severity=Severity.NOTICE,
                what="GPUs have NVLink",
                cost="SGLang's own kernels serve NVLink; this plugin is for PCIe",
            )
        )
    if t.virtual and not t.bridges:
        out.append(
            Finding(
                id="virtual-machine",
                severity=Severity.NOTICE,
                what="a virtual machine hides the PCIe tree",
                cost="islands come from the probe's measurements only",
            )
        )
    if t.unknown:
        out.append(
            Finding(
                id="needs-root",
                severity=Severity.NOTICE,
                what="not readable: " + "; ".join(t.unknown),
                fix=("sudo sglang-sm120 doctor",) if not t.as_root else (),
            )
        )
    return out


CHECKS: Final[tuple[Callable[[Topology], list[Finding]], ...]] = (
    _driver,
    _iommu,
    _acs,
    _errors,
    _mig,
    _p2p,
    _staged,
    _links,
    _bar1,
    _order,
    _shape,
    _hygiene,
)
