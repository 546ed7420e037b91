"""Our draft-length policy inside SGLang's adaptive speculation (`--speculative-adaptive`).

SGLang's `AdaptiveController` captures one runtime state per candidate step count and asks a policy, once
per decode pass, which one to run. We hand it ours in place of its own, time the captured graphs once they
exist, time the passes as they are served, and keep all ranks on rank 0's table.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_sm120.comm.communicator import Op
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.contract import Binding, Part, Seam, Target
from sglang_sm120.verify.agree import GroupLink, Link, LocalLink, TableAgreement
from sglang_sm120.verify.cost import COLD, CostModel, StageTimes, guess
from sglang_sm120.verify.policy import DraftLengthPolicy, PolicyConfig
from sglang_sm120.verify.timing import PassClock, WallEvent, cuda_event, time_replays

logger = logging.getLogger("sglang_sm120")

# Graphs are timed at up to this many batch sizes per step count, this often each.
TIMED_BATCHES = 7
TIMED_REPLAYS = 5
# Without graphs to time, costs are only proportions until this many passes were served.
FIRST_DECISION = 24


class ServedPolicy(DraftLengthPolicy):
    """The policy as SGLang's controller calls it, with its clock, its table and the draft-extend switch.

    Args:
        worker: SGLang's EAGLE worker.
        candidates, initial_steps: as SGLang configured its own policy.
    """

    def __init__(self, worker: Any, candidates: list[int], initial_steps: int) -> None:
        self._device = str(worker.device)
        # A switch that the operator set in the environment stays as it is.
        cold = not envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.is_set()
        self._model = CostModel(guess(candidates, (1, 8, 32)), guessed=True)
        super().__init__(
            candidates,
            initial_steps,
            self._model.table,
            PolicyConfig(cold=cold, first_decision=FIRST_DECISION),
        )
        on_cuda = self._device.startswith("cuda")
        self.clock = PassClock(cuda_event if on_cuda else WallEvent, self._timed)
        group = get_parallel().tp_group
        self._link: Link = (
            LocalLink() if group.world_size == 1 else GroupLink(group.cpu_group, group.ranks)
        )
        self._agreement = TableAgreement(self, self._model, self._link)
        self.asked = 0
        self.shape = (0, 1)
        self.quiet = False

    def calibrate(self, timings: list[StageTimes]) -> None:
        """Replace the guessed costs by timed ones; every rank calls it, rank 0's timings count."""
        self._model = CostModel(timings)
        self.config = PolicyConfig(cold=self.config.cold)
        self._agreement = TableAgreement(self, self._model, self._link)
        self._agreement.install_now()

    def get_steps_for_batch(self, batch_size: int) -> int:
        before = self.probing
        steps = super().get_steps_for_batch(batch_size)
        if self.config.cold:
            envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.set(self.skips_draft_extend)
        self.asked += 1
        self.quiet = self.probing or before
        shape = COLD if self.skips_draft_extend else steps
        self.shape = (shape, self.padded(batch_size))
        return steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        switches = self.switches
        super().on_verify_complete(num_correct_drafts_per_req, batch_size)
        self.clock.poll()
        self._agreement.after_pass()
        if self.switches != switches and self._link.rank == 0:
            batch = self.padded(batch_size)
            logger.info(
                "sglang-sm120: %s at batch %d after %d passes",
                self.sentence(batch),
                batch,
                self.passes,
            )
        return None

    def sentence(self, batch: int) -> str:
        """One line: what is drafted at a batch size, and the estimates that say so."""
        chosen = self.chosen(batch)
        each = ", ".join(
            f"{s}: {1e3 * batch * self.rate(s, batch):.0f}" for s in self.allowed(batch)
        )
        return (
            f"{chosen} draft steps (accept length {self.acceptance.tokens(chosen):.2f}, "
            f"expected tokens/s by steps {each})"
        )

    def _timed(self, steps: int, batch: int, ms: float) -> None:
        # Two events may lie within one tick of the GPU's clock; a rank must not end for that.
        if ms > 0:
            self._model.observe(steps, batch, ms)


class _ProbeFilter(logging.Filter):
    """Keeps SGLang's line about every change of state for changes that last; probes come every few seconds."""

    def __init__(self, policy: ServedPolicy) -> None:
        super().__init__()
        self._policy = policy

    def filter(self, record: logging.LogRecord) -> bool:
        return not (self._policy.quiet and str(record.msg).startswith("Switch adaptive"))


def own_policy(original: Any, controller: Any, worker: Any, policy: Any) -> None:
    """Around `AdaptiveController.__init__`: ours takes the place of the policy SGLang built."""
    steps = worker.speculative_num_steps
    ours = ServedPolicy(worker, list(policy.candidate_steps), steps)
    original(controller, worker, ours)
    _time_passes(worker, ours)
    logging.getLogger("sglang.srt.speculative.eagle_worker_v2").addFilter(_ProbeFilter(ours))
    if sessions.current().tp_rank == 0:
        logger.info(
            "sglang-sm120: draft lengths %s are chosen by measured cost and acceptance, beginning with %d",
            ours.candidate_steps,
            steps,
        )


def _time_passes(worker: Any, policy: ServedPolicy) -> None:
    forward = worker.forward_batch_generation

    def timed(*args: Any, **kwargs: Any) -> Any:
        asked = policy.asked
        policy.clock.begin()
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            policy.clock.cancel()
            raise
        # A decode pass asks the policy once; a prefill does not.
        if policy.asked == asked:
            policy.clock.cancel()
        else:
            policy.clock.end(*policy.shape)
        return result

    # On the instance: the class stays SGLang's, and other workers are not touched.
    worker.forward_batch_generation = timed


def calibrate(result: Any, controller: Any, cuda_graph_bs: list[int] | None = None) -> None:
    """After `AdaptiveController.init_states`: time the graphs, when there are any."""
    policy = controller.params
    if not isinstance(policy, ServedPolicy) or not cuda_graph_bs:
        return
    timings = time_graphs(controller, sorted(cuda_graph_bs))
    if not timings:
        return
    policy.calibrate(timings)
    if sessions.current().tp_rank == 0:
        first = min(t.batch for t in timings)
        row = ", ".join(f"{t.steps}: {t.pass_ms:.2f} ms" for t in timings if t.batch == first)
        logger.info("sglang-sm120: timed passes at batch %d by draft steps: %s", first, row)


def time_graphs(controller: Any, batches: list[int]) -> list[StageTimes]:
    """Replay each captured graph a few times, alike on every rank since replays contain collectives.

    Returns:
        One entry per step count and batch size whose verify graph exists.
    """
    chosen = sorted(
        {batches[round(i * (len(batches) - 1) / (TIMED_BATCHES - 1))] for i in range(TIMED_BATCHES)}
    )
    timings = []
    for steps, state in sorted(controller._states.items()):
        for batch in chosen:
            verify = _graph_ms(state.target_graph_runner, batch)
            if verify is None:
                continue
            timings.append(
                StageTimes(
                    steps=steps,
                    batch=batch,
                    draft_ms=_graph_ms(state.cuda_graph_runner, batch) or 0.0,
                    verify_ms=verify,
                    extend_ms=_graph_ms(state.cuda_graph_runner_for_draft_extend, batch) or 0.0,
                    comm_ms=min(_planned_comm_ms(controller.worker, batch * (steps + 1)), verify),
                )
            )
    return timings


def _graph_ms(runner: Any, batch: int) -> float | None:
    graphs = getattr(getattr(runner, "backend", None), "_graphs", None)
    if not graphs:
        return None
    key = runner._make_graph_key(batch)
    graph = graphs.get(key)
    if graph is None:
        return None
    return time_replays(graph.replay, TIMED_REPLAYS, cuda_event)


def _planned_comm_ms(worker: Any, rows: int) -> float:
    """What the plan expects two sums per layer to take; 0.0 when it does not know."""
    runner = worker.target_worker.model_runner
    plan = getattr(getattr(get_parallel().tp_group.ca_comm, "communicator", None), "plan", None)
    if plan is None:
        return 0.0
    choice = plan.lookup(Op.ALL_REDUCE_RMSNORM, rows)
    return 2 * runner.model_config.num_hidden_layers * (choice.us or choice.baseline_us) / 1e3


def choose_sglangs() -> None:
    """In a scheduler, before it makes its worker: choose SGLang's own policy by cost, where it has one."""
    get_context().override("sglang_sm120", speculative_adaptive_policy="cost_aware")


BUILT_IN = Seam("sglang.srt.speculative.adaptive_cost_policy.CostAwareSpecPolicy", choose_sglangs)

PART = Part(
    "adaptive",
    (
        Binding(
            Target(
                "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController.__init__",
                "(self, worker, policy)",
                "puts the cost-aware draft-length policy in the place of SGLang's own",
            ),
            HookType.AROUND,
            own_policy,
            BUILT_IN,
        ),
        Binding(
            Target(
                "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController.init_states",
                "(self, cuda_graph_bs=...)",
                "times the captured graphs of every step count",
            ),
            HookType.AFTER,
            calibrate,
            BUILT_IN,
        ),
    ),
)
