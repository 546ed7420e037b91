"""The contract of the hooks: every declared target fits the installed SGLang, and a changed one is refused."""

from __future__ import annotations

import sys
import types

import pytest

pytest.importorskip("sglang")

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_sm120.hooks import contract, report
from sglang_sm120.hooks.contract import Binding, HookRefused, Part, Target

ALL = [(name, b.target) for name in contract.PARTS for b in contract.load_part(name).bindings]


@pytest.mark.parametrize("part, target", ALL, ids=[t.path for _, t in ALL])
def test_declared_target_fits_the_installed_sglang(part: str, target: Target):
    finding = contract.check_target(part, target)
    assert finding.fits, f"{finding.state}: {finding.found} {finding.detail}"
    assert finding.found == target.signature
    assert target.why


def test_every_part_declares_its_own_name_and_at_least_one_target():
    for name in contract.PARTS:
        part = contract.load_part(name)
        assert part.name == name and part.bindings


def test_report_lists_every_target_and_is_content(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "500")
    assert report.main() == 0
    text = capsys.readouterr().out
    for _, target in ALL:
        assert target.path in text and target.signature in text


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the place of one of SGLang's, and a part that hooks it."""
    module = types.ModuleType("sglang_other_release")

    def reduce(x: int, *, scale: float = 1.0) -> float:
        return x * scale

    class Holder:
        @staticmethod
        def add(parser: str) -> str:
            return parser

        @classmethod
        def make(cls, args: str) -> str:
            return f"{cls.__name__} {args}"

    module.reduce, module.Holder = reduce, Holder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_other_release", module)
    yield module
    for path in [p for p in HookRegistry._hooks if p.startswith("sglang_other_release")]:
        del HookRegistry._hooks[path]
        HookRegistry._patched.discard(path)


def part_of(name: str, signature: str, hook=None, kind: HookType = HookType.AROUND) -> Part:
    target = Target(f"sglang_other_release.{name}", signature, "a test")
    return Part(
        "trial", (Binding(target, kind, hook or (lambda original, *a, **k: original(*a, **k))),)
    )


def test_known_signature_is_installed_and_runs(release: types.ModuleType):
    part = part_of("reduce", "(x, *, scale=...)", lambda original, x, **k: original(x, **k) + 1)
    contract.install(part)
    assert release.reduce(2, scale=3.0) == 7
    assert contract.check_target("trial", part.bindings[0].target).state == "hooked"


@pytest.mark.parametrize(
    "name, known", [("Holder.add", "(parser)"), ("Holder.make", "(cls, args)")]
)
def test_static_and_class_methods_keep_their_kind(release: types.ModuleType, name: str, known: str):
    contract.install(part_of(name, known, lambda result, *a, **k: result.upper(), HookType.AFTER))
    assert release.Holder.add("a") == ("A" if name == "Holder.add" else "a")
    assert release.Holder.make("b") == ("HOLDER B" if name == "Holder.make" else "Holder b")


def test_target_that_another_plugin_patched_first_is_still_hooked(release: types.ModuleType):
    HookRegistry.register(
        "sglang_other_release.reduce", lambda result, *a, **k: result * 10, HookType.AFTER
    )
    HookRegistry.apply_hooks()
    contract.install(
        part_of("reduce", "(x, *, scale=...)", lambda original, *a, **k: original(*a, **k) + 1)
    )
    assert release.reduce(2) == 21


@pytest.mark.parametrize(
    "name, known, fact",
    [
        ("reduce", "(x)", "takes (x, *, scale=...), not (x)"),
        ("reduce", "(x, scale=...)", "takes (x, *, scale=...), not (x, scale=...)"),
        ("reduce", "(x, *, scale)", "takes (x, *, scale=...), not (x, *, scale)"),
        ("gone", "(x)", "cannot be used (AttributeError"),
        ("Holder.gone", "(self)", "cannot be used (AttributeError"),
    ],
)
def test_doctored_signature_is_refused_in_one_sentence_and_left_alone(
    release: types.ModuleType, name: str, known: str, fact: str
):
    before = release.reduce
    for act in (contract.install, contract.register):
        with pytest.raises(HookRefused) as caught:
            act(part_of(name, known))
        sentence = str(caught.value)
        assert fact in sentence and f"sglang_other_release.{name}" in sentence
        assert contract.KNOWN_RELEASES in sentence and contract.sglang_version() in sentence
        assert "\n" not in sentence
    assert release.reduce is before
    assert f"sglang_other_release.{name}" not in HookRegistry._hooks


def test_a_part_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(contract.PARTS, "absent", "sglang_sm120.hooks.no_such_file")
    with pytest.raises(HookRefused, match=r'the "absent" part knows SGLang .* lacks what it needs'):
        contract.findings(["absent"])


def test_report_fails_when_a_target_differs(
    release: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    holder = types.ModuleType("sglang_trial_part")
    holder.PART = part_of("reduce", "(x)")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_trial_part", holder)
    monkeypatch.setattr(contract, "PARTS", {"trial": "sglang_trial_part"})
    assert report.main() == 1
    text = " ".join(capsys.readouterr().out.split())
    assert 'the "trial" part knows SGLang' in text and "takes (x, *, scale=...), not (x)" in text
    with pytest.raises(HookRefused, match="trial"):
        contract.require(["trial"])


def test_registry_that_fails_to_patch_is_noticed(
    release: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    # SGLang's registry logs its own failures and goes on.
    monkeypatch.setattr(HookRegistry, "_apply_target", classmethod(lambda cls, *a: None))
    with pytest.raises(HookRefused, match="did not patch sglang_other_release.reduce"):
        contract.install(part_of("reduce", "(x, *, scale=...)"))
