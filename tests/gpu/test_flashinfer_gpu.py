"""FlashInfer's own kernels through our backend, ranks as processes of one GPU under MPS."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_sm120.comm.flashinfer import Modules
from test_processes_gpu import mps, run  # noqa: F401  (mps is a fixture)

RANK = Path(__file__).with_name("flashinfer_rank.py")


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_of_flashinfer_sums_right_in_graphs_and_alike_on_all_ranks(mps, world):  # noqa: F811
    found = Modules.found()
    if not (found.pcie or found.trtllm):
        pytest.skip("FlashInfer's all-reduce kernels are not compiled here")
    results = run(mps, world, "", "", script=RANK)
    for code, out in results:
        assert code == 0 and "FLASHINFER RIGHT" in out, out
    print(results[0][1])
    assert results[0][1].count("bit-identical") >= 4
