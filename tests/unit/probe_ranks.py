"""One rank of a probe in a process of its own; imports nothing heavy, because every rank pays for it."""

from __future__ import annotations

from sglang_sm120.fabric import probe
from sglang_sm120.fabric.host_driver import HostDriver

# Bounds for a machine that does other work meanwhile.
SLOW = probe.Effort(
    step_s=10.0,
    arrival_s=10.0,
    ping_rounds=4,
    stream_bytes=64 << 10,
    integrity_bytes=(4 << 10, (64 << 10) + 24),
)


def body(rank: int, world: int, session: str, pipes: list, out) -> None:  # type: ignore[no-untyped-def]
    def exchange(mine: object) -> list[object]:
        # Rank 0 gathers over pipes and hands the list back.
        if rank:
            pipes[rank][1].send(mine)
            return pipes[rank][1].recv()
        told = [mine, *(pipes[r][0].recv() for r in range(1, world))]
        for r in range(1, world):
            pipes[r][0].send(told)
        return told

    driver = HostDriver.join(rank, world, session, exchange, capacity=128 << 10)
    out.put((rank, probe.run(driver, exchange, SLOW)))
