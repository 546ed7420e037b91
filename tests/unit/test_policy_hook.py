"""Our policy in SGLang's real controller, with a worker that only notes what it is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.environ import envs
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang_sm120.hooks import adaptive, contract
from sglang_sm120.verify.cost import COLD

SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"


class Worker:
    """The adaptive protocol of SGLang's EAGLE worker, and its forward call."""

    device = "cpu"
    speculative_num_steps = 3

    def __init__(self) -> None:
        self.controller = None
        self.skipped = []
        self.target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(model_config=SimpleNamespace(num_hidden_layers=4))
        )

    def build_adaptive_runtime_state(
        self, speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs=None
    ):
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        return SimpleNamespace(
            speculative_num_steps=speculative_num_steps,
            target_graph_runner=Runner(cuda_graph_bs, 10.0 + speculative_num_steps),
            cuda_graph_runner=Runner(cuda_graph_bs, 1.0) if speculative_num_steps > 1 else None,
            cuda_graph_runner_for_draft_extend=Runner(cuda_graph_bs, 0.5),
        )

    def apply_runtime_state(self, state) -> None:
        self.speculative_num_steps = state.speculative_num_steps

    def forward_batch_generation(self, batch):
        if batch == "prefill":
            return "prefilled"
        self.controller.activate_step_by_batch(batch)
        self.skipped.append(
            self.speculative_num_steps == 0 and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()
        )
        return self.speculative_num_steps


class Runner:
    """Captured graphs that take a known time on a fake device."""

    now = 0.0

    def __init__(self, batches, ms: float) -> None:
        def graph(batch):
            return SimpleNamespace(replay=lambda: self._run(ms * batch))

        self.backend = SimpleNamespace(_graphs={("key", b): graph(b) for b in batches or []})

    def _run(self, ms: float) -> None:
        Runner.now += ms

    def _make_graph_key(self, batch):
        return ("key", batch)


class FakeEvent:
    def record(self) -> None:
        self.at = Runner.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end) -> float:
        return end.at - self.at


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.delenv(SKIP, raising=False)
    group = SimpleNamespace(world_size=1, cpu_group=None, ranks=[0], ca_comm=None)
    monkeypatch.setattr(adaptive, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(adaptive.sessions, "current", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(adaptive, "cuda_event", FakeEvent)
    worker = Worker()
    stock = SimpleNamespace(candidate_steps=[0, 1, 3])
    controller = AdaptiveController.__new__(AdaptiveController)
    adaptive.own_policy(AdaptiveController.__init__, controller, worker, stock)
    worker.controller = controller
    controller.register(worker.build_adaptive_runtime_state(3, 4, [1, 4]))
    controller.init_states([1, 4])
    yield worker, controller
    logging.getLogger("sglang.srt.speculative.eagle_worker_v2").filters.clear()


def test_the_targets_fit_the_installed_sglang():
    found = [contract.check_target("adaptive", b.target) for b in adaptive.PART.bindings]
    assert contract.refusal(found) is None, found


def test_a_pass_that_the_clock_did_not_see_is_no_cost(rig):
    _, controller = rig
    seen = controller.params._model.passes
    for ms in (0.0, -0.5):
        controller.params._timed(1, 4, ms)
    assert controller.params._model.passes == seen
    controller.params._timed(1, 4, 12.0)
    assert controller.params._model.passes == seen + 1


def test_graphs_are_timed_per_step_count_and_batch(rig):
    _, controller = rig
    timings = adaptive.time_graphs(controller, [1, 4])
    assert [(t.steps, t.batch) for t in timings] == [(s, b) for s in (0, 1, 3) for b in (1, 4)]
    by_shape = {(t.steps, t.batch): t for t in timings}
    assert by_shape[3, 4].verify_ms == pytest.approx(52.0)
    assert by_shape[3, 4].draft_ms == pytest.approx(4.0)
    assert by_shape[0, 1].draft_ms == 0.0 and by_shape[0, 1].extend_ms == pytest.approx(0.5)


def test_timed_graphs_replace_the_guess(rig):
    _, controller = rig
    adaptive.calibrate(None, controller, [1, 4])
    policy = controller.params
    assert policy.table.pass_ms(3, 1) == pytest.approx(13.0 + 1.0 + 0.5)
    assert policy.table.pass_ms(COLD, 4) == pytest.approx(40.0)
    assert policy.config.first_decision == 0


def test_without_graphs_the_guess_stays(rig):
    _, controller = rig
    before = controller.params.table
    adaptive.calibrate(None, controller, None)
    assert controller.params.table is before


def _serve(worker, controller, passes: int, accept: bool) -> list[int]:
    used = []
    for _ in range(passes):
        steps = worker.forward_batch_generation(1)
        used.append(steps)
        worker_accepts = steps if accept else 0
        controller.on_verify_complete([worker_accepts], batch_size=1)
    return used


def test_serving_switches_states_and_the_draft_extend_switch(rig):
    worker, controller = rig
    adaptive.calibrate(None, controller, [1, 4])
    assert worker.forward_batch_generation("prefill") == "prefilled"
    # Costs are this test's calls, microseconds long and noisy: only acceptance is scripted.
    controller.params.clock.poll = lambda: None
    low = _serve(worker, controller, 400, accept=False)
    assert low[0] == 3 and sum(s == 0 for s in low[-200:]) > 180
    assert any(worker.skipped), "at 0 steps draft-extend is left out"
    high = _serve(worker, controller, 4000, accept=True)
    assert sum(s == 3 for s in high[-500:]) > 450
    assert not any(worker.skipped[-450:])


def test_passes_are_timed_and_prefills_are_not(rig):
    worker, controller = rig
    policy = controller.params
    seen = []
    policy.clock._sink = lambda *shape: seen.append(shape[:2])
    for _ in range(5):
        worker.forward_batch_generation("prefill")
        _serve(worker, controller, 1, accept=True)
    worker.forward_batch_generation("prefill")
    policy.clock.poll()
    assert seen == [(3, 1)] * 5


def test_an_operators_switch_is_left_alone(rig, monkeypatch):
    worker, _ = rig
    monkeypatch.setenv(SKIP, "true")
    policy = adaptive.ServedPolicy(worker, [0, 1], 1)
    for _ in range(200):
        policy.get_steps_for_batch(1)
        policy.on_verify_complete([0], 1)
    assert envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get() is True
    assert policy.config.cold is False


def test_probes_do_not_fill_the_log(rig):
    worker, controller = rig
    adaptive.calibrate(None, controller, [1, 4])
    controller.params.clock.poll = lambda: None
    shown = []
    probe_filter = logging.getLogger("sglang.srt.speculative.eagle_worker_v2").filters[0]
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, "Switch adaptive runtime state: a", (), None
    )
    apply = worker.apply_runtime_state

    def noting(state):
        shown.append(probe_filter.filter(record))
        apply(state)

    worker.apply_runtime_state = noting
    _serve(worker, controller, 3000, accept=False)
    assert controller.params.probes > 3
    assert sum(shown) <= controller.params.switches + 1 < len(shown)
