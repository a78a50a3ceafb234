"""Model catalogue: bundled models, variants made on this machine, and suggestions from the hub.

The catalogue is no limit: any causal language model can be loaded by its hub id or from a folder.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from playground.asset_files import ASSETS
from playground.errors import Refusal
from playground.weight_changes import JOINT

BUNDLED_MODELS = ASSETS / "models"
# exact tables instead of networks: files next to the model folders
ORACLE, LISTS, PUZZLES = "oracle", "oracle-lists", "oracle-puzzles"
TEXT_MODEL, DENOISER, BLOCK_DENOISER = "pocket", "pocket-diffusion", "pocket-block-diffusion"
EXPERTS = "pocket-moe"
OTHER_TOKENS = "pocket-other-draft"  # has a different tokenizer
PACKED = ("nf4", "fp4", "int8")  # as the name of a draft: the target itself with quantised weights
ORACLE_SENTENCES = BUNDLED_MODELS.parent / "oracle.json"
TABLES = {
    ORACLE: ORACLE_SENTENCES,
    LISTS: BUNDLED_MODELS.parent / "oracle-lists.json",
    PUZZLES: BUNDLED_MODELS.parent / "oracle-puzzles.json",
}
MOST_COMPARED = 100  # characters of a misspelt name that are compared with the catalogue
CARD = "variant.json"  # describes a model that was made here, in its folder


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue. `draft` names a smaller model with the same tokenizer; empty if there is none.

    attention: of a model that fills masked positions, as in `CanvasDecoder.attention`; empty if it continues text.
    """

    name: str
    title: str
    parameters: str
    draft: str = ""
    note: str = ""
    attention: str = ""

    @property
    def fills(self) -> bool:
        """Whether it fills masked positions instead of continuing text."""
        return bool(self.attention)


BUNDLED = (
    Entry(
        TEXT_MODEL,
        "Pocket",
        "bundled",
        "pocket-draft",
        "Trained for this playground; needs neither network nor GPU.",
    ),
    Entry("pocket-draft", "Pocket draft", "bundled", "", "The small draft model for Pocket."),
    Entry(
        OTHER_TOKENS,
        "Pocket, other tokens",
        "bundled",
        "",
        "Half a million parameters and a different tokenizer; for drafting across tokenizers.",
    ),
    Entry(
        EXPERTS,
        "Pocket experts",
        "bundled",
        "pocket-draft",
        "Eight experts in each layer, of which a token runs two; for routers and SCMoE.",
    ),
    Entry(
        DENOISER,
        "Pocket diffusion",
        "bundled",
        "",
        "Fills masked positions instead of continuing text; for masked diffusion.",
        attention="full",
    ),
    Entry(
        BLOCK_DENOISER,
        "Pocket block diffusion",
        "bundled",
        "",
        "Fills masked positions block by block; for Fast-dLLM with a cache and for its other decoders of blocks.",
        attention="block",
    ),
    Entry(
        ORACLE,
        "Oracle sentences",
        "bundled",
        "",
        "An exact table over 60 sentences, not a neural network; for masked diffusion.",
        attention="full",
    ),
    Entry(
        LISTS,
        "Oracle lists",
        "bundled",
        "",
        "An exact table over lists that are copied, shuffled and changed; for masked diffusion and ParallelBench.",
        attention="full",
    ),
    Entry(
        PUZZLES,
        "Oracle puzzles",
        "bundled",
        "",
        "An exact table over sudokus, sentences and paraphrases; for masked diffusion and ParallelBench.",
        attention="full",
    ),
)
SUGGESTED = (
    Entry("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2 135M", "135 M", "", "Fast on a laptop."),
    Entry(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "SmolLM2 360M",
        "362 M",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Runs on a laptop.",
    ),
    Entry("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5 0.5B", "494 M", "", "Many languages; runs on a laptop."),
    Entry("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5 1.5B", "1.5 B", "Qwen/Qwen2.5-0.5B-Instruct", "Better with a GPU."),
    Entry("Qwen/Qwen3-0.6B", "Qwen3 0.6B", "0.6 B", "", "Thinks before it answers; runs on a laptop."),
    Entry("Qwen/Qwen3-1.7B", "Qwen3 1.7B", "1.7 B", "Qwen/Qwen3-0.6B", "Better with a GPU."),
    Entry(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "SmolLM2 1.7B",
        "1.7 B",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "Better with a GPU.",
    ),
)


def entries(bundled: Path = BUNDLED_MODELS) -> list[Entry]:
    """The whole catalogue; bundled models only if their files exist."""
    return [entry for entry in BUNDLED if _path(entry.name, bundled).exists()] + made() + list(SUGGESTED)


def _path(name: str, bundled: Path) -> Path:
    return bundled.parent / TABLES[name].name if name in TABLES else bundled / name


def listed_attention(name: str) -> str | None:
    """The attention of a model that fills masked positions; empty if it continues text, None if it is not listed."""
    return next((entry.attention for entry in (*BUNDLED, *made(), *SUGGESTED) if entry.name == name), None)


def partner(name: str) -> str:
    """Name of a model's draft model, also of one with adapters; empty if the catalogue has none."""
    name = name.split(JOINT)[0]
    return next((entry.draft for entry in (*BUNDLED, *made(), *SUGGESTED) if entry.name == name), "")


def suggestion(name: str) -> str:
    """A question such as " Did you mean pocket?" for a name that resembles one of the catalogue; otherwise empty."""
    known = {entry.name.lower(): entry.name for entry in entries()}
    near = get_close_matches(name.lower()[:MOST_COMPARED], known, 1)
    return f" Did you mean {known[near[0]]}?" if near and known[near[0]] != name else ""


def made_models() -> Path:
    """Folder of the models made on this machine, below PLAYGROUND_HOME (default ~/.decoding-playground)."""
    home = os.environ.get("PLAYGROUND_HOME") or "~/.decoding-playground"
    return Path(os.path.expanduser(home)) / "models"  # of a user without a home too, whom Path.home() refuses


def made() -> list[Entry]:
    """Models made on this machine, sorted by name. Folders whose card cannot be read are skipped."""
    found = [_read_card(card) for card in sorted(made_models().glob(f"*/{CARD}"))]
    return [entry for entry in found if entry]


def _read_card(path: Path) -> Entry | None:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        return Entry(path.parent.name, *(str(card[field]) for field in ("title", "parameters", "draft", "note")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_local(name: str) -> bool:
    """Whether the name is a bundled model or one made here, not a folder or a hub id."""
    return any(entry.name == name for entry in (*BUNDLED, *made()))


def local_folder(name: str, bundled: Path = BUNDLED_MODELS) -> Path:
    """Folder of a bundled model or one made here. Raises Refusal if its files are missing."""
    if any(entry.name == name for entry in made()):
        return made_models() / name
    folder = bundled / name
    if not folder.is_dir():
        raise Refusal(
            f"The bundled model {name} is missing from assets/models: download the project's files again, or choose "
            "another model.",
            "model",
        )
    return folder
