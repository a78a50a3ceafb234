"""Record runs of strategies that no bundled model can run, for their entries in the library: a tiny model of the right
kind is trained in minutes on made-up stories, and one lane with the strategy's defaults is recorded on it.

    python tools/record_library_runs.py [--only wedlm entropy_bound] [--out assets/traces/library]

Needed again when one of these strategies, its knobs, or the events change. The models are not kept: the seeds are
fixed, and another machine may round otherwise, so that a run made again can choose other words.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tiny_denoisers import known_first, noise_to_text, tokenizer, words  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import playground  # noqa: E402
from playground.decoding.models import Models  # noqa: E402
from playground.engine.loading.loaded_model import loaded_model  # noqa: E402
from playground.trace import Trace  # noqa: E402

PROMPT, LENGTH = "Mia has a red box .", 26
MADE: dict[str, tuple[Callable[[int], PreTrainedModel], int]] = {
    "wedlm": (known_first, 1500), "entropy_bound": (noise_to_text, 900),
}
"""By strategy, the network that it runs on, and the steps of its training."""


def recorded(strategy: str, steps: int = 0) -> Trace:
    """The trace of a lane with the strategy's defaults. steps: of the training; 0: as many as it needs."""
    make, enough = MADE[strategy]
    began = process_time()
    network = make(steps or enough)
    name = described(network, process_time() - began)
    model = loaded_model(network, tokenizer(), name, "", "none")
    result = playground.run(strategy, PROMPT, models=Models(model), max_new_tokens=LENGTH)
    print(f"{strategy} on a {name}: {PROMPT}{result.text}")
    return result.trace


def described(network: PreTrainedModel, seconds: float) -> str:
    """What the model is, in words: the library shows it."""
    size = sum(part.numel() for part in network.parameters() if part.requires_grad)
    return (f"model of {round(size, -3):,} parameters, trained for {seconds / 60:.1f} CPU minutes on made-up stories "
            f"of {len(words())} words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MADE, default=[*MADE])
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "traces" / "library")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    for strategy in given.only:
        recorded(strategy).save(given.out / f"{strategy}.jsonl")


if __name__ == "__main__":
    main()
