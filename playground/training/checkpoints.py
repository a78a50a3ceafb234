"""Files from which an interrupted training goes on."""
from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from playground.errors import Refusal


@dataclass
class Checkpoint:
    """One such file, or none. `about` is what it belongs to: a file about anything else is ignored."""

    path: Path | None
    about: Any

    def load(self) -> dict | None:
        """The saved state; None if there is none."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            saved = torch.load(self.path, weights_only=True)
        except Exception:  # a file that was cut off may fail in any way; the training then begins anew
            return None
        return saved if saved.pop("of", None) == self._digest else None

    def save(self, state: dict) -> None:
        """Replace the file. Raises Refusal if it cannot be written."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_suffix(".unfinished")
            torch.save({**state, "of": self._digest}, unfinished)
            unfinished.replace(self.path)
        except (OSError, RuntimeError) as reason:
            raise Refusal(
                f"{self.path} cannot be written ({reason}): free some space, or set PLAYGROUND_HOME to another "
                "folder.",
                "out",
            ) from None

    def delete(self) -> None:
        """Delete the file after a complete training."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def _digest(self) -> str:
        return blake2b(repr(self.about).encode(), digest_size=8).hexdigest()
