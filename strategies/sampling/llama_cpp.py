"""Sampling in the order of llama.cpp."""
from collections.abc import Iterator

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Lane, Sampler, knob, make
from playground.errors import Refusal

HOTTEST = 5.0  # the largest temperature of `dynamic_temperature`


class LlamaCpp(Decoder):
    """Sample with the samplers of llama.cpp, in its order and with its defaults.

    Penalties on repeats come first, then DRY, top-n-sigma, top-k, typical, top-p, min-p and XTC, and the temperature
    last: at any temperature, only tokens that survive the truncations at temperature 1 can be sampled. The transformers
    library applies the temperature first. Adaptive-p follows the temperature and chooses the token. With mirostat there
    is nothing but the temperature before it, and no adaptive-p. Penalties count the prompt, too. Useful to check
    settings copied from llama.cpp. At their neutral values all samplers are off, and this is plain sampling. Three
    things differ: tokens that tie with the last one of top-k or typical stay, min_keep is always 0, and a constraint
    masks tokens before the samplers, which llama.cpp does only where the token that it drew was not allowed. llama.cpp
    of January 2026 (`common_params_sampling`).
    """

    name, title, paper, sheet = "llama_cpp", "Sampling as in llama.cpp", "llama.cpp 2026", "sampling/sampling-baselines"
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
    repeat_last_n: int = knob(
        64, -1, 4096, step=1, help="last tokens considered by the three penalties; 0: none, -1: all"
    )
    dry_multiplier: float = knob(0.0, 0.0, 5.0, step=0.05, help="penalty of repeated sequences; 0 is off")
    dry_base: float = knob(1.75, 1.0, 4.0, step=0.05, help="factor of that penalty per additional repeated token")
    dry_allowed_length: int = knob(2, 1, 10, step=1, help="shortest repeated sequence that is penalised")
    dry_penalty_last_n: int = knob(-1, -1, 4096, step=1, help="last tokens searched for repeats; 0: none, -1: all")
    xtc_probability: float = knob(0.0, 0.0, 1.0, step=0.05, help="how often likely tokens are removed; 0 is off")
    xtc_threshold: float = knob(0.1, 0.0, 1.0, step=0.01, help="smallest probability of a likely token; off above 0.5")
    dynatemp_range: float = knob(0.0, 0.0, 2.5, step=0.05, help="how far temperature follows entropy; 0 is off")
    dynatemp_exponent: float = knob(1.0, 0.1, 4.0, step=0.1, help="exponent of the normalised entropy in that range")
    mirostat: str = knob("0", choices=("0", "1", "2"), help="version of mirostat, without truncations; 0 is off")
    mirostat_tau: float = knob(5.0, 0.0, 10.0, step=0.1, help="target surprise of mirostat, in bits")
    mirostat_eta: float = knob(0.1, 0.0, 2.0, step=0.01, help="learning rate of mirostat")

    adaptive_target: float = knob(
        -1.0, -1.0, 1.0, step=0.05, help="probability that adaptive-p prefers in the chosen token; negative is off"
    )
    adaptive_decay: float = knob(0.9, 0.0, 0.99, step=0.01, help="weight of earlier choices in adaptive-p")

    def check(self):
        if self.dynatemp_range and self.temperature + self.dynatemp_range > HOTTEST:
            raise Refusal(
                f"temperature and dynatemp_range add up to more than {HOTTEST:g}: choose smaller ones.",
                "dynatemp_range",
            )

    def toggles(self) -> list[Sampler]:
        if self.mirostat == "0":
            chain = [*self._penalties(), *self._truncations(), self._temperature(), *self._adaptive()]
        else:
            chain = [make("temperature", t=self.temperature, place="after cuts"), self._mirostat()]
        for rank, sampler in enumerate(chain):
            sampler.rank = rank  # the order of this list, not the library's
        return chain

    def _penalties(self) -> list[Sampler]:
        return [*(self._repeats() if self.repeat_last_n else []), *(self._dry() if self.dry_penalty_last_n else [])]

    def _repeats(self) -> list[Sampler]:
        recent = {"window": max(0, self.repeat_last_n)}
        return [
            make("repetition_penalty", penalty=self.repeat_penalty, **recent),
            make("frequency_penalty", penalty=self.frequency_penalty, prompt=True, **recent),
            make("presence_penalty", penalty=self.presence_penalty, prompt=True, **recent),
        ]

    def _dry(self) -> list[Sampler]:
        base, allowed, window = self.dry_base, self.dry_allowed_length, max(0, self.dry_penalty_last_n)
        return [make("dry", multiplier=self.dry_multiplier, base=base, allowed=allowed, window=window)]

    def _truncations(self) -> list[Sampler]:
        spread = [make("top_n_sigma", n=self.top_n_sigma)] if self.top_n_sigma else []
        likely = {"probability": self.xtc_probability, "threshold": min(self.xtc_threshold, 0.5), "exempt": False}
        return [
            *spread,
            make("top_k", k=self.top_k),
            make("typical", mass=self.typical_p),
            make("top_p", p=self.top_p),
            make("min_p", m=self.min_p),
            *([make("xtc", **likely)] if self.xtc_threshold <= 0.5 else []),
        ]

    def _temperature(self) -> Sampler:
        t, spread = self.temperature, self.dynatemp_range
        if not spread:
            return make("temperature", t=t, place="after cuts")
        low, exponent = max(0.0, t - spread), self.dynatemp_exponent
        return make("dynamic_temperature", low=low, high=t + spread, exponent=exponent, place="after cuts")

    def _adaptive(self) -> list[Sampler]:
        if self.adaptive_target < 0:
            return []
        return [make("adaptive_p", target=self.adaptive_target, decay=self.adaptive_decay)]

    def _mirostat(self) -> Sampler:
        tau, eta = self.mirostat_tau, self.mirostat_eta
        return make("mirostat", version=self.mirostat, tau=tau, eta=eta, surprise="renormalised", ranks=100)

    def decode(self, lm: Lane) -> Iterator:
        return plain(lm)
