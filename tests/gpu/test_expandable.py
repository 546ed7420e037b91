"""C05: PyTorch's expandable segments, which break libraries that export user tensors, change nothing here."""

from __future__ import annotations

import pytest
from test_processes_gpu import mps, run  # noqa: F401  (mps is a fixture)


@pytest.mark.parametrize("ways", ["vmm,ipc", "ipc"])
def test_c05_expandable_segments_with_graph_capture(mps, ways):  # noqa: F811
    # check_sums of process_rank.py sums eagerly and replays a captured graph.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        mps[name] = "expandable_segments:True"
    for code, out in run(mps, 2, ways, "sums"):
        assert code == 0 and "SUMS RIGHT" in out, out
