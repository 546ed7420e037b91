"""The fused candidates: what they take, what they decline before touching anything, and what they compute."""

from __future__ import annotations

import contextlib
import threading
import types
from collections import Counter

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.layer_boundary import SumGroup, TokenAxis, UnreducedOutput
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.model_executor.runner import base_cuda_graph_runner
from sglang_sm120.comm.choosing import PlanRefused
from sglang_sm120.comm.communicator import CollectiveError, Communicator, Op
from sglang_sm120.comm.factory import Outcome
from sglang_sm120.hooks import all_reduce, census, cpu_all_reduce, fusion, gloo_census, rows
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.adapter import Sm120AllReduce, rows_of
from sglang_sm120.options import Options

ROWS, HIDDEN, EPS = 4, 64, 1e-5


class Doubling(Communicator):
    """A group of two ranks that hold the same partial sums, in torch."""

    def __init__(self, max_rows: int = 64) -> None:
        super().__init__("tp", 0, 2)
        self.max_rows = max_rows
        self.timeout_ms = 0
        self.failure: CollectiveError | None = None

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return 0 < rows <= self.max_rows and dtype in (torch.float32, torch.bfloat16)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        if self.failure:
            raise self.failure
        self.calls[Op.ALL_REDUCE] += 1
        return x * 2

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):
        if self.failure:
            raise self.failure
        self.calls[Op.ALL_REDUCE_RMSNORM] += 1
        total = (x * 2 + residual).float()
        scale = (1 + weight.float()) if gemma else weight.float()
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * scale
        return normed.to(x.dtype), total.to(x.dtype)

    def set_timeout_ms(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms

    def close(self) -> None:
        pass


class Mode:
    """The part of SGLang's ForwardMode that the gates read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_idle(self) -> bool:
        return self.name == "idle"


def batch(mode: str = "verify", can_run_tbo: bool = False) -> types.SimpleNamespace:
    return types.SimpleNamespace(forward_mode=Mode(mode), can_run_tbo=can_run_tbo)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A group served by us, and SGLang's configuration around it."""
    communicator = Doubling()
    adapter = all_reduce.CountedAllReduce(communicator, None, torch.device("cpu"))
    group = types.SimpleNamespace(ca_comm=adapter, all_reduce=lambda x: x * 2, ranks=[0, 1])
    comm = types.SimpleNamespace(enable_quant_communications=False)
    scattered = types.SimpleNamespace(input_scattered=False)
    w = types.SimpleNamespace(
        communicator=communicator,
        adapter=adapter,
        group=group,
        comm=comm,
        scattered=scattered,
        sharded=set(),
        breakable=False,
        invariant=False,
        census=census.Census(),
    )
    monkeypatch.setattr(fusion, "get_parallel", lambda: types.SimpleNamespace(attn_tp_group=group))
    monkeypatch.setattr(fusion, "get_exec", lambda: types.SimpleNamespace(comm=comm))
    monkeypatch.setattr(fusion, "get_attn_tp_context", lambda: scattered)
    monkeypatch.setattr(fusion, "is_in_breakable_cuda_graph", lambda: w.breakable)
    monkeypatch.setattr(fusion, "is_batch_invariant_mode_enabled", lambda: w.invariant)
    for module in (fusion, all_reduce, gloo_census, census):
        monkeypatch.setattr(module, "CENSUS", w.census)
    return w


def plan_for(norm: torch.nn.Module, world: types.SimpleNamespace) -> types.SimpleNamespace:
    rows = types.SimpleNamespace(sharded=world.sharded)
    return types.SimpleNamespace(
        norm=norm, fused_input_rows=lambda fb: rows, incoming_residual_rows=rows
    )


def norm_of(kind: type, **kwargs) -> torch.nn.Module:
    norm = kind(HIDDEN, eps=EPS, **kwargs)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 1.5, HIDDEN))
    return norm


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(ROWS, HIDDEN, generator=generator).to(dtype),
        torch.randn(ROWS, HIDDEN, generator=generator).to(dtype),
    )


def offered(norm: torch.nn.Module, world) -> tuple:
    """The attention candidate and the FFN candidate of one layer, as SGLang would get them."""
    plan = plan_for(norm, world)
    attention = fusion.add_attention_candidate(("theirs",), plan)
    ffn = fusion.add_ffn_candidate(("theirs",), plan)
    assert attention[1:] == ("theirs",) and ffn[1:] == ("theirs",)
    return attention[0], ffn[0]


@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_both_candidates_do_the_sum_the_add_and_the_norm(world, kind, dtype, mode):
    norm = norm_of(kind).to(dtype)
    attention, ffn = offered(norm, world)
    x, residual = tensors(dtype)
    total = (x * 2 + residual).float()
    weight = norm.weight.float() + (1 if kind is GemmaRMSNorm else 0)
    want = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(dtype)
    kept = (x.clone(), residual.clone())
    for normed, left in (
        attention(UnreducedOutput(x, world.group), residual, batch(mode), None),
        ffn.run(x, residual, batch(mode)),
    ):
        torch.testing.assert_close(normed, want)
        torch.testing.assert_close(left, total.to(dtype), rtol=0, atol=0)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    assert ffn.completes is SumGroup.ATTN_TP
    assert world.communicator.calls == {Op.ALL_REDUCE_RMSNORM: 2}
    assert world.census.sums == {
        ("outside", census.Sum.FUSED_FFN): 1,
        ("outside", census.Sum.FUSED_ATTENTION): 1,
    }


def test_post_residual_addition_is_added_before_the_sum(world):
    norm = norm_of(RMSNorm)
    attention, _ = offered(norm, world)
    x, residual = tensors()
    _, left = attention(UnreducedOutput(x, world.group), residual, batch(), torch.ones_like(x))
    torch.testing.assert_close(left, x * 2 + residual + 1)


def _set(where: str, name: str, value):
    def change(world, fb):
        setattr(fb if where == "batch" else getattr(world, where) if where else world, name, value)

    return change


DECLINES = {
    "prefill": _set("batch", "forward_mode", Mode("extend")),
    "idle": _set("batch", "forward_mode", Mode("idle")),
    "two-batch overlap": _set("batch", "can_run_tbo", True),
    "scattered input": _set("scattered", "input_scattered", True),
    "quantised communication": _set("comm", "enable_quant_communications", True),
    "breakable graph": _set("", "breakable", True),
    "batch-invariant mode": _set("", "invariant", True),
    "rows sharded over attention TP": lambda world, fb: world.sharded.add(TokenAxis.ATTN_TP),
    "SGLang's own communicator": _set("group", "ca_comm", object()),
    "no communicator": _set("group", "ca_comm", None),
    "closed": _set("adapter", "disabled", True),
    "more rows than admitted": _set("communicator", "max_rows", ROWS - 1),
}


@pytest.mark.parametrize("reason", DECLINES)
def test_declines_before_touching_anything(world, reason):
    attention, ffn = offered(norm_of(RMSNorm), world)
    fb = batch()
    DECLINES[reason](world, fb)
    x, residual = tensors()
    kept = (x.clone(), residual.clone())
    assert attention(UnreducedOutput(x, world.group), residual, fb, None) is None
    assert ffn.run(x, residual, fb) is None
    assert not ffn.preserves_residual(residual, fb)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    assert not world.communicator.calls and not world.census.sums


def test_weight_of_a_third_dtype_is_declined_and_fp32_is_taken(world):
    x, residual = tensors(torch.bfloat16)
    _, ffn = offered(norm_of(RMSNorm).half(), world)
    assert ffn.run(x, residual, batch()) is None
    _, ffn = offered(norm_of(RMSNorm), world)
    assert ffn.run(x, residual, batch()) is not None


def test_attention_candidate_declines_values_that_owe_something_else(world):
    attention, ffn = offered(norm_of(RMSNorm), world)
    x, residual = tensors()
    identity = torch.clone
    for owed, rest in (
        (x, residual),
        (UnreducedOutput(x, None), residual),
        (UnreducedOutput(x, world.group, reduce_to_dp_local=identity), residual),
        (UnreducedOutput(x, world.group, complete_sum=identity), residual),
        (UnreducedOutput(x, world.group), None),
        (UnreducedOutput(x.bfloat16(), world.group), residual),
        (UnreducedOutput(x[:2], world.group), residual),
        (UnreducedOutput(x[:0], world.group), residual[:0]),
    ):
        assert attention(owed, rest, batch(), None) is None
    assert ffn.run(x, None, batch()) is None
    assert not world.communicator.calls


def test_promise_to_keep_the_residual_holds_even_when_the_partial_has_another_dtype(world):
    _, ffn = offered(norm_of(RMSNorm), world)
    x, residual = tensors()
    kept = residual.clone()
    assert ffn.preserves_residual(residual, batch())
    normed, left = ffn.run(x.bfloat16(), residual, batch())
    assert torch.equal(residual, kept) and left is not residual and normed.shape == x.shape
    assert not world.communicator.calls


@pytest.mark.parametrize(
    "changes",
    [
        {"var_hidden_size": HIDDEN // 2},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"has_weight": False},
    ],
    ids=lambda c: next(iter(c)),
)
def test_other_forms_of_the_norm_get_no_candidate(world, changes):
    plan = plan_for(RMSNorm(HIDDEN, eps=EPS, **changes), world)
    assert fusion.add_attention_candidate((), plan) is None
    assert fusion.add_ffn_candidate((), plan) is None


def test_subclasses_of_the_norm_get_no_candidate(world):
    class Other(RMSNorm):
        pass

    for norm in (Other(HIDDEN), torch.nn.LayerNorm(HIDDEN)):
        assert fusion.add_attention_candidate((), plan_for(norm, world)) is None


def test_norm_that_knows_its_projection_is_plain(world):
    # SGLang's Llama tells every norm its projection; only a static FP8 scale makes the unfused norm quantise, and
    # the projection takes the unquantised input as well.
    norm = norm_of(RMSNorm)
    norm.fuse_input_quant(torch.nn.Linear(2, 2))
    assert len(fusion.add_attention_candidate((), plan_for(norm, world))) == 1


def test_ffn_gets_no_candidate_where_the_residual_is_sharded(world):
    world.sharded.add(TokenAxis.ATTN_TP)
    assert fusion.add_ffn_candidate((), plan_for(norm_of(RMSNorm), world)) is None


def test_plain_sum_of_a_cpu_tensor_is_ours_and_out_of_place(world):
    x, _ = tensors()
    gloo = Counter()

    def original(self, input_):
        gloo["calls"] += 1
        return input_

    out = cpu_all_reduce.all_reduce(original, world.group, x.t())
    torch.testing.assert_close(out, x.t() * 2)
    assert out is not x and not gloo and world.census.sums == {("outside", census.Sum.PLAIN): 1}
    world.communicator.max_rows = 1
    assert cpu_all_reduce.all_reduce(original, world.group, x) is x and gloo["calls"] == 1
    world.group.ca_comm = None
    assert cpu_all_reduce.all_reduce(original, world.group, x) is x and gloo["calls"] == 2


class Theirs:
    """SGLang's own custom all-reduce: takes up to 2 rows, and knows when a graph is captured."""

    disabled = False

    def __init__(self) -> None:
        self.captures = self.closed = 0

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return inp.shape[0] <= 2

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        return inp * 200

    @contextlib.contextmanager
    def capture(self):
        self.captures += 1
        yield

    def close(self) -> None:
        self.closed += 1


def test_what_we_do_not_admit_stays_with_sglang_s_own_custom_all_reduce(world):
    theirs = Theirs()
    adapter = all_reduce.CountedAllReduce(world.communicator, None, torch.device("cpu"), theirs)
    world.communicator.max_rows = 1
    one, two, three = (torch.ones(n, HIDDEN) for n in (1, 2, 3))
    assert [adapter.should_custom_ar(x) for x in (one, two, three)] == [True, True, False]
    assert adapter.custom_all_reduce(one).max() == 2 and adapter.custom_all_reduce(two).max() == 200
    assert world.census.sums == {
        ("outside", census.Sum.PLAIN): 1,
        ("outside", census.Sum.SGLANG): 1,
    }
    with adapter.capture():
        assert theirs.captures == 1
    adapter.close()
    assert theirs.closed == 1
    disabled = Theirs()
    disabled.disabled = True
    assert Sm120AllReduce(world.communicator, None, torch.device("cpu"), disabled).theirs is None


class Pcie:
    """SGLang's communicator over FlashInfer: takes bf16."""

    def __init__(self, disabled: bool = False) -> None:
        self.disabled, self.served = disabled, 0

    def should_pcie_ipc_ar(self, inp: torch.Tensor) -> bool:
        return inp.dtype == torch.bfloat16

    def pcie_ipc_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        self.served += 1
        return inp


class Nccl:
    def __init__(self) -> None:
        self.served = 0

    @contextlib.contextmanager
    def change_state(self, enable: bool):
        assert enable
        yield

    def all_reduce(self, inp: torch.Tensor) -> None:
        self.served += 1


@pytest.mark.parametrize(
    "theirs, pcie, dtype, served",
    [
        (True, True, torch.bfloat16, "theirs"),
        (False, True, torch.bfloat16, "pcie"),
        (False, True, torch.float32, "nccl"),
        (False, None, torch.bfloat16, "nccl"),
    ],
)
def test_the_baseline_is_what_sglang_would_run_itself(monkeypatch, theirs, pcie, dtype, served):
    group, own, nccl = object(), Theirs(), Nccl()
    ours = Pcie() if pcie else None
    coordinator = types.SimpleNamespace(cpu_group=group, pynccl_comm=nccl, pcie_ipc_comm=ours)
    monkeypatch.setattr(all_reduce.parallel_state, "_groups", {"tp:0": lambda: coordinator})
    counted = []
    monkeypatch.setattr(own, "custom_all_reduce", counted.append)
    all_reduce.SglangSum(group, own if theirs else None).sum(torch.ones(2, 8, dtype=dtype))
    found = {"theirs": len(counted), "pcie": ours.served if ours else 0, "nccl": nccl.served}
    assert found == {name: int(name == served) for name in found}


@pytest.mark.parametrize("backend, ends", [("auto", False), ("nccl", False), ("host", True)])
@pytest.mark.parametrize("name", ["tp", "moe_tp"])
def test_declined_group_gets_sglang_s_choice_and_a_named_backend_ends_the_rank(
    world, monkeypatch, caplog, backend, ends, name
):
    session = sessions.Session(Options(enabled=True, backend=backend), "cpu", 0)
    monkeypatch.setattr(sessions, "_session", session)
    outcome = Outcome(None, backend, "rank 1: no space left")
    monkeypatch.setattr(all_reduce.factory, "build", lambda *a, **k: outcome)
    theirs = Theirs()

    def original(group, device):
        return lambda group, device: theirs

    token = all_reduce._group_name.set(name)
    try:
        if ends:
            with pytest.raises(SystemExit):
                all_reduce.dispatch(original, None, None)
            assert "no space left; --sm120-backend host was asked for" in caplog.messages[-1]
        else:
            # SGLang itself would give a split expert group none.
            want = None if name == "moe_tp" else theirs
            assert all_reduce.dispatch(original, None, None)(group=None, device=None) is want
    finally:
        all_reduce._group_name.reset(token)
    assert session.outcomes == {name: outcome} and not session.adapters


def test_an_error_while_a_group_is_set_up_ends_the_rank_instead_of_leaving_it_alone(
    world, monkeypatch, caplog
):
    session = sessions.Session(Options(enabled=True), "cpu", 3)
    monkeypatch.setattr(sessions, "_session", session)

    def broken(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(all_reduce.factory, "build", broken)
    with pytest.raises(SystemExit):
        all_reduce.dispatch(lambda group, device: lambda group, device: None, None, None)
    assert 'rank 3 could not set up group "anonymous" (OSError: No space' in caplog.messages[-1]


def test_a_rank_that_cannot_watch_the_others_serves_all_the_same(world, monkeypatch, caplog):
    def no_socket(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(sessions, "PeerWatch", no_socket)
    session = sessions.Session(Options(enabled=True), "cpu", 0)
    session.adopt("tp", Outcome(world.communicator, "host", "ready", session="s"), world.adapter)
    assert session.adapters == [world.adapter]
    assert "does not watch the other ranks' processes: [Errno 24]" in caplog.messages[-1]
    session.explain()
    session.close()


def test_workspaces_are_prepared_for_the_captured_batches_and_a_refused_plan_ends_the_rank(
    world, monkeypatch, caplog
):
    session = sessions.Session(Options(enabled=True), "cuda", 0, adapters=[world.adapter])
    monkeypatch.setattr(sessions, "_session", session)
    asked = []
    monkeypatch.setattr(world.communicator, "prepare", lambda *a: asked.append(a), raising=False)
    monkeypatch.setattr(
        base_cuda_graph_runner,
        "get_batch_sizes_to_capture",
        lambda model, width, gathered_buffer_required: ([1, 2, 8], []),
    )
    spec = types.SimpleNamespace(speculative_eagle_topk=1, speculative_adaptive=False)
    monkeypatch.setattr(rows, "get_spec", lambda: spec)
    runner = types.SimpleNamespace(
        _widest_decode_rows=lambda: 32,
        device="cuda",
        model_runner=types.SimpleNamespace(
            model_config=types.SimpleNamespace(hidden_size=7168),
            dtype=torch.bfloat16,
            decode_num_tokens_per_req=lambda: 4,
            decode_graph_gather_requirements=lambda: (False, False),
            spec_algorithm=types.SimpleNamespace(is_speculative=lambda: True),
            max_total_num_tokens=100,
        ),
    )
    assert all_reduce.prepare_workspace(None, runner) is None
    assert asked == [(7168, torch.bfloat16, (1, 2, 4, 8, 32))], "drafter and verification"
    spec.speculative_adaptive = True
    monkeypatch.setattr(rows, "max_speculative_num_draft_tokens", lambda: 3)
    assert rows.of_graphs(runner) == (1, 2, 3, 4, 6, 8, 16, 24, 32), "every draft length"
    with monkeypatch.context() as other_release:
        other_release.delattr(base_cuda_graph_runner, "get_batch_sizes_to_capture")
        assert rows.of_graphs(runner) == (1, 2, 4, 8, 16, 32)
        assert "captured batch sizes are not known" in caplog.messages[-1]
    runner._widest_decode_rows = lambda: None
    assert rows.of_graphs(runner) == ()
    schedule = types.SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=64)
    monkeypatch.setattr(rows, "get_schedule", lambda: schedule)
    cpu_all_reduce.prepare_after_warmup(None, runner)
    assert len(asked) == 1, "GPUs have a step of their own"
    runner.device = "cpu"
    cpu_all_reduce.prepare_after_warmup(None, runner)
    assert asked[1:] == [(7168, torch.bfloat16, (1, 2, 4, 8, 16, 32, 64))]

    def refuse(*_):
        raise PlanRefused("--sm120-backend native cannot serve group tp: rank 3 has no peer access")

    monkeypatch.setattr(world.communicator, "prepare", refuse, raising=False)
    with pytest.raises(SystemExit):
        all_reduce.prepare_workspace(None, runner)
    assert "cannot serve group tp: rank 3" in caplog.messages[-1]


def test_adapter_has_what_sglang_reads_and_nothing_it_would_misread(world):
    adapter = world.adapter
    assert not adapter.disabled and adapter.world_size == 2
    with adapter.capture():
        pass
    for name in (
        "obj",
        "has_multicast",
        "_IS_CAPTURING",
        "fused_allreduce_rmsnorm",
        "custom_fused_ar_rms",
    ):
        assert not hasattr(adapter, name)
    assert isinstance(adapter, Sm120AllReduce)
    adapter.close()
    assert adapter.disabled


@pytest.mark.parametrize(
    "shape, rows",
    [((3, 8), (3, 8)), ((2, 3, 8), (6, 8)), ((8,), (1, 8)), ((0, 8), (0, 0)), ((), (0, 0))],
)
def test_rows_of_any_shape(shape, rows):
    assert rows_of(torch.zeros(shape)) == rows


def test_failed_collective_is_logged_on_a_line_of_its_own_and_raised(world, caplog):
    world.communicator.failure = CollectiveError("rank 1 missing in call 7 (all_reduce, 4 x 64)")
    x, residual = tensors()
    _, ffn = offered(norm_of(RMSNorm), world)
    for act in (lambda: world.adapter.custom_all_reduce(x), lambda: ffn.run(x, residual, batch())):
        caplog.clear()
        with pytest.raises(CollectiveError, match="rank 1 missing"):
            act()
        assert caplog.messages == ["sglang-sm120: rank 1 missing in call 7 (all_reduce, 4 x 64)"]


def test_sums_are_booked_under_the_forward_pass_they_belong_to(world, monkeypatch):
    session = sessions.Session(Options(timeout_ms=1234), "cpu", 0, adapters=[world.adapter])
    monkeypatch.setattr(sessions, "_session", session)
    x, _ = tensors()

    def forward(self, forward_batch, *args, **kwargs):
        world.adapter.custom_all_reduce(x)
        gloo_census.count_gloo(lambda t: None, x)
        return "output"

    target = types.SimpleNamespace(is_draft_worker=False)
    draft = types.SimpleNamespace(is_draft_worker=True)
    for runner, mode in (
        (target, "verify"),
        (target, "verify"),
        (draft, "decode"),
        (target, "extend"),
    ):
        assert census.count_forward(forward, runner, batch(mode)) == "output"
    report = census.full_report()
    assert report["passes"] == {"verify": 2, "draft_decode": 1, "extend": 1}
    assert report["sums"]["verify"] == {"plain": 2, "gloo": 2}
    assert report["sums_per_pass"]["draft_decode"] == {"plain": 1.0, "gloo": 1.0}
    assert report["calls"] == {"tp": {"all_reduce": 4}}
    assert world.communicator.timeout_ms == 0
    for _ in range(census.WARM_PASSES):
        census.count_forward(forward, target, batch("decode"))
    assert world.communicator.timeout_ms == 1234


def test_a_pass_that_fails_leaves_the_census_outside(world, monkeypatch):
    def forward(self, forward_batch):
        raise CollectiveError("rank 1 missing")

    with contextlib.suppress(CollectiveError):
        census.count_forward(forward, types.SimpleNamespace(is_draft_worker=True), batch())
    assert world.census.forward == "outside"


def test_reporting_goes_on_where_one_place_cannot_be_written(world, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(sessions, "_session", sessions.Session(Options(), "cpu", 3))
    (tmp_path / "file").write_text("in the way")
    said: set[str] = set()
    published = []
    stats = census._file_sink(tmp_path / "file" / "stats.rank3")
    sinks = {"--sm120-stats": stats, "/metrics": lambda: published.append(1)}
    for _ in range(3):
        census.report_once(sinks, said, 3)
    assert len(published) == 3
    told = [m for m in caplog.messages if "rank 3 cannot report to --sm120-stats now: " in m]
    assert len(told) == 1 and "File exists" in told[0]


def test_stats_file_is_written_whole_and_names_the_rank(world, monkeypatch, tmp_path):
    import msgspec

    session = sessions.Session(Options(), "cpu", 3, adapters=[world.adapter])
    monkeypatch.setattr(sessions, "_session", session)
    with world.census.during("verify"):
        world.census.note(census.Sum.FUSED_FFN)
    census._file_sink(tmp_path / "deep" / "stats.rank3")()
    report = msgspec.json.decode((tmp_path / "deep" / "stats.rank3").read_bytes())
    assert report["rank"] == 3
    assert report["sums_per_pass"] == {"verify": {"fused_ffn_sum": 1.0}}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["stats.rank3"]


def test_group_name_reaches_the_factory_and_split_expert_groups_ask_for_a_custom_all_reduce():
    seen = []

    def original(*args, **kwargs):
        seen.append((all_reduce._group_name.get(), kwargs.get("use_custom_allreduce")))

    all_reduce.name_group(original, [[0, 1]], 0, "gloo", group_name="tp")
    all_reduce.name_group(
        original, [[0, 1]], 0, "gloo", use_custom_allreduce=False, group_name="moe_tp"
    )
    all_reduce.name_group(original, [[0, 1]], 0, "gloo", None, None, False, "pp")
    assert seen == [("tp", None), ("moe_tp", True), ("pp", None)]
    assert all_reduce._group_name.get() == ""


def test_the_stats_file_may_be_in_the_home_folder(world, monkeypatch, tmp_path):
    def once(seconds):
        raise SystemExit  # ends the reporting thread after its first round

    monkeypatch.setattr(sessions, "_session", sessions.Session(Options(), "cpu", 2))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(census.time, "sleep", once)
    before = set(threading.enumerate())
    census.start_reporting("~/figures/stats", 2, metrics=False)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert b'"rank":2' in (tmp_path / "figures" / "stats.rank2").read_bytes()
