"""NCCL settings by group, the memory formula, and the environment check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_sm120.fabric.versions import (
    check_flashinfer,
    check_nccl,
    kernel_driver,
    nccl_build,
    parse,
)
from sglang_sm120.nccl import memory
from sglang_sm120.nccl.config import FIELDS, NcclConfigError, channels_used, config_for
from sglang_sm120.nccl.environment import (
    EnvironmentRefused,
    Level,
    apply,
    check,
    p2p_disabled_by_user,
    settings,
    table,
)

NOW = "2.30.7"


@pytest.mark.parametrize("value", ["Tree", "tree", " TREE "])
def test_c16_bare_tree_is_corrected_and_names_what_it_breaks(value: str) -> None:
    (finding,) = check({"NCCL_ALGO": value}, nccl_version=NOW)
    assert finding.level is Level.CORRECTION
    assert finding.corrected == "allreduce:tree"
    for collective in ("AllGather", "Broadcast", "ReduceScatter"):
        assert collective in finding.reason


def test_c16_tree_can_be_an_error() -> None:
    (finding,) = check({"NCCL_ALGO": "Tree"}, nccl_version=NOW, tree_is_error=True)
    assert finding.level is Level.ERROR
    with pytest.raises(EnvironmentRefused, match="NCCL_ALGO=Tree"):
        apply({"NCCL_ALGO": "Tree"}, {}, [finding])


def test_c16_correction_is_put_in_place_and_shown() -> None:
    env = {"NCCL_ALGO": "Tree"}
    shown = {e.name: e for e in apply(env, {}, check(env, nccl_version=NOW))}
    assert env["NCCL_ALGO"] == "allreduce:tree"
    assert (shown["NCCL_ALGO"].origin, shown["NCCL_ALGO"].note) == ("corrected", "was Tree")


@pytest.mark.parametrize(
    "value", ["Ring,Tree", "^ring", "allreduce:tree", "ring", "ring;allreduce:tree"]
)
def test_c17_sound_algorithms_are_untouched(value: str) -> None:
    env = {"NCCL_ALGO": value}
    assert check(env, nccl_version=NOW) == []
    apply(env, settings(env, pcie_only=True), [])
    assert env["NCCL_ALGO"] == value


def test_tree_with_the_other_collectives_named_is_sound() -> None:
    value = "tree;allgather:ring;broadcast:ring;reduce:ring;reducescatter:ring"
    assert check({"NCCL_ALGO": value}, nccl_version=NOW) == []
    (partly,) = check({"NCCL_ALGO": "tree;allgather:ring"}, nccl_version=NOW)
    assert partly.corrected == "allreduce:tree;allgather:ring"
    assert "AllGather" not in partly.reason and "Broadcast" in partly.reason


def test_tree_before_2_24_only_warns() -> None:
    (finding,) = check({"NCCL_ALGO": "Tree"}, nccl_version="2.23.4", sm120=False)
    assert finding.level is Level.WARNING and finding.corrected is None


@pytest.mark.parametrize(
    ("name", "value", "level", "word"),
    [
        ("NCCL_PROTO", "LL128", Level.WARNING, "corruption"),
        ("NCCL_PROTO", "LL,LL128,Simple", Level.WARNING, "corruption"),
        ("NCCL_PROTO", "Simple;allreduce:LL128", Level.WARNING, "corruption"),
        ("NCCL_PROTO", "^LL", Level.WARNING, "corruption"),
        ("NCCL_PROTO", "LL", Level.WARNING, "prefill"),
        ("NCCL_P2P_LEVEL", "2", Level.WARNING, "PXB"),
        ("NCCL_P2P_LEVEL", "4", Level.WARNING, "SYS"),
        ("NCCL_P2P_LEVEL", "99", Level.WARNING, "SYS"),
        ("NCCL_P2P_LEVEL", "LOC", Level.WARNING, "host memory"),
        ("NCCL_P2P_DISABLE", "1", Level.WARNING, "host memory"),
        ("NCCL_SHM_DISABLE", "1", Level.WARNING, "sockets"),
        ("NCCL_BUFFSIZE", str(64 << 20), Level.WARNING, "72 MiB"),
        ("NCCL_GRAPH_FILE", "/tmp/g.xml", Level.ERROR, "unhandled system error"),
    ],
)
def test_harmful_settings_are_found(name: str, value: str, level: Level, word: str) -> None:
    (finding,) = check({name: value}, nccl_version=NOW, sub_groups=True)
    assert (finding.name, finding.level) == (name, level)
    assert word in finding.reason and finding.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_PROTO", "LL,Simple"),
        ("NCCL_P2P_LEVEL", "SYS"),
        ("NCCL_P2P_DISABLE", "0"),
        ("NCCL_BUFFSIZE", str(4 << 20)),
        ("NCCL_GRAPH_FILE", "/tmp/g.xml"),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_harmless_settings_are_not_touched(name: str, value: str) -> None:
    assert check({name: value}, nccl_version=NOW) == []


def test_graph_file_with_sixteen_ranks_warns() -> None:
    (finding,) = check({"NCCL_GRAPH_FILE": "g.xml"}, nccl_version=NOW, world=16)
    assert finding.level is Level.WARNING and "16 ranks" in finding.reason


def test_c26_nccl_2_26_2_is_warned_about_with_the_first_good_version() -> None:
    (finding,) = check({}, nccl_version="2.26.2", nccl_cuda="12.2")
    assert finding.level is Level.WARNING
    assert "512 KiB" in finding.reason and "2.27.3" in finding.remedy
    assert check({}, nccl_version="2.26.2", nccl_cuda="12.2", sm120=False) == []


def test_nccl_without_sm120_code_is_known() -> None:
    assert check_nccl("2.27.5", "12.4") is not None
    assert check_nccl("2.27.5", "12.9") is None
    assert check_nccl(NOW, "13.3") is None
    too_old = check_nccl("2.25.1", "12.8")
    assert too_old is not None and too_old.fatal
    assert check_nccl("") is None


def test_c18_flashinfer_before_the_12x_fix_is_refused_with_the_version_it_needs() -> None:
    refusal = check_flashinfer("0.6.16.post4")
    assert refusal is not None and "0.6.17" in refusal.remedy and "SM120" in refusal.reason
    assert check_flashinfer("0.6.17") is None
    assert check_flashinfer("0.6.17rc1") is None
    assert check_flashinfer("0.7.2") is None
    missing = check_flashinfer("")
    assert missing is not None and "not installed" in missing.reason


def test_nccl_build_is_read_from_the_library(tmp_path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0\1NCCL version 2 is\0NCCL version 2.26.2+cuda12.2\0more")
    assert nccl_build(library) == ("2.26.2", "12.2")
    other = tmp_path / "other.so"
    other.write_bytes(b"nothing here")
    assert nccl_build(other) == ("", "")


def test_memory_formula_matches_nccls_own_allocation_sizes() -> None:
    # 9637888 bytes is the size that NCCL names when a container's /dev/shm is too small for one channel.
    assert (
        memory.RECV_MEM + memory.LL_DEFAULT + memory.LL128_DEFAULT + memory.SIMPLE_DEFAULT
        == 9637888
    )
    assert memory.channel_bytes(memory.Buffers()) == 12 * memory.MIB
    assert memory.communicator_bytes(8) == 96 * memory.MIB
    small = memory.Buffers(simple=memory.MIB, ll128=memory.MIB)
    assert memory.communicator_bytes(4, small) == 24 * memory.MIB
    big = memory.Buffers(simple=64 * memory.MIB)
    assert memory.communicator_bytes(64, big) == 64 * 72 * memory.MIB
    assert memory.communicator_bytes(2, tree=True) == 48 * memory.MIB
    with pytest.raises(ValueError, match="at least one channel"):
        memory.communicator_bytes(0)


def test_memory_reads_the_environment_like_nccl() -> None:
    env = {"NCCL_BUFFSIZE": "1048576", "NCCL_LL128_BUFFSIZE": "nonsense"}
    assert memory.Buffers.from_environ(env) == memory.Buffers(simple=memory.MIB)


@given(st.integers(1, 64), st.integers(1, 64 << 20))
def test_memory_grows_with_channels_and_buffers(channels: int, simple: int) -> None:
    one = memory.communicator_bytes(channels, memory.Buffers(simple=simple))
    assert memory.communicator_bytes(channels + 1, memory.Buffers(simple=simple)) > one
    assert memory.communicator_bytes(channels, memory.Buffers(simple=simple + (2 << 20))) > one
    assert one % memory.CUDA_IPC_MIN == 0


def test_decode_communicators_are_smaller_than_prefill_ones() -> None:
    graph = config_for("tp", captured=True, widest_bytes=4 * 7168 * 2)
    eager = config_for("tp")
    assert graph["max_ctas"] < eager["max_ctas"]
    assert graph["comm_name"] != eager["comm_name"]
    assert config_for("world")["max_ctas"] <= eager["max_ctas"]
    assert config_for("pdmux_prefill_tp", captured=True)["max_ctas"] == eager["max_ctas"]


def test_decode_gets_the_channels_that_nccl_would_use_itself() -> None:
    assert channels_used(14336, 8) == 1
    assert channels_used(57344, 8) == 2
    assert config_for("tp", captured=True, widest_bytes=57344)["max_ctas"] == 2
    assert config_for("tp", captured=True, widest_bytes=3 * 32768)["max_ctas"] == 3
    assert config_for("tp", captured=True, widest_bytes=1 << 20)["max_ctas"] == 32
    assert config_for("tp", captured=True, widest_bytes=1 << 30)["max_ctas"] == 64
    assert "max_ctas" not in config_for("tp", captured=True), "a guess might cost time"


def test_eager_groups_have_no_limit_where_nvlink_could_use_more() -> None:
    assert "max_ctas" not in config_for("tp", pcie_only=False)
    assert config_for("tp", captured=True, widest_bytes=57344, pcie_only=False)["max_ctas"] == 2
    given = {"tp": {"max_ctas": 5}}
    assert config_for("tp", overrides=given, pcie_only=False)["max_ctas"] == 5


def test_overrides_by_group_name_win_over_the_star() -> None:
    given_ = {"*": {"max_ctas": 16}, "tp": {"max_ctas": 3, "cga_cluster_size": 0}}
    assert config_for("tp:device", overrides=given_)["max_ctas"] == 3
    assert config_for("tp", overrides=given_)["cga_cluster_size"] == 0
    assert config_for("moe_tp", overrides=given_)["max_ctas"] == 16


def test_fields_that_the_library_does_not_know_are_left_out() -> None:
    assert set(config_for("tp", nccl_version="2.26.5")) == {"max_ctas"}
    wanted = {"tp": {"graph_usage_mode": 1}}
    assert "graph_usage_mode" not in config_for("tp", overrides=wanted, nccl_version="2.28.9")
    assert config_for("tp", overrides=wanted, nccl_version=NOW)["graph_usage_mode"] == 1
    assert set(config_for("tp", overrides=wanted)) <= set(FIELDS)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"maxctas": 4}, "unknown field"),
        ({"max_ctas": 0}, "1..64"),
        ({"max_ctas": True}, "integer"),
        ({"max_ctas": "4"}, "integer"),
        ({"min_ctas": 9}, "above max_ctas"),
        ({"comm_name": ""}, "not a name"),
        ({"graph_usage_mode": 3}, "0..2"),
    ],
)
def test_wrong_overrides_are_refused_with_group_and_value(fields: dict, word: str) -> None:
    with pytest.raises(NcclConfigError, match=word) as error:
        config_for("tp", overrides={"tp": fields})
    assert "'tp'" in str(error.value)


def test_settings_never_override_the_user() -> None:
    assert settings({}, verified_p2p=True)["NCCL_P2P_LEVEL"] == "SYS"
    assert "NCCL_P2P_LEVEL" not in settings({})
    assert "NCCL_P2P_LEVEL" not in settings({"NCCL_P2P_LEVEL": "PHB"}, verified_p2p=True)
    assert "NCCL_P2P_LEVEL" not in settings({"NCCL_P2P_DISABLE": "1"}, verified_p2p=True)
    assert "NCCL_LL128_BUFFSIZE" not in settings({"NCCL_PROTO": "LL128"}, pcie_only=True)
    env = {"NCCL_P2P_LEVEL": "PHB"}
    origins = {e.name: e.origin for e in apply(env, {"NCCL_P2P_LEVEL": "SYS"}, [])}
    assert env["NCCL_P2P_LEVEL"] == "PHB" and origins["NCCL_P2P_LEVEL"] == "user"


def test_the_table_names_every_origin() -> None:
    env = {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN"}
    rows = apply(env, settings(env, pcie_only=True), check(env, nccl_version=NOW))
    assert {r.origin for r in rows} == {"corrected", "user", "plugin", "default"}
    assert table(rows).row_count == len(rows)


@pytest.mark.parametrize(
    ("env", "off"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "0"}, ""),
        ({"NCCL_P2P_LEVEL": "loc"}, "NCCL_P2P_LEVEL=loc"),
        ({"NCCL_P2P_LEVEL": "0"}, "NCCL_P2P_LEVEL=0"),
        ({"NCCL_P2P_LEVEL": "SYS"}, ""),
        ({}, ""),
    ],
)
def test_what_counts_as_switched_off(env: dict, off: str) -> None:
    assert p2p_disabled_by_user(env) == off


def test_the_driver_is_read_from_the_kernel(tmp_path) -> None:
    said = tmp_path / "version"
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build"
    )
    assert kernel_driver(said) == "595.58.03"
    assert kernel_driver(tmp_path / "nothing") == ""


def test_versions_parse() -> None:
    assert parse("v0.6.17.post1") == (0, 6, 17)
    assert parse("2.30.7+cuda13.3") == (2, 30, 7)
    assert parse("") == ()


RECORDED = Path(__file__).parents[2] / "benchmark/results/2026-12-02-h200-nccl-limits.json"


def test_a_limit_at_nccls_own_count_costs_no_time_and_a_lower_one_does() -> None:
    """Times recorded on one H200, two ranks: the rule decides which limits are free."""
    times = [r for r in json.loads(RECORDED.read_text())["results"] if r["kind"] == "latency" and r["limit"]]  # fmt: skip
    free = [r for r in times if r["limit"] >= channels_used(r["rows"] * 7168 * 2, 2)]
    tight = [r for r in times if 2 * r["limit"] <= channels_used(r["rows"] * 7168 * 2, 2)]
    assert len(free) >= 10 and max(r["ratio"] for r in free) <= 1.02
    assert len(tight) >= 10 and min(r["ratio"] for r in tight) > 1.2


def test_the_smaller_ll128_buffer_saves_what_the_formula_says() -> None:
    """Recorded too: MiB per communicator with NCCL's buffers and with the plugin's, by channels."""
    found = {(r["label"], r["limit"]): r["mib"] for r in json.loads(RECORDED.read_text())["results"] if r["kind"] == "memory"}  # fmt: skip
    small = memory.Buffers(ll128=256 << 10)
    for channels in (2, 4, 8, 16):
        saved = found["default", channels] - found["compact", channels]
        formula = memory.communicator_bytes(channels) - memory.communicator_bytes(channels, small)
        assert saved == pytest.approx(formula / memory.MIB, rel=0.05)
