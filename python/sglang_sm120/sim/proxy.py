"""A target with Kimi-K2.5's layer shapes and few layers and experts, and its EAGLE-3 head, for machines with a GPU.

Nothing is trained. Embeddings are random, every layer adds little to them, and the output head knows each token's
successor, so the next token has a wide margin and rounding cannot change it. The head predicts two tokens ahead
from the target's state, which is right for the first draft token and wrong for the following: the accept length is
2, one for the draft and one for the target's own token. Messages, weights read and launches per layer are those of
the real model's shapes; its 61 layers and 384 experts are not here.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from sglang_sm120.sim import models, net, tokenizer
from sglang_sm120.sim.models import Built, Progress


@dataclass(frozen=True)
class Proxy:
    """Shapes of the target and of its head, and the target's layers whose outputs feed the head."""

    name: str
    target: net.Shape
    draft: net.Shape
    aux_layers: tuple[int, ...]


# Shapes: the configuration published with moonshotai/Kimi-K2.5; 16 of its 384 experts, of which 8 take part as there.
KIMI = Proxy(
    "kimi-proxy",
    net.Shape(
        vocab=tokenizer.VOCAB_SIZE, layers=5, hidden=7168, heads=64, kv_heads=64, intermediate=18432,
        mla=net.Mla(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        moe=net.Moe(
            n_routed_experts=16, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048,
            first_k_dense_replace=1, routed_scaling_factor=2.827,
        ),
    ),
    net.Shape(
        vocab=tokenizer.VOCAB_SIZE, layers=1, hidden=7168, heads=56, kv_heads=8, intermediate=18432
    ),
    aux_layers=(1, 2, 3),
)  # fmt: skip
# Of a layer's output beside the embedding it is added to: enough to be summed, too little to change a token.
SMALL = 0.01
_STEP = 101  # token t is followed by (t + _STEP) mod 256, a walk through all bytes
_SEED = 25
_VERSION = 1  # raise when the weights change


def successor(token: int, steps: int = 1) -> int:
    """The token that follows after `steps` steps."""
    return (token + _STEP * steps) % 256


def build(
    proxy: Proxy = KIMI, cache: Path | None = None, progress: Progress | None = None
) -> Built:
    """Write both checkpoints (about 9 GB for `KIMI`), unless the cache has them.

    Raises:
        OSError: the cache cannot be written.
    """
    report = progress or (lambda done, what: None)
    cache = cache or models.default_cache()
    folder = cache / f"{proxy.name}-{_VERSION}"
    manifest = folder / "manifest.json"
    if not manifest.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{proxy.name}.", dir=cache))
        try:
            report(0.1, "weights")
            made = _make(proxy, scratch, folder)
            (scratch / manifest.name).write_bytes(msgspec.json.encode(made))
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    report(1.0, "ready")
    return msgspec.json.decode(manifest.read_bytes(), type=Built)


def _make(proxy: Proxy, scratch: Path, folder: Path) -> Built:
    generator = torch.Generator(device=_device()).manual_seed(_SEED)
    shape = proxy.target
    embedding = _normal(generator, shape.vocab, shape.hidden, std=1.0)
    models.save_checkpoint(
        scratch / "target", _target(shape, generator, embedding), models.target_config(shape)
    )
    models.save_checkpoint(
        scratch / "drafter",
        _drafter(proxy, generator, embedding),
        models.drafter_config(proxy.draft, proxy.aux_layers),
    )
    return Built(
        family=proxy.name,
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        layers=shape.layers,
        hidden=shape.hidden,
        aux_layers=proxy.aux_layers,
        text="",
        context=1,
        max_length=4096,
        margin=0.0,
        draft_accept_length=2.0,
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _normal(generator: torch.Generator, *size: int, std: float) -> torch.Tensor:
    out = torch.empty(*size, dtype=torch.bfloat16, device=generator.device)
    return out.normal_(0.0, std, generator=generator).cpu()


def _head(embedding: torch.Tensor, steps: int) -> torch.Tensor:
    """Output head whose row of a token is the embedding of the token `steps` before it; specials get nothing."""
    out = torch.zeros_like(embedding)
    for token in range(256):
        out[successor(token, steps)] = embedding[token]
    return out


def _linears(
    generator: torch.Generator, sizes: dict[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Linear layers by name, (outputs, inputs), with what leaves a block small."""
    out = {}
    for name, (rows, columns) in sizes.items():
        last = name.endswith(("o_proj", "down_proj"))
        out[f"{name}.weight"] = _normal(
            generator, rows, columns, std=(SMALL if last else 1.0) * columns**-0.5
        )
    return out


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.gate_proj": (width, hidden),
        f"{prefix}.up_proj": (width, hidden),
        f"{prefix}.down_proj": (hidden, width),
    }


def _target(
    shape: net.Shape, generator: torch.Generator, embedding: torch.Tensor
) -> dict[str, torch.Tensor]:
    mla, moe, hidden = shape.mla, shape.moe, shape.hidden
    assert mla is not None and moe is not None
    out = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden)}
    out["lm_head.weight"] = _head(embedding, 1)
    for number in range(shape.layers):
        sizes = {
            "self_attn.q_a_proj": (mla.q_lora_rank, hidden),
            "self_attn.q_b_proj": (
                shape.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
                mla.q_lora_rank,
            ),
            "self_attn.kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
            "self_attn.kv_b_proj": (
                shape.heads * (mla.qk_nope_head_dim + mla.v_head_dim),
                mla.kv_lora_rank,
            ),
            "self_attn.o_proj": (hidden, shape.heads * mla.v_head_dim),
        }
        norms = {
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
            "self_attn.q_a_layernorm": mla.q_lora_rank,
            "self_attn.kv_a_layernorm": mla.kv_lora_rank,
        }
        dense = number < moe.first_k_dense_replace
        if dense:
            sizes |= _mlp("mlp", hidden, shape.intermediate)
        else:
            sizes |= _mlp(
                "mlp.shared_experts", hidden, moe.moe_intermediate_size * moe.n_shared_experts
            )
            for expert in range(moe.n_routed_experts):
                sizes |= _mlp(f"mlp.experts.{expert}", hidden, moe.moe_intermediate_size)
            sizes["mlp.gate"] = (moe.n_routed_experts, hidden)
        prefix = f"model.layers.{number}."
        for name, tensor in _linears(generator, sizes).items():
            out[prefix + name] = tensor
        for name, width in norms.items():
            out[f"{prefix}{name}.weight"] = torch.ones(width)
        if not dense:
            out[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.zeros(moe.n_routed_experts)
    return out


def _drafter(
    proxy: Proxy, generator: torch.Generator, embedding: torch.Tensor
) -> dict[str, torch.Tensor]:
    shape, sources = proxy.draft, len(proxy.aux_layers)
    hidden, dim = shape.hidden, shape.head_dim
    sizes = {
        "midlayer.self_attn.q_proj": (shape.heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (shape.kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (shape.kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, shape.heads * dim),
        **_mlp("midlayer.mlp", hidden, shape.intermediate),
    }
    out = _linears(generator, sizes)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        out[f"midlayer.{name}.weight"] = torch.ones(hidden)
    # The mean of the target's three states, each about the embedding of the token it belongs to.
    out["fc.weight"] = (torch.eye(hidden).repeat(1, sources) / sources).bfloat16()
    out["norm.weight"] = torch.ones(hidden)
    out["lm_head.weight"] = _head(embedding, 2)
    out["embed_tokens.weight"] = embedding
    return out
