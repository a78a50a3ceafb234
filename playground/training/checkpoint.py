"""The file from which an interrupted training goes on."""
from __future__ import annotations

from dataclasses import dataclass
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from playground.errors import Refusal


@dataclass(frozen=True)
class Checkpoint:
    """A state of a training in a file. `about` is what it belongs to: a file of anything else is ignored."""

    path: Path
    about: tuple[Any, ...]

    def read(self) -> dict | None:
        """What was written last; None if there is nothing to go on from."""
        if not self.path.is_file():
            return None
        try:
            saved = torch.load(self.path, weights_only=True)
        except Exception:  # a file that was cut off may fail in any way; the training then begins anew
            return None
        return saved if saved.pop("of", None) == self._digest else None

    def write(self, state: dict) -> None:
        """Replace the file. Raises Refusal if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".unfinished")
            torch.save({**state, "of": self._digest}, unfinished)
            unfinished.replace(self.path)
        except (OSError, RuntimeError) as reason:
            raise Refusal(
                f"{self.path} cannot be written ({reason}): free some space, or set PLAYGROUND_HOME to another folder.",
                "out",
            ) from None

    @property
    def _digest(self) -> str:
        return blake2b(repr(self.about).encode(), digest_size=8).hexdigest()


def delete_files(checkpoint: Path) -> None:
    """Delete the files of a complete training, those of its phases included."""
    checkpoint.unlink(missing_ok=True)
    for file in checkpoint.parent.glob(f"{escape(checkpoint.stem)}.*{checkpoint.suffix}"):
        file.unlink()
