"""The event engine of the fabric simulator: transfers with dependencies over shared links, in virtual time.

A transfer starts when everything it depends on has arrived; transfers of one edge and engine leave in order;
concurrent transfers share links exactly as `flows.shares` says (this file computes the same shares with arrays
because it needs them thousands of times; a test compares the two). Nothing is random: equal inputs give equal
event orders and times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_sm120.fabric.machine import Collapse, Engine, Machine

_EPS = 1e-9


class SimulationError(ValueError):
    """The transfers cannot be simulated; the text names the transfer and the fault."""


class Transfer(NamedTuple):
    """One message of a schedule.

    Attributes:
        hop: which hop of the schedule it belongs to, for time lines.
        source, target: ranks. For engine "load" the source reads from the target.
        nbytes: bytes on the wire.
        after: indices of transfers that must have arrived first; all must be smaller than this one's index.
        engine: "store", "load" or "copy".
        delay_us: software time between the last arrival and the start (poll, sum, encode).
        extra_us: latency on top of the path's, for example a bounce through host memory.
    """

    hop: int
    source: int
    target: int
    nbytes: int
    after: tuple[int, ...] = ()
    engine: Engine = "store"
    delay_us: float = 0.0
    extra_us: float = 0.0


class LinkUse(msgspec.Struct, frozen=True):
    """Load of one link direction: bytes moved, usable GB/s, and the share of the run it was needed at full rate."""

    link: str
    nbytes: int
    bandwidth: float
    busy: float


class HopTime(msgspec.Struct, frozen=True):
    """When a hop's first transfer started and its last one arrived (microseconds), and its bytes and transfers."""

    hop: int
    start_us: float
    end_us: float
    nbytes: int
    transfers: int


class Run(msgspec.Struct, frozen=True):
    """What a simulation returns. Times are microseconds from the first start.

    Attributes:
        total_us: arrival of the last transfer (0 without transfers).
        hops: one `HopTime` per hop, ascending.
        links: loads of all used link directions, busiest first.
        finish_us: per rank, arrival of the last transfer that it receives.
    """

    total_us: float
    hops: tuple[HopTime, ...]
    links: tuple[LinkUse, ...]
    finish_us: tuple[float, ...]


class Network:
    """A machine compiled for simulation: which limits each edge uses, and its latency.

    Args:
        machine: the described machine; ranks are its GPUs in order.
        ranks: which GPUs take part, in rank order; all by default.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int] | None = None) -> None:
        self.machine = machine
        self.ranks = tuple(range(machine.world) if ranks is None else ranks)
        self.world = len(self.ranks)
        self._limit_ids: dict[str, int] = {}
        self._limits: list[float] = []
        self._edge_ids: dict[tuple[int, int, Engine], int] = {}
        self._uses: list[tuple[int, ...]] = []
        self.ways: list[tuple[str, ...]] = []
        self.latency: list[float] = []
        self._cache: dict[bytes, np.ndarray] = {}
        self._matrix = np.zeros((0, 0), dtype=bool)

    def edge(self, source: int, target: int, engine: Engine) -> int:
        """Index of the edge between two ranks for one engine, compiled at first use."""
        key = (source, target, engine)
        if key not in self._edge_ids:
            self._edge_ids[key] = len(self._uses)
            self._compile(*key)
            self._cache.clear()
            self._matrix = np.zeros((0, 0), dtype=bool)
        return self._edge_ids[key]

    def _compile(self, source: int, target: int, engine: Engine) -> None:
        machine = self.machine
        a, b = machine.gpus[self.ranks[source]], machine.gpus[self.ranks[target]]
        used: list[int] = []
        cap = {"store": a.store_bandwidth, "load": a.load_bandwidth}.get(engine)
        if cap is not None:
            used.append(self._limit(f"{a.id} {engine}", cap))
        staged = any(
            f.kind == "staged" and f.hits(a.id, b.id, 1 << 62, engine) for f in machine.faults
        )
        if staged or not machine.p2p(a.id, b.id):
            used.append(self._limit(f"{a.id}>{b.id} host", machine.host.bandwidth))
        begin, end = (b.id, a.id) if engine == "load" else (a.id, b.id)
        ways: list[str] = []
        for hop in machine.path(begin, end):
            way = f"{hop.wire} {'up' if hop.up else 'down'}"
            ways.append(way)
            used.append(self._limit(way, hop.link.bandwidth))
            used.append(self._limit(hop.wire, hop.link.bandwidth * hop.link.duplex))
        self._uses.append(tuple(used))
        self.ways.append(tuple(ways))
        one_way = machine.latency_us(a.id, b.id)
        # A load sends its request before the data comes back.
        self.latency.append(
            one_way + machine.latency_us(b.id, a.id) if engine == "load" else one_way
        )

    def _limit(self, name: str, value: float) -> int:
        if name not in self._limit_ids:
            self._limit_ids[name] = len(self._limits)
            self._limits.append(value)
        return self._limit_ids[name]

    def bandwidth(self, way: str) -> float:
        """Usable GB/s of a link direction such as "sw0 up"."""
        return self._limits[self._limit_ids[way]]

    def shares(self, active: np.ndarray) -> np.ndarray:
        """GB/s of every edge while exactly the edges of the boolean mask `active` carry data."""
        key = active.tobytes()
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._shares(active)
        return found

    def _shares(self, active: np.ndarray) -> np.ndarray:
        if self._matrix.shape != (len(self._uses), len(self._limits)):
            self._matrix = np.zeros((len(self._uses), len(self._limits)), dtype=bool)
            for row, used in enumerate(self._uses):
                self._matrix[row, list(used)] = True
        got = np.zeros(len(self._uses))
        left = np.array(self._limits)
        rows = np.flatnonzero(active)
        while rows.size:
            sub = self._matrix[rows]
            load = sub.sum(axis=0)
            room = np.divide(left, load, out=np.full(left.shape, np.inf), where=load > 0)
            step = room.min()
            full = room <= step * (1 + _EPS)
            got[rows] += step
            left -= load * step
            rows = rows[~sub[:, full].any(axis=1)]
        for rule in self.machine.collapse:
            self._collapse(rule, np.flatnonzero(active), got)
        return got

    def _collapse(self, rule: Collapse, active: np.ndarray, got: np.ndarray) -> None:
        groups: dict[str, list[int]] = {}
        edges = list(self._edge_ids)
        for i in active.tolist():
            source, target, engine = edges[i]
            if engine not in rule.engines:
                continue
            a, b = (self.machine.gpus[self.ranks[r]].id for r in (source, target))
            if rule.scope == "gpu":
                groups.setdefault(a, []).append(i)
                continue
            switch = self.machine.switch_of(a)
            if switch is None or (rule.switches and switch not in rule.switches):
                continue
            if switch != self.machine.switch_of(b):
                groups.setdefault(switch, []).append(i)
        for group in groups.values():
            sources = {edges[i][0] for i in group}
            roots = {
                self.machine.root_of(self.machine.gpus[self.ranks[edges[i][1]]].id) for i in group
            }
            hit = (
                len(sources) >= rule.min_sources
                and len(roots) >= rule.min_roots
                and len(group) >= rule.min_flows
            )
            whole = float(got[group].sum())
            if hit and whole > rule.bandwidth:
                got[group] *= rule.bandwidth / whole


def run(network: Network, transfers: Sequence[Transfer]) -> Run:
    """Simulate `transfers` on `network`.

    Raises:
        SimulationError: a transfer names a rank outside the network, or depends on a later transfer.
    """
    edges = [_edge_of(network, i, t) for i, t in enumerate(transfers)]
    count = len(network.latency)
    waits = [len(t.after) for t in transfers]
    feeds: list[list[int]] = [[] for _ in transfers]
    for i, t in enumerate(transfers):
        for dep in t.after:
            feeds[dep].append(i)
    queues: list[deque[int]] = [deque() for _ in range(count)]
    current = [-1] * count
    left = np.zeros(count)
    active = np.zeros(count, dtype=bool)
    rates = np.zeros(count)
    started = [0.0] * len(transfers)
    arrived = [0.0] * len(transfers)
    # (time, 0 arrival | 1 ready, index): arrivals first, then by index, so equal times have one order.
    events: list[tuple[float, int, int]] = [
        (t.delay_us, 1, i) for i, t in enumerate(transfers) if not t.after
    ]
    heapq.heapify(events)
    now = 0.0
    while events or active.any():
        soonest = np.inf
        if active.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                ends = np.where(active, left / (rates * 1e3), np.inf)  # GB/s = 1e3 bytes per us
            soonest = now + float(ends.min())
        time = min(soonest, events[0][0] if events else np.inf)
        left[active] -= rates[active] * 1e3 * (time - now)
        now = time
        changed = False
        for e in np.flatnonzero(active & (left <= _EPS * 1e3)).tolist():
            done = current[e]
            heapq.heappush(events, (now + network.latency[e] + transfers[done].extra_us, 0, done))
            current[e], active[e], changed = -1, False, True
        while events and events[0][0] <= now + _EPS:
            _, kind, i = heapq.heappop(events)
            if kind == 0:
                arrived[i] = now
                for j in feeds[i]:
                    waits[j] -= 1
                    if not waits[j]:
                        heapq.heappush(events, (now + transfers[j].delay_us, 1, j))
            else:
                queues[edges[i]].append(i)
                changed = True
        if changed:
            for e, queue in enumerate(queues):
                if queue and current[e] < 0:
                    i = queue.popleft()
                    current[e], active[e] = i, True
                    left[e] = max(float(transfers[i].nbytes), 1.0)
                    started[i] = now
            rates = network.shares(active)
    return _report(network, transfers, edges, started, arrived)


def _edge_of(network: Network, index: int, t: Transfer) -> int:
    if not (0 <= t.source < network.world and 0 <= t.target < network.world):
        raise SimulationError(
            f"transfer {index} goes from rank {t.source} to rank {t.target}: "
            f"the machine takes part with {network.world} ranks"
        )
    if t.source == t.target:
        raise SimulationError(f"transfer {index} of rank {t.source} goes to itself")
    if any(not 0 <= dep < index for dep in t.after):
        raise SimulationError(
            f"transfer {index} depends on {t.after}: only earlier ones may be named"
        )
    return network.edge(t.source, t.target, t.engine)


def _report(
    network: Network,
    transfers: Sequence[Transfer],
    edges: Sequence[int],
    started: Sequence[float],
    arrived: Sequence[float],
) -> Run:
    total = max(arrived, default=0.0)
    moved: dict[str, int] = {}
    finish = [0.0] * network.world
    spans: dict[int, list[float]] = {}
    for i, t in enumerate(transfers):
        for way in network.ways[edges[i]]:
            moved[way] = moved.get(way, 0) + t.nbytes
        receiver = t.source if t.engine == "load" else t.target
        finish[receiver] = max(finish[receiver], arrived[i])
        span = spans.setdefault(t.hop, [np.inf, 0.0, 0, 0])
        span[0] = min(span[0], started[i])
        span[1] = max(span[1], arrived[i])
        span[2] += t.nbytes
        span[3] += 1
    links = [
        LinkUse(
            link=way,
            nbytes=nbytes,
            bandwidth=network.bandwidth(way),
            busy=nbytes / (network.bandwidth(way) * 1e3 * total) if total else 0.0,
        )
        for way, nbytes in moved.items()
    ]
    links.sort(key=lambda u: (-u.busy, u.link))
    hops = tuple(
        HopTime(hop=h, start_us=s[0], end_us=s[1], nbytes=int(s[2]), transfers=int(s[3]))
        for h, s in sorted(spans.items())
    )
    return Run(total_us=total, hops=hops, links=tuple(links), finish_us=tuple(finish))
