"""Atomic writes of folders and files: after an interruption or on a full disk, no partial result is left.

Folders and checkpoints are written under a temporary name and renamed when complete. A failed write leaves existing
files unchanged.
"""
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from playground.errors import Refusal

FAILURES = (OSError, RuntimeError, SafetensorError)        # torch reports a full disk as a RuntimeError


@contextmanager
def new_folder(folder, replace=False):
    """Context manager that yields a temporary folder and renames it to `folder` at the end.

    Raises Refusal if `folder` exists (unless `replace`), or if it cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not replace:
        raise Refusal(f"{folder} exists already and was not changed: remove it, or choose another folder.", "out")
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except FAILURES as reason:
        raise Refusal(
            f"{folder} could not be written ({reason}): free some disk space and start again.", "out"
        ) from reason
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(path, text):
    """Write a text file, replacing an existing one. Raises Refusal if it cannot be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as reason:
        raise Refusal(
            f"{path} could not be written ({reason}): free some disk space and start again.", "out"
        ) from reason
    finally:
        part.unlink(missing_ok=True)


def write_checkpoint(stored, path):
    """Save a dictionary of tensors and plain values.

    Raises Refusal if it cannot be written; the previous checkpoint is then intact.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(stored, part)
        part.replace(path)
    except FAILURES as reason:
        raise Refusal(
            f"The checkpoint {path} could not be written ({_first_line(reason)}): the previous one, if any, is intact; "
            "free some disk space and continue with --resume.",
            "out",
        ) from reason
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path, device="cpu"):
    """Load a checkpoint of `write_checkpoint`. Raises Refusal if there is none, or if it cannot be read."""
    if not path.exists():
        raise Refusal(f"There is nothing to resume in {path.parent}: omit --resume to start a training.", "resume")
    try:
        return torch.load(path, weights_only=True, map_location=device)
    except Exception as reason:  # torch.load raises many unrelated types
        raise Refusal(
            f"The checkpoint {path} cannot be read ({type(reason).__name__}): remove it and start again.", "resume"
        ) from reason


def _first_line(reason):
    return str(reason).strip().splitlines()[0]
