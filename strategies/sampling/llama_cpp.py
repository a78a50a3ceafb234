"""Sampling in the order of llama.cpp."""
from collections.abc import Iterator

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Sampler, knob, make


class LlamaCpp(Decoder):
    """Sample with the samplers of llama.cpp, in its order and with its defaults.

    Penalties on repeats come first, then DRY, top-n-sigma, top-k, typical, top-p, min-p and XTC, and the temperature
    last: at any temperature, only tokens that survive the truncations at temperature 1 can be sampled. The transformers
    library applies the temperature first. Useful to check settings copied from llama.cpp. At their neutral values all
    samplers are off, and this is plain sampling. llama.cpp of 2025 (`common_params_sampling`).
    """

    name, title, paper, sheet = "llama_cpp", "Sampling as in llama.cpp", "llama.cpp 2025", "sampling/sampling-baselines"
    guarantee = ("collapses",)

    temperature: float = knob(0.8, 0.0, 5.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")
    top_k: int = knob(40, 0, 1000, step=1, help="keep this many tokens; 0 keeps all")
    top_p: float = knob(0.95, 0.0, 1.0, step=0.01, help="keep the smallest set with this much probability; 1 keeps all")
    min_p: float = knob(
        0.05, 0.0, 1.0, step=0.01, help="keep tokens at least this probable, relative to the best; 0 keeps all"
    )
    typical_p: float = knob(1.0, 0.05, 1.0, step=0.01, help="probability of the typical tokens; 1 keeps all")
    top_n_sigma: float = knob(0.0, 0.0, 5.0, step=0.1, help="standard deviations below the best logit; 0 is off")
    repeat_penalty: float = knob(1.0, 0.8, 2.0, step=0.05, help="above 1 makes recent tokens less likely")
    frequency_penalty: float = knob(0.0, -2.0, 2.0, step=0.1, help="subtracted per recent occurrence; 0 is off")
    presence_penalty: float = knob(0.0, -2.0, 2.0, step=0.1, help="subtracted from recent tokens once; 0 is off")
    repeat_last_n: int = knob(64, 0, 1024, step=1, help="last tokens considered by the three penalties; 0: all")
    dry_multiplier: float = knob(0.0, 0.0, 5.0, step=0.05, help="penalty of repeated sequences; 0 is off")
    xtc_probability: float = knob(0.0, 0.0, 1.0, step=0.05, help="how often likely tokens are removed; 0 is off")
    xtc_threshold: float = knob(0.1, 0.0, 0.5, step=0.01, help="smallest probability of a likely token")

    def toggles(self) -> list[Sampler]:
        chain = [*self._penalties(), *self._truncations(), make("temperature", t=self.temperature, place="after cuts")]
        for rank, sampler in enumerate(chain):
            sampler.rank = rank  # the order of this list, not the library's
        return chain

    def _penalties(self) -> list[Sampler]:
        recent = {"window": self.repeat_last_n}
        return [
            make("repetition_penalty", penalty=self.repeat_penalty, **recent),
            make("frequency_penalty", penalty=self.frequency_penalty, prompt=True, **recent),
            make("presence_penalty", penalty=self.presence_penalty, prompt=True, **recent),
            make("dry", multiplier=self.dry_multiplier),
        ]

    def _truncations(self) -> list[Sampler]:
        spread = [make("top_n_sigma", n=self.top_n_sigma)] if self.top_n_sigma else []
        return [
            *spread,
            make("top_k", k=self.top_k),
            make("typical", mass=self.typical_p),
            make("top_p", p=self.top_p),
            make("min_p", m=self.min_p),
            make("xtc", probability=self.xtc_probability, threshold=self.xtc_threshold, exempt=False),
        ]

    def decode(self, lm) -> Iterator:
        return plain(lm)
