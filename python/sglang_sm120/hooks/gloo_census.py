"""Count the all-reduces that torch really runs on CPU tensors, so that "none uses gloo" is seen, not inferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks.census import CENSUS, Sum
from sglang_sm120.hooks.contract import Binding, Part, Target


def count_gloo(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `torch.distributed.all_reduce`."""
    if tensor.is_cpu:
        CENSUS.note(Sum.GLOO)
    return original(tensor, *args, **kwargs)


PART = Part(
    "gloo_census",
    (
        Binding(
            Target(
                "torch.distributed.all_reduce",
                "(tensor, op=..., group=..., async_op=...)",
                "counts the sums that gloo does",
            ),
            HookType.AROUND,
            count_gloo,
        ),
    ),
)
