"""Which calls of a mailbox group take the relay, and what a group of peer memory, which has none, declines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_sm120.comm import mailbox, native_build, slab
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.comm.native_how import RELAYS

RELAY_BYTES = 1 << 16


class Library:
    """The CUDA library's part in these decisions."""

    opened: tuple[Any, ...] = ()

    def cuda_slab_bytes(self, *_: object) -> int:
        return 1 << 20

    def cuda_relay_bytes(self, capacity: int) -> int:
        return RELAY_BYTES

    def cuda_open(self, *arguments: Any) -> int:
        self.opened = arguments
        return 1

    def cuda_set_crowded(self, handle: int, crowded: bool) -> None:
        pass

    def cuda_close(self, handle: int) -> None:
        pass

    def cuda_admits(self, handle: int, schedule: int, *_: object) -> bool:
        return schedule >= 6 or self.opened[3] >= 0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    gpu = SimpleNamespace(uuid="gpu", multi_processor_count=132, major=12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    shared: dict[str, int] = {}

    def share(library: Any, exchange: Any, rank: int, world: int, nbytes: int, **_: Any) -> Any:
        shared["nbytes"] = nbytes
        return SimpleNamespace(way="host", addresses=[1] * world, close=lambda: None)

    monkeypatch.setattr(slab, "share", share)

    def made(world: int, **options: Any) -> Any:
        library = Library()
        communicator = NativeCommunicator(
            "tp", 0, world, lambda mine: [mine] * world, library=library, ways=slab.HOST_WAYS, **options
        )  # fmt: skip
        return communicator, library, shared["nbytes"]

    return made


def form(communicator: NativeCommunicator, rows: int) -> str:
    return communicator.how(Op.ALL_REDUCE, rows, 7168, 2).schedule


def test_calls_beyond_the_tile_forms_take_the_relay(make: Any) -> None:
    two, library, nbytes = make(2, largest_bytes=mailbox.LARGEST_BYTES[2], relay=True)
    assert nbytes == (1 << 20) + RELAY_BYTES and library.opened[8] is True
    assert [form(two, rows) for rows in (1, 4, 5, 64)] == ["one_shot"] * 2 + [RELAYS[0]] * 2
    four, _, _ = make(4, largest_bytes=mailbox.LARGEST_BYTES[4], relay=True)
    assert [form(four, rows) for rows in (1, 2, 4, 5, 64)] == [
        "one_shot",
        *[RELAYS[0]] * 2,
        *[RELAYS[1]] * 2,
    ]
    eight, _, _ = make(8, largest_bytes=0, relay=True)
    assert [form(eight, rows) for rows in (1, 64)] == list(RELAYS)
    assert all(eight.admits(Op.ALL_REDUCE, rows, 7168, torch.bfloat16) for rows in (1, 64))


def test_the_planner_times_the_relay_like_any_other_way(make: Any) -> None:
    four, _, _ = make(4, largest_bytes=14 << 10, relay=True)
    ways = four.ways(Op.ALL_REDUCE)
    assert {s for s, _ in ways} >= {"one_shot", "two_shot", *RELAYS}
    four.choose(Op.ALL_REDUCE, 64, 7168, RELAYS[1], 8)
    how = four.how(Op.ALL_REDUCE, 64, 7168, 2)
    assert (how.schedule, how.ctas, how.cluster) == (RELAYS[1], 8, 0)
    # A tile form pinned beyond its limit is declined, as the planner expects of a way that does not serve a size.
    four.choose(Op.ALL_REDUCE, 64, 7168, "two_shot")
    assert not four.admits(Op.ALL_REDUCE, 64, 7168, torch.bfloat16)
    two, _, _ = make(2, largest_bytes=56 << 10, relay=True)
    assert RELAYS[1] not in {s for s, _ in two.ways(Op.ALL_REDUCE)}


def test_without_it_slabs_hold_no_outboxes_and_large_calls_are_declined(make: Any) -> None:
    two, library, nbytes = make(2, largest_bytes=56 << 10)
    assert nbytes == 1 << 20 and library.opened[8] is False
    assert not {s for s, _ in two.ways(Op.ALL_REDUCE)} & set(RELAYS)
    assert two.admits(Op.ALL_REDUCE, 4, 7168, torch.bfloat16)
    assert not two.admits(Op.ALL_REDUCE, 5, 7168, torch.bfloat16)
    with pytest.raises(ValueError, match="relay_one_shot"):
        make(2, schedule=RELAYS[0])


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"islands": "0,1;2,3"}], ids=str)
def test_quantised_wires_and_islands_have_no_relay(make: Any, options: dict[str, str]) -> None:
    four, library, nbytes = make(4, largest_bytes=14 << 10, relay=True, **options)
    assert nbytes == 1 << 20 and library.opened[8] is False
    assert form(four, 64) not in RELAYS


@pytest.mark.parametrize(("world", "tiles"), [(2, 56 << 10), (3, 14 << 10), (8, 0), (16, 0)])
def test_every_mailbox_has_the_relay(
    monkeypatch: pytest.MonkeyPatch, world: int, tiles: int
) -> None:
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(native_build, "build_over", lambda *a, relay: built.append((*a[1:], relay)))
    spec: Any = SimpleNamespace(world=world, device=torch.device("cpu"))
    mailbox.build(spec)
    assert built == [(slab.HOST_WAYS, -1, tiles, True)]
