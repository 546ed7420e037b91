"""The tiny models of the CPU rig: made on first use, kept in a cache, loaded by unmodified SGLang.

Per family a target that knows one text by heart (so the right continuation of any place of it is known) and an EAGLE-3
drafter trained on it. A model's folder is named after a hash of everything that determines it; it appears by one
rename, so a reader never sees half of it, and a lock keeps two processes from training the same model twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save_file

from sglang_sm120.sim import net, tokenizer, train

Family = Literal["llama", "deepseek"]
FAMILIES: tuple[Family, ...] = ("llama", "deepseek")
# Raise when code outside the recipe (net.py, train.py, this file) changes what is built.
_BUILD_VERSION = 1
_MANIFEST = "manifest.json"

# (part done between 0 and 1, what is being done)
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines one family's models.

    Attributes:
        shape: The target's shape.
        aux_layers: Layers whose outputs feed the drafter. SGLang reads a DeepSeek list that starts with 1 as outputs
            of those layers, others as their inputs; Llama's always as outputs. So both start with 1.
        target: How the target is trained.
        drafter: How the drafter is trained.
        seed: Seed of the weights and of the windows.
    """

    shape: net.Shape
    aux_layers: tuple[int, ...]
    target: train.TargetRecipe = field(default_factory=train.TargetRecipe)
    drafter: train.DrafterRecipe = field(default_factory=train.DrafterRecipe)
    seed: int = 20

    def key(self, text: str) -> str:
        """Twelve hex digits that change with the recipe, the text or the way models are built."""
        parts = json.dumps([_BUILD_VERSION, tokenizer.VOCAB_SIZE, asdict(self), text])
        return hashlib.sha256(parts.encode()).hexdigest()[:12]


RECIPES: dict[Family, Recipe] = {
    "llama": Recipe(
        net.Shape(vocab=tokenizer.VOCAB_SIZE, layers=8),
        aux_layers=(1, 3, 6),
        target=train.TargetRecipe(rate=3e-3),
    ),
    "deepseek": Recipe(
        net.Shape(vocab=tokenizer.VOCAB_SIZE, layers=6, mla=net.Mla(), moe=net.Moe()),
        aux_layers=(1, 2, 4),
    ),
}


class Case(msgspec.Struct, frozen=True):
    """A prompt and the text that must follow it under greedy decoding."""

    prompt: str
    expected: str


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """One family's models on disk; also the content of its manifest.json.

    Attributes:
        family: "llama", "deepseek" or "kimi-proxy".
        target: Directory of the target's checkpoint (bf16).
        drafter: Directory of the EAGLE-3 head's checkpoint (bf16).
        layers: The target's decoder layers.
        hidden: The target's hidden size.
        aux_layers: Layers whose outputs feed the drafter.
        text: What the target knows by heart; it starts over at its end.
        context: Least tokens of prompt after which every next token is right.
        max_length: Most tokens of prompt and answer together that training covered.
        margin: Least lead of the right logit over any other, in bf16-rounded weights.
        draft_accept_length: Accept length the drafter reached on the text in training (3 steps, topk 1).
    """

    family: str
    target: str
    drafter: str
    layers: int
    hidden: int
    aux_layers: tuple[int, ...]
    text: str
    context: int
    max_length: int
    margin: float
    draft_accept_length: float

    def cases(self, count: int, *, prompt: int = 48, new: int = 64) -> list[Case]:
        """Prompts spread over the text, with their continuations; one token is one byte.

        Args:
            count: Cases.
            prompt: Bytes per prompt, at least `context`.
            new: Bytes of continuation.

        Raises:
            ValueError: The prompt is too short, or prompt and continuation exceed `max_length`.
        """
        if prompt < self.context:
            raise ValueError(f"prompt={prompt} is shorter than the {self.context} bytes needed")
        if prompt + new > self.max_length:
            raise ValueError(
                f"prompt={prompt} and new={new} exceed the {self.max_length} tokens of training"
            )
        endless = self.text * 2
        starts = [number * len(self.text) // count for number in range(count)]
        return [
            Case(endless[at : at + prompt], endless[at + prompt : at + prompt + new])
            for at in starts
        ]


def default_cache() -> Path:
    """~/.cache/sglang-sm120."""
    return Path.home() / ".cache" / "sglang-sm120"


def text() -> str:
    """The text the targets learn; written for this package."""
    return importlib.resources.files(__package__).joinpath("text.txt").read_text()


def build(family: Family, cache: Path | None = None, progress: Progress | None = None) -> Built:
    """The family's models, made if the cache lacks them (a minute or two on two cores).

    Args:
        family: "llama" or "deepseek".
        cache: Folder of the cache; `default_cache()` if None.
        progress: Called now and then with the part done and a few words.

    Raises:
        sglang_sm120.sim.train.TrainingError: Training did not reach its goal.
        OSError: The cache cannot be written.
    """
    recipe, known, report = RECIPES[family], text(), progress or (lambda done, what: None)
    cache = cache or default_cache()
    folder = cache / f"{family}-{recipe.key(known)}"
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / f".{folder.name}.lock"):
        if not (folder / _MANIFEST).exists():
            scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache))
            try:
                made = _make(family, recipe, known, scratch, folder, report)
                (scratch / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
                scratch.chmod(0o755)
                os.rename(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    report(1.0, "ready")
    stored = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Built)
    # A cache may have been moved since the manifest was written.
    return msgspec.structs.replace(
        stored, target=str(folder / "target"), drafter=str(folder / "drafter")
    )


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """These products are so small that a second thread gains little, and loses much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make(
    family: Family, recipe: Recipe, known: str, scratch: Path, folder: Path, report: Progress
) -> Built:
    data = torch.tensor(tokenizer.encode(known))
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(recipe.seed)
        target = net.Decoder(recipe.shape)
        train.train_target(
            target,
            data,
            recipe.target,
            recipe.seed,
            lambda done, what: report(0.7 * done, f"{family} target: {what}"),
        )
        _round_to_bf16(target)
        margin = train.least_margin(target, data, recipe.target)
        if margin <= 0:
            raise train.TrainingError(
                f"rounding the {family} target to bf16 made it forget its text (margin {margin:.2f})"
            )
        head = net.Eagle3Head(target, len(recipe.aux_layers))
        accept = train.train_drafter(
            head,
            target,
            recipe.aux_layers,
            data,
            recipe.drafter,
            recipe.seed + 1,
            lambda done, what: report(0.7 + 0.3 * done, f"{family} drafter: {what}"),
        )
    save_checkpoint(scratch / "target", target.weights(), target_config(recipe.shape))
    save_checkpoint(
        scratch / "drafter", head.weights(), drafter_config(head.shape, recipe.aux_layers)
    )
    return Built(
        family=family,
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        layers=recipe.shape.layers,
        hidden=recipe.shape.hidden,
        aux_layers=recipe.aux_layers,
        text=known,
        context=recipe.target.context,
        max_length=recipe.target.window,
        margin=margin,
        draft_accept_length=accept,
    )


def _round_to_bf16(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def save_checkpoint(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write a checkpoint that SGLang loads: weights in bf16, config.json and the byte tokenizer, into a new folder."""
    folder.mkdir()
    stored = {
        # DeepSeek keeps the router's bias in fp32.
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in weights.items()
    }
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_tokenizer(folder)


def target_config(shape: net.Shape) -> dict[str, Any]:
    """The target's config.json: LlamaForCausalLM, or DeepseekV3ForCausalLM for a shape with MLA and experts."""
    config = {
        **_common_config(shape),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
    }
    if shape.mla and shape.moe:
        del config["head_dim"]
        config |= {
            **asdict(shape.mla),
            **asdict(shape.moe),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": shape.heads,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }
    return config


def drafter_config(shape: net.Shape, aux_layers: tuple[int, ...]) -> dict[str, Any]:
    """The EAGLE-3 head's config.json (LlamaForCausalLMEagle3)."""
    return {
        **_common_config(shape),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        "draft_vocab_size": shape.vocab,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        },
    }


def _common_config(shape: net.Shape) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": net.NORM_EPS,
        "rope_theta": net.ROPE_THETA,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": tokenizer.BOS_ID,
        "eos_token_id": tokenizer.EOS_ID,
        "pad_token_id": tokenizer.PAD_ID,
    }
