"""Small waits between the graphs of a speculative iteration.

Sampled verification ends with three small broadcasts from rank 0 (tokens, indices, counts). One sum through our
communicator carries all three: rank 0 contributes the values, the others zeros. An attention backend that needs
sequence lengths on the host makes it wait for each pass; the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_sm120.comm.share import share_from_rank_0
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.contract import Binding, Part, Target

logger = logging.getLogger("sglang_sm120")

# What the sampler writes and SGLang broadcasts right after, in the order of its parameters.
RESULTS = ("predicts", "accept_index", "accept_token_num")


class Shared:
    """Tensors that all ranks have already, until SGLang asks for their broadcast."""

    def __init__(self) -> None:
        self._group: Any = None
        self._tensors: list[torch.Tensor] = []

    def send(self, group: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Give every rank rank 0's values in one sum; False if the communicator does not take it."""
        self._tensors = []
        adapter = getattr(group, "ca_comm", None)
        if group.world_size == 1 or not isinstance(adapter, Sm120AllReduce) or adapter.disabled:
            return False
        if not share_from_rank_0(adapter.communicator, tensors):
            return False
        self._group, self._tensors = group, list(tensors)
        return True

    def holds(self, group: Any, tensor: torch.Tensor) -> bool:
        """Whether this broadcast was done already; each tensor counts once."""
        if group is not self._group:
            return False
        before = len(self._tensors)
        self._tensors = [t for t in self._tensors if t is not tensor]
        return len(self._tensors) < before


SHARED = Shared()


def share_results(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the sampler of draft trees: afterwards every rank has rank 0's results."""
    result = original(*args, **kwargs)
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    # INT8 on the wire rounds what a sum carries, and these are token numbers.
    exact = sessions.current().options.wire != "int8"
    if exact and (algorithm.is_eagle() or algorithm.is_ngram()):
        tensors = [kwargs[n] if n in kwargs else args[i] for i, n in enumerate(RESULTS)]
        parallel = get_parallel()
        SHARED.send(
            parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group, tensors
        )
    return result


def skip_done(original: Callable[..., Any], self: Any, input_: torch.Tensor, src: int = 0) -> Any:
    """Around `GroupCoordinator.broadcast`: nothing is left to do for what `share_results` sent."""
    if src == 0 and SHARED.holds(self, input_):
        return input_
    return original(self, input_, src)


def say_who_waits(result: bool, attn_backends: Sequence[Any]) -> None:
    """After `decide_needs_cpu_seq_lens`: name the attention backend that makes the host wait."""
    if not result or sessions.current().tp_rank != 0:
        return
    named = sorted(
        {
            type(b).__name__
            for b in attn_backends
            if b is not None and getattr(b, "needs_cpu_seq_lens", True)
        }
    )
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    if not named or not algorithm.is_eagle():
        return
    asked = getattr(get_server_args(), "_raw_input", {}).get("attention_backend")
    whose = f"--attention-backend {asked}" if asked else "SGLang's choice of attention backend"
    logger.info(
        "sglang-sm120: %s (%s) makes the host wait for each verify pass before it prepares the next; "
        "--attention-backend triton does not, compare both",
        whose,
        ", ".join(named),
    )


def sampler(path: str) -> Binding:
    """The hook around a sampler of draft trees: SGLang's, or the CPU platform's with the same parameters."""
    return Binding(
        Target(
            path,
            "(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, "
            "retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, "
            "draft_probs, threshold_single=..., threshold_acc=..., deterministic=...)",
            "sends the results of sampled verification to all ranks in one sum",
        ),
        HookType.AROUND,
        share_results,
    )


BROADCAST = Binding(
    Target(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast",
        "(self, input_, src=...)",
        "leaves out the broadcasts that one sum has replaced",
    ),
    HookType.AROUND,
    skip_done,
)

PART = Part(
    "seams",
    (
        sampler("sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only"),
        BROADCAST,
        Binding(
            Target(
                "sglang.srt.managers.overlap_utils.decide_needs_cpu_seq_lens",
                "(attn_backends)",
                "says which attention backend makes the host wait",
            ),
            HookType.AFTER,
            say_who_waits,
        ),
    ),
)
