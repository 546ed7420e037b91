"""The SGLang functions this platform replaces, each declared with the parameters it was written for.

Two moments: `install_launch_hooks` for what is decided in the launcher, `install_worker_hooks` for what runs in the
processes that hold a model. SGLang's own registry applies both; `check_installed` ends a worker that lacks one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_sm120.sim import attention, kernels, kv_kernels, launch, sampling, spec_tree

ATTENTION_BACKEND = "triton"
_SOURCE = HookSource(plugin_name="sm120_sim", dist_name="sglang-sm120")
# Importing them fills launch's table.
_KERNEL_MODULES = (kernels, kv_kernels)


class PlatformError(RuntimeError):
    """The installed SGLang is not one this platform can replace functions of."""


@dataclass(frozen=True)
class Target:
    """A function of SGLang that is replaced or wrapped.

    Attributes:
        path: Dotted path.
        hook: Our function.
        kind: How the registry applies it.
        parameters: The parameters ours relies on; each must still exist.
    """

    path: str
    hook: Callable[..., Any]
    kind: HookType
    parameters: tuple[str, ...]

    def mismatch(self) -> str | None:
        """One sentence on how the installed SGLang differs from the declaration; None if it does not."""
        module_name, _, name = self.path.rpartition(".")
        try:
            function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            return f"SGLang's function {self.path} does not exist ({error})"
        found = inspect.signature(inspect.unwrap(function)).parameters
        missing = [name for name in self.parameters if name not in found]
        if missing:
            return f"SGLang's function {self.path} lost its parameters {', '.join(missing)}"
        return None


def _choose_attention_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's own choices for a CPU need its CPU kernel library or cannot verify drafts."""
    # Not at the top: this module is imported while SGLang's utilities still are.
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    if resolving_view(server_args).attention_backend is None:
        declare_resolution(server_args, "sm120_sim", attention_backend=ATTENTION_BACKEND)
    previous(server_args)


def _keep_overlap_schedule(server_args: object) -> None:
    """SGLang turns overlap off for speculation on CPU; nothing here needs that."""


def _decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    **options: Any,
) -> None:
    _refuse_options("decode attention", options, k_scale, v_scale)
    attention.decode_attention(q, k_buffer, v_buffer, o, kv_indptr, kv_indices, sm_scale, logit_cap)


def _extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    **options: Any,
) -> None:
    _refuse_options("extend attention", options, k_scale, v_scale)
    attention.extend_attention(
        q_extend,
        k_extend,
        v_extend,
        o_extend,
        k_buffer,
        v_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        custom_mask,
        is_causal,
        mask_indptr,
        sm_scale or q_extend.shape[-1] ** -0.5,
        logit_cap,
        skip_prefix_custom_mask,
    )


# Options that change the result; whatever else arrives only shapes a GPU launch.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sinks": (None,),
    "xai_temperature_len": (-1, 0, None),
    "score_mod": (None,),
    "sliding_window_size": (-1, None),
    "window_kv_offsets": (None,),
    "lse_extend": (None,),
    "skip_prefix": (False,),
    "skip_extend": (False,),
}


def _refuse_options(what: str, options: dict[str, Any], k_scale: float, v_scale: float) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in options and options[name] not in neutral:
            raise PlatformError(f"the platform sm120_sim's {what} does not support {name}")
    if k_scale not in (1.0, None) or v_scale not in (1.0, None):
        raise PlatformError(f"the platform sm120_sim's {what} does not support scaled KV pools")


def _build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    if int(tree_mask_mode) > 1:
        raise PlatformError("the platform sm120_sim does not pack tree masks into bits")
    spec_tree.build_tree(
        parent_list,
        top_scores_index,
        seq_lens,
        tree_mask,
        positions,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        topk,
        spec_steps,
        num_verify_tokens,
        full_mask=int(tree_mask_mode) == 0,
    )


def _verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spec_tree.verify_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        target_predict,
    )
    return predicts, accept_index, accept_token_num


def _rope_without_cpu_kernels(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang's CPU variant of the rotary embedding needs its CPU kernel library; take the generic one."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["device"] = None
    return original(*bound.args, **bound.kwargs)


LAUNCH_TARGETS: tuple[Target, ...] = (
    Target(
        "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
        _keep_overlap_schedule,
        HookType.REPLACE,
        ("server_args",),
    ),
)

WORKER_TARGETS: tuple[Target, ...] = (
    Target(
        "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd",
        _decode_attention_fwd,
        HookType.REPLACE,
        tuple(inspect.signature(_decode_attention_fwd).parameters)[:-1],
    ),
    Target(
        "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd",
        _extend_attention_fwd,
        HookType.REPLACE,
        tuple(inspect.signature(_extend_attention_fwd).parameters)[:-1],
    ),
    Target(
        "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
        _build_tree,
        HookType.REPLACE,
        tuple(inspect.signature(_build_tree).parameters),
    ),
    Target(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        _verify_tree_greedy,
        HookType.REPLACE,
        tuple(inspect.signature(_verify_tree_greedy).parameters),
    ),
    Target(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        _rope_without_cpu_kernels,
        HookType.AROUND,
        ("device",),
    ),
)

# Names that SGLang leaves None where the platform has no kernel, and the modules that hold them. The registry cannot
# wrap None.
EMPTY_NAMES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("sglang.kernels.ops.sampling.renorm", "top_k_renorm_prob", sampling.top_k_renorm),
    ("sglang.kernels.ops.sampling.renorm", "top_p_renorm_prob", sampling.top_p_renorm),
    (
        "sglang.kernels.ops.speculative.verify_sampling",
        "tree_speculative_sampling_target_only",
        sampling.sample_tree,
    ),
)
_SAMPLER = "sglang.srt.speculative.eagle_utils"


def install_launch_hooks() -> None:
    """Register what the launcher decides; SGLang applies it when it loads its plugins."""
    register_resolution_hook("handle_cpu_backends")(_choose_attention_backend)
    _register(LAUNCH_TARGETS)


def install_worker_hooks() -> None:
    """Route Triton launches to torch and replace the worker's functions."""
    launch.install()
    _register(WORKER_TARGETS)
    # SGLang loads its plugins before it imports the model runner, whose import leads here.
    HookRegistry.apply_hooks()


def fill_empty_names() -> None:
    """Give SGLang's empty names our functions, where they are defined and where EAGLE's sampler imported them.

    Raises:
        PlatformError: A name is gone.
    """
    for module_name, name, function in EMPTY_NAMES:
        for module in (module_name, _SAMPLER):
            holder = importlib.import_module(module)
            if not hasattr(holder, name):
                raise PlatformError(
                    f"the platform sm120_sim does not fit the installed SGLang: {module} has no {name}"
                )
            # As it is now: a plugin may have wrapped it.
            setattr(holder, name, getattr(sampling, function.__name__, function))


def mismatches() -> list[str]:
    """One sentence for each declared target the installed SGLang does not have as declared."""
    targets = [target.mismatch() for target in (*LAUNCH_TARGETS, *WORKER_TARGETS)]
    return [text for text in (*targets, *map(launch.mismatch, launch.declared())) if text]


def check_installed() -> None:
    """Check in a worker, before it serves, that every declared function exists and was replaced.

    Raises:
        PlatformError: One is missing, changed, or still SGLang's own.
    """
    problems = mismatches()
    for target in WORKER_TARGETS:
        module_name, _, name = target.path.rpartition(".")
        function = getattr(importlib.import_module(module_name), name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            problems.append(f"SGLang did not apply the replacement of {target.path}")
    if problems:
        raise PlatformError(
            "the platform sm120_sim does not fit the installed SGLang: " + "; ".join(problems)
        )


def _register(targets: tuple[Target, ...]) -> None:
    for target in targets:
        if (target.kind, target.hook, _SOURCE) not in HookRegistry._hooks.get(target.path, []):
            HookRegistry.register(target.path, target.hook, target.kind, source=_SOURCE)
