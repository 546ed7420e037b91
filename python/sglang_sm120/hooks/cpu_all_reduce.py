"""CPU tensors: SGLang sends their sums to gloo before it looks at any custom all-reduce, and warms no kernels up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks import rows
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.all_reduce import prepare
from sglang_sm120.hooks.contract import Binding, Part, Target


def all_reduce(original: Callable[..., Any], self: Any, input_: Any) -> Any:
    """Around `GroupCoordinator.all_reduce`: out of place through our communicator, as on a GPU."""
    adapter = self.ca_comm
    if isinstance(adapter, Sm120AllReduce) and input_.is_cpu and adapter.should_custom_ar(input_):
        return adapter.custom_all_reduce(input_)
    return original(self, input_)


def prepare_after_warmup(result: Any, self: Any) -> None:
    """After `BaseRunner.warmup`, whose steps SGLang skips on a CPU: plan, with prefill, for nothing is captured."""
    if self.device != "cuda":
        prepare(self, rows.of_eager(self))


PART = Part(
    "cpu_all_reduce",
    (
        Binding(
            Target(
                "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
                "(self, input_)",
                "sends CPU tensors to our communicator instead of gloo",
            ),
            HookType.AROUND,
            all_reduce,
        ),
        Binding(
            Target(
                "sglang.srt.model_executor.runner.base_runner.BaseRunner.warmup",
                "(self)",
                "plans the sums of CPU tensors before the first batch",
            ),
            HookType.AFTER,
            prepare_after_warmup,
        ),
    ),
)
