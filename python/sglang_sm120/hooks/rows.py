"""The row counts of a model's batches as SGLang will issue them, which are what a plan decides about."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.runtime_context import (
    get_schedule,
    get_spec,
    max_speculative_num_draft_tokens,
)

from sglang_sm120.comm.plan import captured_rows
from sglang_sm120.comm.start import rows_up_to

logger = logging.getLogger("sglang_sm120")


def of_graphs(runner: Any) -> tuple[int, ...]:
    """Rows of every batch that a model's graphs are captured for, ascending; empty where none is captured.

    Batch sizes times tokens per request: those of this runner, and with speculation those of the drafter's steps and,
    where the draft length adapts, of every length.
    """
    widest = runner._widest_decode_rows()
    if widest is None:
        return ()
    model = runner.model_runner
    try:
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import (
            get_batch_sizes_to_capture,
        )

        width = model.decode_num_tokens_per_req()
        sizes, _ = get_batch_sizes_to_capture(
            model, width, gathered_buffer_required=any(model.decode_graph_gather_requirements())
        )
        widths = {width, *_drafted(model, width)}
    except (ImportError, AttributeError, TypeError) as error:
        # Another release says it elsewhere: the plan then rests on rows near the captured ones.
        logger.warning("sglang-sm120: the captured batch sizes are not known (%s)", error)
        return rows_up_to(widest)
    return captured_rows(sizes, sorted(widths))


def _drafted(model: Any, width: int) -> set[int]:
    """Tokens per request of the drafter's passes and of shorter verifications."""
    if not model.spec_algorithm.is_speculative():
        return set()
    spec = get_spec()
    if not spec.speculative_adaptive:
        return {1, spec.speculative_eagle_topk or 1}
    return set(range(1, (max_speculative_num_draft_tokens() or width) + 1))


def of_eager(runner: Any) -> tuple[int, ...]:
    """Rows to plan for where nothing is captured: powers of two up to the widest prefill."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    widest = chunk if chunk > 0 else schedule.max_prefill_tokens
    return rows_up_to(min(widest, runner.model_runner.max_total_num_tokens))
