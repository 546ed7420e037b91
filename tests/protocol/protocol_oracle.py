"""The canonical sum and the epilogues, written again in torch: what every schedule must equal bit for bit.

Nothing here calls the engine. Islands are given as lists of ranks in canonical order.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """Replace every NaN of a tensor by the positive one with all mantissa bits set."""
    if x.dtype == torch.float32:
        bits = x.view(torch.int32).clone()
        bits[torch.isnan(x)] = 0x7FFFFFFF
    else:
        bits = x.view(torch.int16).clone()
        bits[torch.isnan(x)] = 0x7FFF
    return bits.view(x.dtype)


def int8_wire(x: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, hidden] through the INT8 wire: blocks of 32 that share a power-of-two step.

    The step is the smallest power of two (at least 2**-126) for which no code rounds above 127; blocks
    restart at each tile of 256, which 32 divides, so they are plain blocks of the row. A block with a NaN or
    an infinity decodes to NaN.
    """
    rows, hidden = x.shape
    padded = torch.nn.functional.pad(x, (0, -hidden % 32)).reshape(rows, -1, 32).double()
    amax = padded.abs().amax(-1, keepdim=True)
    broken = ~torch.isfinite(amax)
    amax = torch.where(broken, torch.ones_like(amax), amax)
    exponent = torch.ceil(torch.log2((amax / 127.5).clamp_min(2.0**-150)))
    # log2 of a double may be off by one at the edges: correct it with exact comparisons.
    exponent = torch.where(amax >= 127.5 * torch.exp2(exponent), exponent + 1, exponent)
    exponent = torch.where(amax < 127.5 * torch.exp2(exponent - 1), exponent - 1, exponent)
    step = torch.exp2(exponent.clamp_min(-126))
    # Code 0 has no sign: adding 0.0 turns a negative zero into the positive one.
    decoded = (torch.round(padded / step) * step + 0.0).float()
    decoded = torch.where(broken, torch.full_like(decoded, float("nan")), decoded)
    return decoded.reshape(rows, -1)[:, :hidden]


def canonical_sum(
    xs: torch.Tensor,
    islands: list[list[int]],
    *,
    wire: str = "lossless",
    fp32_partials: bool = False,
) -> torch.Tensor:
    """Sum [world, rows, hidden] over ranks in the canonical order; result [rows, hidden], same dtype."""
    dtype = xs.dtype
    quantise = wire == "int8"

    def partial_wire(part: torch.Tensor) -> torch.Tensor:
        if fp32_partials:
            return part
        return int8_wire(part) if quantise else part.to(dtype).float()

    total = None
    for island in islands:
        part = None
        for rank in island:
            x = xs[rank].float()
            x = int8_wire(x) if quantise else x
            part = x if part is None else part + x
        assert part is not None
        if len(islands) > 1:
            part = partial_wire(part)
        total = part if total is None else total + part
    assert total is not None
    if quantise:
        total = int8_wire(total)
    return canonical_nan(total.to(dtype))


def rmsnorm_chain(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's unfused chain (RMSNorm.forward_native, or GemmaRMSNorm.forward_native)."""
    dtype = total.dtype
    if gemma:
        residual_out = total + residual
        x = residual_out.float()
    else:
        x = total.float() + residual.float()
        residual_out = x.to(dtype)
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    x = x * (1.0 + weight.float()) if gemma else x * weight
    return x.to(dtype), residual_out


def per_token_fp8(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's per-token FP8 E4M3 quantiser: codes as bytes [rows, hidden], scales [rows]."""
    x = normed.float()
    scale = x.abs().amax(-1) / E4M3_MAX
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)
    scaled = (x * inverse[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance between two finite tensors of one dtype, in units of the last place."""
    width = torch.int32 if a.dtype == torch.float32 else torch.int16

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(width).long()
        limit = 1 << (31 if width == torch.int32 else 15)
        return torch.where(bits < 0, -(bits + limit), bits)

    return int((ordered(a) - ordered(b)).abs().max())
