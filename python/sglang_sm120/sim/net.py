"""The tiny decoders the project trains for its CPU rig, in plain torch with Hugging Face's parameter names.

Two families: Llama (grouped-query attention, gated MLP) and DeepSeek-V3 (multi-head latent attention, a dense first
layer, then experts behind a sigmoid router plus a shared expert), the architecture of Kimi-K2.5. `weights` gives the
checkpoint's tensors by the names SGLang loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

ROPE_THETA = 10000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Mla:
    """Widths of multi-head latent attention; names as in DeepSeek-V3's configuration."""

    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32


@dataclass(frozen=True)
class Moe:
    """Experts of a DeepSeek-V3 layer; names as in DeepSeek-V3's configuration."""

    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 32
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.0


@dataclass(frozen=True)
class Shape:
    """A decoder's shape; `mla` and `moe` are both set for the DeepSeek-V3 family and both None for Llama."""

    vocab: int
    layers: int
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    mla: Mla | None = None
    moe: Moe | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def rotate(x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of [..., time, dim]; pairs are (0, 1), (2, 3), ... if interleaved, else (0, dim / 2), ..."""
    dim = x.shape[-1]
    frequency = ROPE_THETA ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = positions.float().unsqueeze(-1) * frequency
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaAttention(nn.Module):
    """Grouped-query attention; `inputs` is 2 x hidden in an EAGLE-3 head."""

    def __init__(self, shape: Shape, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        inputs = inputs or shape.hidden
        self.q_proj = linear(inputs, self.heads * self.dim)
        self.k_proj = linear(inputs, self.kv_heads * self.dim)
        self.v_proj = linear(inputs, self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, shape.hidden)

    def project(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[batch, time, inputs] -> q, k, v as [batch, heads, time, dim], rotated, keys repeated per query head."""
        batch, time, _ = x.shape
        q = self.q_proj(x).view(batch, time, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, time, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.kv_heads, self.dim).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k = rotate(k, positions, False).repeat_interleave(repeat, 1)
        return rotate(q, positions, False), k, v.repeat_interleave(repeat, 1)

    def join(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x, positions)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class MlaAttention(nn.Module):
    """DeepSeek-V3's multi-head latent attention, keys and values expanded."""

    def __init__(self, shape: Shape, mla: Mla) -> None:
        super().__init__()
        self.heads, self.mla = shape.heads, mla
        qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.q_a_proj = linear(shape.hidden, mla.q_lora_rank)
        self.q_a_layernorm = Norm(mla.q_lora_rank)
        self.q_b_proj = linear(mla.q_lora_rank, self.heads * qk)
        self.kv_a_proj_with_mqa = linear(shape.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(mla.kv_lora_rank)
        self.kv_b_proj = linear(
            mla.kv_lora_rank, self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        )
        self.o_proj = linear(self.heads * mla.v_head_dim, shape.hidden)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mla, (batch, time, _) = self.mla, x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, time, self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [mla.kv_lora_rank, mla.qk_rope_head_dim], -1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, time, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(1), positions, True).expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, positions, True)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SiLU-gated MLP."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias takes part in the choice only, as in DeepSeek-V3."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.randn(moe.n_routed_experts, hidden) * hidden**-0.5)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(moe.n_routed_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, experts] weights, zero for experts not chosen."""
        scores = F.linear(x, self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.moe.num_experts_per_tok).indices
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        if self.training:
            self._balance(mask)
        kept = scores * mask
        return kept / kept.sum(-1, keepdim=True) * self.moe.routed_scaling_factor

    @torch.no_grad()
    def _balance(self, mask: torch.Tensor) -> None:
        load = mask.mean(0)
        self.e_score_correction_bias += 0.001 * torch.sign(load.mean() - load)


class MoeMlp(nn.Module):
    """Routed experts plus a shared one. Training runs every expert on every token: at this size one batched product
    is faster than gathering."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        experts, width = moe.n_routed_experts, moe.moe_intermediate_size
        self.gate = Router(hidden, moe)
        self.gate_up = nn.Parameter(torch.randn(experts, hidden, 2 * width) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.shared_experts = Mlp(hidden, width * moe.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        share = self.gate(flat)
        gate, up = torch.matmul(flat, self.gate_up).chunk(2, -1)  # experts, tokens, width
        routed = torch.bmm(F.silu(gate) * up * share.T.unsqueeze(-1), self.down).sum(0)
        return self.shared_experts(x) + routed.view_as(x)

    def expert_weights(self) -> dict[str, torch.Tensor]:
        """Each expert's three matrices under the checkpoint's names."""
        out = {}
        for number in range(self.gate_up.shape[0]):
            gate, up = self.gate_up[number].chunk(2, -1)
            out[f"experts.{number}.gate_proj.weight"] = gate.T
            out[f"experts.{number}.up_proj.weight"] = up.T
            out[f"experts.{number}.down_proj.weight"] = self.down[number].T
        return out


class Layer(nn.Module):
    """Attention and MLP, each after its norm, each added to the residual."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.self_attn: nn.Module
        self.mlp: nn.Module
        self.self_attn = MlaAttention(shape, shape.mla) if shape.mla else LlamaAttention(shape)
        if shape.moe and number >= shape.moe.first_k_dense_replace:
            self.mlp = MoeMlp(shape.hidden, shape.moe)
        else:
            self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=1.0)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = Norm(shape.hidden)


class Decoder(nn.Module):
    """A causal language model of one of the two families."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = linear(shape.hidden, shape.vocab)

    def forward(
        self, ids: torch.Tensor, aux_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, time] ids -> [batch, time, vocab] logits, and the outputs of `aux_layers` side by side."""
        positions = torch.arange(ids.shape[1])
        x, aux = self.model.embed_tokens(ids), []
        for number, layer in enumerate(self.model.layers):
            x = layer(x, positions)
            if number in aux_layers:
                aux.append(x)
        return self.lm_head(self.model.norm(x)), torch.cat(aux, -1) if aux else None

    def weights(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, fp32, by the names SGLang loads."""
        out = {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not name.endswith((".gate_up", ".mlp.down"))
        }
        for number, layer in enumerate(self.model.layers):
            if isinstance(layer.mlp, MoeMlp):
                for name, tensor in layer.mlp.expert_weights().items():
                    out[f"model.layers.{number}.mlp.{name}"] = tensor
        return {name: tensor.detach().contiguous() for name, tensor in out.items()}


class Eagle3Head(nn.Module):
    """SGLang's `LlamaForCausalLMEagle3`: one Llama layer fed with [token embedding, fused target states].

    The embedding is the target's and stays fixed: SGLang shares it between both models.
    """

    def __init__(self, target: Decoder, aux_states: int) -> None:
        super().__init__()
        shape = target.shape
        self.shape = Shape(vocab=shape.vocab, layers=1, hidden=shape.hidden, heads=4, kv_heads=2)
        self.embed_tokens = nn.Embedding.from_pretrained(
            target.model.embed_tokens.weight.detach().clone(), freeze=True
        )
        self.fc = linear(aux_states * shape.hidden, shape.hidden)
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": LlamaAttention(self.shape, 2 * shape.hidden),
                "mlp": Mlp(shape.hidden, self.shape.intermediate),
                "input_layernorm": Norm(shape.hidden),
                "hidden_norm": Norm(shape.hidden),
                "post_attention_layernorm": Norm(shape.hidden),
            }
        )
        self.norm = Norm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.vocab)
        self.lm_head.weight.data.copy_(target.lm_head.weight.detach())

    def unroll(self, ids: torch.Tensor, aux: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits of each draft step, the way the server runs them.

        Step 0 sees, at index t, the target's states of token t and the embedding of token t + 1, and predicts token
        t + 2. Step k continues the draft from there: it is fed its own state of step k - 1 and token t + 1 + k, and it
        attends to the target-fed entries up to t and to its own entries of the steps before.

        Args:
            ids: [batch, time] tokens.
            aux: [batch, time, aux_states * hidden], the target's states on them.
            steps: Draft steps.

        Returns:
            Per step [batch, time - 1 - steps, vocab]; step k's row t predicts ids[:, t + 2 + k].
        """
        attn, count = self.midlayer["self_attn"], ids.shape[1] - 1 - steps
        state, positions = self.fc(aux[:, :count]), torch.arange(count)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        out, own_k, own_v = [], [], []
        for step in range(steps):
            embedded = self.embed_tokens(ids[:, 1 + step : 1 + step + count])
            mixed_in = torch.cat(
                [self.midlayer["input_layernorm"](embedded), self.midlayer["hidden_norm"](state)],
                -1,
            )
            q, k, v = attn.project(mixed_in, positions + step)
            own_k.append(k)
            own_v.append(v)
            scale = q.shape[-1] ** -0.5
            scores = [(q @ own_k[0].transpose(-1, -2) * scale).masked_fill(~causal, -1e30)]
            scores += [(q * key).sum(-1, keepdim=True) * scale for key in own_k[1:]]
            share = torch.cat(scores, -1).softmax(-1)
            mixed = share[..., :count] @ own_v[0]
            for number, value in enumerate(own_v[1:]):
                mixed = mixed + share[..., count + number, None] * value
            x = state + attn.join(mixed)
            state = x + self.midlayer["mlp"](self.midlayer["post_attention_layernorm"](x))
            out.append(self.lm_head(self.norm(state)))
        return out

    def weights(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, fp32, by the names SGLang loads."""
        return {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
