"""The doctor's screen: the tree of the machine, the edge matrix, the findings."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sglang_sm120.fabric.checks import link_gbps
from sglang_sm120.fabric.findings import Finding, Severity
from sglang_sm120.fabric.machine import EdgeClass
from sglang_sm120.fabric.report import ProbeReport, shares_a_link
from sglang_sm120.fabric.topology import Gpu, Topology

_SHORT = {
    EdgeClass.SAME_SWITCH: ("switch", "green"),
    EdgeClass.SAME_ROOT: ("root", "cyan"),
    EdgeClass.CROSS_SOCKET: ("socket", "yellow"),
    EdgeClass.HOST: ("host", "red"),
}
_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTICE: "dim"}


def screen(
    topology: Topology, findings: list[Finding], report: ProbeReport | None = None
) -> RenderableType:
    """Everything on one screen."""
    parts: list[RenderableType] = [header(topology), tree(topology)]
    if len(topology.gpus) > 1:
        parts.append(
            measured_matrix(report) if report and report.latency_us else edge_matrix(topology)
        )
    parts.append(finding_list(findings))
    return Group(*parts)


def header(t: Topology) -> Text:
    """One line on the machine."""
    facts = [
        f"{len(t.gpus)} GPUs",
        t.cpu or "unknown CPU",
        f"{t.sockets} socket{'s' if t.sockets > 1 else ''}",
        f"driver {t.driver or 'none'}{' open' if t.driver_open else ''}",
        f"IOMMU {t.iommu}",
        f"kernel {t.kernel}",
    ]
    return Text(", ".join(facts), style="bold")


def tree(t: Topology) -> Tree:
    """Root ports, switches and GPUs, each with its link."""
    top = Tree("PCIe", guide_style="dim")
    sockets: dict[int, Tree] = {}
    nodes: dict[str, Tree] = {}
    for gpu in t.gpus:
        here = sockets.get(gpu.socket)
        if here is None:
            here = sockets[gpu.socket] = top.add(f"socket {gpu.socket}")
        # A switch is shown once, by its uplink; its ports show only where ACS is on.
        for bdf in reversed(gpu.bridges):
            bridge = t.bridge(bdf)
            acs = f" [red]ACS {'+'.join(bridge.acs)}[/]" if bridge.acs else ""
            if bridge.kind == "switch port" and not acs:
                continue
            if bdf not in nodes:
                word = {"root port": "root port", "switch uplink": "switch"}.get(
                    bridge.kind, "port"
                )
                link = f" x{bridge.width_now} Gen{bridge.gen_best}" if bridge.width_now else ""
                nodes[bdf] = here.add(f"{word} {bdf}{link}{acs}")
            here = nodes[bdf]
        here.add(_gpu_line(gpu))
    return top


def _gpu_line(g: Gpu) -> str:
    full = g.width_now == g.width_best and g.gen_best == g.gen_gpu
    link = f"x{g.width_now} Gen{g.gen_best} ({link_gbps(g.gen_best, g.width_now):.0f} GB/s)"
    name = escape(g.name.replace("NVIDIA ", ""))
    style = "green" if full else "yellow"
    mig = " [red]MIG[/]" if g.mig else ""
    return f"[bold]GPU {g.index}[/] {g.bdf} {name} [{style}]{link}[/] BAR1 {g.bar1_mib} MiB{mig}"


def edge_matrix(t: Topology) -> Table:
    """Edge classes between all GPUs."""
    out = _grid(
        len(t.gpus),
        "edges: switch = turns round in a switch, root = in the CPU, socket = other CPU",
    )
    for a in range(len(t.gpus)):
        cells = []
        for b in range(len(t.gpus)):
            word, style = _SHORT[t.edge_class(a, b)] if a != b else ("-", "dim")
            cells.append(f"[{style}]{word}[/]")
        out.add_row(f"GPU {a}", *cells)
    return out


def measured_matrix(report: ProbeReport) -> Table:
    """What the probe measured: one-way microseconds, and GB/s of single flows."""
    kind = "simulated" if report.simulated else "measured"
    out = _grid(
        report.world,
        f"edges {kind} with {report.rig}: one way us / GB/s alone, row stores to column",
    )
    bad = {(f.source, f.target) for f in report.failures}
    for a in range(report.world):
        cells = []
        for b in range(report.world):
            if a == b:
                cells.append("[dim]-[/]")
                continue
            gbps = f"{report.store_gbps[a][b]:.1f}" if report.store_gbps else "-"
            cell = f"{report.latency_us[a][b]:.2f} / {gbps}"
            cells.append(f"[bold red]{cell} !![/]" if (a, b) in bad else cell)
        out.add_row(f"rank {a}", *cells)
    return out


def patterns(report: ProbeReport) -> Table:
    """The concurrent patterns and how far each fell."""
    out = Table(title=f"concurrent stores ({report.rig})", title_justify="left")
    for column in ("pattern", "islands", "flows", "GB/s in all", "of one flow alone", ""):
        out.add_column(column)
    for p in report.patterns:
        islands = " ".join("{" + ",".join(map(str, i)) + "}" for i in p.islands)
        state = "[red]collapses: never used[/]" if p.collapsed else "[green]ok[/]"
        if shares_a_link(report, p):
            state = "[red]one link for all: never used[/]"
        out.add_row(
            p.name, islands, str(len(p.flows)), f"{sum(p.gbps):.1f}", f"{p.ratio:.2f}", state
        )
    return out


def finding_list(findings: list[Finding]) -> RenderableType:
    """Findings with cost and fix; a green line when there are none."""
    if not findings:
        return Text("nothing wrong found", style="bold green")
    parts: list[RenderableType] = []
    for f in findings:
        body = Text()
        if f.cost:
            body.append(f"costs: {f.cost}\n")
        for line in f.fix:
            body.append("fix:   ", style="dim")
            body.append(f"{line}\n", style="bold")
        style = _STYLE[f.severity]
        title = Text(f"{f.severity.value}: {f.what}  [{f.id}]", style=style)
        parts.append(
            Panel(body, title=title, title_align="left", border_style=style, padding=(0, 1))
            if body.plain
            else title
        )
    return Group(*parts)


def _grid(n: int, title: str) -> Table:
    out = Table(title=title, title_justify="left", padding=(0, 1), show_edge=False)
    out.add_column("")
    for b in range(n):
        out.add_column(f"{b}", justify="center")
    return out
