"""Random transfers on random trees: never faster than a link or a chain allows, never slower than one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.fabric import machine as described
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import Network, Transfer, run


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """One or two sockets, one to three switches, two to six GPUs, odd bandwidths and duplex factors."""
    sockets = draw(st.integers(1, 2))
    switches = draw(st.integers(sockets, 3))
    gpus = draw(st.integers(2, 6))
    rate = st.floats(2.0, 60.0)
    text = ['name = "r"', 'title = "r"', "[links]", "die = { bandwidth = 200.0 }"]
    for name in ("port", "up", "joint"):
        text.append(
            f"{name} = {{ bandwidth = {draw(rate)}, latency_us = {draw(st.floats(0.1, 1.0))}, "
            f"duplex = {draw(st.floats(1.0, 2.0))} }}"
        )
    text += [f'[[sockets]]\nid = "s{i}"' for i in range(sockets)]
    if sockets == 2:
        text.append('[[socket_links]]\na = "s0"\nb = "s1"\nlink = "joint"')
    for i in range(switches):
        text.append(f'[[roots]]\nid = "r{i}"\nparent = "s{i % sockets}"\nlink = "die"')
        text.append(f'[[switches]]\nid = "w{i}"\nparent = "r{i}"\nlink = "up"')
    for i in range(gpus):
        text.append(
            f'[[gpus]]\nid = "g{i}"\nparent = "w{draw(st.integers(0, switches - 1))}"\nlink = "port"'
        )
    return described.parse("\n".join(text))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Machine, tuple[Transfer, ...]]:
    machine = draw(machines())
    transfers: list[Transfer] = []
    for i in range(draw(st.integers(1, 14))):
        source = draw(st.integers(0, machine.world - 1))
        target = (source + draw(st.integers(1, machine.world - 1))) % machine.world
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        transfers.append(
            Transfer(
                hop=draw(st.integers(0, 3)),
                source=source,
                target=target,
                nbytes=draw(st.integers(1, 200_000)),
                after=tuple(sorted(after)),
                engine=draw(st.sampled_from(("store", "load", "copy"))),
                delay_us=draw(st.floats(0.0, 2.0)),
                extra_us=draw(st.floats(0.0, 2.0)),
            )
        )
    return machine, tuple(transfers)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_time_lies_between_its_bounds(case: tuple[Machine, tuple[Transfer, ...]]) -> None:
    machine, transfers = case
    network = Network(machine)
    done = run(network, transfers)

    alone = []
    for t in transfers:
        single = run(Network(machine), [t._replace(after=())])
        alone.append(single.total_us)
    # A chain of dependencies takes at least the sum of its members alone on the machine.
    chain: list[float] = []
    for t, own in zip(transfers, alone):
        chain.append(own + max((chain[i] for i in t.after), default=0.0))
    assert done.total_us >= max(chain) * (1 - 1e-6)
    assert done.total_us <= sum(alone) * (1 + 1e-6)
    for use in done.links:
        assert use.busy <= 1 + 1e-6
    assert sum(h.nbytes for h in done.hops) == sum(t.nbytes for t in transfers)
    assert max(done.finish_us) == pytest.approx(done.total_us)
    assert done == run(Network(machine), transfers)
