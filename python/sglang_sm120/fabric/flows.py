"""What concurrent flows get on a described machine: fair shares of every link, then the collapse rules."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sm120.fabric.machine import Collapse, Engine, Machine

Flow = tuple[int, int]  # (source rank, target rank)


def shares(machine: Machine, flows: Sequence[Flow], engine: Engine = "store") -> list[float]:
    """GB/s that each of the simultaneous `flows` gets.

    Max-min fairness (progressive filling) over link directions, the combined limit of links that are not
    fully duplex, and each GPU's own engine limit; then every collapse rule that the set of flows triggers.
    A load moves data from the target to the source, so its bytes cross the path in reverse.
    """
    limits: dict[str, float] = {}
    uses: list[set[str]] = []
    for source, target in flows:
        used: set[str] = set()
        a, b = machine.gpus[source], machine.gpus[target]
        cap = {"store": a.store_bandwidth, "load": a.load_bandwidth}.get(engine)
        if cap is not None:
            limits[f"{a.id} {engine}"] = cap
            used.add(f"{a.id} {engine}")
        if not machine.p2p(a.id, b.id) or _staged(machine, a.id, b.id, engine):
            limits[f"{a.id}>{b.id} host"] = machine.host.bandwidth
            used.add(f"{a.id}>{b.id} host")
        begin, end = (b.id, a.id) if engine == "load" else (a.id, b.id)
        for hop in machine.path(begin, end):
            way = f"{hop.wire} {'up' if hop.up else 'down'}"
            limits[way] = hop.link.bandwidth
            limits[hop.wire] = hop.link.bandwidth * hop.link.duplex
            used.update((way, hop.wire))
        uses.append(used)
    got = _fill(limits, uses)
    for rule in machine.collapse:
        if engine in rule.engines:
            for group in _collapsed(machine, rule, flows):
                whole = sum(got[i] for i in group)
                if whole > rule.bandwidth:
                    for i in group:
                        got[i] *= rule.bandwidth / whole
    return got


def _staged(machine: Machine, source: str, target: str, engine: Engine) -> bool:
    return any(
        f.kind == "staged" and f.hits(source, target, 1 << 62, engine) for f in machine.faults
    )


def _fill(limits: dict[str, float], uses: Sequence[set[str]]) -> list[float]:
    """Raise all flows together; freeze those that cross the limit that fills up first; repeat."""
    left = dict(limits)
    got = [0.0] * len(uses)
    active = set(range(len(uses)))
    while active:
        load = {name: sum(name in uses[i] for i in active) for name in left}
        busy = {name: left[name] / n for name, n in load.items() if n}
        step = min(busy.values())
        full = {name for name, room in busy.items() if room <= step * (1 + 1e-9)}
        for i in active:
            got[i] += step
            for name in uses[i]:
                left[name] -= step
        active -= {i for i in active if uses[i] & full}
    return got


def _collapsed(machine: Machine, rule: Collapse, flows: Sequence[Flow]) -> list[list[int]]:
    """Groups of flow indices that trigger `rule`."""
    groups: dict[str, list[int]] = {}
    for i, (source, target) in enumerate(flows):
        a, b = machine.gpus[source].id, machine.gpus[target].id
        if rule.scope == "gpu":
            groups.setdefault(a, []).append(i)
            continue
        switch = machine.switch_of(a)
        if switch is None or (rule.switches and switch not in rule.switches):
            continue
        if switch != machine.switch_of(b):
            groups.setdefault(switch, []).append(i)
    hit: list[list[int]] = []
    for group in groups.values():
        sources = {flows[i][0] for i in group}
        roots = {machine.root_of(machine.gpus[flows[i][1]].id) for i in group}
        if (
            len(sources) >= rule.min_sources
            and len(roots) >= rule.min_roots
            and len(group) >= rule.min_flows
        ):
            hit.append(group)
    return hit
