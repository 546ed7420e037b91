"""Where a simulated machine comes from: a TOML file, a folder saved by `doctor`, or a name.

A saved folder tells the tree but not the speeds, so links get the figures that healthy machines of the same
kind showed in public measurements (`DEFAULTS`); a `fabric.toml` in the folder, with measured figures, wins.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sglang_sm120.fabric import machine as described
from sglang_sm120.fabric.machine import Machine, MachineError
from sglang_sm120.fabric.simulate_published import machine_names, published_machine
from sglang_sm120.fabric.source import Saved
from sglang_sm120.fabric.topology import Topology, discover

# In a checkout the doctor's fixtures are ready machines as well.
FIXTURES = Path(__file__).resolve().parents[3] / "tests" / "fixtures" / "machines"


def ready() -> tuple[str, ...]:
    """Names that `read` knows: the machines of the published tables, and in a checkout the doctor's fixtures."""
    more = {p.parent.name for p in FIXTURES.glob("*/fabric.toml")}
    return tuple(sorted({*machine_names(), *more}))


class Defaults(msgspec.Struct, frozen=True):
    """Link figures assumed for a tree without measurements; GB/s and microseconds one way.

    Sources: https://github.com/local-inference-lab/rtx6kpro (hardware/*.md): 55-56 GB/s per Gen5 x16 port, 0.63-0.73 us
    through one switch, 1.07 us across two switches of one CPU, 0.76-0.84 us between directly attached GPUs, 50 GB/s
    and +0.53 us across AMD sockets, 15% lost to a translating IOMMU. Intel's socket link has no public measurement;
    22 GB/s is what NCCL assumes for Sapphire Rapids (src/graph/topo.h).
    """

    gen5_lane_gbps: float = 3.5
    switch_port_us: float = 0.34
    root_port_us: float = 0.40
    uplink_us: float = 0.195
    die_gbps: float = 204.0
    amd_sockets_gbps: float = 50.0
    intel_sockets_gbps: float = 22.0
    sockets_us: float = 0.53
    translated: float = 0.85


DEFAULTS = Defaults()


def read(where: str | Path) -> Machine:
    """The machine behind a path or a name.

    Args:
        where: a `.toml` file, a folder saved by `sglang-sm120 doctor --save`, or one of `ready()`.

    Raises:
        MachineError: nothing of that name exists, or the description contradicts itself.
    """
    path = Path(where)
    if path.is_file():
        return described.load(path)
    if path.is_dir():
        if (path / "fabric.toml").is_file():
            return described.load(path / "fabric.toml")
        return from_topology(discover(Saved(path)), path.name)
    if str(where) in machine_names():
        return published_machine(str(where))
    if str(where) in ready():
        return described.load(FIXTURES / str(where) / "fabric.toml")
    raise MachineError(
        f"no machine {str(where)!r}: give a TOML file, a folder saved by `sglang-sm120 doctor --save DIR`, "
        f"or one of {', '.join(ready())}"
    )


def from_topology(topology: Topology, name: str, defaults: Defaults = DEFAULTS) -> Machine:
    """A described machine with the tree of `topology` and the default speeds.

    Raises:
        MachineError: the topology has no GPUs.
    """
    if not topology.gpus:
        raise MachineError(f"{name}: the saved folder shows no GPU")
    factor = defaults.translated if topology.iommu == "translated" else 1.0
    links: dict[str, described.Link] = {
        "die": described.Link(bandwidth=defaults.die_gbps),
    }

    def link(kind: str, gen: int, width: int, latency_us: float) -> str:
        gen, width = gen or 5, width or 16
        key = f"{kind}-gen{gen}-x{width}"
        links[key] = described.Link(
            bandwidth=defaults.gen5_lane_gbps * width * 2.0 ** (gen - 5) * factor,
            latency_us=latency_us,
            gen=gen,
            width=width,
        )
        return key

    roots: dict[str, described.Root] = {}
    switches: dict[str, described.Switch] = {}
    gpus: list[described.Gpu] = []
    for gpu in topology.gpus:
        above = [topology.bridge(b) for b in gpu.bridges]
        uplinks = [b for b in above if b.kind == "switch uplink"]
        socket = f"s{gpu.socket}"
        root = next((b.bdf for b in above if b.kind == "root port"), f"root of {gpu.bdf}")
        roots.setdefault(root, described.Root(id=root, parent=socket, link="die"))
        # An idle GPU's link sleeps at a lower rate, so its best rate counts.
        gen = gpu.gen_best if gpu.idle and gpu.gen_best else gpu.gen_now
        kind, latency = (
            ("switch-port", defaults.switch_port_us)
            if uplinks
            else ("root-port", defaults.root_port_us)
        )
        gpus.append(
            described.Gpu(
                id=f"gpu{gpu.index}",
                parent=uplinks[0].bdf if uplinks else root,
                link=link(kind, gen, gpu.width_now or gpu.width_best, latency),
                name=gpu.name,
                memory_gib=max(1, gpu.memory_mib // 1024),
                bar1_mib=gpu.bar1_mib,
            )
        )
        for lower, upper in zip(uplinks, (*uplinks[1:], None)):
            redirects = any(b.redirects for b in above if b.kind == "switch port")
            switches.setdefault(
                lower.bdf,
                described.Switch(
                    id=lower.bdf,
                    parent=upper.bdf if upper else root,
                    link=link(
                        "uplink",
                        lower.gen_best or lower.gen_now,
                        lower.width_now or lower.width_best,
                        defaults.uplink_us if upper is None else 0.01,
                    ),
                    acs=redirects,
                ),
            )
    sockets = sorted({r.parent for r in roots.values()})
    if len(sockets) > 1:
        amd = "AMD" in topology.cpu or "EPYC" in topology.cpu
        links["sockets"] = described.Link(
            bandwidth=defaults.amd_sockets_gbps if amd else defaults.intel_sockets_gbps,
            latency_us=defaults.sockets_us,
        )
    return Machine(
        name=name,
        title=f"{len(gpus)} x {gpus[0].name}, {topology.cpu or 'unknown CPU'} (tree as discovered, speeds assumed)",
        gpus=tuple(gpus),
        sockets=tuple(described.Socket(id=s, numa=i) for i, s in enumerate(sockets)),
        roots=tuple(roots.values()),
        links=links,
        switches=tuple(switches.values()),
        socket_links=tuple(
            described.SocketLink(a=a, b=b, link="sockets")
            for i, a in enumerate(sockets)
            for b in sockets[i + 1 :]
        ),
        iommu="translated" if topology.iommu == "translated" else "off",
        no_p2p=tuple(
            (f"gpu{a}", f"gpu{b}")
            for a in range(len(gpus))
            for b in range(a + 1, len(gpus))
            if topology.can_p2p(a, b) is False
        ),
    ).check()
