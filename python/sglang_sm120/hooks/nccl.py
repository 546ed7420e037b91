"""Compact NCCL: settings per communicator by its group's name, and a checked environment.

Only the groups that SGLang makes through `init_model_parallel_group` are touched. Its extra communicators for KV
transfers set a CTA policy of their own and stay as they are.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import torch
from rich.console import Console
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators.pynccl_wrapper import (
    NCCL_CONFIG_UNDEF_INT,
    ncclConfig_t,
)
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, max_speculative_num_draft_tokens

from sglang_sm120.comm import plan_cache
from sglang_sm120.fabric.source import Live
from sglang_sm120.fabric.topology import Topology, discover
from sglang_sm120.fabric.versions import installed, nccl_build, nccl_library
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.all_reduce import current_group
from sglang_sm120.hooks.contract import Binding, Part, Target
from sglang_sm120.hooks.nccl_option import OPTION, check_carried
from sglang_sm120.nccl.config import ConfigValue, config_for
from sglang_sm120.nccl.environment import Effective, apply, check, settings, table
from sglang_sm120.options import Options

logger = logging.getLogger("sglang_sm120")

BF16_BYTES = 2  # of an activation; wider dtypes are not served at speed anyway
# Groups that never gather logits: those of the experts.
SUMS_ONLY = frozenset({"moe_tp", "moe_ep", "shared_experts_tp"})
# Our field -> field of ncclConfig_t.
_STRUCT_FIELDS = {
    "min_ctas": "minCTAs",
    "max_ctas": "maxCTAs",
    "cga_cluster_size": "cgaClusterSize",
    "comm_name": "commName",
    "graph_usage_mode": "graphUsageMode",
}


@lru_cache(maxsize=1)
def machine() -> Topology:
    """This machine's GPUs and how they are linked."""
    return discover(Live())


def overrides_of(options: Options) -> dict[str, dict[str, ConfigValue]]:
    """The user's settings by group; {} when none were given."""
    return msgspec.json.decode(options.nccl_config or "{}")


def torch_options(original: Callable[..., Any], group_name: str | None = None) -> Any:
    """Around `get_torch_distributed_pg_options`: a fresh options object for an NCCL group, else SGLang's answer."""
    given = original(group_name)
    session = sessions.current()
    if given is not None or session.device != "cuda" or not torch.distributed.is_nccl_available():
        return given
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    made = torch.distributed.ProcessGroupNCCL.Options()
    wanted = config_for(
        group_name or "world",
        overrides=overrides_of(session.options),
        nccl_version=version,
        pcie_only=machine().pcie_only,
    )
    for field, value in wanted.items():
        if hasattr(made.config, field):
            setattr(made.config, field, value)
    # torch warns when the options' timeout differs from the one SGLang passes beside them.
    if group_name and parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT is not None:
        made._timeout = parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT
    return made


def init_rank(
    original: Callable[..., Any], self: Any, world_size: int, unique_id: Any, rank: int
) -> Any:
    """Around `NCCLLibrary.ncclCommInitRank`: the call with a config, for a group that has a name."""
    if not current_group():
        return original(self, world_size, unique_id, rank)
    # The hook on the other method fills the config in.
    return self.ncclCommInitRankConfig(world_size, unique_id, rank, ncclConfig_t.create())


def init_rank_config(
    original: Callable[..., Any],
    self: Any,
    world_size: int,
    unique_id: Any,
    rank: int,
    config: Any = None,
) -> Any:
    """Around `NCCLLibrary.ncclCommInitRankConfig`: set what the caller left open."""
    name = current_group()
    own_policy = config is not None and config.CTAPolicy != NCCL_CONFIG_UNDEF_INT
    if not name or own_policy:
        return original(self, world_size, unique_id, rank, config)
    config = ncclConfig_t.create() if config is None else config
    wanted = config_for(
        name,
        captured=True,
        widest_bytes=_widest_of(name),
        world=world_size,
        overrides=overrides_of(sessions.current().options),
        nccl_version=self.ncclGetVersion(),
    )
    for field, value in wanted.items():
        struct_field = _STRUCT_FIELDS[field]
        if isinstance(value, str):
            if getattr(config, struct_field) is None:
                setattr(config, struct_field, value.encode())
        elif getattr(config, struct_field) == NCCL_CONFIG_UNDEF_INT:
            setattr(config, struct_field, value)
    return original(self, world_size, unique_id, rank, config)


def check_environment(options: Options, world: int, sub_groups: bool) -> list[Effective]:
    """Put NCCL's environment in order; the launcher calls it before it spawns ranks, which inherit the result.

    Args:
        world: ranks of the tensor-parallel group.
        sub_groups: whether the server makes groups smaller than that.

    Raises:
        EnvironmentRefused: a variable cannot work; the text lists all of them.
        NcclConfigError: `--sm120-nccl-config` has a setting that NCCL does not take.
    """
    overrides = overrides_of(options)
    for group in overrides:
        config_for("tp" if group == "*" else group, overrides=overrides)
    if OPTION.offered:
        check_carried(overrides)
    library = nccl_library()
    version, cuda = nccl_build(library) if library else ("", "")
    topology = machine()
    findings = check(
        os.environ,
        nccl_version=version,
        nccl_cuda=cuda,
        world=world,
        sub_groups=sub_groups,
        sm120=any(gpu.cc.startswith("12.") for gpu in topology.gpus),
    )
    for finding in findings:
        logger.warning("sglang-sm120: %s", finding.sentence())
    # Across root ports NCCL uses peer-to-peer only when told to: told where a kept probe has proved every edge.
    verified = plan_cache.verified_p2p(
        plan_cache.folder(options.plan_cache),
        [gpu.uuid for gpu in topology.gpus],
        installed(topology.driver),
        platform.release(),
    )
    additions = settings(os.environ, verified_p2p=verified, pcie_only=topology.pcie_only)
    return apply(os.environ, additions, findings)


def log_environment(effective: list[Effective]) -> None:
    """The variables in force, as a table in the log."""
    console = Console(width=120, no_color=True)
    with console.capture() as shown:
        console.print(table(effective))
    logger.info("\n%s", shown.get().rstrip())


def restore_environment(*args: Any, **kwargs: Any) -> None:
    """Before `init_parallel_runtime`: NCCL reads its environment once, and a worker may not have inherited it.

    Also the moment to learn what the communicators for CUDA graphs will carry at most.
    """
    server_args = kwargs["server_args"]
    handed_down: Mapping[str, str] = getattr(server_args, "_sm120_nccl", {})
    for name, value in handed_down.items():
        os.environ[name] = value
    sessions.current().widest_bytes = widest_bytes(server_args)


def _widest_of(group: str) -> int | None:
    """Bytes of a group's widest captured collective; the groups of the head also gather logits in graphs."""
    widest = sessions.current().widest_bytes
    if widest is None:
        return None
    activations, logits = widest
    return activations if group in SUMS_ONLY else max(activations, logits)


def widest_bytes(server_args: Any) -> tuple[int, int] | None:
    """Bytes of the (activations, logits) of the widest batch that graphs are captured for; None if not known yet."""
    try:
        sizes = get_exec().graph.cuda_graph_config.decode.bs
        model = ModelConfig.from_server_args(server_args)
        hidden, vocabulary = model.hidden_size, model.vocab_size
        tokens = max_speculative_num_draft_tokens() or 1
    except Exception as error:  # a model whose configuration cannot be read now is read again, and judged, by SGLang
        logger.debug("sglang-sm120: the widest batch is not known: %s", error)
        return None
    if not sizes:
        return None
    rows = max(sizes) * tokens
    return rows * hidden * BF16_BYTES, rows * vocabulary * BF16_BYTES


PART = Part(
    "nccl",
    (
        Binding(
            Target(
                "sglang.srt.distributed.parallel_state.get_torch_distributed_pg_options",
                "(group_name=...)",
                "sizes PyTorch's NCCL communicator of each group",
            ),
            HookType.AROUND,
            torch_options,
            OPTION,
        ),
        Binding(
            Target(
                "sglang.srt.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.ncclCommInitRank",
                "(self, world_size, unique_id, rank)",
                "gives SGLang's own NCCL communicator a config",
            ),
            HookType.AROUND,
            init_rank,
            OPTION,
        ),
        Binding(
            Target(
                "sglang.srt.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.ncclCommInitRankConfig",
                "(self, world_size, unique_id, rank, config=...)",
                "sizes SGLang's own NCCL communicator of each group",
            ),
            HookType.AROUND,
            init_rank_config,
            OPTION,
        ),
        Binding(
            Target(
                "sglang.srt.distributed.bootstrap.init_parallel_runtime",
                "(*, server_args, device, dist_port)",
                "restores the checked NCCL environment before the first communicator",
            ),
            HookType.BEFORE,
            restore_environment,
        ),
    ),
)
