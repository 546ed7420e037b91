"""Our NCCL sizes in the form of SGLang's `--nccl-comm-config`. No GPU, no NCCL call, no patched SGLang."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang_sm120.hooks import nccl_option
from sglang_sm120.hooks.nccl_option import OPTION, merged, sizes
from sglang_sm120.nccl.config import BULK_CTAS, MAX_CTAS, NcclConfigError, channels_used

FIELDS = frozenset({"min_ctas", "max_ctas", "cga_cluster_size"})
WIDEST = 256 << 10


def made(overrides=None, *, widest_bytes=WIDEST, pcie_only=True):
    return sizes(
        overrides or {},
        groups=frozenset({"tp", "pp"}),
        fields=FIELDS,
        suffix="/graph",
        world=8,
        widest_bytes=widest_bytes,
        pcie_only=pcie_only,
    )


def test_each_communicator_gets_its_own_size():
    found = made()
    assert found["tp"] == {"max_ctas": BULK_CTAS}
    assert found["tp/graph"] == {"max_ctas": channels_used(WIDEST, 8)}
    # Another group may have two ranks, and then NCCL takes more channels for the same message.
    assert found["pp/graph"] == {"max_ctas": channels_used(WIDEST, 2)}


def test_a_communicator_without_a_limit_does_not_inherit_its_siblings():
    found = made(widest_bytes=None)
    assert found["tp"] == {"max_ctas": BULK_CTAS}
    assert found["tp/graph"] == {"max_ctas": MAX_CTAS}
    assert "tp" not in made(pcie_only=False)


def test_overrides_reach_both_communicators():
    found = made({"*": {"cga_cluster_size": 2}, "tp": {"max_ctas": 6}})
    assert found["tp"] == found["tp/graph"] == {"max_ctas": 6, "cga_cluster_size": 2}
    assert found["pp"]["cga_cluster_size"] == 2


@pytest.mark.parametrize(
    ("users", "tp", "graph", "pp"),
    [
        ({}, 8, 4, 8),
        ({"tp": {"max_ctas": 16}}, 16, 16, 8),
        ({"tp/graph": {"max_ctas": 2}}, 8, 2, 8),
        ({"*": {"max_ctas": 5}}, 5, 5, 5),
        ({"*/graph": {"max_ctas": 5}}, 8, 5, 8),
        # As SGLang reads them: a group's own settings win, in whatever order they are written.
        ({"tp": {"max_ctas": 16}, "*": {"max_ctas": 5}}, 16, 16, 5),
        ({"tp": {"max_ctas": 16}, "*/graph": {"max_ctas": 5}}, 16, 16, 8),
    ],
)
def test_the_users_own_option_wins_where_it_says_something(users, tp, graph, pp):
    ours = {"tp": {"max_ctas": 8}, "tp/graph": {"max_ctas": 4}, "pp": {"max_ctas": 8}}
    found = merged(ours, users)
    assert [found[name]["max_ctas"] for name in ("tp", "tp/graph", "pp")] == [tp, graph, pp]
    assert ours["tp"] == {"max_ctas": 8}, "the argument is not changed"


def test_a_lower_bound_of_the_user_lifts_our_limit():
    assert merged({"tp": {"max_ctas": 8}}, {"*": {"min_ctas": 12}})["tp"] == {
        "min_ctas": 12,
        "max_ctas": 12,
    }


def test_what_the_option_does_not_carry_is_refused(monkeypatch):
    monkeypatch.setattr(nccl_option, "lookup", lambda path: dict.fromkeys(FIELDS))
    nccl_option.check_carried({"tp": {"max_ctas": 4, "comm_name": "mine"}})
    with pytest.raises(NcclConfigError, match="does not carry graph_usage_mode"):
        nccl_option.check_carried({"tp": {"graph_usage_mode": 1}})


def test_the_released_sglang_has_no_such_option():
    assert not OPTION.offered
