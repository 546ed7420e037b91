"""The verdict can only veto, and all ranks hold the same one."""

from __future__ import annotations

import logging

import pytest
from sglang_sm120.fabric.software import ThreadExchange, run_ranks
from sglang_sm120.fabric.verdict import (
    NEEDS,
    Verdict,
    Veto,
    host_vetoes,
    user_vetoes,
    version_vetoes,
)
from sglang_sm120.nccl import environment

BROKEN = Veto(target="p2p", reason="IPC open failed with CUDA error 101", remedy="--ipc=host")


def test_nothing_is_vetoed_at_first_and_nothing_removes_a_veto() -> None:
    verdict = Verdict()
    assert all(verdict.allows(path) for path in NEEDS)
    verdict.veto(BROKEN)
    verdict.veto(BROKEN)
    assert verdict.vetoes == [BROKEN]
    assert not verdict.allows("native") and not verdict.allows("flashinfer")
    assert verdict.allows("mailbox") and verdict.allows("nccl")
    verdict.force()
    assert not verdict.allows("native")


def test_a_veto_of_one_way_leaves_the_others_and_one_of_the_path_stops_all() -> None:
    verdict = Verdict()
    verdict.veto(Veto(target="flashinfer/pcie_unstaged/16c", reason="different bits"))
    assert verdict.allows("flashinfer") and verdict.allows("flashinfer/trtllm_one_shot")
    assert not verdict.allows("flashinfer/pcie_unstaged/16c")
    verdict.veto(BROKEN)
    assert "error 101" in verdict.why("flashinfer/trtllm_one_shot")


def test_an_unknown_path_is_an_error() -> None:
    with pytest.raises(KeyError):
        Verdict().allows("natve")


@pytest.mark.parametrize("env", [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}])
def test_c15_users_p2p_switch_keeps_custom_kernels_off_unless_forced(env: dict, caplog) -> None:
    verdict = Verdict("tp")
    verdict.add(user_vetoes(env))
    assert not verdict.allows("native")
    with caplog.at_level(logging.WARNING):
        verdict.log_once("native")
        verdict.log_once("native")
    (line,) = [r.getMessage() for r in caplog.records]
    assert next(iter(env)) in line and "user" in line
    verdict.force()
    assert verdict.allows("native")


def test_c15_other_values_are_not_a_wish() -> None:
    assert user_vetoes({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}) == []


def test_c04_one_rank_fails_and_all_fall_back_together(caplog) -> None:
    meet = ThreadExchange(4)

    def rank_body(rank: int) -> Verdict:
        verdict = Verdict("tp", rank)
        if rank == 3:
            verdict.veto(BROKEN)
        return verdict.agree(meet.of(rank))

    with caplog.at_level(logging.WARNING):
        verdicts = run_ranks(4, rank_body)
        for verdict in verdicts:
            verdict.log_once("native")
    assert {v.allows("native") for v in verdicts} == {False}
    assert all(v.vetoes == verdicts[0].vetoes for v in verdicts)
    assert verdicts[0].vetoes[0].ranks == (3,)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "rank 3" in line and "101" in line and "--ipc=host" in line


def test_the_same_reason_on_several_ranks_is_one_veto() -> None:
    meet = ThreadExchange(3)

    def rank_body(rank: int) -> Verdict:
        verdict = Verdict("tp", rank)
        if rank:
            verdict.veto(BROKEN)
        return verdict.agree(meet.of(rank))

    (first, *_) = run_ranks(3, rank_body)
    assert [v.ranks for v in first.vetoes] == [(1, 2)]


def test_c22_a_group_on_two_hosts_has_no_custom_path() -> None:
    assert host_vetoes(["a", "a", "a"]) == []
    (veto,) = host_vetoes(["a", "a", "b", "b"])
    assert veto.ranks == (2, 3) and "2 hosts" in veto.reason
    verdict = Verdict()
    verdict.veto(veto)
    assert not any(verdict.allows(p) for p in ("native", "mailbox", "host", "flashinfer"))
    assert verdict.allows("nccl")


def test_c18_c19_flashinfer_is_vetoed_by_version_and_the_rest_is_not() -> None:
    verdict = Verdict()
    verdict.add(version_vetoes("0.6.14"))
    assert not verdict.allows("flashinfer") and "0.6.17" in verdict.why("flashinfer")
    assert verdict.allows("native")
    assert version_vetoes("0.7.2") == []


def test_c05_expandable_segments_are_nobodys_business() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert user_vetoes(env) == []
    assert environment.check(env, nccl_version="2.30.7") == []
