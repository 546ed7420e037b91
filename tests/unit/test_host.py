"""The host communicator's decisions and errors, and the schedule command; no second process."""

from __future__ import annotations

import os

import pytest
import torch
from sglang_sm120.cli.main import build
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.host import HostCommunicator
from sglang_sm120.comm.schedule import SCHEDULES, describe, islands_text, slab_layout
from typer.testing import CliRunner


@pytest.fixture
def alone():
    comm = HostCommunicator("tp", 0, 1, session=f"unit-{os.getpid()}", capacity_bytes=1 << 20)
    yield comm
    comm.close()


def test_admits_depends_on_shape_and_dtype_only(alone: HostCommunicator) -> None:
    assert alone.admits(Op.ALL_REDUCE, 1, 7168, torch.bfloat16)
    assert alone.admits(Op.ALL_REDUCE_RMSNORM, 100_000, 2880, torch.float16)
    assert alone.admits(Op.ALL_REDUCE, 0, 8, torch.float32)
    assert not alone.admits(Op.ALL_REDUCE, 1, 7, torch.bfloat16)
    assert not alone.admits(Op.ALL_REDUCE, 1, 0, torch.bfloat16)
    assert not alone.admits(Op.ALL_REDUCE, 1, 64, torch.int64)
    assert not alone.admits(Op.ALL_REDUCE, 1, 1 << 19, torch.float32)


def test_any_leading_shape_is_kept_and_calls_are_counted(alone: HostCommunicator) -> None:
    x = torch.randn(2, 3, 64)
    assert torch.equal(alone.all_reduce(x), x)
    normed, residual = alone.all_reduce_rmsnorm(x, x, torch.ones(64), 1e-6)
    assert normed.shape == residual.shape == x.shape
    assert torch.equal(residual, x + x)
    codes, scales, _ = alone.all_reduce_rmsnorm_fp8(x, x, torch.ones(64), 1e-6)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (2, 3, 1)
    assert dict(alone.calls) == {
        Op.ALL_REDUCE: 1,
        Op.ALL_REDUCE_RMSNORM: 1,
        Op.ALL_REDUCE_RMSNORM_FP8: 1,
    }


def test_a_closed_communicator_says_so(alone: HostCommunicator) -> None:
    alone.close()
    alone.close()
    assert not alone.admits(Op.ALL_REDUCE, 1, 64, torch.float32)
    with pytest.raises(CollectiveError, match="rank 0 is closed"):
        alone.all_reduce(torch.ones(1, 64))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"world": 17}, "world must be 1 to 16"),
        ({"schedule": "tree"}, "schedule 'tree'"),
        ({"wire": "int4"}, "wire 'int4'"),
        ({"islands": "0;0"}, "rank 0 appears twice"),
        ({"islands": "0-"}, "cannot read character"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments: dict, sentence: str) -> None:
    options = {"world": 1, "session": "never-made", **arguments}
    with pytest.raises(ValueError, match=sentence):
        HostCommunicator("tp", 0, options.pop("world"), **options)


def test_mismatched_norm_inputs_are_refused(alone: HostCommunicator) -> None:
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="residual"):
        alone.all_reduce_rmsnorm(x, torch.ones(1, 64), torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        alone.all_reduce_rmsnorm(x, x, torch.ones(32), 1e-6)


def test_islands_as_text_or_lists_are_the_same_partition() -> None:
    assert islands_text([[0, 1], [2, 3]]) == "0,1;2,3"
    a = describe("island_dataflow", world=4, rows=1, hidden=1024, islands=[[2, 3], [0, 1]])
    b = describe("island_dataflow", world=4, rows=1, hidden=1024, islands="0-1; 2-3")
    assert a == b and a.islands == ((0, 1), (2, 3))


def test_slab_layout_is_its_formula() -> None:
    for world, islands in ((2, ""), (8, "0-3;4-7"), (5, "0,1;2,3,4")):
        slab = slab_layout(world=world, capacity=1 << 20, small=1 << 15, islands=islands)
        assert slab.slab == slab.control + slab.slots * (slab.reduce + slab.cross + slab.gather)
        assert slab.slot % 128 == slab.reduce % 128 == slab.cross % 128 == 0
        assert slab.slots == 3 and slab.gather == 1 << 20


def test_schedule_command_shows_the_boundary_of_each_schedule() -> None:
    line = ["schedule", "--world", "8", "--islands", "0-3;4-7", "--rows", "4", "--hidden", "7168"]
    shown = CliRunner().invoke(build(line), line)
    assert shown.exit_code == 0, shown.output
    crossing = {
        row.split()[1]: row.split("│")[-2].split()[-1]
        for row in shown.output.splitlines()
        if "│" in row
    }
    assert crossing["one_shot"] == "16x"
    assert crossing["two_shot"] == "4x"
    assert crossing["island_dataflow"] == "1x"
    assert set(SCHEDULES) <= set(crossing)
    detailed = CliRunner().invoke(build(line), [*line, "--schedule", "island_dataflow"])
    assert detailed.exit_code == 0 and "bytes per edge" in detailed.output
    refused = CliRunner().invoke(build(line), [*line, "--islands", "0-3;4-8"])
    assert refused.exit_code != 0 and "outside world 8" in refused.output
