"""From the command line to the workers: flags, checks before anything is spawned, and activation of the deep hooks.

Phase 1 runs in every process and touches only SGLang's argument code. Phase 2 runs in scheduler processes, when
SGLang publishes their configuration: before NCCL, before any group of ranks, before the model.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any, NoReturn

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import _OVERRIDABLE_HOOKS, register_resolution_hook
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_device, get_observability, get_parallel

from sglang_sm120 import options as opt
from sglang_sm120.hooks import contract
from sglang_sm120.hooks.contract import Binding, Part, Seam, Target
from sglang_sm120.options import OptionError, Options

logger = logging.getLogger("sglang_sm120")

BUILT_IN_STEP = "handle_sm120_fusion"

_activated = False


def options_of(server_args: Any) -> Options:
    """The options a launch resolved, in the launcher and in any process that received its arguments.

    Raises:
        OptionError: the environment has a wrong value (only without a command line, which was checked).
    """
    attached = getattr(server_args, "_sm120", None)
    if attached is not None:
        return opt.from_dict(attached)
    return _carried(server_args) if PLUGIN_ARGS.offered else opt.from_environment()


def _carried(server_args: Any) -> Options:
    # What SGLang itself carries for us where it has the seam; single variables fill in the rest.
    given = dict(server_args.plugin_args or {})
    given[opt.BUILT_IN_ENABLED] = getattr(server_args, opt.BUILT_IN_ENABLED, False)
    return opt.from_namespace(argparse.Namespace(**given))


def attach(server_args: Any, options: Options) -> None:
    """Let the options travel with the pickled arguments, and in the environment where those are rebuilt."""
    server_args._sm120 = opt.to_dict(options)
    opt.hand_down(options)


def parts_for(options: Options, device: str | None) -> list[str]:
    """Names of the parts that these options need on this device."""
    parts = ["census"] if options.enabled or options.stats else []
    if options.enabled:
        parts += ["all_reduce", "fusion", "failures"]
        if options.nccl == "compact" and device == "cuda":
            parts += ["nccl"]
        parts += ["cpu_seams" if device == "cpu" else "seams"]
        if options.prefetch == "auto" and device == "cuda":
            parts += ["prefetch"]
        if options.verify == "auto":
            parts += ["adaptive"]
    if parts and device == "cpu":
        parts += ["gloo_census"]
        if options.enabled:
            parts += ["cpu_all_reduce"]
    return parts


def register_flags() -> None:
    """Declare the flags where SGLang lets plugins do so; it then carries their values."""
    register: Any = contract.lookup(PLUGIN_ARGS.path)
    register(opt.fill_group, plugin_name="sm120")


PLUGIN_ARGS = Seam("sglang.srt.plugins.plugin_args.register_plugin_args", register_flags)


def add_cli_args(result: Any, parser: Any) -> None:
    """After `ServerArgs.add_cli_args`."""
    opt.add_arguments(parser)


def from_cli_args(result: Any, cls: type, args: Any) -> Any:
    """After `ServerArgs.from_cli_args`; a wrong value ends the launch with its sentence."""
    try:
        options = opt.from_namespace(args)
    except OptionError as error:
        raise SystemExit(f"sglang-sm120: {error}") from None
    attach(result, options)
    result._sm120_from_command_line = True
    return result


def check_contract(server_args: Any, previous: Any) -> None:
    """Resolution step before the model is looked at: every hook target must be the one we know."""
    previous(server_args)
    try:
        attached = getattr(server_args, "_sm120", None)
        # `Engine(...)` has no command line, and what an earlier engine handed to its children is not its own.
        unattached = _carried if PLUGIN_ARGS.offered else lambda _: opt.from_variables()
        options = unattached(server_args) if attached is None else opt.from_dict(attached)
        attach(server_args, options)
        parts = parts_for(options, resolving_view(server_args).device)
        if options.enabled:
            contract.require(["launch", *parts])
            opt.end_quickly()
    except (OptionError, contract.HookRefused) as error:
        _refuse_launch(server_args, error)


def check_server(server_args: Any, previous: Any) -> None:
    """Resolution step after SGLang's own validation: refuse or settle what contradicts our part."""
    previous(server_args)
    options = options_of(server_args)
    if options.shared_gpu:
        _share_gpu(server_args)
    if not options.enabled:
        return
    view = resolving_view(server_args)
    asked = getattr(server_args, "_raw_input", {})
    try:
        options.check_world(view.tp_size)
        for field, flag in (
            ("disable_custom_all_reduce", "--disable-custom-all-reduce"),
            ("flashinfer_allreduce_fusion_backend", "--flashinfer-allreduce-fusion-backend"),
            ("enable_mscclpp", "--enable-mscclpp"),
            ("enable_torch_symm_mem", "--enable-torch-symm-mem"),
        ):
            if asked.get(field):
                raise OptionError(
                    f"--enable-sm120-fusion and {flag} want the same sums; give only one of them"
                )
        if view.disable_custom_all_reduce and view.tp_size > 1:
            _say_sums_stay(options)
    except OptionError as error:
        _refuse_launch(server_args, error)
    if options.nccl == "compact" and view.device == "cuda":
        _order_nccl(server_args, options, view)
    if view.flashinfer_allreduce_fusion_backend is not None:
        # SGLang switched it on by itself; two fusions of one sum are one too many.
        declare_resolution(server_args, "sglang_sm120", flashinfer_allreduce_fusion_backend=None)
    if view.tp_size == 1:
        logger.warning(
            "sglang-sm120: one rank has nothing to sum; --enable-sm120-fusion has no effect"
        )


def _say_sums_stay(options: Options) -> None:
    """SGLang makes no custom all-reduce, so no group of ours either: `--enable-deterministic-inference` does that."""
    text = (
        "SGLang has switched custom all-reduce off, as it does for --enable-deterministic-inference"
    )
    if options.backend not in ("auto", "nccl"):
        raise OptionError(f"{text}; --sm120-backend {options.backend} cannot serve then")
    logger.warning(
        "sglang-sm120: %s: every sum stays with SGLang and NCCL; what makes no sums (NCCL's settings, draft lengths) is on",
        text,
    )


def _share_gpu(server_args: Any) -> None:
    """Before ranks are spawned: all of them get device 0."""
    from sglang_sm120.hooks import shared_gpu

    try:
        shared_gpu.install_once()
    except contract.HookRefused as error:
        _refuse_launch(server_args, error)


def _order_nccl(server_args: Any, options: Options, view: Any) -> None:
    from sglang_sm120.hooks import nccl
    from sglang_sm120.nccl.config import NcclConfigError
    from sglang_sm120.nccl.environment import EnvironmentRefused

    sub_groups = max(view.ep_size, view.dp_size, getattr(view, "attn_dp_size", 1) or 1) > 1
    try:
        effective = nccl.check_environment(options, view.tp_size, sub_groups)
    except (EnvironmentRefused, NcclConfigError) as error:
        _refuse_launch(server_args, error)
    nccl.log_environment(effective)
    # Spawned ranks inherit the environment; ranks that some other launcher starts get it from the arguments.
    server_args._sm120_nccl = {e.name: e.value for e in effective if e.origin != "default"}


def _refuse_launch(server_args: Any, error: Exception) -> NoReturn:
    text = str(error) if str(error).startswith("sglang-sm120: ") else f"sglang-sm120: {error}"
    if _from_command_line(server_args):
        raise SystemExit(text) from None
    raise type(error)(text) from None


def _from_command_line(server_args: Any) -> bool:
    if PLUGIN_ARGS.offered:
        return not str(server_args.launch_command or "Engine(").startswith("Engine(")
    return getattr(server_args, "_sm120_from_command_line", False)


def on_publish(result: Any, server_args: Any, *, role: str, **_: Any) -> None:
    """After `runtime_context.publish`: in a scheduler, install the deep hooks once."""
    global _activated
    if role != "scheduler" or _activated:
        return
    options = options_of(server_args)
    device = get_device().device
    if options.shared_gpu:
        from sglang_sm120.hooks import shared_gpu

        shared_gpu.fit_tuner()
        shared_gpu.print_stacks_when_asked()
    parts = parts_for(options, device)
    if not parts:
        return
    _activated = True
    from sglang_sm120.hooks import session as sessions

    try:
        for name in parts:
            contract.install(contract.load_part(name))
    except contract.HookRefused as refused:
        sessions.refuse(str(refused))
    tp_rank = get_parallel().tp_rank
    sessions.start(options, device, tp_rank)
    from sglang_sm120.hooks import census

    census.start_reporting(options.stats, tp_rank, get_observability().enable_metrics)


def register_checks() -> None:
    """Add the two resolution steps; SGLang has an official list of steps that a plugin may wrap."""
    register_resolution_hook("handle_hardware_runtime_validation")(check_contract)
    register_resolution_hook("handle_other_validations")(check_server)
    if BUILT_IN_STEP in _OVERRIDABLE_HOOKS:
        # A SGLang with a backend of its own for the flag; ours has other limits, checked above.
        register_resolution_hook(BUILT_IN_STEP)(lambda server_args, previous: None)


PART = Part(
    "launch",
    (
        Binding(
            Target(
                "sglang.srt.server_args.ServerArgs.add_cli_args",
                "(parser)",
                "adds the flags to --help and the parser",
            ),
            HookType.AFTER,
            add_cli_args,
            PLUGIN_ARGS,
        ),
        Binding(
            Target(
                "sglang.srt.server_args.ServerArgs.from_cli_args",
                "(cls, args)",
                "checks the flags and attaches them to the server's arguments",
            ),
            HookType.AFTER,
            from_cli_args,
            PLUGIN_ARGS,
        ),
        Binding(
            Target(
                "sglang.srt.runtime_context.publish",
                "(server_args, *, role, hf_config=..., ranks=...)",
                "installs the other parts in scheduler processes",
            ),
            HookType.AFTER,
            on_publish,
        ),
    ),
)
