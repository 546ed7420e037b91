"""The doctor: what is wrong with the machine, what it costs, and the exact line that fixes it."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_sm120.fabric.checks import CHECKS
from sglang_sm120.fabric.findings import Finding, Severity
from sglang_sm120.fabric.report import ProbeReport, forbidden, vetoes
from sglang_sm120.fabric.topology import Topology
from sglang_sm120.fabric.versions import Versions, check_flashinfer, check_nccl
from sglang_sm120.nccl.environment import Finding as EnvFinding
from sglang_sm120.nccl.environment import Level


def diagnose(
    topology: Topology,
    *,
    versions: Versions | None = None,
    environment: Iterable[EnvFinding] = (),
    report: ProbeReport | None = None,
) -> list[Finding]:
    """Everything wrong, worst first; the order inside a severity is that of the checks."""
    found: list[Finding] = []
    for check in CHECKS:
        found.extend(check(topology))
    if versions:
        found.extend(_versions(topology, versions))
    found.extend(_environment(environment))
    if report:
        found.extend(_measured(report))
    return sorted(found, key=lambda f: list(Severity).index(f.severity))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 nothing but notices, 1 warnings, 2 errors."""
    return max((f.severity.exit_code for f in findings), default=0)


def _versions(t: Topology, versions: Versions) -> list[Finding]:
    if not any(g.cc.startswith("12.") for g in t.gpus):
        return []
    out: list[Finding] = []
    nccl = check_nccl(versions.nccl, versions.nccl_cuda)
    if nccl:
        out.append(
            Finding(
                id="nccl-version",
                severity=Severity.ERROR if nccl.fatal else Severity.WARNING,
                what=nccl.reason,
                cost="crashes in prefill and large all-gathers",
                fix=(nccl.remedy,),
            )
        )
    flashinfer = check_flashinfer(versions.flashinfer) if versions.flashinfer else None
    if flashinfer:
        out.append(
            Finding(
                id="flashinfer-version",
                severity=Severity.NOTICE,
                what=flashinfer.reason,
                cost="the flashinfer backend stays off",
                fix=(flashinfer.remedy,),
            )
        )
    return out


def _environment(findings: Iterable[EnvFinding]) -> list[Finding]:
    return [
        Finding(
            id="environment",
            severity=Severity.ERROR if f.level is Level.ERROR else Severity.WARNING,
            what=f"{f.name}={f.value}",
            cost=f.reason,
            fix=(f.remedy,),
        )
        for f in findings
    ]


def _measured(report: ProbeReport) -> list[Finding]:
    out = [
        Finding(
            id="probe-veto",
            severity=Severity.ERROR,
            what=v.reason,
            cost="this plugin's peer kernels stay off on all ranks",
            fix=(v.remedy,) if v.remedy else (),
            where=tuple(f"GPU {r}" for r in v.ranks),
        )
        for v in vetoes(report)
    ]
    partitions = {p.islands for p in report.patterns}
    banned = sorted(
        {(k, why) for p in sorted(partitions) for k, why in forbidden(report, p).items()}
    )
    shared = [f"{k}: {why}" for k, why in banned if "share a link" in why]
    collapsed = [f"{k}: {why}" for k, why in banned if "collapses" in why]
    for id, seen, fix in (
        (
            "shared-uplink",
            shared,
            "clear ACS request redirect on every bridge above the GPUs: the setpci lines of `sudo sglang-sm120 doctor`",
        ),
        (
            "writes-collapse",
            collapsed,
            "newer BIOS, kernel and driver removed it on some machines; GPUs of one group below one switch avoid it",
        ),
    ):
        if seen:
            out.append(
                Finding(
                    id=id,
                    severity=Severity.WARNING,
                    what="; ".join(seen),
                    cost="schedules with that traffic are never chosen",
                    fix=(fix,),
                )
            )
    return out
