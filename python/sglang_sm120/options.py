"""Every option once: its flag, environment variable, type, default, choices, help and check.

This is the only file that reads environment variables. Everyone else gets an `Options` or a value of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

GROUP_TITLE = "SM120 fusion"
GROUP_HELP = (
    "sglang-sm120: fused collectives for GPUs that talk over PCIe only. "
    "Nothing changes without --enable-sm120-fusion."
)
# Where a newer SGLang with its own --enable-sm120-fusion keeps the flag.
BUILT_IN_ENABLED = "enable_sm120_fusion"
# Carries the launcher's resolved options to children that do not receive its ServerArgs object.
CONFIG_ENV = "SGLANG_SM120_CONFIG"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


class OptionError(ValueError):
    """A value that cannot be used; the text is one sentence that names the option and what it accepts."""


@dataclass(frozen=True)
class Option:
    """How one field of `Options` is spelled outside Python.

    Attributes:
        flag: command-line flag of the server.
        env: environment variable with the same meaning; the flag wins.
        help: one sentence for `--help` and the documentation.
        choices: the accepted texts; empty if `check` decides.
        metavar: placeholder in `--help`; the choices if empty.
        check: returns what is accepted (the end of "FLAG must be ...") when the value is wrong, else None.
    """

    flag: str
    env: str
    help: str
    choices: tuple[str, ...] = ()
    metavar: str = ""
    check: Callable[[Any], str | None] | None = None

    @property
    def placeholder(self) -> str:
        return self.metavar or "{" + ",".join(self.choices) + "}"


def _between(low: int, high: int, unit: str) -> Callable[[int], str | None]:
    def check(value: int) -> str | None:
        return None if low <= value <= high else f"from {low} to {high} {unit}"

    return check


def _islands_complaint(text: str) -> str | None:
    try:
        parse_islands(text)
    except OptionError:
        return (
            'auto or groups of ranks like "0,1;2,3" or "0-3;4-7" that name every rank from 0 once'
        )
    return None


def _nccl_config_complaint(text: str) -> str | None:
    if not text:
        return None
    try:
        msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError:
        return 'a JSON object like {"tp":{"max_ctas":4}}'
    return None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin's settings. Plain values only, because they are pickled into every worker."""

    enabled: Annotated[
        bool,
        Option(
            "--enable-sm120-fusion",
            "SGLANG_SM120_ENABLE",
            "Use the sglang-sm120 collectives: all-reduce, and all-reduce + residual add + RMSNorm in one kernel.",
        ),
    ] = False
    backend: Annotated[
        str,
        Option(
            "--sm120-backend",
            "SGLANG_SM120_BACKEND",
            "Whose kernels sum tensors over ranks; auto picks by device and measurement, any other is used or refused.",
            choices=("auto", "host", "native", "mailbox", "flashinfer", "nccl"),
        ),
    ] = "auto"
    islands: Annotated[
        str,
        Option(
            "--sm120-islands",
            "SGLANG_SM120_ISLANDS",
            "Ranks that share a PCIe switch or a socket; auto reads them from the machine.",
            metavar='{auto,"0,1;2,3"}',
            check=_islands_complaint,
        ),
    ] = "auto"
    wire: Annotated[
        str,
        Option(
            "--sm120-wire",
            "SGLANG_SM120_WIRE",
            "How activations travel: bf16 is lossless, int8 halves the bytes and changes results slightly.",
            choices=("bf16", "int8"),
        ),
    ] = "bf16"
    timeout_ms: Annotated[
        int,
        Option(
            "--sm120-timeout-ms",
            "SGLANG_SM120_TIMEOUT_MS",
            "Milliseconds a collective waits for a missing rank while serving, before every rank gets an error.",
            metavar="MS",
            check=_between(50, 600_000, "milliseconds"),
        ),
    ] = 20_000
    warmup_timeout_ms: Annotated[
        int,
        Option(
            "--sm120-warmup-timeout-ms",
            "SGLANG_SM120_WARMUP_TIMEOUT_MS",
            "The same bound until the server is ready: ranks compile, load and capture at different speeds.",
            metavar="MS",
            check=_between(50, 3_600_000, "milliseconds"),
        ),
    ] = 60_000
    capacity_mib: Annotated[
        int,
        Option(
            "--sm120-capacity-mib",
            "SGLANG_SM120_CAPACITY_MIB",
            "MiB of the largest message one rank contributes; larger ones stay with SGLang's own all-reduce.",
            metavar="MIB",
            check=_between(1, 1024, "MiB"),
        ),
    ] = 8
    nccl: Annotated[
        str,
        Option(
            "--sm120-nccl",
            "SGLANG_SM120_NCCL",
            "compact sizes NCCL's channels and buffers for PCIe and checks its environment; keep leaves it alone.",
            choices=("compact", "keep"),
        ),
    ] = "compact"
    nccl_config: Annotated[
        str,
        Option(
            "--sm120-nccl-config",
            "SGLANG_SM120_NCCL_CONFIG",
            'NCCL settings per group as JSON, for example {"tp":{"max_ctas":4},"*":{"max_ctas":8}}.',
            metavar="JSON",
            check=_nccl_config_complaint,
        ),
    ] = ""
    verify: Annotated[
        str,
        Option(
            "--sm120-verify",
            "SGLANG_SM120_VERIFY",
            "auto sets the draft length by measured cost and acceptance where SGLang's --speculative-adaptive is on; "
            "off leaves it to SGLang.",
            choices=("auto", "off"),
        ),
    ] = "auto"
    prefetch: Annotated[
        str,
        Option(
            "--sm120-prefetch",
            "SGLANG_SM120_PREFETCH",
            "auto brings the weights that are read next into L2 while a fused sum waits for its peers; off does not.",
            choices=("auto", "off"),
        ),
    ] = "auto"
    plan_cache: Annotated[
        str,
        Option(
            "--sm120-plan-cache",
            "SGLANG_SM120_PLAN_CACHE",
            "Folder that keeps measured plans between starts; off measures every time; empty means the user's cache folder.",
            metavar="PATH",
        ),
    ] = ""
    shared_gpu: Annotated[
        bool,
        Option(
            "--sm120-shared-gpu",
            "SGLANG_SM120_SHARED_GPU",
            "For development: every rank runs on GPU 0 (start MPS first; NCCL 2.30 or newer), "
            "and SGLang's own custom all-reduce is off, as on most PCIe machines.",
        ),
    ] = False
    stats: Annotated[
        str,
        Option(
            "--sm120-stats",
            "SGLANG_SM120_STATS",
            "Each rank writes its counters of collectives as JSON to PATH.rank<N>, about twice a second.",
            metavar="PATH",
        ),
    ] = ""

    @property
    def island_ranks(self) -> tuple[tuple[int, ...], ...] | None:
        """Islands as tuples of ranks, or None for auto."""
        return parse_islands(self.islands)

    def check_world(self, world: int) -> None:
        """Refuse islands that do not fit a group of `world` ranks.

        Raises:
            OptionError: with the ranks that are missing or too many.
        """
        islands = self.island_ranks
        if islands is None:
            return
        named = sorted(rank for island in islands for rank in island)
        if named != list(range(world)):
            raise OptionError(
                f'--sm120-islands "{self.islands}" names ranks 0 to {named[-1]}, '
                f"but the tensor-parallel group has ranks 0 to {world - 1}; name each of them once"
            )


@dataclass(frozen=True)
class Declared:
    """One option with what its field says: name, Python type and default."""

    name: str
    type: type
    default: Any
    option: Option

    def parse(self, value: Any, source: str) -> Any:
        """Turn a text into the field's type and check it.

        Args:
            value: text, or a value that has the type already.
            source: the flag or variable it came from, for the error.

        Raises:
            OptionError: the value is not accepted.
        """
        option = self.option
        if self.type is bool:
            if isinstance(value, bool):
                return value
            text = str(value).strip().lower()
            if text in _TRUE | _FALSE:
                return text in _TRUE
            raise OptionError(f'{source} must be 1 or 0, not "{value}"')
        if self.type is int:
            try:
                value = int(value)
            except (TypeError, ValueError):
                wanted = option.check(-1) if option.check else None
                raise OptionError(
                    f"{source} must be a whole number {wanted or ''}".rstrip() + f', not "{value}"'
                ) from None
        else:
            value = str(value).strip()
        if option.choices and value not in option.choices:
            raise OptionError(f'{source} must be one of {", ".join(option.choices)}, not "{value}"')
        wanted = option.check(value) if option.check else None
        if wanted:
            raise OptionError(f'{source} must be {wanted}, not "{value}"')
        return value


def _declare() -> tuple[Declared, ...]:
    hints = get_type_hints(Options, include_extras=True)
    declared = []
    for field in msgspec.structs.fields(Options):
        kind, option = get_args(hints[field.name])
        declared.append(Declared(field.name, kind, field.default, option))
    return tuple(declared)


def parse_islands(text: str) -> tuple[tuple[int, ...], ...] | None:
    """Read `"0,1;2,3"` or `"0-3;4-7"`; None for "auto".

    Raises:
        OptionError: the text is malformed, an island is empty, a rank appears twice or one is left out.
    """
    if text == "auto":
        return None
    islands = []
    for part in text.split(";"):
        ranks: list[int] = []
        for item in part.split(","):
            first, dash, last = item.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise OptionError(f'"{item.strip()}" is not a rank or a range of ranks')
            ranks.extend(range(int(first), int(last if dash else first) + 1))
        if not ranks:
            raise OptionError(f'"{part}" is an empty island')
        islands.append(tuple(ranks))
    named = sorted(rank for island in islands for rank in island)
    if named != list(range(len(named))):
        raise OptionError(f'"{text}" does not name every rank from 0 once')
    return tuple(islands)


DECLARED: tuple[Declared, ...] = _declare()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags in a group of their own; a second call does nothing.

    Only `store` and `store_true` actions: SGLang's `--config` file reader knows no others. Choices are
    checked in `from_namespace`, because argparse would print SGLang's whole usage before the error.
    """
    if DECLARED[0].option.flag in parser._option_string_actions:
        return
    fill_group(parser.add_argument_group(GROUP_TITLE, GROUP_HELP))


def fill_group(group: argparse._ArgumentGroup) -> None:
    """Add the flags to a group; leave out one that SGLang has itself."""
    for item in DECLARED:
        option = item.option
        if option.flag in group._option_string_actions:
            continue
        note = f"{option.help} Environment: {option.env}."
        if item.type is bool:
            group.add_argument(option.flag, dest=_dest(item), action="store_true", default=None, help=note)  # fmt: skip
        else:
            shown = f"{note} Default: {item.default}." if item.default != "" else note
            group.add_argument(
                option.flag,
                dest=_dest(item),
                default=None,
                metavar=option.placeholder,
                help=shown.replace("%", "%%"),
            )


def _dest(item: Declared) -> str:
    return f"sm120_{item.name}"


def from_namespace(
    namespace: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> Options:
    """Options of a command line; a flag wins over its variable, a variable over the default.

    Raises:
        OptionError: a flag or a variable has a wrong value.
    """
    values = _environment_values(os.environ if environ is None else environ)
    for item in DECLARED:
        given = getattr(namespace, _dest(item), None)
        if item.name == "enabled" and getattr(namespace, BUILT_IN_ENABLED, False):
            given = True
        if given is not None:
            values[item.name] = item.parse(given, item.option.flag)
    return Options(**values)


def from_environment(environ: Mapping[str, str] | None = None) -> Options:
    """Options of the environment: what a launcher handed down, else the single variables.

    Raises:
        OptionError: a variable has a wrong value.
    """
    environ = os.environ if environ is None else environ
    handed_down = environ.get(CONFIG_ENV)
    if handed_down:
        try:
            return from_dict(msgspec.json.decode(handed_down))
        except (msgspec.MsgspecError, OptionError) as error:
            raise OptionError(
                f"{CONFIG_ENV} is written by the launcher and cannot be read ({error}); unset it"
            ) from None
    return from_variables(environ)


def from_variables(environ: Mapping[str, str] | None = None) -> Options:
    """Options of the single variables only: what a launcher without a command line was asked for.

    Raises:
        OptionError: a variable has a wrong value.
    """
    return Options(**_environment_values(os.environ if environ is None else environ))


def _environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        item.name: item.parse(environ[item.option.env], item.option.env)
        for item in DECLARED
        if item.option.env in environ
    }


def to_dict(options: Options) -> dict[str, Any]:
    """Plain builtins, safe to pickle into a process that has not imported this package."""
    return msgspec.to_builtins(options)


def from_dict(values: Mapping[str, Any]) -> Options:
    """The inverse of `to_dict`.

    Raises:
        OptionError: a name or a type is unknown to this version.
    """
    unknown = set(values) - {item.name for item in DECLARED}
    if unknown:
        raise OptionError(f"unknown sm120 option {sorted(unknown)[0]!r}")
    return Options(
        **{
            item.name: item.parse(values[item.name], item.name)
            for item in DECLARED
            if item.name in values
        }
    )


def hand_down(options: Options, environ: MutableMapping[str, str] | None = None) -> None:
    """Leave the options for child processes in `SGLANG_SM120_CONFIG`; remove it when the plugin is off."""
    environ = os.environ if environ is None else environ
    if options.enabled:
        environ[CONFIG_ENV] = msgspec.json.encode(to_dict(options)).decode()
    else:
        environ.pop(CONFIG_ENV, None)


def end_quickly(environ: MutableMapping[str, str] | None = None) -> None:
    """Let a failed server end at once instead of after SGLang's crash diagnostics (5 s and more).

    Those look for ranks that hang. Ours do not: they have named the missing rank and left. A value the user has
    set stays.
    """
    environ = os.environ if environ is None else environ
    for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environ.setdefault(name, "0")


def enable(environ: MutableMapping[str, str] | None = None, **values: Any) -> Options:
    """Switch the plugin on for an `sglang.Engine(...)` created later in this process.

    Args:
        environ: where to write; the process's environment by default.
        **values: fields of `Options`, for example `backend="host"`.

    Raises:
        OptionError: an unknown field or a wrong value; nothing is written then.
    """
    environ = os.environ if environ is None else environ
    options = from_dict({"enabled": True, **values})
    for item in DECLARED:
        value = getattr(options, item.name)
        if value == item.default:
            environ.pop(item.option.env, None)
        else:
            environ[item.option.env] = "1" if value is True else str(value)
    environ.pop(CONFIG_ENV, None)
    return options


def plugins_switched_off(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `SGLANG_PLUGINS` is set and empty: SGLang reads that as "all", the user means "none"."""
    environ = os.environ if environ is None else environ
    return "SGLANG_PLUGINS" in environ and not environ["SGLANG_PLUGINS"].strip()


def asked_for(argv: list[str] | None = None, environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process's command line or environment switches the plugin on; wrong values count as no."""
    if DECLARED[0].option.flag in (sys.argv if argv is None else argv):
        return True
    try:
        return from_environment(environ).enabled
    except OptionError:
        return False
