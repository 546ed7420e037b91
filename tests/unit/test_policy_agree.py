"""All ranks decide by rank 0's cost table, and find out when they do not."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from sglang_sm120.verify.agree import (
    CAPACITY,
    HEADER,
    GroupLink,
    LocalLink,
    PolicyDivergence,
    TableAgreement,
    Update,
)
from sglang_sm120.verify.cost import COLD, CostModel, guess
from sglang_sm120.verify.policy import DraftLengthPolicy, PolicyConfig

CANDIDATES = (0, 1, 3)


def _model() -> CostModel:
    return CostModel(guess(CANDIDATES, (1, 8)), guessed=True)


def _serve(
    rank: int, link, passes: int, own_cost: float, lie_at: int = -1
) -> tuple[list[int], float, int]:
    """Serve passes on one rank whose own clock shows `own_cost` per draft step."""
    model = _model()
    policy = DraftLengthPolicy(CANDIDATES, 3, model.table, PolicyConfig(first_decision=16))
    agreement = TableAgreement(policy, model, link)
    rng = random.Random(0)
    used = []
    for i in range(passes):
        steps = policy.get_steps_for_batch(1)
        used.append(steps)
        model.observe(steps, 1, 5.0 + own_cost * steps + rng.random())
        luck = rng.random()
        accepted = sum(luck < 0.6 ** (n + 1) for n in range(steps))
        if i == lie_at and steps:
            accepted = 0 if accepted else 1
        policy.on_verify_complete([accepted], 1)
        agreement.after_pass()
    return used, policy.table.pass_ms(3, 1), agreement.installed


def test_one_rank_follows_its_own_clock():
    cheap, cheap_ms, installed = _serve(0, LocalLink(), 600, own_cost=0.3)
    dear, dear_ms, _ = _serve(0, LocalLink(), 600, own_cost=6.0)
    assert sum(cheap[200:]) > 2 * 400 > sum(dear[200:])
    assert cheap_ms < dear_ms
    assert installed >= 4 + 600 // 64 - 2


def _rank(rank: int, port: int, lie_at: int, queue) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    link = GroupLink(dist.group.WORLD, [0, 1])
    try:
        # Rank 1's own clock says that drafting is ruinous; rank 0's that it is cheap.
        result = _serve(rank, link, 300, 0.3 if rank == 0 else 30.0, lie_at if rank else -1)
        queue.put((rank, result))
    except PolicyDivergence as error:
        queue.put((rank, str(error)))
    else:
        dist.barrier()
    dist.destroy_process_group()


def _run_two(lie_at: int) -> dict:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, port, lie_at, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    results = dict(queue.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    return results


def test_two_ranks_with_different_clocks_choose_the_same_lengths():
    results = _run_two(lie_at=-1)
    assert results[0] == results[1]
    used, pass_ms, installed = results[0]
    assert sum(used[100:]) > 2 * 200, "rank 0's cheap drafts decide"
    assert installed >= 6


class _Scripted:
    """A link whose rank is 1 and whose rank 0 is a recorded run."""

    rank = 1

    def __init__(self, payloads: list[bytes]) -> None:
        self._payloads = iter(payloads)

    def start(self, payload: bytes):
        assert payload == b"", "only rank 0 sends"
        data = next(self._payloads)
        return lambda: data


class _Recording(LocalLink):
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def start(self, payload: bytes):
        self.sent.append(payload)
        return lambda: payload


def test_a_rank_that_saw_something_else_is_named():
    recording = _Recording()
    _serve(0, recording, 200, own_cost=0.3)
    with pytest.raises(PolicyDivergence, match=r"rank 1 differs from rank 0 .*after \d+ passes"):
        _serve(1, _Scripted(recording.sent), 200, own_cost=0.3, lie_at=20)
    used, _, _ = _serve(1, _Scripted(recording.sent), 200, own_cost=9.0)
    assert len(used) == 200


def test_construction_is_checked():
    policy = DraftLengthPolicy(CANDIDATES, 3, _model().table)
    with pytest.raises(ValueError, match="rank 0 needs"):
        TableAgreement(policy, None, LocalLink())
    with pytest.raises(ValueError, match="delay"):
        TableAgreement(policy, _model(), LocalLink(), delay=9)


def test_the_table_of_a_server_that_has_seen_every_batch_size_can_still_be_sent() -> None:
    candidates = list(range(8))
    captured = [1, 2, 4, 8, *range(16, 257, 8)]
    model = CostModel(guess(candidates, captured))
    policy = DraftLengthPolicy(candidates, 3, model.table)
    policy.set_cuda_graph_bs(captured)
    for batch in range(1, 2049):
        padded = policy.padded(batch)
        assert padded >= batch
        for steps in (COLD, *policy.allowed(padded)):
            model.observe(steps, padded, 10.123 + 0.0137 * padded)
    sent = msgspec.msgpack.encode(Update(1 << 40, 1 << 31, model.table))
    assert len(sent) < CAPACITY - HEADER
