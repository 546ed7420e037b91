"""From a Hugging Face `config.json` to shapes: which kind of attention and FFN each layer has, and in what format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_sm120.foresight.shapes import Layer, Matrix, Model, ShapeError


def from_config(config: Mapping[str, Any], origin: str = "config.json") -> Model:
    """Shapes from a Hugging Face configuration (a multimodal one's `text_config` is used).

    Raises:
        ShapeError: a field that the shapes need is missing.
    """
    top = config
    if "text_config" in config:
        config = {**config["text_config"]}
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"):
        if key not in config:
            raise ShapeError(f"{origin}: {key} is missing")
    formats = dict(top.get("_weights", {})) or _formats(top, config)
    return Model(
        name=str(top.get("_name") or _named(top, origin)),
        source=str(top.get("_source", origin)),
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        layers=_layers(config, origin),
        formats=formats,
        plain_residual="hc_mult" not in config and config.get("model_type") != "deepseek_v4",
    )


def _named(config: Mapping[str, Any], origin: str) -> str:
    return str(config.get("_name_or_path") or config.get("model_type") or Path(origin).parent.name)


def _formats(top: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Weight formats from `quantization_config`; what its ignore list names stays BF16."""
    quant = top.get("quantization_config") or config.get("quantization_config") or {}
    method = str(quant.get("quant_method", "")).lower()
    text = json.dumps(quant).lower()
    if not quant:
        low = "bf16"
    elif "nvfp4" in text or ("modelopt" in method and "fp4" in text):
        low = "nvfp4"
    elif "mxfp4" in text:
        low = "mxfp4"
    elif method == "fp8" or "e4m3" in text or '"num_bits": 8, "type": "float"' in text:
        low = "fp8"
    elif '"num_bits": 4' in text or '"bits": 4' in text or method in ("awq", "gptq"):
        low = "int4"
    elif '"num_bits": 8' in text:
        low = "int8"
    else:
        raise ShapeError(f"quantization {method!r} is not known: give the weight formats")
    kept = " ".join(
        str(x)
        for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
        for x in quant.get(key) or ()
    )
    return {
        "experts": low,
        "attention": "bf16" if "attn" in kept or "attention" in kept else low,
        "dense": "bf16" if "shared_expert" in kept or "mlp." in kept else low,
        "head": "bf16",
    }


def _layers(config: Mapping[str, Any], origin: str) -> tuple[Layer, ...]:
    """Group the decoder's layers by attention kind and by dense or mixture-of-experts FFN."""
    depth = config["num_hidden_layers"]
    count: dict[tuple[str, bool], int] = {}
    for at in range(depth):
        key = (_attention_kind(config, at), _is_moe(config, at))
        count[key] = count.get(key, 0) + 1
    out = []
    for (kind, moe), layers in count.items():
        attention = _ATTENTION[kind.split(":")[0]](config, kind)
        ffn, experts, active = _ffn(config, moe, origin)
        out.append(
            msgspec.structs.replace(
                attention,
                name=f"{kind} + {'experts' if moe else 'dense'}",
                layers=layers,
                matrices=(*attention.matrices, *ffn),
                experts=experts,
                active=active,
            )
        )
    return tuple(out)


def _attention_kind(config: Mapping[str, Any], at: int) -> str:
    if "compress_ratios" in config:
        return f"compressed:{config['compress_ratios'][at]}"
    if config.get("kv_lora_rank"):
        return "latent"
    types = config.get("layer_types")
    linear = (
        types[at] == "linear_attention"
        if types
        else bool(config.get("linear_num_value_heads"))
        and (at + 1) % int(config.get("full_attention_interval", 4)) != 0
    )
    return "linear" if linear else "grouped"


def _experts(config: Mapping[str, Any]) -> int:
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if config.get(key):
            return int(config[key])
    return 0


def _is_moe(config: Mapping[str, Any], at: int) -> bool:
    if not _experts(config):
        return False
    types = config.get("mlp_layer_types")
    if types:
        return types[at] != "dense"
    if at in (config.get("mlp_only_layers") or ()):
        return False
    return at >= int(config.get("first_k_dense_replace") or 0)


def _ffn(config: Mapping[str, Any], moe: bool, origin: str) -> tuple[tuple[Matrix, ...], int, int]:
    hidden = config["hidden_size"]
    if not moe:
        if not config.get("intermediate_size"):
            raise ShapeError(f"{origin}: intermediate_size is missing")
        width = int(config["intermediate_size"])
        return (Matrix("mlp", hidden, width, "dense", count=3),), 0, 0
    experts = _experts(config)
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    parts = [
        Matrix("router", hidden, experts, "head", "replicated"),
        Matrix("experts", hidden, width, "experts", "expert", 3 * experts),
    ]
    shared = config.get("shared_expert_intermediate_size") or (
        int(config.get("n_shared_experts") or 0) * width
    )
    if shared:
        parts.append(Matrix("shared expert", hidden, shared, "dense", count=3))
    active = int(config.get("num_experts_per_tok") or config.get("top_k_experts") or 0)
    if not active:
        raise ShapeError(f"{origin}: num_experts_per_tok is missing")
    return tuple(parts), experts, active


def _grouped(config: Mapping[str, Any], kind: str) -> Layer:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    gate = 2 if config.get("attn_output_gate") else 1
    return Layer(
        name=kind,
        layers=0,
        matrices=(
            Matrix("q", hidden, gate * heads * size, "attention"),
            Matrix("kv", hidden, 2 * groups * size, "attention"),
            Matrix("o", heads * size, hidden, "attention"),
        ),
        cache_per_token=2 * groups * size,
        cache_ways=groups,
    )


def _latent(config: Mapping[str, Any], kind: str) -> Layer:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank = config.get("q_lora_rank")
    parts = [Matrix("kv_a", hidden, rank + rope, "attention", "replicated")]
    if q_rank:
        parts.append(Matrix("q_a", hidden, q_rank, "attention", "replicated"))
        parts.append(Matrix("q_b", q_rank, heads * (nope + rope), "attention"))
    else:
        parts.append(Matrix("q", hidden, heads * (nope + rope), "attention"))
    parts.append(Matrix("kv_b", rank, heads * (nope + value), "attention"))
    parts.append(Matrix("o", heads * value, hidden, "attention"))
    index = 0
    if config.get("index_n_heads"):
        index = config["index_head_dim"]
        parts.append(
            Matrix(
                "index",
                config["q_lora_rank"],
                config["index_n_heads"] * index,
                "attention",
                "replicated",
            )
        )
        parts.append(Matrix("index key", hidden, index, "attention", "replicated"))
    return Layer(
        name=kind,
        layers=0,
        matrices=tuple(parts),
        cache_per_token=rank + rope,
        cache_window=int(config.get("index_topk") or 0),
        index_per_token=index,
    )


def _linear(config: Mapping[str, Any], kind: str) -> Layer:
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * size
    return Layer(
        name=kind,
        layers=0,
        matrices=(
            Matrix("qkvz", hidden, 2 * keys + 2 * values, "attention"),
            Matrix("ba", hidden, 2 * heads, "attention"),
            Matrix("out", values, hidden, "attention"),
        ),
        state=heads * size * config["linear_key_head_dim"],
    )


def _compressed(config: Mapping[str, Any], kind: str) -> Layer:
    """DeepSeek-V4: one shared key-value head, compressed by the layer's ratio, grouped low-rank output."""
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    ratio, q_rank = int(kind.split(":")[1]), config["q_lora_rank"]
    groups, o_rank = config["o_groups"], config["o_lora_rank"]
    parts = [
        Matrix("q_a", hidden, q_rank, "attention", "replicated"),
        Matrix("q_b", q_rank, heads * size, "attention"),
        Matrix("kv", hidden, size, "attention", "replicated"),
        Matrix("o_a", heads * size // groups, groups * o_rank, "attention"),
        Matrix("o_b", groups * o_rank, hidden, "attention"),
    ]
    index = 0
    if ratio:
        # Overlapping windows at ratio 4 need two projections for values and two for gates.
        overlap = 2 if ratio == 4 else 1
        parts.append(Matrix("compressor", hidden, 2 * overlap * size, "attention", "replicated"))
    if ratio == 4:
        index = config["index_head_dim"]
        parts.append(
            Matrix(
                "index",
                config["q_lora_rank"],
                config["index_n_heads"] * index,
                "attention",
                "replicated",
            )
        )
    return Layer(
        name=kind,
        layers=0,
        matrices=tuple(parts),
        cache_per_token=size,
        cache_window=int(config["index_topk"])
        if ratio == 4
        else 0
        if ratio
        else config["sliding_window"],
        cache_stride=max(1, ratio),
        index_per_token=index // 4 if index else 0,
    )


_ATTENTION = {
    "grouped": _grouped,
    "latent": _latent,
    "linear": _linear,
    "compressed": _compressed,
}
