"""NCCL's hooks: which communicator gets which settings, and which is left alone. No GPU and no NCCL call."""

from __future__ import annotations

import types
from datetime import timedelta

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.distributed.device_communicators.pynccl_wrapper import (
    NCCL_CONFIG_UNDEF_INT,
    NCCL_CTA_POLICY_ZERO,
    ncclConfig_t,
)
from sglang_sm120.hooks import all_reduce, launch, nccl
from sglang_sm120.hooks import session as sessions
from sglang_sm120.nccl.config import NcclConfigError, config_for
from sglang_sm120.nccl.environment import EnvironmentRefused
from sglang_sm120.options import Options

needs_nccl = pytest.mark.skipif(
    not torch.distributed.is_nccl_available(), reason="this PyTorch was built without NCCL"
)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    def begin(**options) -> None:
        session = sessions.Session(Options(enabled=True, **options), "cuda", 0)
        monkeypatch.setattr(sessions, "_session", session)

    begin()
    return begin


@pytest.fixture
def group():
    tokens = []
    yield lambda name: tokens.append(all_reduce._group_name.set(name))
    for token in reversed(tokens):
        all_reduce._group_name.reset(token)


class Library:
    """SGLang's NCCL wrapper with the hooks around it, down to the call that would reach NCCL."""

    def __init__(self) -> None:
        self.plain = 0
        self.configs: list[ncclConfig_t | None] = []

    def ncclGetVersion(self) -> str:
        return "2.30.7"

    def ncclCommInitRank(self, world_size, unique_id, rank):
        def original(*args):
            self.plain += 1

        return nccl.init_rank(original, self, world_size, unique_id, rank)

    def ncclCommInitRankConfig(self, world_size, unique_id, rank, config=None):
        def original(_, world_size, unique_id, rank, config):
            self.configs.append(config)

        return nccl.init_rank_config(original, self, world_size, unique_id, rank, config)


def test_communicator_of_a_named_group_gets_a_config(on_cuda, group):
    group("tp")
    sessions.current().widest_bytes = (4 * 7168 * 2, 0)
    library = Library()
    library.ncclCommInitRank(8, None, 3)
    (config,) = library.configs
    wanted = config_for("tp", captured=True, widest_bytes=4 * 7168 * 2, world=8)
    assert library.plain == 0
    assert config.maxCTAs == wanted["max_ctas"] and config.commName.decode() == "sglang_tp_graph"
    assert config.graphUsageMode == config.cgaClusterSize == config.minCTAs == NCCL_CONFIG_UNDEF_INT
    assert config.blocking == NCCL_CONFIG_UNDEF_INT


def test_what_the_caller_set_stays(on_cuda, group):
    group("tp")
    library, given = Library(), ncclConfig_t.create()
    given.graphUsageMode, given.maxCTAs = 1, 17
    library.ncclCommInitRankConfig(8, None, 0, given)
    assert library.configs[0] is given and (given.graphUsageMode, given.maxCTAs) == (1, 17)


def test_communicators_outside_groups_and_with_an_own_policy_are_left_alone(on_cuda, group):
    library, policy = Library(), ncclConfig_t.create()
    library.ncclCommInitRank(8, None, 0)
    assert library.plain == 1 and not library.configs
    group("tp")
    policy.CTAPolicy = NCCL_CTA_POLICY_ZERO
    library.ncclCommInitRankConfig(8, None, 0, policy)
    assert policy.maxCTAs == NCCL_CONFIG_UNDEF_INT and policy.commName is None


def test_user_s_settings_win_by_group(on_cuda, group):
    on_cuda(nccl_config='{"tp":{"max_ctas":6,"min_ctas":2},"*":{"max_ctas":16}}')
    library = Library()
    group("tp")
    library.ncclCommInitRank(8, None, 0)
    group("pp")
    library.ncclCommInitRank(8, None, 0)
    assert [(c.minCTAs, c.maxCTAs) for c in library.configs] == [
        (2, 6),
        (NCCL_CONFIG_UNDEF_INT, 16),
    ]


@needs_nccl
def test_torch_options_are_fresh_named_and_keep_sglang_s_timeout(on_cuda, monkeypatch):
    monkeypatch.setattr(nccl.parallel_state, "_MODEL_PARALLEL_GROUP_TIMEOUT", timedelta(seconds=77))
    first = nccl.torch_options(lambda name: None, "moe_tp")
    second = nccl.torch_options(lambda name: None, "moe_tp")
    assert first is not second
    assert first.config.max_ctas == config_for("moe_tp")["max_ctas"]
    assert first.config.comm_name == "sglang_moe_tp" and first._timeout == timedelta(seconds=77)


def test_torch_options_are_sglang_s_own_where_it_has_some_and_on_other_devices(
    on_cuda, monkeypatch
):
    theirs = object()
    assert nccl.torch_options(lambda name: theirs, "tp") is theirs
    monkeypatch.setattr(sessions, "_session", sessions.Session(Options(), "cpu", 0))
    assert nccl.torch_options(lambda name: None, "tp") is None


def test_launcher_corrects_the_environment_and_workers_restore_it(on_cuda, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    effective = nccl.check_environment(Options(enabled=True), 8, False)
    by_name = {e.name: e for e in effective}
    assert by_name["NCCL_ALGO"].origin == "corrected"
    assert nccl.os.environ["NCCL_ALGO"] == "allreduce:tree"
    assert by_name["NCCL_LL128_BUFFSIZE"].origin == "plugin"
    args = types.SimpleNamespace(_sm120_nccl={"NCCL_ALGO": by_name["NCCL_ALGO"].value})
    monkeypatch.setenv("NCCL_ALGO", "lost")
    assert nccl.restore_environment(server_args=args, device="cuda", dist_port=1) is None
    assert nccl.os.environ["NCCL_ALGO"] == "allreduce:tree"
    monkeypatch.delenv("NCCL_LL128_BUFFSIZE", raising=False)


def test_the_widest_captured_batch_is_known_before_the_first_communicator(on_cuda, monkeypatch):
    decode = types.SimpleNamespace(bs=[1, 8, 16])
    config = types.SimpleNamespace(graph=types.SimpleNamespace(cuda_graph_config=types.SimpleNamespace(decode=decode)))  # fmt: skip
    monkeypatch.setattr(nccl, "get_exec", lambda: config)
    monkeypatch.setattr(nccl, "max_speculative_num_draft_tokens", lambda: 4)
    monkeypatch.setattr(nccl.ModelConfig, "from_server_args", lambda args: types.SimpleNamespace(hidden_size=7168, vocab_size=163840))  # fmt: skip
    nccl.restore_environment(server_args=types.SimpleNamespace(), device="cuda", dist_port=1)
    rows = 16 * 4
    assert sessions.current().widest_bytes == (rows * 7168 * 2, rows * 163840 * 2)
    assert nccl._widest_of("moe_tp") == rows * 7168 * 2
    assert nccl._widest_of("tp") == rows * 163840 * 2, "the head gathers logits in the graph"
    decode.bs = []
    nccl.restore_environment(server_args=types.SimpleNamespace(), device="cuda", dist_port=1)
    assert sessions.current().widest_bytes is None, "no graphs, no limit"
    assert nccl.widest_bytes(None) is None


def test_environment_that_cannot_work_and_settings_nccl_does_not_take_are_refused(monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_FILE", "/some/graph.xml")
    with pytest.raises(EnvironmentRefused, match="NCCL_GRAPH_FILE"):
        nccl.check_environment(Options(enabled=True), 8, True)
    with pytest.raises(NcclConfigError, match="unknown field 'speed'"):
        nccl.check_environment(Options(enabled=True, nccl_config='{"tp":{"speed":1}}'), 8, False)


@pytest.mark.parametrize(
    "options, device, has, has_not",
    [
        (Options(), "cuda", (), ("census", "all_reduce", "nccl")),
        (Options(stats="x"), "cpu", ("census", "gloo_census"), ("all_reduce", "cpu_all_reduce")),
        (Options(enabled=True), "cuda", ("all_reduce", "fusion", "nccl", "adaptive"), ("cpu_all_reduce", "gloo_census")),
        (Options(enabled=True), "cpu", ("all_reduce", "fusion", "cpu_all_reduce"), ("nccl",)),
        (Options(enabled=True, nccl="keep", verify="off"), "cuda", ("fusion",), ("nccl", "adaptive")),
    ],
)  # fmt: skip
def test_parts_follow_the_options_and_the_device(options, device, has, has_not):
    parts = launch.parts_for(options, device)
    assert set(has) <= set(parts) and not set(has_not) & set(parts)


def test_resolved_arguments_have_the_fields_that_the_launcher_reads():
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    view = resolving_view(ServerArgs(model_path="dummy"))
    for field in (
        "tp_size",
        "ep_size",
        "dp_size",
        "attn_dp_size",
        "device",
        "flashinfer_allreduce_fusion_backend",
    ):
        assert hasattr(view, field), field
