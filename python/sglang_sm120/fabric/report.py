"""What the probe found, as data, and what follows from it: vetoes and forbidden schedules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from sglang_sm120.fabric.islands import Partition
from sglang_sm120.fabric.verdict import Veto

STAGED_US = (
    5.0  # one-way latency above which peer traffic goes through system memory (case R27: ~14 us)
)
COLLAPSED = 0.4  # a pattern below this share of its best single flow is never used
EVEN = 0.67  # flows share a link fairly when the slowest gets this much of the fastest; a collapse hits some of them
P2P_OPTIONS = (
    'options nvidia NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;'
    'GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"'
)
IOMMU_REMEDY = (
    "switch the IOMMU off or to identity (kernel parameter iommu=pt, or amd_iommu=off / intel_iommu=off) and clear "
    "ACS request redirect on every bridge above the GPUs (`sglang-sm120 doctor` prints the setpci lines)"
)

Flow = tuple[int, int]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One edge that does not work.

    kind: "open" (cannot be mapped), "lost" (stores never arrive), "corrupt" (bytes differ), "kernel" (the real
    collective gave a wrong result), "stuck" (a step did not return).
    """

    kind: str
    source: int
    target: int
    detail: str


class PatternResult(msgspec.Struct, frozen=True, kw_only=True):
    """Flows that ran at once.

    Attributes:
        name: "ring" (each island to the next), "inside", "lanes" or "all-to-all".
        islands: the partition it was made for.
        flows, gbps: what ran and what each flow got.
        ratio: see `collapse_ratio`; 1 or more is healthy.
    """

    name: str
    islands: Partition
    flows: tuple[Flow, ...]
    gbps: tuple[float, ...]
    ratio: float

    @property
    def collapsed(self) -> bool:
        """Whether no schedule may use this pattern."""
        return self.ratio < COLLAPSED


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one group, the same on every rank.

    Attributes:
        rig: what moved the bytes; need: what its failures veto; simulated: whether times were computed.
        latency_us: [world][world] one way, microseconds; 0 on the diagonal and where nothing was measured.
        store_gbps, load_gbps: [world][world] of single flows, GB/s; load_gbps may be empty (fast mode).
        patterns: concurrent patterns.
        failures: edges that do not work; measuring stops at the first kind that fails.
        staged_us: see `EdgeDriver.staged_us`.
        seconds: wall time of the probe on rank 0; steps: the same per step.
    """

    rig: str
    simulated: bool
    world: int
    latency_us: tuple[tuple[float, ...], ...] = ()
    store_gbps: tuple[tuple[float, ...], ...] = ()
    load_gbps: tuple[tuple[float, ...], ...] = ()
    patterns: tuple[PatternResult, ...] = ()
    failures: tuple[Failure, ...] = ()
    need: str = "p2p"
    staged_us: float = 0.0
    seconds: float = 0.0
    steps: dict[str, float] = {}

    @property
    def sound(self) -> bool:
        """Whether every edge may be used."""
        return not self.failures

    def pattern(self, name: str, islands: Partition) -> PatternResult | None:
        """The result of one pattern, or None when it was not run; all-to-all is the same for every partition."""
        return next(
            (
                p
                for p in self.patterns
                if p.name == name and (p.islands == islands or name == "all-to-all")
            ),
            None,
        )

    @property
    def staged(self) -> bool:
        """Whether the driver bounces peer traffic through system memory, by its latency."""
        return 0 < self.staged_us < self.median_latency_us()

    def median_latency_us(self) -> float:
        """Median one-way latency over all measured edges, microseconds; 0.0 when none was measured."""
        values = [us for row in self.latency_us for us in row if us > 0]
        return statistics.median(values) if values else 0.0

    def sentence(self) -> str:
        """What was measured, in one line: rig, soundness, latency and the slowest edge."""
        kind = "simulated" if self.simulated else "measured"
        if not self.sound:
            return f"probe over {self.rig} ({kind}): {len(self.failures)} failures"
        rates = [g for row in self.store_gbps for g in row if g > 0]
        slowest = f", slowest edge {min(rates):.1f} GB/s" if rates else ""
        return (
            f"probe over {self.rig} ({kind}): every edge sound, {self.median_latency_us():.1f} us one way{slowest}, "
            f"{self.seconds:.2f} s"
        )


def collapse_ratio(
    flows: Sequence[Flow],
    gbps: Sequence[float],
    solo: Sequence[Sequence[float]],
    groups: Sequence[Sequence[int]],
) -> float:
    """How far concurrent flows fall below what one of them reaches alone.

    For each group of sources: everything that leaves the group, over the fastest single flow that leaves it.
    Sharing a link fairly leaves at least 1 (the link stays full); a collapse leaves far less. The smallest over
    the groups counts. Groups without leaving flows do not.
    """
    worst = float("inf")
    for group in groups:
        leaving = [i for i, (a, b) in enumerate(flows) if a in group and b not in group]
        best = max((solo[flows[i][0]][flows[i][1]] for i in leaving), default=0.0)
        if best > 0:
            worst = min(worst, sum(gbps[i] for i in leaving) / best)
    return worst if worst != float("inf") else 1.0


def vetoes(report: ProbeReport) -> list[Veto]:
    """What the report forbids for the whole group."""
    out: list[Veto] = []
    for kind, reason, remedy in (
        (
            "open",
            "peer memory cannot be mapped",
            "see the CUDA error; containers need --ipc=host and --cap-add SYS_PTRACE",
        ),
        ("lost", "stores never arrive although the driver reports peer access", IOMMU_REMEDY),
        ("corrupt", "peer writes arrive corrupted", IOMMU_REMEDY),
        ("kernel", "the collective kernel gives wrong sums", IOMMU_REMEDY),
        ("stuck", "a probe step did not return", "reset the GPUs, then `sglang-sm120 doctor`"),
    ):
        hit = [f for f in report.failures if f.kind == kind]
        if hit:
            shown = "; ".join(f"GPU {f.source} -> GPU {f.target}: {f.detail}" for f in hit[:4])
            more = f" and {len(hit) - 4} more" if len(hit) > 4 else ""
            ranks = tuple(sorted({r for f in hit for r in (f.source, f.target) if r >= 0}))
            out.append(
                Veto(
                    target=report.need,
                    reason=f"{reason} ({shown}{more})",
                    remedy=remedy,
                    ranks=ranks,
                )
            )
    latency = report.median_latency_us()
    if report.staged:
        out.append(
            Veto(
                target=report.need,
                reason=f"the driver stages peer traffic through system memory: one way takes {latency:.1f} us, "
                "direct peer writes take about 1",
                remedy=f"/etc/modprobe.d/nvidia-p2p.conf: {P2P_OPTIONS}",
                ranks=tuple(range(report.world)),
            )
        )
    return out


# What each schedule sends, by pattern name.
PATTERNS_OF: dict[str, tuple[str, ...]] = {
    "one_shot": ("all-to-all",),
    "two_shot": ("all-to-all",),
    "island_two_hop": ("inside", "all-to-all"),
    "island_dataflow": ("inside", "lanes"),
    "island_ring": ("inside", "ring"),
}


def shares_a_link(report: ProbeReport, result: PatternResult) -> bool:
    """Whether a pattern that gives little was slowed by sharing a link, not by a collapse.

    Then every flow gets the same and the link stays full: all of them together carry what one alone does. That is what
    ACS request redirect looks like, which sends all traffic of a switch up to the root port and down again.
    """
    solo = report.store_gbps
    best = max((solo[a][b] for a, b in result.flows), default=0.0) if solo else 0.0
    even = min(result.gbps) >= EVEN * max(result.gbps)
    return result.collapsed and even and sum(result.gbps) >= best > 0


def forbidden(report: ProbeReport, islands: Partition) -> dict[str, str]:
    """Schedules that must not run with this partition, each with the pattern that gives too little and how much."""
    out: dict[str, str] = {}
    for schedule, names in PATTERNS_OF.items():
        for name in names:
            result = report.pattern(name, islands)
            if result is not None and result.collapsed:
                figures = (
                    f"{sum(result.gbps):.1f} GB/s in all, {result.ratio:.2f} of one flow alone"
                )
                out[schedule] = (
                    f"in its {name} pattern the GPUs share a link above their switch, as with ACS request redirect "
                    f"({figures})"
                    if shares_a_link(report, result)
                    else f"its {name} pattern collapses to {figures}"
                )
                break
    return out
