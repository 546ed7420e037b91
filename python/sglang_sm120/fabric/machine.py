"""The description of a PCIe machine: the format that fixtures, the software fabric and the simulator share.

A machine is a tree written in TOML. GPUs hang below switches or root ports, switches below switches or
root ports, root ports below sockets; sockets are joined by inter-socket links. Every node but a socket
has one `link` to its parent: the name of an entry of `[links]`. Example (two GPUs, one switch):

    name = "tiny"
    title = "2 GPUs behind one switch"
    source = "https://..."                      # where the figures come from
    [links]
    x16 = { gen = 5, width = 16, bandwidth = 56.4, latency_us = 0.32 }
    uplink = { gen = 5, width = 16, bandwidth = 56.4, latency_us = 0.20 }
    die = { bandwidth = 204.0, latency_us = 0.0 }
    [[sockets]]
    id = "s0"
    [[roots]]
    id = "r0"
    parent = "s0"
    link = "die"
    [[switches]]
    id = "sw0"
    parent = "r0"
    link = "uplink"
    [[gpus]]
    id = "g0"
    parent = "sw0"
    link = "x16"
    [[gpus]]
    id = "g1"
    parent = "sw0"
    link = "x16"

Units: GB/s = 1e9 bytes per second and per direction, microseconds one way. The one-way latency of an edge
is the sum over the links of its path. Flows share a link direction fairly (max-min); see `flows.py`.

Rank r is the r-th entry of `gpus`, so an interleaved numbering is written by ordering that list.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

Engine = Literal["store", "load", "copy"]


class MachineError(ValueError):
    """A machine file contradicts itself; the text names the file's machine, the node and the fault."""


class EdgeClass(str, Enum):
    """How far two GPUs are apart; the key of measured constants."""

    SAME_SWITCH = "same-switch"  # traffic turns round in a switch, below every CPU
    SAME_ROOT = "same-root"  # through the CPU's root complex, one socket
    CROSS_SOCKET = "cross-socket"  # through the link between sockets
    HOST = "host"  # no peer access: bounced through host memory


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One wire of a path.

    Attributes:
        bandwidth: usable payload GB/s in each direction.
        latency_us: one-way latency that crossing this link adds, in microseconds.
        duplex: both directions together over one direction alone; 2.0 is full duplex, 1.0 half.
        gen, width: PCIe generation and lanes in use; 0 where the link is not PCIe (inside a CPU).
        best_gen, best_width: what both ends could do; 0 means the same as `gen` and `width`.
    """

    bandwidth: float
    latency_us: float = 0.0
    duplex: float = 2.0
    gen: int = 0
    width: int = 0
    best_gen: int = 0
    best_width: int = 0


class Socket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One CPU package; `numa` is its NUMA node, `cpu` the name printed."""

    id: str
    numa: int = 0
    cpu: str = ""


class Root(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One PCIe root port; `parent` is a socket."""

    id: str
    parent: str
    link: str


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One switch, or one virtual switch of a chip; `parent` is a root port or another switch.

    Virtual switches of one chip have the same `chip`.
    """

    id: str
    parent: str
    link: str
    chip: str = ""
    acs: bool = False  # request redirect is on: traffic between its ports goes up to the CPU


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU; `parent` is a switch or a root port.

    `store_bandwidth` and `load_bandwidth` are what its own stores and loads reach at most (GB/s), below
    the link's rate or not; `bar1_mib` is the window that peers write through.
    """

    id: str
    parent: str
    link: str
    name: str = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    store_bandwidth: float = 52.6
    load_bandwidth: float = 51.0
    memory_gib: int = 96
    bar1_mib: int = 131072
    sms: int = 188


class SocketLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between two sockets (xGMI, UPI); `link` names an entry of `[links]`."""

    a: str
    b: str
    link: str


class Collapse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When concurrent flows fall far below their fair share.

    The rule looks at the flows whose sources share one `scope` and that leave the scope:
    if at least `min_sources` different GPUs send to at least `min_roots` different destination root ports,
    with at least `min_flows` flows, all those flows together get `bandwidth` GB/s.

    scope "switch": the sources sit directly below one switch (of `switches`; all switches when empty).
    scope "gpu": one GPU's own flows to several peers.
    `engines`: which engines are hit; loads are not known to be.
    """

    bandwidth: float
    scope: Literal["switch", "gpu"] = "switch"
    min_sources: int = 2
    min_roots: int = 2
    min_flows: int = 2
    switches: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = ("store", "copy")


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moving data through host memory: what edges without peer access pay, and what mailboxes pay.

    `bandwidth` and `latency_us` are those of one staged flow (driver or NCCL shared memory);
    `mailbox_latency_us` is one way through a pinned mailbox written and polled by kernels.
    """

    bandwidth: float = 22.0
    latency_us: float = 14.0
    mailbox_latency_us: float = 1.62


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something wrong with the edges `source` -> `target` ("*" is any GPU).

    kind "drop": stores never arrive. "flip": one byte in `every` bytes is wrong.
    "flag-first": a flag is seen before the payload it announces. "staged": peer traffic is bounced through
    host memory by the driver although peer access is reported (latency_us of `Host` / 2 per direction).
    "ipc": opening the handle fails with CUDA error `code`.
    `above_bytes`: only messages larger than this are hit. `engines`: which engines are hit.
    """

    kind: Literal["drop", "flip", "flag-first", "staged", "ipc"]
    source: str = "*"
    target: str = "*"
    above_bytes: int = 0
    every: int = 4096
    code: int = 101
    engines: tuple[Engine, ...] = ("store", "load", "copy")

    def hits(self, source: str, target: str, nbytes: int, engine: Engine) -> bool:
        """Whether this fault touches a message of `nbytes` bytes moved by `engine`."""
        return (
            self.source in ("*", source)
            and self.target in ("*", target)
            and nbytes > self.above_bytes
            and engine in self.engines
        )


class Hop(msgspec.Struct, frozen=True):
    """One link crossed in one direction: `wire` names the child node or the socket pair, `up` the direction."""

    wire: str
    up: bool
    link: Link


class Machine(msgspec.Struct, forbid_unknown_fields=True, dict=True):
    """A whole machine. Build with `load` or `parse`, which check it.

    Attributes:
        name: short identifier; title: one line for tables; source: URL of the figures.
        iommu: "off", "pt" (identity) or "translated".
        no_p2p: pairs of GPU ids without peer access, both directions; ("*", "*") is all pairs.
        atomics: whether peers support native atomics (none over PCIe do).
    """

    name: str
    title: str
    gpus: tuple[Gpu, ...]
    sockets: tuple[Socket, ...]
    roots: tuple[Root, ...]
    links: dict[str, Link]
    source: str = ""
    switches: tuple[Switch, ...] = ()
    socket_links: tuple[SocketLink, ...] = ()
    collapse: tuple[Collapse, ...] = ()
    faults: tuple[Fault, ...] = ()
    host: Host = Host()
    iommu: Literal["off", "pt", "translated"] = "off"
    no_p2p: tuple[tuple[str, str], ...] = ()
    atomics: bool = False

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return len(self.gpus)

    @cached_property
    def nodes(self) -> dict[str, Gpu | Switch | Root]:
        """Every node that has a parent, by id."""
        below: tuple[Gpu | Switch | Root, ...] = (*self.roots, *self.switches, *self.gpus)
        return {n.id: n for n in below}

    @cached_property
    def ancestors(self) -> dict[str, tuple[str, ...]]:
        """Each GPU's nodes from its parent up to and including its socket."""
        out: dict[str, tuple[str, ...]] = {}
        for gpu in self.gpus:
            chain: list[str] = [gpu.parent]
            while chain[-1] in self.nodes:
                chain.append(self.nodes[chain[-1]].parent)
                if len(chain) > len(self.nodes) + 1:
                    raise MachineError(f"{self.name}: the parents of {gpu.id} form a ring")
            out[gpu.id] = tuple(chain)
        return out

    def socket_of(self, gpu: str) -> str:
        """The id of the socket that `gpu` hangs below."""
        return self.ancestors[gpu][-1]

    def root_of(self, gpu: str) -> str:
        """The id of the root port that `gpu` hangs below."""
        return self.ancestors[gpu][-2]

    def switch_of(self, gpu: str) -> str | None:
        """The id of the switch directly above `gpu`, or None when it hangs on a root port."""
        parent = self.ancestors[gpu][0]
        return parent if any(s.id == parent for s in self.switches) else None

    def p2p(self, source: str, target: str) -> bool:
        """Whether the driver reports peer access between two GPUs."""
        pairs = self.no_p2p
        return not (("*", "*") in pairs or (source, target) in pairs or (target, source) in pairs)

    def edge_class(self, source: str, target: str) -> EdgeClass:
        """The class of the edge between two GPUs."""
        if not self.p2p(source, target):
            return EdgeClass.HOST
        meet = self._meet(source, target)
        if any(s.id == meet for s in self.switches):
            return EdgeClass.SAME_SWITCH
        same = self.socket_of(source) == self.socket_of(target)
        return EdgeClass.SAME_ROOT if same else EdgeClass.CROSS_SOCKET

    def _meet(self, source: str, target: str) -> str | None:
        """Lowest node above both GPUs at which traffic may turn round; None when sockets differ."""
        above = self.ancestors[target]
        redirecting = {s.id for s in self.switches if s.acs}
        for node in self.ancestors[source]:
            if node in above and node not in redirecting:
                return node
        return None

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """The links that a write from `source` to `target` crosses, in order, over PCIe.

        Switches with ACS redirect do not turn traffic round: it goes up to the next node that may.
        """
        meet = self._meet(source, target)
        up = self._climb(source, meet)
        down = tuple(Hop(h.wire, False, h.link) for h in reversed(self._climb(target, meet)))
        if meet is not None:
            return up + down
        a, b = self.socket_of(source), self.socket_of(target)
        for joint in self.socket_links:
            if {joint.a, joint.b} == {a, b}:
                hop = Hop(f"{joint.a}-{joint.b}", a == joint.a, self.links[joint.link])
                return (*up, hop, *down)
        raise MachineError(f"{self.name}: no socket link between {a} and {b}")

    def _climb(self, gpu: str, stop: str | None) -> tuple[Hop, ...]:
        hops: list[Hop] = []
        node = gpu
        while node in self.nodes and node != stop:
            hops.append(Hop(node, True, self.links[self.nodes[node].link]))
            node = self.nodes[node].parent
        return tuple(hops)

    def latency_us(self, source: str, target: str) -> float:
        """One-way latency of a small store on an idle machine, faults included, in microseconds."""
        if not self.p2p(source, target):
            return self.host.latency_us
        wire = sum(hop.link.latency_us for hop in self.path(source, target))
        for fault in self.faults:
            if fault.kind == "staged" and fault.hits(source, target, 1 << 62, "store"):
                return max(wire, self.host.latency_us / 2)
        return wire

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Ranks grouped by switch when there are switches, else by socket, in order of first rank."""
        groups: dict[str, list[int]] = {}
        for rank, gpu in enumerate(self.gpus):
            key = self.switch_of(gpu.id) or self.socket_of(gpu.id)
            groups.setdefault(key, []).append(rank)
        return tuple(tuple(g) for g in groups.values())

    def check(self) -> Machine:
        """Return self, or raise MachineError naming what does not fit."""
        ids = [s.id for s in self.sockets] + [r.id for r in self.roots]
        ids += [s.id for s in self.switches] + [g.id for g in self.gpus]
        if len(ids) != len(set(ids)):
            raise MachineError(f"{self.name}: an id is used twice: {sorted(ids)}")
        if not self.gpus:
            raise MachineError(f"{self.name}: no GPUs")
        sockets = {s.id for s in self.sockets}
        inner = {r.id for r in self.roots} | {s.id for s in self.switches}
        for node in self.nodes.values():
            allowed = sockets if isinstance(node, Root) else inner
            if node.parent not in allowed:
                raise MachineError(f"{self.name}: parent {node.parent!r} of {node.id} does not fit")
            if node.link not in self.links:
                raise MachineError(
                    f"{self.name}: {node.id} uses link {node.link!r}: not in [links]"
                )
        for joint in self.socket_links:
            if {joint.a, joint.b} - sockets or joint.link not in self.links:
                raise MachineError(f"{self.name}: socket link {joint.a}-{joint.b} does not fit")
        for rule in self.collapse:
            if rule.scope == "gpu" and rule.min_sources > 1:
                raise MachineError(f"{self.name}: a rule of scope gpu has one source, not {rule}")
        gpus = {g.id for g in self.gpus} | {"*"}
        for a, b in (*self.no_p2p, *((f.source, f.target) for f in self.faults)):
            if {a, b} - gpus:
                raise MachineError(f"{self.name}: no_p2p or fault names {a!r}, {b!r}: not a GPU")
        for link in self.links.values():
            if link.bandwidth <= 0 or link.latency_us < 0 or not 1.0 <= link.duplex <= 2.0:
                raise MachineError(f"{self.name}: a link has impossible figures: {link}")
        for gpu in self.gpus:
            for other in self.gpus:
                if gpu.id != other.id:
                    self.path(gpu.id, other.id)
        return self


def parse(text: str | bytes) -> Machine:
    """Read a machine from TOML text; MachineError or msgspec.ValidationError say what does not fit."""
    return msgspec.toml.decode(text, type=Machine).check()


def load(path: str | Path) -> Machine:
    """Read a machine from a TOML file."""
    return parse(Path(path).read_bytes())
