"""A Hugging Face checkpoint read from its headers: shapes and types of all tensors, values only of those asked for."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch


class CheckpointError(ValueError):
    """A checkpoint lacks something or cannot be read; the text names the folder and the file or tensor."""


class Checkpoint:
    """A folder with `config.json` and safetensors files.

    Args:
        folder: the checkpoint; tensors may be spread over any number of `*.safetensors` files.

    Raises:
        CheckpointError: no folder, no config.json, or no safetensors files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config = self.folder / "config.json"
        if not config.is_file():
            raise CheckpointError(
                f"{self.folder} has no config.json: give a local checkpoint folder"
            )
        try:
            self.config: dict[str, Any] = json.loads(config.read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{config} is not JSON: {error}") from error
        if not self.files:
            raise CheckpointError(
                f"{self.folder} has no *.safetensors: convert the weights to safetensors first"
            )

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name."""
        return tuple(sorted(self.folder.glob("*.safetensors")))

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration."""
        return {**self.config, **self.config.get("text_config", {})}

    @cached_property
    def _where(self) -> dict[str, Path]:
        where: dict[str, Path] = {}
        for path in self.files:
            try:
                with safe_open(str(path), framework="pt") as opened:
                    where.update(dict.fromkeys(opened.keys(), path))
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
        return where

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._where)

    def find(self, *endings: str) -> str | None:
        """Name of the tensor that equals or ends in ".<ending>", for the first ending that any tensor has."""
        for ending in endings:
            for name in self._where:
                if name == ending or name.endswith(f".{ending}"):
                    return name
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        with self._open(name) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        with self._open(name) as opened:
            return opened.get_tensor(name)

    def rows(self, name: str, indices: list[int]) -> torch.Tensor:
        """Some rows of a matrix as fp32 [len(indices), columns]; only those rows are read."""
        import torch

        with self._open(name) as opened:
            part = opened.get_slice(name)
            return torch.cat([part[i : i + 1] for i in indices]).float()

    def _open(self, name: str) -> Any:
        if name not in self._where:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        return safe_open(str(self._where[name]), framework="pt")
