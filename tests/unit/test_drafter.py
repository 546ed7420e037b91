"""Drafter check, remap and measure on synthetic checkpoints of known faults."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_sm120.cli.drafter import app
from sglang_sm120.foresight import drafter_check, drafter_measure, drafter_remap, mapping
from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError
from sglang_sm120.foresight.mapping import Mapping
from typer.testing import CliRunner

HIDDEN, VOCAB, DRAFT, DEPTH = 48, 4000, 1000, 12
AUX = (2, 6, 9)


def words(vocab: int = VOCAB) -> dict[str, Any]:
    return {"model": {"vocab": {f"w{i}": i for i in range(vocab)}}, "added_tokens": []}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words(config["vocab_size"])))
    names = sorted(tensors)
    # Two files, so that the index of tensors is exercised.
    for part, chosen in enumerate((names[::2], names[1::2])):
        if chosen:
            save_file({n: tensors[n] for n in chosen}, str(folder / f"model-{part}.safetensors"))
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def head() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def target(tmp_path: Path, head: torch.Tensor) -> Checkpoint:
    config = {"hidden_size": HIDDEN, "num_hidden_layers": DEPTH, "vocab_size": VOCAB}
    return write(tmp_path / "target", config, {"lm_head.weight": head.bfloat16()})


def ids(seed: int) -> torch.Tensor:
    drawn = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT]
    return drawn.sort().values


def drafter(
    folder: Path,
    head: torch.Tensor,
    chosen: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """A sound drafter: head rows near the target's rows of the chosen tokens."""
    noise = torch.randn(len(chosen), HIDDEN, generator=torch.Generator().manual_seed(1))
    own = head[chosen if rows is None else rows] + 0.5 * noise
    mapped = Mapping(chosen)
    return write(
        folder,
        {
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "draft_vocab_size": len(chosen),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX)},
            **(config or {}),
        },
        {
            "lm_head.weight": own.bfloat16(),
            "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
            "d2t": mapped.d2t,
            "t2d": mapped.t2d(VOCAB),
            **(tensors or {}),
        },
    )


def levels(done: drafter_check.Check) -> dict[str, str]:
    worst = {"ok": 0, "note": 1, "warning": 2, "error": 3}
    out: dict[str, str] = {}
    for f in done.findings:
        if worst[f.level] >= worst[out.get(f.name, "ok")]:
            out[f.name] = f.level
    return out


def test_a_sound_drafter_fits(tmp_path: Path, target: Checkpoint, head: torch.Tensor) -> None:
    done = drafter_check.check(target, drafter(tmp_path / "d", head, ids(1)))
    assert done.fits
    assert set(levels(done).values()) == {"ok"}


def test_nothing_but_headers_and_few_rows_is_read(
    tmp_path: Path, target: Checkpoint, head: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name: (read.append(name), whole(self, name))[1]
    )
    drafter_check.check(target, drafter(tmp_path / "d", head, ids(1)))
    assert set(read) == {"d2t", "t2d"}


@pytest.mark.parametrize(
    ("config", "tensors", "name", "says"),
    [
        ({"hidden_size": 64}, {}, "hidden size", "made for 64"),
        ({"vocab_size": 3000}, {}, "vocabulary size", "made for 3000"),
        ({"draft_vocab_size": 999}, {}, "draft vocabulary", "draft_vocab_size 999"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6]}},
            {},
            "aux layers",
            "takes 3 hidden states, the configuration names 2",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 40]}},
            {},
            "aux layers",
            "out of range",
        ),
        (
            {},
            {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)},
            "aux layers",
            "takes 2 hidden states",
        ),
        ({}, {"d2t": Mapping(ids(1)).d2t + VOCAB}, "d2t", "outside the target's"),
        ({}, {"d2t": ids(1)}, "d2t", "read as plain target ids d2t would be sound"),
        ({}, {"t2d": Mapping(ids(2)).t2d(VOCAB)}, "t2d", "disagree about"),
        ({}, {"t2d": torch.zeros(7, dtype=torch.bool)}, "t2d", "7 entries"),
        (
            {},
            {"lm_head.weight": torch.zeros(DRAFT - 1, HIDDEN)},
            "draft vocabulary",
            "lm_head has 999 rows",
        ),
    ],
)
def test_each_fault_is_an_error_that_names_itself(
    tmp_path: Path,
    target: Checkpoint,
    head: torch.Tensor,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    name: str,
    says: str,
) -> None:
    done = drafter_check.check(
        target, drafter(tmp_path / "d", head, ids(1), config=config, tensors=tensors)
    )
    assert not done.fits
    found = [f for f in done.findings if f.name == name and f.level == "error"]
    assert any(says in f.text for f in found), done.findings
    assert all(f.remedy for f in found)


def test_missing_aux_layers_take_sglangs_default(
    tmp_path: Path, target: Checkpoint, head: torch.Tensor
) -> None:
    done = drafter_check.check(
        target, drafter(tmp_path / "d", head, ids(1), config={"eagle_config": {}})
    )
    assert done.fits
    assert any("[2, 6, 9]" in f.text and f.level == "warning" for f in done.findings)


def test_other_tokenizer_is_found(tmp_path: Path, target: Checkpoint, head: torch.Tensor) -> None:
    draft = drafter(tmp_path / "d", head, ids(1))
    body = words()
    body["model"]["vocab"] = {f"w{i}": (i + 1) % VOCAB for i in range(VOCAB)}
    (draft.folder / "tokenizer.json").write_text(json.dumps(body))
    found = [f for f in drafter_check.check(target, draft).findings if f.name == "tokenizer"]
    assert [f.level for f in found] == ["error"]
    assert f"{VOCAB} of {VOCAB}" in found[0].text


def test_head_of_another_mapping_is_found(
    tmp_path: Path, target: Checkpoint, head: torch.Tensor
) -> None:
    """The week-long case: a head trained for one vocabulary, served with another's d2t."""
    own, other = ids(1), ids(2)
    wrong = drafter(tmp_path / "wrong", head, own, rows=other)
    alone = levels(drafter_check.check(target, wrong))
    assert alone["head rows"] == "warning"
    done = drafter_check.check(target, wrong, against=Mapping(other))
    assert not done.fits
    assert levels(done)["head rows"] == "error"


def test_position_overlap_is_counted_exactly() -> None:
    """252 of 32,000 positions mean the same token although most tokens are in both vocabularies."""
    size, same = 32_000, 252
    one = torch.arange(size)
    other = one.clone()
    moved = torch.arange(same, size)
    other[moved] = one[moved].roll(1)
    seen = mapping.overlap(Mapping(one), Mapping(other))
    assert (seen.positions, seen.same_position, seen.shared_tokens) == (size, same, size)
    finding = drafter_check._against(Mapping(one), Mapping(other))[0]
    assert "252 of 32,000 positions" in finding.text
    assert finding.level == "warning"


@pytest.mark.parametrize(("share", "level"), [(1.0, "ok"), (0.9, "warning"), (0.5, "error")])
def test_coverage_of_frequent_tokens(
    tmp_path: Path, target: Checkpoint, head: torch.Tensor, share: float, level: str
) -> None:
    chosen = ids(1)
    absent = next(i for i in range(VOCAB) if i not in set(chosen.tolist()))
    counts = {int(chosen[0]): round(1000 * share), absent: round(1000 * (1 - share))}
    done = drafter_check.check(
        target, drafter(tmp_path / "d", head, chosen), counts={t: n for t, n in counts.items() if n}
    )
    assert levels(done)["coverage"] == level
    if share < 1:
        assert any(str(absent) in f.text for f in done.findings if f.name == "coverage")


def test_remap_moves_rows_and_names_those_without_source(
    tmp_path: Path, target: Checkpoint, head: torch.Tensor
) -> None:
    own, other = ids(1), ids(2)
    draft = drafter(tmp_path / "d", head, own)
    done = drafter_remap.remap(draft, Mapping(other), tmp_path / "new", target=target)
    kept = set(own.tolist())
    assert done.without_source == tuple(t for t in other.tolist() if t not in kept)
    assert done.moved + len(done.without_source) == done.rows == DRAFT
    new = Checkpoint(tmp_path / "new")
    rows, old = new.read("lm_head.weight"), draft.read("lm_head.weight")
    at = Mapping(own).positions()
    for j, token in enumerate(other.tolist()):
        if token in kept:
            assert torch.equal(rows[j], old[at[token]])
        else:
            cosine = torch.nn.functional.cosine_similarity(rows[j].float(), head[token], dim=0)
            assert cosine > 0.99
    assert torch.equal(mapping.from_checkpoint(new).target_of, other)
    assert new.config["draft_vocab_size"] == DRAFT
    assert torch.equal(new.read("fc.weight"), draft.read("fc.weight"))
    assert drafter_check.check(target, new).fits
    assert (new.folder / "tokenizer.json").is_file()


def test_remap_there_and_back_is_the_identity(tmp_path: Path, head: torch.Tensor) -> None:
    own = ids(1)
    mixed = own[torch.randperm(DRAFT, generator=torch.Generator().manual_seed(3))]
    draft = drafter(tmp_path / "d", head, own)
    there = drafter_remap.remap(draft, Mapping(mixed), tmp_path / "there")
    assert there.without_source == ()
    drafter_remap.remap(Checkpoint(tmp_path / "there"), Mapping(own), tmp_path / "back")
    back = load_file(str(tmp_path / "back" / "model.safetensors"))
    for name in draft.names:
        assert torch.equal(back[name], draft.read(name)), name


def test_remap_of_a_whole_vocabulary_truncates_it(tmp_path: Path, head: torch.Tensor) -> None:
    folder = write(
        tmp_path / "d",
        {"hidden_size": HIDDEN, "vocab_size": VOCAB},
        {"lm_head.weight": head, "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)},
    )
    assert mapping.from_checkpoint(folder).whole
    done = drafter_remap.remap(folder, Mapping(ids(4)), tmp_path / "small")
    assert (done.rows, done.without_source) == (DRAFT, ())
    assert torch.equal(Checkpoint(tmp_path / "small").read("lm_head.weight"), head[ids(4)])


def test_missing_rows_without_target_never_win(tmp_path: Path, head: torch.Tensor) -> None:
    done = drafter_remap.remap(
        drafter(tmp_path / "d", head, ids(1)), Mapping(ids(2)), tmp_path / "new"
    )
    rows = Checkpoint(tmp_path / "new").read("lm_head.weight").float()
    lacking = [j for j, t in enumerate(ids(2).tolist()) if t in set(done.without_source)]
    states = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(5))
    best = (states @ rows.T).argmax(dim=1)
    assert not set(best.tolist()) & set(lacking)


def test_remap_refuses_what_it_cannot_do(tmp_path: Path, head: torch.Tensor) -> None:
    draft = drafter(tmp_path / "d", head, ids(1))
    with pytest.raises(CheckpointError, match="names a target token twice"):
        drafter_remap.remap(draft, Mapping(torch.tensor([3, 3])), tmp_path / "x")
    with pytest.raises(CheckpointError, match="is not empty"):
        drafter_remap.remap(draft, Mapping(ids(2)), draft.folder)
    broken = drafter(
        tmp_path / "b", head, ids(1), tensors={"lm_head.weight": torch.zeros(5, HIDDEN)}
    )
    with pytest.raises(CheckpointError, match="5 rows, its mapping 1000"):
        drafter_remap.remap(broken, Mapping(ids(2)), tmp_path / "y")


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="convert the weights"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        _ = Checkpoint(tmp_path).names


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".json"])
def test_mappings_are_read_from_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    chosen = ids(6)
    if suffix == ".safetensors":
        save_file({"d2t": Mapping(chosen).d2t}, str(path))
    elif suffix == ".pt":
        torch.save(chosen.tolist(), path)
    else:
        path.write_text(json.dumps(chosen.tolist()))
    assert torch.equal(mapping.read(path).target_of, chosen)


# --- measure ---------------------------------------------------------------------------------------


class FakeServer(BaseHTTPRequestHandler):
    """Answers /generate with the meta_info in `answers`, keyed by the prompt's first word."""

    answers: dict[str, dict[str, Any]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        info = self.answers[body["text"].split()[0]]
        out = json.dumps({"text": "x", "meta_info": info}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server_url() -> Any:
    server = HTTPServer(("127.0.0.1", 0), FakeServer)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def info(histogram: list[int]) -> dict[str, Any]:
    passes = sum(histogram)
    tokens = passes + sum(i * n for i, n in enumerate(histogram))
    return {
        "spec_verify_ct": passes,
        "completion_tokens": tokens,
        "spec_correct_drafts_histogram": histogram,
    }


def test_measure_by_position_and_class(tmp_path: Path, server_url: str) -> None:
    FakeServer.answers = {"code": info([10, 10, 30, 50]), "chat": info([50, 30, 15, 5])}
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "code a", "class": "code"},
        {"prompt": "chat b", "class": "chat"},
        {"prompt": "code c", "class": "code"},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    result = CliRunner().invoke(app, ["measure", str(file), "--url", server_url, "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.output)
    groups = {g["group"]: g for g in body["groups"]}
    assert list(groups) == ["code", "chat", "all"]
    assert groups["code"]["positions"] == pytest.approx([0.9, 0.8, 0.5])
    assert groups["chat"]["positions"] == pytest.approx([0.5, 0.2, 0.05])
    assert groups["all"]["passes"] == 300
    assert groups["all"]["positions"][0] == pytest.approx((0.9 * 2 + 0.5) / 3)
    assert not body["verdict"]["misaligned"]
    shown = CliRunner().invoke(app, ["measure", str(file), "--url", server_url])
    assert "accept length" in shown.output
    assert "3.20" in shown.output  # 1 + 0.9 + 0.8 + 0.5


@pytest.mark.parametrize(
    ("histogram", "right", "misaligned", "says"),
    [
        ([1940, 50, 10, 0], True, True, "not the ones it was trained on"),
        ([1940, 50, 10, 0], None, True, "if `drafter check` finds"),
        ([1940, 50, 10, 0], False, False, "fix that first"),
        ([700, 1250, 40, 10], True, True, "the drafter feeds itself"),
        ([800, 400, 400, 400], True, False, "healthy"),
        ([1400, 300, 200, 100], True, False, "above guessing"),
        ([9, 1, 0, 0], True, False, "above guessing"),
    ],
)
def test_verdict(histogram: list[int], right: bool | None, misaligned: bool, says: str) -> None:
    group = drafter_measure.Group("all", 1, 1, sum(histogram), drafter_measure.reached(histogram))
    verdict = drafter_measure.judge(group, right)
    assert (verdict.misaligned, says in verdict.text) == (misaligned, True), verdict.text


def test_measure_says_what_is_wrong(tmp_path: Path, server_url: str) -> None:
    FakeServer.answers = {"plain": {"completion_tokens": 5}}
    file = tmp_path / "prompts.txt"
    file.write_text("plain text\n")
    result = CliRunner().invoke(app, ["measure", str(file), "--url", server_url])
    assert result.exit_code == 2
    assert "no verify passes" in result.output
    result = CliRunner().invoke(app, ["measure", str(file), "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    file.write_text('{"text": 1}\n')
    with pytest.raises(drafter_measure.MeasureError, match=r"prompts\.txt:1"):
        drafter_measure.read_prompts(file)


def test_commands_check_and_remap(tmp_path: Path, target: Checkpoint, head: torch.Tensor) -> None:
    good = drafter(tmp_path / "good", head, ids(1))
    run = CliRunner()
    result = run.invoke(app, ["check", str(target.folder), str(good.folder), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["fits"] is True
    text = tmp_path / "counts.json"
    text.write_text(json.dumps({"1": 3, "2": 4}))
    bad = drafter(tmp_path / "bad", head, ids(1), config={"hidden_size": 1})
    result = run.invoke(
        app,
        ["check", str(target.folder), str(bad.folder), "--counts", str(text)],
        terminal_width=200,
    )
    assert result.exit_code == 1
    assert "does not fit" in result.output
    result = run.invoke(
        app, ["remap", str(good.folder), str(bad.folder), str(tmp_path / "out"), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["without_source"] == []
    result = run.invoke(app, ["check", str(tmp_path / "none"), str(good.folder)])
    assert result.exit_code == 2
