"""Model shapes, roofline, speculation arithmetic, and the deployment plan with the case the project was born from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Literal

import pytest
from sglang_sm120.cli.main import build
from sglang_sm120.fabric import simulate_machine
from sglang_sm120.foresight import compute, shapes, speculation, sums
from sglang_sm120.foresight.config import from_config
from sglang_sm120.foresight.deployment import PARTS, Planner, Setting
from sglang_sm120.foresight.memory import memory
from typer.testing import CliRunner

MACHINES = Path(__file__).parents[1] / "fixtures" / "machines"

# Billions of parameters that the makers publish on the models' cards.
PUBLISHED = {
    "kimi-k2.5": (1000, 0.03),
    "deepseek-v3": (671, 0.01),
    "deepseek-v4-flash": (284, 0.01),
    "deepseek-v4-pro": (1600, 0.03),
    "glm-5": (744, 0.01),
    "qwen3.5-397b": (397, 0.01),
    "minimax-m2.5": (230, 0.01),
}


def setting(
    machine: str, model: str = "kimi-k2.5", *, drafts: int = 3, ep: int = 1, **kwargs: object
) -> Setting:
    box = simulate_machine.read(MACHINES / machine)
    card = compute.card_named(box.gpus[0].name)
    return Setting(
        machine=box,
        ranks=tuple(range(box.world)),
        model=shapes.read(model),
        roof=compute.Roof(card, box.world, expert_ways=ep),
        drafts=drafts,
        **kwargs,  # type: ignore[arg-type]
    )


# --- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.names())
def test_shapes_add_up_to_the_published_size(name: str) -> None:
    model = shapes.read(name)
    billions, within = PUBLISHED[name]
    assert model.parameters() / 1e9 == pytest.approx(billions, rel=within)
    assert model.source.startswith("https://")


def test_kimi_has_122_sums_of_which_121_fuse() -> None:
    model = shapes.read("moonshotai/Kimi-K2.5")
    assert (model.depth, model.layer_sums, model.fusable_sums) == (61, 122, 121)
    assert shapes.read("deepseek-v4-pro").fusable_sums == 0  # hyper-connections, no plain residual


def test_a_config_json_gives_the_same_shapes(tmp_path: Path) -> None:
    """As Hugging Face has it: nested, with a quantization_config instead of our keys."""
    inner = json.loads((shapes.FOLDER / "kimi-k2.5.json").read_text())
    inner = {k: v for k, v in inner.items() if not k.startswith("_")}
    inner["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up)_proj.*",
        ],
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "kimi_k25", "text_config": inner}))
    got, ready = shapes.read(tmp_path), shapes.read("kimi-k2.5")
    assert got.layers == ready.layers
    assert got.formats == ready.formats


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_the_tiny_models_plan_too(tmp_path: Path, family: str) -> None:
    from sglang_sm120.sim import models

    shape = models.RECIPES[family].shape  # type: ignore[index]
    (tmp_path / "config.json").write_text(json.dumps(models.target_config(shape)))
    model = shapes.read(tmp_path)
    assert (model.hidden, model.layer_sums) == (shape.hidden, 2 * shape.layers)
    code, out = run("plan", "pair-one-socket", str(tmp_path), "--json")
    assert code == 0, out
    assert json.loads(out)["rows"] == 4


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_weight_formats_from_quantization_config(quant: dict | None, expected: str) -> None:
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 4,
        "intermediate_size": 128, "quantization_config": quant,
    }  # fmt: skip
    assert from_config(config).formats["dense"] == expected


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(shapes.ShapeError, match="no model 'gpt-9'"):
        shapes.read("gpt-9")
    with pytest.raises(shapes.ShapeError, match="hidden_size is missing"):
        from_config({"num_hidden_layers": 1})
    with pytest.raises(shapes.ShapeError, match="unknown weight kind or format int3"):
        shapes.read("glm-5", {"experts": "int3"})
    with pytest.raises(shapes.ShapeError, match="quantization 'exl9' is not known"):
        from_config(
            {
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "vocab_size": 8,
                "num_attention_heads": 1,
                "quantization_config": {"quant_method": "exl9"},
            }  # fmt: skip
        )


# --- roofline --------------------------------------------------------------------------------------


def test_distinct_experts_between_one_token_and_all() -> None:
    assert compute.distinct_experts(384, 8, 1) == pytest.approx(8)
    assert 8 * 3 < compute.distinct_experts(384, 8, 4) < 32
    assert compute.distinct_experts(384, 8, 10_000) == pytest.approx(384)
    assert compute.distinct_experts(0, 0, 4) == 0


def test_bytes_of_a_dense_layer_by_hand() -> None:
    config = {
        "hidden_size": 1000, "num_hidden_layers": 3, "vocab_size": 50, "num_attention_heads": 10,
        "num_key_value_heads": 2, "head_dim": 100, "intermediate_size": 4000,
    }  # fmt: skip
    model = from_config(config)
    roof = compute.Roof(compute.CARDS[0], world=2)
    weights = 1000 * 1000 + 1000 * 400 + 1000 * 1000 + 3 * 1000 * 4000
    cost = compute.forward(model, roof, rows=1, sequences=1, context=10)
    assert cost.weight_bytes == pytest.approx((3 * weights + 1000 * 50) * 2 / 2)
    assert cost.cache_bytes == pytest.approx(3 * 10 * 400 / 2 * 2)
    assert cost.memory_bound
    assert cost.ms == pytest.approx((cost.weight_bytes + cost.cache_bytes) / 1792e6, rel=1e-6)
    assert not compute.forward(model, roof, 100_000, 1, 10).memory_bound


def test_more_ranks_and_fewer_rows_cost_less() -> None:
    model = shapes.read("kimi-k2.5")
    one, two = (compute.Roof(compute.CARDS[0], world) for world in (8, 16))
    cost = [compute.forward(model, one, rows, 1, 4096).ms for rows in (1, 2, 4, 8, 64)]
    assert cost == sorted(cost)
    assert compute.forward(model, two, 4, 1, 4096).ms < cost[2]
    # Whole experts on few ranks: the busiest rank has more to read than with every expert cut.
    whole = compute.Roof(compute.CARDS[0], 8, expert_ways=8)
    assert compute.forward(model, whole, 4, 1, 4096).ms > cost[2]
    with pytest.raises(ValueError, match="does not divide"):
        compute.Roof(compute.CARDS[0], 8, expert_ways=3)
    with pytest.raises(ValueError, match="cannot belong"):
        compute.forward(model, one, 1, 2, 4096)


# --- speculation and measured sums -----------------------------------------------------------------


def test_accept_length_of_the_published_drafter() -> None:
    """0.633, 0.404, 0.264 is published with accept length 2.30."""
    assert speculation.tokens_per_pass(speculation.DEFAULT_ACCEPTANCE, 3) == pytest.approx(
        2.30, abs=0.005
    )
    assert speculation.tokens_per_pass((0.5,), 0) == 1.0
    assert speculation.reach((0.8, 0.4), 4) == pytest.approx(0.4 * 0.5 * 0.5)
    for bad in ((), (0.5, 0.6), (1.2,), (0.5, -0.1)):
        with pytest.raises(ValueError, match="acceptance"):
            speculation.check(bad)


def test_best_length_follows_the_cost() -> None:
    cheap = speculation.lengths(lambda k: 10 + 0.1 * k, (0.8, 0.6, 0.4), 1, 6)
    dear = speculation.lengths(lambda k: 10 + 15 * k, (0.8, 0.6, 0.4), 1, 6)
    assert speculation.best(cheap).drafts == 6
    assert speculation.best(dear).drafts == 0


def test_measured_points() -> None:
    assert sums.parse_points("1=59,4=205") == {1: 59.0, 4: 205.0}
    for bad in ("4", "x=1", "0=5", "4=-1", ""):
        with pytest.raises(sums.SumsError, match="is not ROWS=MICROSECONDS"):
            sums.parse_points(bad)
    line = sums.measured({1: 50.0, 3: 150.0}, lambda rows: 20.0)
    assert [line(r) for r in (1, 2, 3, 5)] == pytest.approx([50, 100, 150, 250])
    excess = sums.measured({4: 205.0}, lambda rows: 25.0)
    assert excess(1) == pytest.approx(25 + 180 / 4)
    assert excess(8) == pytest.approx(25 + 180 * 2)
    faster = sums.measured({4: 10.0}, lambda rows: 10.0 * rows)
    assert faster(8) == pytest.approx(20.0)


# --- the deployment --------------------------------------------------------------------------------


def test_the_original_case() -> None:
    """Kimi-K2.5 on 8 GPUs, 205 us per all-reduce, 4 rows: 122 sums, 25 ms of 30, speculation loses at 2.0."""
    planner = Planner(setting("dual-socket-direct", points={4: 205.0}))
    now = planner.outcome(PARTS[0])
    assert planner.setting.model.layer_sums == 122
    assert now.sums_ms == pytest.approx(25.0, abs=0.1)
    assert now.verify_ms == pytest.approx(30.0, rel=0.1)
    assert planner.loses_at(2.0)
    assert not planner.loses_at(3.4)
    # 82 tok/s plain and 60 with EAGLE-3 were measured there.
    assert now.plain_tps == pytest.approx(82, rel=0.1)
    at_two = 2.0 / (now.verify_ms + now.draft_ms) * 1e3
    assert at_two == pytest.approx(60, rel=0.1)


def test_the_original_case_with_its_measured_compute() -> None:
    now = Planner(
        setting("dual-socket-direct", points={1: 59.0, 4: 205.0}, compute_ms={4: 5.0})
    ).outcome(PARTS[0])
    assert (now.sums_ms, now.compute_ms) == (pytest.approx(25.0, abs=0.1), pytest.approx(5.0))
    assert now.verify_ms == pytest.approx(30.0, abs=0.1)
    assert now.best_drafts == 0


def test_each_part_gives_what_it_should() -> None:
    outcomes = {
        o.name: o for o in Planner(setting("dual-socket-direct", points={4: 205.0})).outcomes()
    }
    now, alone = outcomes["as it is"], outcomes["best draft length alone"]
    tuned, fused = outcomes["tuned NCCL"], outcomes["fused kernels"]
    hidden, everything = (
        outcomes["fused kernels + prefetch"],
        outcomes["all of it + best draft length"],
    )
    assert alone.drafts < 3 and alone.tps > now.tps
    assert tuned.sum_us < now.sum_us / 4
    assert fused.sum_us < tuned.sum_us / 2
    assert tuned.pays and fused.pays and not now.pays
    assert hidden.verify_ms < fused.verify_ms
    # A prefetch cannot hide more than the wait.
    assert fused.verify_ms - hidden.verify_ms < fused.sums_ms
    assert everything.tps == max(o.tps for o in outcomes.values())


@pytest.mark.parametrize(
    ("machine", "model"),
    [
        ("three-gpus", "minimax-m2.5"),
        ("six-interleaved", "glm-5"),
        ("sixteen-four-islands", "kimi-k2.5"),
        ("geforce-no-p2p", "minimax-m2.5"),
        ("dual-socket-virtual-switches", "qwen3.5-397b"),
        ("one-bad-direction", "deepseek-v4-flash"),
    ],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_any_machine_and_model_plans(machine: str, model: str, batch: int) -> None:
    planner = Planner(setting(machine, model, sequences=batch))
    outcomes = planner.outcomes()
    assert [o.name for o in outcomes] == [p.name for p in PARTS]
    assert outcomes[-1].tps >= max(max(o.tps, o.plain_tps) for o in outcomes)
    for o in outcomes:
        assert 0 < o.plain_ms < o.verify_ms or o.drafts == 0
        assert o.sums_ms == pytest.approx(planner.setting.model.layer_sums * o.sum_us / 1e3)


def test_where_nccl_stays_fastest_nothing_is_called_fused() -> None:
    planner = Planner(setting("staged-p2p", "minimax-m2.5"))
    for part in PARTS:
        if part.sums == "fused":
            _, schedule = planner.sum_us("fused", 4)
            work, _ = planner.pass_ms(part, 4)
            own = schedule not in ("as it is",) and not schedule.startswith("NCCL")
            assert (work < planner.compute_ms(4)) == own


def test_memory_adds_up() -> None:
    s = setting("dual-socket-direct")
    without, within = memory(s, plugin=False), memory(s)
    assert within.weights_gib == pytest.approx(70.9, abs=0.5)
    assert within.nccl_compact_mib < within.nccl_mib
    assert within.slabs_mib < 32
    assert within.fits
    # DeepSeek-V3 in FP8 does not fit 4 x 96 GB, and the plan says so.
    assert not memory(setting("workstation-4", "deepseek-v3")).fits
    gained = (
        (within.nccl_mib - within.nccl_compact_mib - within.slabs_mib) * 1024 / within.cache_kib
    )
    assert within.tokens - without.tokens == pytest.approx(gained, abs=2)


# --- commands --------------------------------------------------------------------------------------


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(list(args)), list(args), terminal_width=200)
    return result.exit_code, result.output


def test_plan_command_prints_and_writes_json() -> None:
    case = ("plan", "dual-socket-direct", "kimi-k2.5", "--all-reduce-us", "4=205")
    code, shown = run(*case)
    assert code == 0, shown
    text = " ".join(shown.split())
    assert "122 all-reduces per pass" in text
    assert "25.0 of 31" in text
    assert "At accept length 2.0 speculation loses" in text
    code, out = run(*case, "--json")
    body = json.loads(out)
    assert code == 0
    assert body["layer_sums"] == 122
    assert [c["name"] for c in body["configurations"]] == [p.name for p in PARTS]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nowhere", "kimi-k2.5"), "no machine"),
        (("dual-socket-direct", "gpt-9"), "no model"),
        (("dual-socket-direct", "kimi-k2.5", "--tp", "9"), "has 8 GPUs"),
        (("dual-socket-direct", "kimi-k2.5", "--ep", "3"), "does not divide"),
        (("dual-socket-direct", "kimi-k2.5", "--drafter", "oracle"), "eagle3 or mtp"),
        (("dual-socket-direct", "kimi-k2.5", "--accept", "0.4,0.5"), "must fall"),
        (("dual-socket-direct", "kimi-k2.5", "--all-reduce-us", "205"), "ROWS=MICROSECONDS"),
    ],
)
def test_plan_refuses_in_one_sentence(args: tuple[str, ...], says: str) -> None:
    code, out = run("plan", *args)
    assert code == 2
    assert says in " ".join(out.split())


def test_simulate_command(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    where = str(MACHINES / "two-switches")
    code, out = run("simulate", where, "--rows", "1,8", "--timeline", "4", "--plot", str(picture))
    assert code == 0, out
    for word in (
        "island_dataflow",
        "nccl-ll",
        "one-shot-pull",
        "staged-push",
        "Busiest",
        "time line",
    ):
        assert word in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out = run(
        "simulate", where, "--rows", "4", "-s", "island_dataflow", "-s", "nccl", "--json"
    )
    body = json.loads(out)
    assert code == 0
    assert body["kind"] == "simulated"
    assert [e["method"] for e in body["estimates"]] == ["island_dataflow", "nccl"]
    assert len(body["estimates"][0]["hops"]) == 3
    slower = ("--kernel-us", "12.3", "--hop-us", "0.4")
    code, out = run("simulate", where, "--rows", "4", "-s", "island_dataflow", "--json", *slower)
    late = json.loads(out)["estimates"][0]["total_us"]
    assert late == pytest.approx(body["estimates"][0]["total_us"] + 10.0)
    code, out = run("simulate", where, "-s", "warp-drive")
    assert code == 2 and "no schedule 'warp-drive'" in " ".join(out.split())
    code, out = run("simulate", "--list")
    assert code == 0 and "dual-socket-direct" in out


# --- published serving steps, and the page made from the plan --------------------------------------


@pytest.mark.parametrize(
    ("model", "drafter", "points", "cache", "plain", "speculative"),
    [
        # Kimi-K2.6, same shapes as K2.5, fused sums of 12.3 and 21.1 us: 92.4 and 122 tok/s at accept length 2.28.
        ("kimi-k2.5", "eagle3", {1: 12.3, 4: 21.1}, 1.0, (10.3, 11.3), (17.8, 19.6)),
        # GLM-5 on NCCL: 50 to 53 tok/s plain; 95 to 105 with accept lengths of 2.2 to 2.8.
        ("glm-5", "mtp", {1: 24.0, 4: 25.0}, 2.0, (18.0, 20.0), (22.0, 27.5)),
    ],
)
def test_published_steps_at_forty_percent_of_the_bandwidth(
    model: str,
    drafter: Literal["eagle3", "mtp"],
    points: dict[int, float],
    cache: float,
    plain: tuple[float, float],
    speculative: tuple[float, float],
) -> None:
    """Source: https://github.com/local-inference-lab/rtx6kpro (models/kimi-k26-v4.md, models/glm5.md)."""
    box = simulate_machine.read("two-switches-separate-root")
    planner = Planner(
        Setting(
            machine=box,
            ranks=tuple(range(8)),
            model=shapes.read(model),
            roof=compute.Roof(compute.CARDS[0], 8, efficiency=0.4, cache_bytes=cache),
            points=points,
            drafter=drafter,
        )
    )
    assert plain[0] <= planner.speculative_ms(PARTS[0], 0) <= plain[1]
    assert speculative[0] <= planner.speculative_ms(PARTS[0], 3) <= speculative[1]


@pytest.mark.parametrize(
    "name", ["as measured once: 205 us at 4 rows, 8 GPUs", "workstation, 3 GPUs"]
)
def test_the_page_holds_what_the_script_makes(name: str) -> None:
    """Two classes of machine stand for all: the script checks the whole page (--check)."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(
        "fast_verify", root / "benchmark" / "fast_verify.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (root / "docs" / "fast-verify.md").read_text()
    for table in script.tables({name: script.CLASSES[name]}).values():
        assert table.splitlines()[-1] in page
