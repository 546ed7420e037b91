"""The tiny models: tokenizer, checkpoints against Hugging Face's own classes, the drafter's unrolling, the cache."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from sglang_sm120.sim import models, net, tokenizer, train
from torch.nn import functional as F

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "llama": net.Shape(
        vocab=tokenizer.VOCAB_SIZE, layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48
    ),
    "deepseek": net.Shape(
        vocab=tokenizer.VOCAB_SIZE,
        layers=3,
        hidden=32,
        heads=4,
        intermediate=48,
        mla=net.Mla(
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        ),
        moe=net.Moe(n_routed_experts=4, moe_intermediate_size=16),
    ),
}


@pytest.fixture(params=["llama", "deepseek"])
def family(request):
    return request.param


def test_tokenizer_files_give_one_token_per_byte_and_the_text_back(tmp_path):
    tokenizer.save_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sample = "Grüße, 世界!\n\ttab  two spaces\x00\x7f </s>not" + "".join(map(chr, range(32, 127)))
    plain = sample.replace("</s>", "")
    ids = loaded(plain, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(plain)
    assert loaded.decode(ids) == plain == tokenizer.decode(ids)
    assert loaded("</s>")["input_ids"] == [tokenizer.EOS_ID] == [loaded.eos_token_id]
    assert loaded.bos_token_id == tokenizer.BOS_ID
    assert max(tokenizer.PAD_ID, *ids) < tokenizer.VOCAB_SIZE


def test_the_text_is_plain_ascii_and_long_enough():
    known = models.text()
    assert known.isascii() and len(known) > 1200


def test_checkpoint_gives_the_same_logits_in_hugging_faces_own_class(tmp_path, family):
    torch.manual_seed(0)
    ours = net.Decoder(SMALL[family]).eval()
    if (
        family == "deepseek"
    ):  # a bias that changes the choice of experts must not change their weights
        for layer in ours.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(4))
    models._round_to_bf16(ours)
    models.save_checkpoint(tmp_path / "m", ours.weights(), models.target_config(ours.shape))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == models.target_config(ours.shape)["architectures"][0]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(0, 64, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=2e-4, rtol=1e-4)


def test_deepseek_config_names_what_sglang_reads():
    config = models.target_config(models.RECIPES["deepseek"].shape)
    assert config["moe_layer_freq"] == 1 and config["scoring_func"] == "sigmoid"
    assert config["n_shared_experts"] == 1 and config["first_k_dense_replace"] == 1
    assert config["topk_method"] == "noaux_tc" and config["kv_lora_rank"] and config["q_lora_rank"]


def test_shapes_suit_two_ranks_and_the_collectives():
    for recipe in models.RECIPES.values():
        shape = recipe.shape
        assert shape.hidden % 8 == 0 and shape.heads % 2 == 0 and shape.kv_heads % 2 == 0
        assert shape.vocab % 64 == 0
        assert recipe.aux_layers[0] == 1 and max(recipe.aux_layers) < shape.layers - 1
        config = models.drafter_config(shape, recipe.aux_layers)
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert ids == sorted(set(recipe.aux_layers))


def serve_step_by_step(head, ids, aux, start, steps):
    """Logits of `steps` drafts after token `start + 1`, computed the way a server does, with a list as KV pool."""
    attn, layer = head.midlayer["self_attn"], head.midlayer
    keys, values, state, out = [], [], None, []
    for position in range(start + steps):
        state = head.fc(aux[position]) if position <= start else state
        embedded = head.embed_tokens(ids[position + 1])
        both = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](state)])
        q, k, v = attn.project(both[None, None], torch.tensor([position]))
        keys.append(k)
        values.append(v)
        mixed = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2))
        x = state + attn.join(mixed)[0, 0]
        state = x + layer["mlp"](layer["post_attention_layernorm"](x))
        if position >= start:
            out.append(head.lm_head(head.norm(state)))
    return out


def test_unrolled_drafter_equals_serving_step_by_step():
    torch.manual_seed(1)
    target = net.Decoder(SMALL["llama"])
    head = net.Eagle3Head(target, 2)
    ids = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        _, aux = target(ids, (0, 1))
        unrolled = head.unroll(ids, aux, 3)
        for start in range(unrolled[0].shape[1]):
            served = serve_step_by_step(head, ids[0], aux[0], start, 3)
            for step in range(3):
                torch.testing.assert_close(
                    unrolled[step][0, start], served[step], atol=1e-4, rtol=1e-4
                )


def test_margin_is_that_of_the_worst_token():
    class Fixed(torch.nn.Module):
        def forward(self, ids, aux_layers=()):
            logits = F.one_hot((ids + 1) % 10, 10).float() * 5
            logits[ids == 6, 3] = 4.0  # the runner-up after token 6
            return logits, None

    data = torch.arange(10).repeat(4)
    recipe = train.TargetRecipe(window=16, context=4, batch=2)
    assert train.least_margin(Fixed(), data, recipe) == pytest.approx(1.0)
    data[17] = 0  # now the model is wrong once
    assert train.least_margin(Fixed(), data, recipe) < 0


def tiny(family, **changes):
    recipe = models.Recipe(
        SMALL[family],
        aux_layers=(1,),
        target=train.TargetRecipe(steps=60, batch=3, window=24, context=6, rate=1e-2, margin=0.2),
        drafter=train.DrafterRecipe(steps=20, batch=3, window=24, context=6, pool=6, goal=1.2),
    )
    return dataclasses.replace(recipe, **changes)


def test_build_trains_saves_and_finds_again(tmp_path, monkeypatch):
    family, tmp_path = "llama", tmp_path / "cache"
    monkeypatch.setitem(models.RECIPES, family, tiny(family))
    monkeypatch.setattr(models, "text", lambda: "a cat on a mat. ")
    said = []
    built = models.build(family, tmp_path, lambda done, what: said.append((done, what)))
    assert said[-1] == (1.0, "ready") and any("drafter" in what for _, what in said)
    assert built.margin > 0 and built.draft_accept_length > 1
    for part in (built.target, built.drafter):
        config = transformers.AutoConfig.from_pretrained(part)
        assert config.hidden_size == 32
        assert transformers.AutoTokenizer.from_pretrained(part)("ab")["input_ids"] == [97, 98]
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    monkeypatch.setattr(models, "_make", lambda *a: pytest.fail("trained again"))
    again = models.build(family, moved)
    assert again.target.startswith(str(moved)) and again.margin == built.margin
    case = built.cases(2, prompt=8, new=12)[1]
    assert (case.prompt + case.expected) in "a cat on a mat. " * 3
    monkeypatch.setitem(models.RECIPES, family, tiny(family, seed=21))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        models.build(family, moved)


def test_two_builders_train_once_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def fail(*args):
        raise train.TrainingError("not learned")

    monkeypatch.setattr(models, "_make", fail)
    with pytest.raises(train.TrainingError):
        models.build("llama", tmp_path)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []

    def make(family, recipe, known, scratch, folder, report):
        calls.append(family)
        time.sleep(0.3)
        return models.Built(
            family=family, target="", drafter="", layers=1, hidden=8, aux_layers=(1,), text=known,
            context=4, max_length=32, margin=1.0, draft_accept_length=2.0,
        )  # fmt: skip

    monkeypatch.setattr(models, "_make", make)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(models.build("llama", tmp_path)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["llama"] and len({built.target for built in found}) == 1


def test_a_target_that_does_not_learn_is_an_error(monkeypatch, tmp_path):
    # 3 steps, and three more rounds of 1 step
    recipe = tiny("llama", target=train.TargetRecipe(steps=3, batch=2, window=24, context=6))
    monkeypatch.setitem(models.RECIPES, "llama", recipe)
    with pytest.raises(train.TrainingError, match="after 6 steps"):
        models.build("llama", tmp_path)


def test_cases_refuse_what_the_model_was_not_trained_for():
    built = models.Built(
        family="llama", target="", drafter="", layers=1, hidden=8, aux_layers=(1,), text="0123456789" * 9,
        context=24, max_length=100, margin=1.0, draft_accept_length=2.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="shorter than the 24"):
        built.cases(1, prompt=20, new=10)
    with pytest.raises(ValueError, match="exceed the 100"):
        built.cases(1, prompt=50, new=51)
    assert [len(case.expected) for case in built.cases(3, prompt=30, new=70)] == [70] * 3
