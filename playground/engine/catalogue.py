"""Models on offer: those that come with the project, and some from the Hugging Face hub that run well with it.

The list is an offer, not a limit: any causal language model may be named by its hub id or by a folder.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from playground.errors import Refusal

BUNDLED_MODELS = Path(__file__).resolve().parents[2] / "assets" / "models"


@dataclass(frozen=True)
class Entry:
    """A model on offer. `draft` names a smaller model with the same tokenizer, empty where there is none."""

    name: str
    title: str
    parameters: str
    draft: str = ""
    note: str = ""


BUNDLED = (
    Entry("pocket", "Pocket", "bundled", "pocket-draft", "Trained for this playground; needs neither network nor GPU."),
    Entry("pocket-draft", "Pocket draft", "bundled", "", "The small partner that guesses ahead for Pocket."),
)
SUGGESTED = (
    Entry("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2 135M", "135 M", "", "Fast on a laptop."),
    Entry("HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2 360M", "362 M", "HuggingFaceTB/SmolLM2-135M-Instruct", "Runs on a laptop."),
    Entry("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5 0.5B", "494 M", "", "Many languages; runs on a laptop."),
    Entry("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5 1.5B", "1.5 B", "Qwen/Qwen2.5-0.5B-Instruct", "Better with a GPU."),
    Entry("Qwen/Qwen3-0.6B", "Qwen3 0.6B", "0.6 B", "", "Thinks before it answers; runs on a laptop."),
    Entry("Qwen/Qwen3-1.7B", "Qwen3 1.7B", "1.7 B", "Qwen/Qwen3-0.6B", "Better with a GPU."),
    Entry("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2 1.7B", "1.7 B", "HuggingFaceTB/SmolLM2-360M-Instruct", "Better with a GPU."),
)


def entries(bundled: Path = BUNDLED_MODELS) -> list[Entry]:
    """All models on offer; of the bundled ones those whose files are there."""
    return [entry for entry in BUNDLED if (bundled / entry.name).is_dir()] + list(SUGGESTED)


def partner(name: str) -> str:
    """Name of the draft model that goes with a model, empty where the catalogue knows none."""
    return next((entry.draft for entry in BUNDLED + SUGGESTED if entry.name == name), "")


def is_bundled(name: str) -> bool:
    return any(entry.name == name for entry in BUNDLED)


def bundled_folder(name: str, bundled: Path = BUNDLED_MODELS) -> Path:
    """Folder of a model that comes with the project; raises Refusal where its files are missing."""
    folder = bundled / name
    if not folder.is_dir():
        raise Refusal(f"The bundled model {name} is missing from assets/models: fetch the project's files again, or name another model.", "model")
    return folder
