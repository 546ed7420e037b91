"""What the hooks expect of SGLang: each target with the signature it was written for, checked before it is touched.

SGLang's registry only logs a hook that cannot be applied, and skips a target that another plugin patched
earlier. A fused collective that is silently missing on one rank is a hang, so nothing here is silent.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

KNOWN_RELEASES = "0.5.22 and 0.5.23"
SOURCE = HookSource("sm120", "sglang-sm120")

# Part -> module that declares it as `PART`. A module is imported only when its part is checked or installed.
PARTS: dict[str, str] = {
    "launch": "sglang_sm120.hooks.launch",
    "all_reduce": "sglang_sm120.hooks.all_reduce",
    "cpu_all_reduce": "sglang_sm120.hooks.cpu_all_reduce",
    "fusion": "sglang_sm120.hooks.fusion",
    "prefetch": "sglang_sm120.hooks.prefetch",
    "seams": "sglang_sm120.hooks.seams",
    "cpu_seams": "sglang_sm120.hooks.cpu_seams",
    "failures": "sglang_sm120.hooks.failures",
    "nccl": "sglang_sm120.hooks.nccl",
    "adaptive": "sglang_sm120.hooks.adaptive",
    "census": "sglang_sm120.hooks.census",
    "gloo_census": "sglang_sm120.hooks.gloo_census",
    "shared_gpu": "sglang_sm120.hooks.shared_gpu",
}


class HookRefused(RuntimeError):
    """A part does not fit the installed SGLang; the text is one sentence that says where and what it knows."""


@dataclass(frozen=True)
class Target:
    """One function of SGLang that a hook wraps.

    Attributes:
        path: dotted name.
        signature: what the hook was written for, without annotations, every default as `...`.
        why: what the hook does there, for the report.
    """

    path: str
    signature: str
    why: str


@dataclass(frozen=True)
class Seam:
    """What SGLang offers by itself in a newer tree; where it exists, the target is left alone.

    Attributes:
        path: dotted name of SGLang's function to register with.
        use: registers our part there, once per process.
    """

    path: str
    use: Callable[[], None]

    @property
    def offered(self) -> bool:
        try:
            return callable(lookup(self.path))
        except (ImportError, AttributeError):
            return False


@dataclass(frozen=True)
class Binding:
    """A target, the function that is put around it, and what makes that unnecessary."""

    target: Target
    kind: HookType
    hook: Callable[..., Any]
    seam: Seam | None = None

    @property
    def replaced(self) -> bool:
        return self.seam is not None and self.seam.offered


@dataclass(frozen=True)
class Part:
    """Hooks that only make sense together; all of them are installed, or none."""

    name: str
    bindings: tuple[Binding, ...]


@dataclass(frozen=True)
class Finding:
    """What the check of one target found.

    Attributes:
        found: the installed signature; empty when there is no such function.
        state: "ready", "hooked" (by us or another plugin), "seam", "changed" or "missing".
        detail: why it is missing, or the name of the seam.
    """

    part: str
    target: Target
    found: str
    state: str
    detail: str = ""

    @property
    def fits(self) -> bool:
        return self.state in ("ready", "hooked", "seam")


def sglang_version() -> str:
    """Version of the installed SGLang, or "unknown" for a source tree without metadata."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def lookup(path: str) -> Any:
    """The function behind a dotted name, as the defining module or class holds it.

    Raises:
        ImportError, AttributeError: there is no such module or name.
    """
    holder_path, _, name = path.rpartition(".")
    holder = pkgutil.resolve_name(holder_path)
    if isinstance(holder, type):
        raw = inspect.getattr_static(holder, name)
        return raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    return getattr(holder, name)


def signature_of(function: Callable[..., Any]) -> str:
    """Parameters of the innermost function: no annotations, every default as `...`."""
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _ELLIPSIS)
        for p in inspect.signature(inspect.unwrap(function)).parameters.values()
    ]
    return str(inspect.Signature(parameters))


class _Shown:
    def __repr__(self) -> str:
        return "..."


_ELLIPSIS = _Shown()


def check_target(part: str, target: Target) -> Finding:
    """Compare one target with the installed SGLang; importing the target's module is the only effect."""
    try:
        function = lookup(target.path)
    except Exception as error:  # a module that fails to import is as gone as a missing one
        return Finding(part, target, "", "missing", f"{type(error).__name__}: {error}")
    try:
        found = signature_of(function)
    except (TypeError, ValueError) as error:
        return Finding(part, target, "", "missing", f"no readable signature: {error}")
    if found != target.signature:
        return Finding(part, target, found, "changed")
    return Finding(part, target, found, "hooked" if hasattr(function, "__wrapped__") else "ready")


def check_binding(part: str, binding: Binding) -> Finding:
    """Compare a binding with the installed SGLang: its seam if there is one, else its target."""
    if binding.seam is not None and binding.seam.offered:
        return Finding(part, binding.target, "", "seam", binding.seam.path)
    return check_target(part, binding.target)


def load_part(name: str) -> Part:
    """Import a part's module and return its declaration.

    Raises:
        HookRefused: the module imports something that the installed SGLang does not have.
    """
    try:
        return importlib.import_module(PARTS[name]).PART
    except ImportError as error:
        raise HookRefused(
            f'sglang-sm120: the "{name}" part knows SGLang {KNOWN_RELEASES}, but SGLang {sglang_version()} '
            f"lacks what it needs ({error}); {_ADVICE}"
        ) from error


_ADVICE = "install one of those releases, or start without --enable-sm120-fusion"


def findings(names: Iterator[str] | list[str] | None = None) -> list[Finding]:
    """Check every target of the named parts (all parts by default), and touch nothing.

    Raises:
        HookRefused: a part cannot even be imported.
    """
    parts = [load_part(name) for name in (PARTS if names is None else names)]
    return [check_binding(part.name, b) for part in parts for b in part.bindings]


def refusal(found: list[Finding]) -> str | None:
    """One sentence about everything that does not fit, or None."""
    bad = [f for f in found if not f.fits]
    if not bad:
        return None
    first = bad[0]
    if first.state == "missing":
        fact = f"{first.target.path} cannot be used ({first.detail})"
    else:
        fact = f"{first.target.path} takes {first.found}, not {first.target.signature}"
    more = f" (and {len(bad) - 1} more: run `sglang-sm120 hooks`)" if len(bad) > 1 else ""
    return (
        f'sglang-sm120: the "{first.part}" part knows SGLang {KNOWN_RELEASES}, but in SGLang '
        f"{sglang_version()} {fact}{more}; {_ADVICE}"
    )


def require(names: list[str]) -> None:
    """Check parts without installing them.

    Raises:
        HookRefused: with the one sentence.
    """
    sentence = refusal(findings(names))
    if sentence:
        raise HookRefused(sentence)


def register(part: Part) -> None:
    """Hand a part to SGLang's registry, which applies it when all plugins have registered (phase 1).

    Raises:
        HookRefused: a target does not fit; nothing was registered.
    """
    _require_part(part)
    for binding in _hooks_of(part):
        HookRegistry.register(binding.target.path, binding.hook, binding.kind, source=SOURCE)


def install(part: Part) -> None:
    """Put a part's hooks in place now (phase 2), also on targets that another plugin patched before.

    Raises:
        HookRefused: a target does not fit, or the registry did not patch it.
    """
    _require_part(part)
    for binding in _hooks_of(part):
        path = binding.target.path
        before = lookup(path)
        if path in HookRegistry._patched:
            # apply_hooks() skips a target for ever once it was patched; the new hook goes around that patch.
            HookRegistry._apply_target(path, [(binding.kind, binding.hook, SOURCE)])
        else:
            HookRegistry.register(path, binding.hook, binding.kind, source=SOURCE)
            HookRegistry.apply_hooks()
        if lookup(path) is before:
            raise HookRefused(
                f"sglang-sm120: SGLang's hook registry did not patch {path} (its log says why); {_ADVICE}"
            )


def _hooks_of(part: Part) -> list[Binding]:
    """Use the seams that SGLang offers; the bindings that remain to be patched."""
    for seam in {b.seam.path: b.seam for b in part.bindings if b.seam and b.replaced}.values():
        seam.use()
    return [binding for binding in part.bindings if not binding.replaced]


def _require_part(part: Part) -> None:
    sentence = refusal([check_binding(part.name, b) for b in part.bindings])
    if sentence:
        raise HookRefused(sentence)
