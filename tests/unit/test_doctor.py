"""The doctor's findings on every fixture machine, its screen, its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from sglang_sm120.cli.main import build
from sglang_sm120.fabric import doctor, machine, screen
from sglang_sm120.fabric.findings import Severity
from sglang_sm120.fabric.islands import flat
from sglang_sm120.fabric.report import Failure, PatternResult, ProbeReport
from sglang_sm120.fabric.source import Saved
from sglang_sm120.fabric.topology import Topology, discover
from sglang_sm120.fabric.versions import Versions
from sglang_sm120.nccl import environment
from typer.testing import CliRunner

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"

# machine -> exit code, findings in order (worst first)
EXPECTED: dict[str, tuple[int, list[str]]] = {
    "single-switch": (0, []),
    "two-switches": (0, []),
    "workstation-4": (0, []),
    "three-gpus": (0, []),
    "one-bad-direction": (0, []),  # only the probe can see it
    "dual-socket-direct": (0, ["cross-socket"]),
    "sixteen-four-islands": (0, ["more-than-eight"]),
    "dual-socket-virtual-switches": (1, ["collapse-risk", "cross-socket"]),
    "geforce-no-p2p": (1, ["no-p2p", "needs-root"]),
    "mixed-link-widths": (1, ["narrow-link", "slow-slot", "mixed-links"]),
    "six-interleaved": (1, ["interleaved-order"]),
    "staged-p2p": (1, ["p2p-may-be-staged", "needs-root", "link-power"]),
    "acs-on": (2, ["acs-redirect"]),
    "iommu-translated": (2, ["iommu-translated", "hmm", "link-power"]),
    "small-bar1": (2, ["pcie-errors", "small-bar1"]),
}


def read(name: str) -> Topology:
    return discover(Saved(FIXTURES / name))


def finding(name: str, id_: str):
    return next(f for f in doctor.diagnose(read(name)) if f.id == id_)


def test_every_fixture_has_an_expectation() -> None:
    assert set(EXPECTED) == {p.name for p in FIXTURES.iterdir()}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_findings_and_exit_code(name: str) -> None:
    findings = doctor.diagnose(read(name))
    assert (doctor.exit_code(findings), [f.id for f in findings]) == EXPECTED[name]
    assert all(f.fix for f in findings if f.severity is not Severity.NOTICE)
    assert all(f.cost for f in findings if f.severity is not Severity.NOTICE)


def test_acs_prints_one_setpci_line_per_bridge() -> None:
    fix = finding("acs-on", "acs-redirect").fix
    lines = [line for line in fix if line.startswith("setpci")]
    assert len(lines) == 8
    assert lines[0] == "setpci -s 0000:12:00.0 ECAP_ACS+0x6.w=0000"


def test_iommu_remedy_is_the_cpu_makers_parameter() -> None:
    assert "amd_iommu=off" in finding("iommu-translated", "iommu-translated").fix[0]
    intel = msgspec.structs.replace(read("iommu-translated"), cpu="Intel(R) Xeon(R)")
    assert any("intel_iommu=off" in line for f in doctor.diagnose(intel) for line in f.fix)


def test_c25_the_module_option_is_printed_where_p2p_may_be_staged() -> None:
    fix = finding("staged-p2p", "p2p-may-be-staged").fix
    assert any("options nvidia" in line and "ForceP2P=0x11" in line for line in fix)


def test_narrow_links_name_the_gpu_and_the_loss() -> None:
    narrow = finding("mixed-link-widths", "narrow-link")
    assert "8 of 16 lanes" in narrow.what and "28 instead of 56 GB/s" in narrow.cost
    slow = finding("mixed-link-widths", "slow-slot")
    assert "Gen5" in slow.what and "Gen4" in slow.what


def test_interleaved_order_prints_the_order_to_export() -> None:
    fix = finding("six-interleaved", "interleaved-order").fix[0]
    assert fix.endswith("CUDA_VISIBLE_DEVICES=0,2,4,1,3,5")


def test_an_idle_link_is_not_called_trained_down_but_a_busy_one_is() -> None:
    t = read("workstation-4")
    assert doctor.diagnose(t) == []
    busy = msgspec.structs.replace(
        t, gpus=tuple(msgspec.structs.replace(g, idle=False, gen_now=3) for g in t.gpus)
    )
    assert {f.id for f in doctor.diagnose(busy)} == {"link-trained-down"}


def test_mig_and_some_pairs_without_p2p_are_errors() -> None:
    t = read("workstation-4")
    split = msgspec.structs.replace(
        t, gpus=(msgspec.structs.replace(t.gpus[0], mig=True), *t.gpus[1:])
    )
    assert "nvidia-smi -i 0 -mig 0" in doctor.diagnose(split)[0].fix
    status = [list(row) for row in t.p2p["write"]]
    status[0][1] = status[1][0] = "topology not supported"
    partial = msgspec.structs.replace(t, p2p={**t.p2p, "write": tuple(map(tuple, status))})
    found = {f.id: f for f in doctor.diagnose(partial)}["no-p2p"]
    assert found.severity is Severity.ERROR and "0-1" in found.what


def test_acs_is_suspected_without_root_when_groups_are_apart() -> None:
    t = read("two-switches")
    hidden = msgspec.structs.replace(
        t, bridges=tuple(msgspec.structs.replace(b, acs=None) for b in t.bridges)
    )
    assert "acs-suspected" in {f.id for f in doctor.diagnose(hidden)}


def test_no_driver_is_an_error() -> None:
    findings = doctor.diagnose(Topology(gpus=(), nvml_error="NVMLError_LibraryNotFound"))
    assert findings[0].id == "no-driver" and doctor.exit_code(findings) == 2


def test_environment_and_versions_are_part_of_the_diagnosis() -> None:
    wrong = environment.check({"NCCL_P2P_LEVEL": "2"}, nccl_version="2.30.7")
    findings = doctor.diagnose(
        read("workstation-4"), versions=Versions(nccl="2.26.2", nccl_cuda="12.2"), environment=wrong
    )
    assert [f.id for f in findings] == ["nccl-version", "environment"]
    old = doctor.diagnose(read("workstation-4"), versions=Versions(flashinfer="0.6.14"))
    assert [f.id for f in old] == ["flashinfer-version"] and doctor.exit_code(old) == 0


def test_a_probe_report_adds_what_only_measuring_shows() -> None:
    islands = ((0, 1), (2, 3))
    report = ProbeReport(
        rig="test",
        simulated=True,
        world=4,
        patterns=(
            PatternResult(name="lanes", islands=islands, flows=((0, 2),), gbps=(2.7,), ratio=0.07),
        ),
        failures=(Failure(kind="corrupt", source=1, target=0, detail="32 bytes wrong"),),
    )
    found = {f.id: f for f in doctor.diagnose(read("workstation-4"), report=report)}
    assert "GPU 1 -> GPU 0: 32 bytes wrong" in found["probe-veto"].what
    assert "island_dataflow" in found["writes-collapse"].what


def render(what: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_screen_shows_every_gpu_and_finding(name: str) -> None:
    t = read(name)
    findings = doctor.diagnose(t)
    text = render(screen.screen(t, findings))
    assert all(g.bdf in text for g in t.gpus)
    assert all(f"[{f.id}]" in text for f in findings)
    assert ("nothing wrong found" in text) == (not findings)


def test_the_measured_matrix_says_simulated_and_marks_bad_edges() -> None:
    report = ProbeReport(
        rig="software fabric of x",
        simulated=True,
        world=2,
        latency_us=((0, 0.7), (0.8, 0)),
        store_gbps=((0, 50.0), (51.0, 0)),
        failures=(Failure(kind="corrupt", source=1, target=0, detail="d"),),
        patterns=(
            PatternResult(
                name="all-to-all", islands=flat(2), flows=((0, 1),), gbps=(2.0,), ratio=0.04
            ),
        ),
    )
    text = render(screen.measured_matrix(report))
    assert "simulated" in text and "0.80 / 51.0 !!" in text and "0.70 / 50.0" in text
    assert "never used" in render(screen.patterns(report))


def run(*args: str):
    return CliRunner().invoke(build([args[0]]), list(args))


def test_command_prints_json_and_returns_the_severity(tmp_path) -> None:
    got = run("doctor", "--from", str(FIXTURES / "acs-on"), "--json")
    out = json.loads(got.stdout)
    assert got.exit_code == out["exit_code"] == 2
    assert out["findings"][0]["id"] == "acs-redirect"
    assert len(out["topology"]["gpus"]) == 8


def test_command_saves_a_folder_that_reads_the_same(tmp_path) -> None:
    first = run(
        "doctor", "--from", str(FIXTURES / "six-interleaved"), "--save", str(tmp_path / "s")
    )
    second = run("doctor", "--from", str(tmp_path / "s"))
    assert first.exit_code == second.exit_code == 1
    assert first.stdout == second.stdout


def test_command_refuses_a_folder_that_is_none(tmp_path) -> None:
    got = run("doctor", "--from", str(tmp_path))
    assert got.exit_code == 3 and "sysfs.json" in got.stdout


def test_fixture_files_load_for_the_simulator_too() -> None:
    for name in EXPECTED:
        assert machine.load(FIXTURES / name / "fabric.toml").name == name
