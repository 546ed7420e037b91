"""What a model's layers weigh: matrices by kind, how tensor parallelism cuts them, and what a token keeps in the cache.

Read from a Hugging Face `config.json`, or from one of the models that come with the package. Nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).with_name("models")

Kind = Literal["experts", "attention", "dense", "head"]
Cut = Literal["split", "replicated", "expert"]

# Bits per weight, block scales included: INT4 groups of 32 with a 16-bit scale, MXFP4 one byte per 32, NVFP4 one
# byte per 16, FP8 one 32-bit scale per 128x128.
WEIGHT_BITS: dict[str, float] = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0 + 32 / (128 * 128),
    "int8": 8.0,
    "int4": 4.0 + 16 / 32,
    "mxfp4": 4.0 + 8 / 32,
    "nvfp4": 4.0 + 8 / 16,
}


class ShapeError(ValueError):
    """A configuration cannot be turned into shapes; the text names the missing or impossible field."""


class Matrix(msgspec.Struct, frozen=True):
    """One weight matrix: `inputs` x `outputs`, `count` of them per layer.

    cut: "split" over tensor-parallel ranks, "replicated" on each, or "expert" (one of the routed experts).
    """

    name: str
    inputs: int
    outputs: int
    kind: Kind
    cut: Cut = "split"
    count: int = 1

    @property
    def weights(self) -> int:
        """Number of weights of all `count` matrices."""
        return self.inputs * self.outputs * self.count


class Layer(msgspec.Struct, frozen=True):
    """One kind of decoder layer, and how many the model has of it.

    Attributes:
        name: for tables; layers: how many.
        matrices: its weights; those of `cut` "expert" describe all routed experts.
        experts, active: routed experts and how many of them one token uses; 0 for dense layers.
        cache_per_token: elements that every token keeps in the cache; cache_ways: over how many ranks they can be cut.
        cache_window: tokens that attention reads at most, 0 for all; cache_stride: it reads one entry of so many.
        index_per_token: elements per token that an index reads in full.
        state: elements of a recurrent state per sequence (read and written each pass), cut over ranks.
    """

    name: str
    layers: int
    matrices: tuple[Matrix, ...]
    experts: int = 0
    active: int = 0
    cache_per_token: int = 0
    cache_ways: int = 1
    cache_window: int = 0
    cache_stride: int = 1
    index_per_token: int = 0
    state: int = 0


class Model(msgspec.Struct, frozen=True):
    """A model as the planner sees it.

    Attributes:
        name, source: what it is and where the shapes are from.
        hidden, vocab: sizes; layers: kinds of layers.
        formats: weight format per kind, a key of WEIGHT_BITS.
        plain_residual: residual add + RMSNorm after each sum, which the fused kernels need.
    """

    name: str
    source: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    formats: dict[str, str]
    plain_residual: bool = True

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return sum(layer.layers for layer in self.layers)

    @property
    def layer_sums(self) -> int:
        """All-reduces of the layers in one pass under tensor parallelism: after attention and after the FFN."""
        return 2 * self.depth

    @property
    def fusable_sums(self) -> int:
        """Those followed by residual add and a layer's RMSNorm; the last FFN's meets the final norm instead."""
        return self.layer_sums - 1 if self.plain_residual else 0

    def bits(self, kind: Kind) -> float:
        """Bits per weight of a kind of matrix."""
        return WEIGHT_BITS[self.formats[kind]]

    def parameters(self) -> int:
        """All weights: layers, embedding and head."""
        layers = sum(m.weights * layer.layers for layer in self.layers for m in layer.matrices)
        return layers + 2 * self.vocab * self.hidden


def names() -> tuple[str, ...]:
    """Models that come with the package."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.json")))


def read(where: str | Path, formats: Mapping[str, str] | None = None) -> Model:
    """The model behind a name, a `config.json`, or a folder that holds one.

    Args:
        where: one of `names()` (case and a vendor prefix do not matter), or a path.
        formats: weight formats that replace the model's own, by kind ("experts", "attention", "dense", "head").

    Raises:
        ShapeError: no such model, or a field is missing.
    """
    path = Path(where)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        wanted = str(where).rsplit("/", 1)[-1].lower()
        found = [n for n in names() if n == wanted or wanted.startswith(n)]
        if not found:
            raise ShapeError(
                f"no model {str(where)!r}: give a config.json or one of {', '.join(names())}"
            )
        path = FOLDER / f"{max(found, key=len)}.json"
    from sglang_sm120.foresight.config import from_config

    model = from_config(json.loads(path.read_text()), str(path))
    if formats:
        unknown = set(formats) - set(model.formats) | set(formats.values()) - set(WEIGHT_BITS)
        if unknown:
            raise ShapeError(
                f"unknown weight kind or format {', '.join(sorted(unknown))}: kinds are "
                f"{', '.join(model.formats)}, formats {', '.join(WEIGHT_BITS)}"
            )
        model = msgspec.structs.replace(model, formats={**model.formats, **formats})
    return model
