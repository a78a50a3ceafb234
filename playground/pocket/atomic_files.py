"""Files that are either whole or not there: what an interrupted or a full disk must not leave half done.

A folder is filled under another name and takes its own when everything is in it; a checkpoint likewise. What stands
there already is never touched by a write that fails.
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
    """A folder to fill, which becomes `folder` at the end. Refusal: `folder` exists (unless `replace`), or cannot be
    written.
    """
    folder = Path(folder)
    if folder.exists() and not replace:
        raise Refusal(f"{folder} exists already and is left as it is: remove it, or choose another folder.", "out")
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except FAILURES as reason:
        raise Refusal(
            f"{folder} could not be written ({reason}): make room on the disk and start again.", "out"
        ) from reason
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(path, text):
    """Put a text file in place of the one that may be there. Refusal: it could not be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as reason:
        raise Refusal(
            f"{path} could not be written ({reason}): make room on the disk and start again.", "out"
        ) from reason
    finally:
        part.unlink(missing_ok=True)


def write_checkpoint(stored, path):
    """Store a dictionary of tensors and plain values. Refusal: it could not be written; the checkpoint before it is
    whole.
    """
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(stored, part)
        part.replace(path)
    except FAILURES as reason:
        raise Refusal(
            f"The checkpoint {path} could not be written ({_first_line(reason)}): the one before it, if any, is whole; "
            "make room on the disk and go on with --resume.",
            "out",
        ) from reason
    finally:
        part.unlink(missing_ok=True)


def read_checkpoint(path, device="cpu"):
    """What `write_checkpoint` stored. Refusal: there is nothing to resume, or it cannot be read."""
    if not path.exists():
        raise Refusal(f"There is nothing to resume in {path.parent}: leave --resume away to begin.", "resume")
    try:
        return torch.load(path, weights_only=True, map_location=device)
    except Exception as reason:  # torch.load raises whatever its parts raise
        raise Refusal(
            f"The checkpoint {path} cannot be read ({type(reason).__name__}): remove it and begin again.", "resume"
        ) from reason


def _first_line(reason):
    return str(reason).strip().splitlines()[0]
