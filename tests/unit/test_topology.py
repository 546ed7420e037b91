"""Discovery from saved folders, and that the fixtures say what their builders mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from sglang_sm120.fabric import machine, nvml
from sglang_sm120.fabric.machine import EdgeClass, MachineError
from sglang_sm120.fabric.source import Live, Recording, Saved, Source, SourceError
from sglang_sm120.fabric.topology import acs_bits, discover

FIXTURES = Path(__file__).parents[1] / "fixtures"
MACHINES = sorted(p.name for p in (FIXTURES / "machines").iterdir())


def read(name: str):
    return discover(Saved(FIXTURES / "machines" / name))


def test_there_are_at_least_ten_machines() -> None:
    assert len(MACHINES) >= 10


def test_committed_fixtures_are_what_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(FIXTURES / "make_machines.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MACHINES)
def test_discovery_agrees_with_the_fabric_file(name: str) -> None:
    topology, box = read(name), machine.load(FIXTURES / "machines" / name / "fabric.toml")
    assert len(topology.gpus) == box.world
    assert len({g.uuid for g in topology.gpus}) == box.world
    assert topology.islands() == box.islands()
    for a in range(box.world):
        for b in range(box.world):
            if a != b and not any(s.acs for s in box.switches):
                wanted = box.edge_class(box.gpus[a].id, box.gpus[b].id)
                assert topology.edge_class(a, b) is wanted, (name, a, b)


def test_a_tree_with_two_switches() -> None:
    t = read("two-switches")
    assert [b.kind for b in t.bridges].count("switch uplink") == 2
    assert [b.kind for b in t.bridges].count("root port") == 2
    assert t.common_bridge(0, 3) and not t.common_bridge(0, 4)
    assert t.edge_class(0, 3) is EdgeClass.SAME_SWITCH
    assert (t.iommu, t.driver, t.driver_open, t.sockets) == ("identity", "595.58.03", True, 1)
    assert t.gpus[0].idle and t.gpus[0].gen_now == 1 and t.gpus[0].gen_best == 5
    assert "ForceP2P" in t.driver_options["RegistryDwords"]
    assert t.p2p["atomics"][0][1] == "not supported"


def test_acs_bits_need_root_and_are_parsed() -> None:
    on = read("acs-on")
    ports = [b for b in on.bridges if b.kind == "switch port"]
    assert all(b.acs == ("SV", "RR", "CR", "UF") and b.redirects for b in ports)
    assert not any(b.redirects for b in read("two-switches").bridges)
    unprivileged = read("geforce-no-p2p")
    assert all(b.acs is None for b in unprivileged.bridges)
    assert any("ACS" in u for u in unprivileged.unknown)


def test_acs_parser_survives_nonsense() -> None:
    assert acs_bits(b"") is None
    assert acs_bits(bytes(64)) is None
    assert acs_bits(bytes(4096)) == ()
    ring = bytearray(4096)
    ring[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(
        4, "little"
    )  # a capability that points at itself
    assert acs_bits(bytes(ring)) == ()
    assert acs_bits(bytes(b"\xff" * 4096)) == ()


def test_sockets_come_from_the_package_not_the_numa_node() -> None:
    t = read("dual-socket-direct")
    assert [g.socket for g in t.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert t.edge_class(0, 4) is EdgeClass.CROSS_SOCKET


def test_this_machine_is_read_without_root_and_saved(tmp_path) -> None:
    recording = Recording(Live())
    here = discover(recording)
    recording.save(tmp_path / "saved")
    again = discover(Saved(tmp_path / "saved"))
    assert again == here
    assert here.kernel
    size = sum(f.stat().st_size for f in (tmp_path / "saved").iterdir())
    assert size < 2_000_000


def test_a_foreign_folder_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(SourceError, match="sysfs.json"):
        Saved(tmp_path)
    for name in ("sysfs", "nvml"):
        (tmp_path / f"{name}.json").write_text('{"files": {}, "links": {}, "dirs": {}}')
    (tmp_path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(SourceError, match="format 99"):
        Saved(tmp_path)


class Guest(Source):
    """A virtual machine whose GPUs hang on root buses, with no bridge above them."""

    def read(self, path: str) -> None:
        return None

    def link(self, path: str) -> str | None:
        bdf = path.rsplit("/", 1)[-1]
        return f"/sys/devices/pci{bdf[:7]}/{bdf}" if ":" in bdf else None

    def names(self, path: str) -> list[str]:
        return []

    def nvml(self) -> dict:
        return {"gpus": [{"bdf": "0000:05:00.0"}, {"bdf": "0000:06:00.0"}]}

    def root(self) -> bool:
        return False


def test_gpus_of_a_virtual_machine_need_no_bridge() -> None:
    topology = discover(Guest())
    assert [gpu.bdf for gpu in topology.gpus] == ["0000:05:00.0", "0000:06:00.0"]
    assert topology.bridges == ()
    assert all(gpu.bridges == () for gpu in topology.gpus)
    assert len(topology.islands()) == 1


class FakeNvml:
    """NVML with two GPUs whose MIG question is not supported; constants and errors are pynvml's own."""

    def __getattr__(self, name: str):
        return getattr(pynvml, name)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> str:
        return f"h{i}"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"595.58.03"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, kind: int) -> int:
        if kind == pynvml.NVML_P2P_CAPS_INDEX_ATOMICS:
            return pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return pynvml.NVML_P2P_STATUS_OK

    def nvmlDeviceGetUUID(self, h: str) -> str:
        return f"GPU-{h}"

    def nvmlDeviceGetPciInfo(self, h: str):
        return type("Pci", (), {"busId": f"00000000:C{h[1]}:00.0"})

    def nvmlDeviceGetMemoryInfo(self, h: str):
        return type("Memory", (), {"total": 96 << 30})

    def nvmlDeviceGetBAR1MemoryInfo(self, h: str):
        return type("Bar1", (), {"bar1Total": 128 << 30})

    def nvmlDeviceGetCudaComputeCapability(self, h: str) -> tuple[int, int]:
        return (12, 0)

    def nvmlDeviceGetMigMode(self, h: str):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _missing(self, *args):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvmlDeviceGetName = nvmlDeviceGetPerformanceState = nvmlDeviceGetNvLinkState = _missing
    nvmlDeviceGetCurrPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration = _missing
    nvmlDeviceGetGpuMaxPcieLinkGeneration = _missing
    nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth = _missing


def test_nvml_answers_become_plain_data() -> None:
    facts = nvml._Reader(FakeNvml()).read()
    assert json.loads(json.dumps(facts)) == facts
    first = facts["gpus"][0]
    assert first["bdf"] == "0000:c0:00.0" and first["cc"] == "12.0" and first["bar1_mib"] == 131072
    assert "mig" not in first and "name" not in first
    assert facts["p2p"]["write"] == [["self", "ok"], ["ok", "self"]]
    assert facts["p2p"]["atomics"][0][1] == "not supported"


def test_every_nvml_function_that_is_asked_exists() -> None:
    source = Path(nvml.__file__).read_text()
    names = {w.strip("(),.") for w in source.replace("n.nvml", " nvml").replace("(", " ").split()}
    asked = {n.rstrip(",)") for n in names if n.startswith(("nvmlDevice", "nvmlSystem"))}
    assert asked
    assert not [n for n in asked if not hasattr(pynvml, n)]


def minimal(**changes: str) -> str:
    parts = {
        "links": "x = { bandwidth = 50.0 }",
        "gpu": 'id = "g0", parent = "r0", link = "x"',
        "root": 'id = "r0", parent = "s0", link = "x"',
    } | changes
    return (
        'name = "m"\ntitle = "t"\nsockets = [{ id = "s0" }]\n'
        f"roots = [{{ {parts['root']} }}]\ngpus = [{{ {parts['gpu']} }}]\n"
        f"{parts.get('more', '')}\n[links]\n{parts['links']}\n"
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpu": 'id = "g0", parent = "nowhere", link = "x"'}, "nowhere"),
        ({"gpu": 'id = "g0", parent = "r0", link = "y"'}, "'y'"),
        ({"gpu": 'id = "r0", parent = "r0", link = "x"'}, "twice"),
        ({"links": "x = { bandwidth = 0.0 }"}, "impossible"),
        ({"links": "x = { bandwidth = 1.0, duplex = 3.0 }"}, "impossible"),
        ({"more": 'no_p2p = [["g0", "g9"]]'}, "g9"),
    ],
)
def test_contradictory_machines_are_refused_by_name(changes: dict, word: str) -> None:
    assert machine.parse(minimal()).world == 1
    with pytest.raises(MachineError, match=word):
        machine.parse(minimal(**changes))
