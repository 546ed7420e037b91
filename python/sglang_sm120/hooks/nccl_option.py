"""Sizes of NCCL's communicators where SGLang takes them by itself (`--nccl-comm-config`): no hook is needed there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.runtime_context import get_context, get_exec, get_parallel, get_server_args

from sglang_sm120.hooks.contract import Seam, lookup
from sglang_sm120.nccl.config import MAX_CTAS, ConfigValue, NcclConfigError, config_for
from sglang_sm120.options import Options

Settings = dict[str, dict[str, ConfigValue]]
MODULE = "sglang.srt.utils.nccl_comm_config"
# Every communicator has a name of SGLang's own there.
UNSAID = frozenset({"comm_name"})


def sizes(
    overrides: Mapping[str, Mapping[str, ConfigValue]],
    *,
    groups: frozenset[str],
    fields: frozenset[str],
    suffix: str,
    world: int,
    widest_bytes: int | None,
    pcie_only: bool,
) -> Settings:
    """What `config_for` gives each group's two communicators, in the form of SGLang's option.

    Args:
        overrides: settings of `--sm120-nccl-config` by group.
        groups, fields: names that SGLang's option takes.
        suffix: what SGLang puts behind a group's name for the communicator of CUDA graphs.
        world: ranks of the tensor-parallel group; other groups may be as small as two.
        widest_bytes, pcie_only: as `config_for` takes them.
    """
    made: Settings = {}
    for group in sorted(groups):
        for captured in (False, True):
            wanted = config_for(
                group,
                captured=captured,
                widest_bytes=widest_bytes,
                world=world if group == "tp" else 2,
                overrides=overrides,
                pcie_only=pcie_only,
            )
            # A communicator without a limit must not inherit the one of its eager sibling.
            limits = {"max_ctas": MAX_CTAS} if captured else {}
            kept = {k: v for k, v in wanted.items() if k in fields}
            if limits or kept:
                made[group + suffix if captured else group] = {**limits, **kept}
    return made


def merged(ours: Settings, users: Mapping[str, Mapping[str, ConfigValue]]) -> Settings:
    """The user's own `--nccl-comm-config` wherever it says something; ours elsewhere."""
    out = {group: dict(given) for group, given in ours.items()}
    # In SGLang's order: what is said for all groups first, what is said for one communicator last.
    for name in sorted(users, key=lambda n: (not n.startswith("*"), "/" in n)):
        asked, only_graph, _ = name.partition("/")
        for group, settings in out.items():
            base, in_graph, _ = group.partition("/")
            if asked in ("*", base) and (in_graph or not only_graph):
                settings.update(users[name])
        out.setdefault(name, dict(users[name]))
    for settings in out.values():
        low, high = settings.get("min_ctas"), settings.get("max_ctas")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            settings["max_ctas"] = low  # the user's lower bound against our limit
    return out


def check_carried(overrides: Mapping[str, Mapping[str, ConfigValue]]) -> None:
    """Refuse settings of `--sm120-nccl-config` that SGLang's option does not carry.

    Raises:
        NcclConfigError: there is one.
    """
    fields = frozenset(lookup(f"{MODULE}.NCCL_COMM_FIELDS"))
    for group, given in overrides.items():
        unknown = sorted(set(given) - fields - UNSAID)
        if unknown:
            raise NcclConfigError(
                f"NCCL settings of group {group!r}: SGLang's --nccl-comm-config does not carry "
                f"{', '.join(unknown)}; leave it out of --sm120-nccl-config"
            )


def said(options: Options, server_args: Any) -> Settings:
    """The value for SGLang's option: our sizes, with what the user gave on top."""
    from sglang_sm120.hooks import nccl

    widest = nccl.widest_bytes(server_args)
    ours = sizes(
        nccl.overrides_of(options),
        groups=lookup(f"{MODULE}.NCCL_COMM_GROUPS"),
        fields=frozenset(lookup(f"{MODULE}.NCCL_COMM_FIELDS")),
        suffix=lookup(f"{MODULE}.GRAPH_SUFFIX"),
        world=get_parallel().tp_size,
        widest_bytes=max(widest) if widest else None,
        pcie_only=nccl.machine().pcie_only,
    )
    return merged(ours, get_exec().comm.nccl_comm_config or {})


def say() -> None:
    """In a scheduler, before it makes its first group: put our sizes into the published configuration."""
    from sglang_sm120.hooks.launch import options_of

    server_args = get_server_args()
    get_context().override(
        "sglang_sm120", nccl_comm_config=said(options_of(server_args), server_args)
    )


OPTION = Seam("sglang.srt.distributed.parallel_state.set_nccl_comm_config", say)
