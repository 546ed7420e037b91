"""The packed broadcast on the CPU platform, whose sampler is this package's own."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_sm120.hooks.contract import Binding, Part, Target
from sglang_sm120.hooks.seams import BROADCAST, share_results

PART = Part(
    "cpu_seams",
    (
        Binding(
            Target(
                "sglang_sm120.sim.sampling.sample_tree",
                "(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, "
                "retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, "
                "draft_probs, threshold_single=..., threshold_acc=..., deterministic=...)",
                "sends the results of sampled verification to all ranks in one sum",
            ),
            HookType.AROUND,
            share_results,
        ),
        BROADCAST,
    ),
)
