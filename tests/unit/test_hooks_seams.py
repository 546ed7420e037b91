"""The packed broadcast carries any integers to every rank in one sum; the log names who makes the host wait."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.hooks import cpu_seams, seams
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.contract import check_binding
from sglang_sm120.options import Options


class Wire:
    """What rank 0 contributed, for rank 1 to add."""

    row: torch.Tensor


class OneOfTwo(Communicator):
    def __init__(self, rank: int, wire: Wire, admitted: bool = True) -> None:
        super().__init__("tp", rank, 2)
        self.wire, self.admitted = wire, admitted

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return self.admitted and op is Op.ALL_REDUCE and hidden % 8 == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32 and x.shape[0] == 1 and x.shape[1] % 8 == 0
        self.calls[Op.ALL_REDUCE] += 1
        if self.rank == 0:
            self.wire.row = x.clone()
            return x.clone()
        return self.wire.row + x

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):
        raise AssertionError("nothing is normed here")

    def close(self) -> None:
        pass


def group(rank: int, wire: Wire, admitted: bool = True) -> types.SimpleNamespace:
    adapter = Sm120AllReduce(OneOfTwo(rank, wire, admitted), None, torch.device("cpu"))
    return types.SimpleNamespace(world_size=2, rank_in_group=rank, ca_comm=adapter)


int32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(int32, min_size=1, max_size=9), min_size=3, max_size=3))
def test_every_rank_gets_rank_0s_integers(values):
    wire = Wire()
    theirs = [torch.tensor(v, dtype=torch.int32) for v in values]
    mine = [torch.full_like(t, 77) for t in theirs]
    first, second = seams.Shared(), seams.Shared()
    one, two = group(0, wire), group(1, wire)
    assert first.send(one, theirs) and second.send(two, mine)
    for a, b, v in zip(theirs, mine, values, strict=True):
        assert a.tolist() == b.tolist() == v
    assert one.ca_comm.communicator.calls[Op.ALL_REDUCE] == 1
    # SGLang then asks for each broadcast once; a second time would be a new one.
    assert all(second.holds(two, t) for t in mine)
    assert not any(second.holds(two, t) for t in mine)


def test_two_dimensions_keep_their_shape():
    wire = Wire()
    index = torch.arange(12, dtype=torch.int32).view(3, 4)
    other = torch.zeros_like(index)
    assert seams.Shared().send(group(0, wire), [index])
    assert seams.Shared().send(group(1, wire), [other])
    assert torch.equal(index, other)


@pytest.mark.parametrize(
    "changed",
    [
        lambda g, t: (setattr(g, "world_size", 1), t)[1],
        lambda g, t: (setattr(g, "ca_comm", None), t)[1],
        lambda g, t: (setattr(g.ca_comm, "disabled", True), t)[1],
        lambda g, t: (setattr(g.ca_comm.communicator, "admitted", False), t)[1],
        lambda g, t: t.long(),
        lambda g, t: t.expand(4, 3).t(),
    ],
)
def test_what_it_cannot_carry_stays_with_sglang(changed):
    one = group(0, Wire())
    tensor = changed(one, torch.ones(3, dtype=torch.int32))
    shared = seams.Shared()
    assert not shared.send(one, [tensor])
    assert not shared.holds(one, tensor)


@pytest.fixture
def speculative(monkeypatch):
    def under(algorithm: str) -> None:
        monkeypatch.setattr(
            seams, "get_spec", lambda: types.SimpleNamespace(speculative_algorithm=algorithm)
        )

    return under


def serve(monkeypatch, **options) -> None:
    session = sessions.Session(Options(enabled=True, **options), "cuda", 0)
    monkeypatch.setattr(sessions, "_session", session)


def test_the_broadcasts_after_sampling_are_left_out(monkeypatch, speculative):
    serve(monkeypatch)
    speculative("EAGLE3")
    one = group(0, Wire())
    parallel = types.SimpleNamespace(tp_group=one, attn_tp_group=None)
    monkeypatch.setattr(seams, "get_parallel", lambda: parallel)
    monkeypatch.setattr(seams, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(seams, "SHARED", seams.Shared())
    done: list[torch.Tensor] = []

    def sampler(predicts, accept_index, accept_token_num, candidates):
        predicts.fill_(5)
        accept_index.fill_(6)
        accept_token_num.fill_(7)

    def broadcast(group, input_, src):
        done.append(input_)
        return input_

    a, b, c, other = (torch.zeros(4, dtype=torch.int32) for _ in range(4))
    seams.share_results(sampler, predicts=a, accept_index=b, accept_token_num=c, candidates=other)
    for tensor in (a, b, c, other):
        assert seams.skip_done(broadcast, one, tensor, src=0) is tensor
    assert len(done) == 1 and done[0] is other
    assert (a[0], b[0], c[0]) == (5, 6, 7)
    # Another speculation's sampler is not followed by broadcasts.
    speculative("DFLASH")
    seams.share_results(sampler, a, b, c, other)
    seams.skip_done(broadcast, one, a)
    assert done[-1] is a


def test_a_wire_that_rounds_carries_no_token_numbers(monkeypatch, speculative):
    serve(monkeypatch, wire="int8")
    speculative("EAGLE3")
    one = group(0, Wire())
    parallel = types.SimpleNamespace(tp_group=one, attn_tp_group=None)
    monkeypatch.setattr(seams, "get_parallel", lambda: parallel)
    monkeypatch.setattr(seams, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(seams, "SHARED", seams.Shared())
    tensors = [torch.full((4,), 151_643, dtype=torch.int32) for _ in range(3)]
    seams.share_results(lambda *a: None, *tensors)
    done: list[torch.Tensor] = []
    for tensor in tensors:
        seams.skip_done(lambda group, input_, src: done.append(input_), one, tensor)
    assert len(done) == 3 and one.ca_comm.communicator.calls.total() == 0


class Waiting:
    needs_cpu_seq_lens = True


class Free:
    needs_cpu_seq_lens = False


@pytest.mark.parametrize(
    ("backends", "algorithm", "result", "said"),
    [
        ([Waiting(), Free(), None], "EAGLE3", True, True),
        ([Free()], "EAGLE3", True, False),
        ([Free()], "EAGLE3", False, False),
        ([Waiting()], "NGRAM", True, False),
    ],
)
def test_the_log_names_who_makes_the_host_wait(
    monkeypatch, caplog, speculative, backends, algorithm, result, said
):
    serve(monkeypatch)
    speculative(algorithm)
    monkeypatch.setattr(seams, "get_server_args", lambda: types.SimpleNamespace(_raw_input={}))
    with caplog.at_level("INFO", logger="sglang_sm120"):
        seams.say_who_waits(result, backends)
    assert (
        "SGLang's choice of attention backend (Waiting) makes the host wait" in caplog.text
    ) == said


@pytest.mark.parametrize("part", [seams.PART, cpu_seams.PART])
def test_the_targets_are_those_we_know(part):
    findings = [check_binding(part.name, b) for b in part.bindings]
    assert all(f.fits for f in findings), [(f.target.path, f.found, f.detail) for f in findings]
