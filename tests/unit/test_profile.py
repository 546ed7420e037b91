"""Profiles of synthetic traces whose contents are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from sglang_sm120.cli.main import build
from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Choice, Entry, Plan
from sglang_sm120.verify.profile import analyse, length, merge, overlap, split
from sglang_sm120.verify.savings import economy, savings
from sglang_sm120.verify.trace import RankTrace, TraceError, Work, read_trace
from synthetic_trace import GEMM, NCCL, TraceMaker, verify_pass


def run(*args: str) -> str:
    result = CliRunner().invoke(
        build(["verify-profile"]), ["verify-profile", *args], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def make(path: Path, passes: int = 3, **pass_args) -> Path:
    maker = TraceMaker()
    for _ in range(passes):
        verify_pass(maker, **pass_args)
        maker.idle(1500.0)
    return maker.save(path)


def test_the_pass_that_started_the_project(tmp_path):
    trace = make(tmp_path / "server-TP-0.trace.json.gz")
    picture, data = tmp_path / "pass.png", tmp_path / "out.json"
    output = run(
        str(trace), "--rows", "4", "--hidden", "7168", "--plain-ms", "12.2", "--accept-length", "2.0",
        "--picture", str(picture), "--json", str(data),
    )  # fmt: skip
    assert "VERIFY batch 1: 3 passes of 30.0 ms, 122 all-reduces each" in output
    assert "communication 25.0 ms, compute 5.0 ms, idle 0.000 ms" in output
    assert "205.0 us" in output and "mean of 61" in output
    found = json.loads(data.read_text())["ranks"]["0"]["VERIFY"]
    assert found["all_reduces"] == 122
    assert found["communication"] == pytest.approx(122 * 205.0, abs=1.0)
    assert found["compute"] == pytest.approx(30_000.0 - 122 * 205.0, abs=1.0)
    assert len(found["layers"]) == 61
    assert found["layers"][5]["communication"] == pytest.approx(410.0, abs=0.1)
    # 122 sums of 56 KiB: from 205 to 9.2 + 0.255 * 56 = 23.5 us each.
    assert "22.1 ms" in output
    assert "an iteration costs 2.46 plain passes" in output or "2.58 plain passes" in output
    assert "it stops drafting" in output
    image = picture.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and len(image) > 5000


def test_json_without_compression_and_folder_argument(tmp_path):
    make(tmp_path / "a-TP-0.trace.json", passes=1)
    assert "122 all-reduces each" in run(str(tmp_path))


def test_overlapping_streams_are_not_counted_twice(tmp_path):
    maker = TraceMaker()
    maker.step("VERIFY", 2)
    start = maker.now
    for i in range(20):
        at = start + i * 100.0
        maker.kernel(NCCL, 60.0, at=at, stream=20)
        maker.kernel(GEMM, 50.0, at=at + 40.0, stream=7)
    maker.now = start + 2000.0
    report = analyse([read_trace(maker.save(tmp_path / "t.json"))]).main["VERIFY"]
    part = report.typical.split
    assert part.communication == pytest.approx(20 * 60.0)
    assert part.hidden == pytest.approx(20 * 20.0)
    assert part.exposed == pytest.approx(20 * 40.0)
    assert part.compute == pytest.approx(20 * 50.0)
    assert part.idle == pytest.approx(19 * 10.0)
    assert part.exposed + part.compute + part.idle == pytest.approx(part.span)


def test_idle_inside_and_between_passes(tmp_path):
    maker = TraceMaker()
    for _ in range(4):
        maker.step("VERIFY", 1)
        for _ in range(10):
            maker.kernel(GEMM, 30.0)
            maker.idle(20.0)
            maker.kernel(NCCL, 50.0)
        maker.idle(900.0)
    profile = analyse([read_trace(maker.save(tmp_path / "t.json"))])
    report = profile.main["VERIFY"]
    assert report.mean("idle") == pytest.approx(200.0)
    assert profile.gap_us == pytest.approx(900.0)


def test_late_rank_is_found(tmp_path):
    for rank in range(4):
        # Rank 2 arrives last everywhere: its sums are short, the others wait inside theirs.
        make(
            tmp_path / f"srv-TP-{rank}.trace.json.gz",
            passes=2,
            sum_us=25.0 if rank == 2 else 105.0 + rank,
            pass_us=15_000.0,
        )
    output = run(str(tmp_path))
    assert "Rank 2 is the one the others wait for" in output
    assert "3.0 ms of the all-reduce time is transfer" in output.replace("3.1 ms", "3.0 ms")
    assert "rank 3 10.1 ms" in output and "rank 2 0.000 ms" in output


def test_draft_and_plain_passes_are_kept_apart(tmp_path):
    maker = TraceMaker()
    for _ in range(3):
        for _ in range(2):
            verify_pass(maker, layers=1, sum_us=60.0, pass_us=1_000.0, kind="DRAFT")
            maker.idle(100.0)
        verify_pass(maker)
        maker.idle(100.0)
    verify_pass(maker, kind="DECODE", sum_us=59.0, pass_us=12_200.0)
    profile = analyse([read_trace(maker.save(tmp_path / "t.json"))])
    assert {k: len(r.passes) for k, r in profile.main.items()} == {
        "DRAFT": 6,
        "VERIFY": 3,
        "DECODE": 1,
    }
    found = economy(profile, accept_length=2.0)
    assert found is not None
    assert found.iteration_us == pytest.approx(30_000.0 + 2 * 1_000.0 + 3 * 100.0, rel=0.01)
    assert found.break_even == pytest.approx(32_300.0 / 12_200.0, rel=0.01)
    lines = savings(profile.main["VERIFY"], rows=4, hidden=7168, economy_of=found)
    policy = next(s for s in lines if s.part == "draft-length policy")
    assert policy.us == pytest.approx(32_300.0 - 2 * 12_200.0, rel=0.02)


@pytest.mark.parametrize("annotate", ["device", "none"])
def test_passes_without_host_annotations(tmp_path, annotate):
    path = make(tmp_path / "t.json", passes=2, annotate=annotate)
    profile = analyse([read_trace(path)])
    kind = "VERIFY" if annotate == "device" else "GRAPH"
    assert profile.main[kind].all_reduces == 122
    assert len(profile.main[kind].passes) == 2


def test_passes_of_eager_kernels_are_split_at_pauses(tmp_path):
    maker = TraceMaker()
    for _ in range(3):
        for _ in range(8):
            maker.correlation += 1
            maker.kernel(GEMM, 40.0)
            maker.correlation += 1
            maker.kernel(NCCL, 20.0, **{"In msg nelems": 28672, "dtype": "BFloat16"})
        maker.idle(5000.0)
    report = analyse([read_trace(maker.save(tmp_path / "t.json"))]).main["RUN"]
    assert len(report.passes) == 3
    assert report.all_reduce_kinds() == [("NCCL", 57344, 8, pytest.approx(20.0))]


def test_sums_outside_the_layers(tmp_path):
    maker = TraceMaker()
    maker.step("VERIFY", 1)
    maker.kernel(NCCL, 11.0)
    for i in range(8):
        maker.kernel(GEMM, 40.0)
        maker.kernel(NCCL, 20.0 + i)
    report = analyse([read_trace(maker.save(tmp_path / "t.json"))]).main["VERIFY"].typical
    assert [(s.layer, s.place) for s in report.segments[:4]] == [
        (-1, "outside"),
        (0, "attention"),
        (0, "ffn"),
        (1, "attention"),
    ]
    assert report.segments[-1].layer == 3


def test_known_kernels_are_told_apart(tmp_path):
    names = {
        NCCL: "NCCL",
        "void sm120::flat_kernel<__nv_bfloat16, (sm120::Output)1, true, 8, 2>(sm120::Params)": "sm120",
        "void sm120::general_kernel<__half, (sm120::Output)0>(sm120::Params)": "sm120",
        "void sm120::relay_kernel<__nv_bfloat16, (sm120::Output)1>(sm120::Params, sm120::RelayParams)": "sm120",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>()": "FlashInfer",
        "void sglang::cross_device_reduce_1stage<nv_bfloat16, 8>(RankData*, ...)": "SGLang custom",
        "pcie_ipc_all_reduce_kernel": "SGLang PCIe IPC",
    }
    maker = TraceMaker()
    maker.step("VERIFY", 1)
    for name in names:
        maker.kernel(GEMM, 10.0)
        maker.kernel(name, 20.0)
    maker.kernel("ncclDevKernel_AllGather_RING_LL(...)", 8.0)
    report = analyse([read_trace(maker.save(tmp_path / "t.json"))]).main["VERIFY"].typical
    assert [s.who for s in report.segments] == list(names.values())
    assert report.others == (("all-gather", "NCCL", 8.0),)


def test_savings_use_this_machines_plan(tmp_path):
    report = analyse([read_trace(make(tmp_path / "t.json"))]).main["VERIFY"]
    plan = Plan(
        group="tp",
        world=8,
        hidden=7168,
        itemsize=2,
        islands=((0, 1, 2, 3, 4, 5, 6, 7),),
        entries=(
            Entry(Op.ALL_REDUCE_RMSNORM, 4, Choice(backend="native", us=15.0, source="timed")),
        ),
    )
    lines = {s.part: s for s in savings(report, rows=4, hidden=7168, plan=plan)}
    assert lines["fused all-reduce"].us == pytest.approx(122 * 190.0, rel=0.001)
    assert lines["RMSNorm inside it"].us == pytest.approx(122 * 3.0, rel=0.001)
    assert 0.0 < lines["weight prefetch"].us <= 122 * (15.0 - 4.0) * 0.5
    unknown = {s.part: s for s in savings(report, rows=4, hidden=0)}
    assert unknown["fused all-reduce"].us is None


@pytest.mark.parametrize("name", ["gloo:all_reduce", "sm120:all_reduce"])
def test_a_cpu_servers_trace(tmp_path, name):
    maker = TraceMaker()
    span = {"ph": "X", "pid": 1, "tid": 5, "args": {}}
    for i in range(2):
        at = 1000.0 + i * 10_000.0
        maker.events.append(
            {**span, "cat": "user_annotation", "name": "step[VERIFY bs=1]", "ts": at, "dur": 9000.0}
        )
        for k in range(4):
            t = at + 100.0 + k * 2000.0
            maker.events.append(
                {**span, "cat": "cpu_op", "name": "aten::linear", "ts": t, "dur": 900.0}
            )
            maker.events.append(
                {**span, "cat": "cpu_op", "name": "aten::addmm", "ts": t + 10, "dur": 800.0}
            )
            maker.events.append({**span, "tid": 9, "cat": "user_annotation", "name": name, "ts": t + 1000, "dur": 500.0})  # fmt: skip
            if name == "gloo:all_reduce":
                # The operator that hands the tensor to gloo is not a second collective.
                maker.events.append({**span, "cat": "cpu_op", "name": "c10d::allreduce_", "ts": t + 990, "dur": 600.0})  # fmt: skip
    report = analyse([read_trace(maker.save(tmp_path / "t.json"))]).main["VERIFY"]
    assert report.all_reduces == 4
    assert report.mean("communication") == pytest.approx(2000.0)
    assert report.mean("compute") == pytest.approx(3600.0), "inner operators are not counted again"


def test_files_that_are_no_traces(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{not json")
    with pytest.raises(TraceError, match="not a Chrome trace"):
        read_trace(bad)
    bad.write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="no GPU kernels"):
        read_trace(bad)
    result = CliRunner().invoke(build(["verify-profile"]), ["verify-profile", str(bad)])
    assert result.exit_code != 0
    with pytest.raises(TraceError, match="twice"):
        good = read_trace(make(tmp_path / "t.json", passes=1))
        analyse([good, RankTrace(0, good.passes)])


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans()), min_size=1, max_size=25
)


@given(spans)
def test_split_agrees_with_counting_ticks(items):
    """Against the definition: look at each unit of time and ask who runs."""
    work = [
        Work("k", a, a + n, 0, "all-reduce" if comm else "", "", 0, False) for a, n, comm in items
    ]
    start, end = 5.0, 70.0
    part = split(work, start, end)
    comm = {t for a, n, c in items if c for t in range(a, a + n) if 5 <= t < 70}
    compute = {t for a, n, c in items if not c for t in range(a, a + n) if 5 <= t < 70}
    assert part.exposed == len(comm - compute)
    assert part.hidden == len(comm & compute)
    assert part.compute == len(compute)
    assert part.idle == 65 - len(comm | compute)


def test_interval_algebra():
    assert merge([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert length([(0, 3), (5, 8)]) == 6
    assert overlap([(0, 3), (5, 8)], [(2, 6)]) == 2
