"""PAWN: does a text look as if a model had written it, and which of its tokens say so?"""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.special import entr

from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.algorithms.overlays.token_figures import bars, over_tokens, shaded
from playground.contract import knob
from playground.contract.overlay import ReadsLogits, ReadsStates
from playground.events import Note
from strategies.overlays.pawn.detector import ScoredTokens, area, evidence_of, judge, metrics_of, running, untrained

OPENING, LENGTH = 16, 64  # tokens of a training text before those that are judged, and of these
RULES = ("argmax", "t = 0.7", "t = 1", "top-p 0.9")  # how the machine's texts are sampled, in turn
TOP_P, WARMTH = 0.9, {"t = 0.7": 0.7}
HIDDEN_SHARE = 0.15  # of the tokens of a training text, which its verdict does not see
HELD_OUT = 5  # the last of so many parts of the tales is not trained on
PER_STEP = 16  # texts of each kind in a training step
DESCENT = Descent("loss of the detector", steps=400, rate=2e-3, clip=1.0)


class Pawn(ReadsLogits, ReadsStates):
    """Score how much a text looks written by a model, and show which tokens weigh most in that score.

    Five numbers of each next-token distribution become features, and the model's last hidden states before and after
    the token decide the weight of the token's features in a sum; a small network turns the sum into a score. `python -m
    playground fit pawn` trains these networks for a model, on the bundled tales and on the model's own continuations of
    their openings; the bundled ones are fitted to `pocket`. Without a fit the text has the colour of the probability of
    all tokens at least as probable, and only scores without training are shown: the mean log-probability, the mean
    log-rank, the mean log-probability over its expectation, and the standardised sum of the latter. A lane's text is
    scored by the model that wrote it, which flatters every detector. A score is not evidence of who wrote a text: use
    it on nobody's. Networks narrower than the paper's and the score after each token are ours. Miralles-Gonzalez et al.
    2025, arXiv 2501.03940.
    """

    name, title, paper, sheet = "pawn", "PAWN detector", "2501.03940", "overlays/pawn-detector"
    reconstruction, sure = True, "medium"
    fitted_to_target, prefers_trained = True, True
    calibrates_on_tales = True

    colour: str = knob("weight", choices=("weight", "surprise"), help="what colours the text: a token's weight in the "
                       "score, 0.5 is the mean; or the probability of all tokens at least as probable")

    _text, _weights = None, None

    def begin_fitted(self, weights):
        self._weights = {name: tensor.float() for name, tensor in weights.items()}

    def layers(self, depth):
        return (depth,)

    def begin(self, text, model):
        self._text, self._normed = text, model.normed
        self._tokens = torch.tensor(text.tokens, device=model.device)
        self._metrics: list[Tensor] = []  # [n, 5] of each piece of the text
        self._variances: list[Tensor] = []  # of the log-probability of a sampled token, [n]
        self._states: list[Tensor] = []  # inputs of the lm_head, [n, d]

    def read_logits(self, first, logits):
        followed = self._tokens[first + 1:first + 1 + len(logits)]  # the last token of the text has no next one
        rows, self._vocabulary = logits[:len(followed)].double(), logits.shape[1]
        logp = rows.log_softmax(1)
        self._metrics.append(metrics_of(rows, followed).cpu())
        variance = (logp.exp() * logp.square()).nan_to_num(0).sum(1) - entr(logp.exp()).sum(1).square()
        self._variances.append(variance.cpu())

    def read_states(self, first, states):
        self._states += [self._normed(rows).float().cpu() for rows in states.values()]

    def evidence(self, first: int, end: int) -> ScoredTokens:
        """About the tokens from position `first` on, at least 1, and before `end`."""
        metrics, states = torch.cat(self._metrics), torch.cat(self._states)
        return evidence_of(metrics[first - 1:end - 1], states[first - 1:end])

    def draw(self):
        if self._text is None or self._text.generated < 1:
            return
        evidence = self.evidence(self._text.start, len(self._text.tokens))
        shares = judge(self._weights, evidence).shares.mean(1) if self._weights else None
        yield self._painted(evidence.metrics, shares)
        yield bars("scores without training, nats", *zip(*self.untrained_scores(evidence.metrics).items()))
        if self._weights is None:
            yield Note("PAWN without a fit shows no score of its own: `python -m playground fit pawn` trains it.")
            return
        scores = running(self._weights, evidence).sigmoid().tolist()
        yield from over_tokens("PAWN: score after each token", {"written by a model": scores})
        yield Note(f"PAWN gives this text {scores[-1]:.2f}{self._of_the_prompt()}, where 1 means written by a model. "
                   "The model that scores it wrote it: a score, not evidence.")

    def _painted(self, metrics: Tensor, shares: Tensor | None):
        if shares is None or self.colour == "surprise":
            return shaded("probability of all tokens at least as probable", metrics[:, 4].tolist(), _labels(metrics))
        relative = shares * len(shares)  # 1 is the mean
        return shaded("weight in the score, 0.5 is the mean", (relative / (1 + relative)).tolist(),
                      [f"{weight:.2f} times the mean weight; {label}"
                       for weight, label in zip(relative.tolist(), _labels(metrics))])

    def untrained_scores(self, metrics: Tensor) -> dict[str, float]:
        """Larger means more like a machine, but for the rank. Metrics [n, 5] are those of the generated tokens."""
        entropy, _, own, rank, _ = metrics.unbind(1)
        variance = torch.cat(self._variances)[-len(metrics):]
        return {
            "mean log-probability": float(own.mean()),
            "mean log-rank": float((rank * self._vocabulary).log().mean()),
            "log-probability over its expectation": float((own + entropy).mean()),
            "standardised": float((own + entropy).sum() / variance.sum().clamp(min=1e-12).sqrt()),
        }

    def _of_the_prompt(self) -> str:
        """The score of the prompt in words, where it is long enough to have one."""
        if self._text.start < OPENING:
            return ""
        return f", and its prompt {float(judge(self._weights, self.evidence(1, self._text.start)).logit.sigmoid()):.2f}"

    @classmethod
    def calibrate(cls, texts, seed: int) -> Iterator:
        """Train on pieces of the texts and on the model's continuations of their openings."""
        pieces = [ids[at:at + OPENING + LENGTH] for ids in texts.texts
                  for at in range(0, len(ids) - OPENING - LENGTH + 1, OPENING + LENGTH)]
        written = continued(texts, [ids[:OPENING] for ids in pieces], seed)
        both = [[evidence_in(texts, ids) for ids in group] for group in (written, pieces)]
        known = len(pieces) * (HELD_OUT - 1) // HELD_OUT
        machine, human = (evidence[:known] for evidence in both)
        metrics = torch.cat([each.metrics for each in machine + human])
        weights = untrained(machine[0].states.shape[1] // 2, metrics, seed)
        learnt = {name: tensor for name, tensor in weights.items() if "." in name}
        yield from descend(learnt, _loss(weights, machine, human, seed), DESCENT, texts)
        yield from _measured(weights, *(evidence[known:] for evidence in both))
        return {name: tensor.half() if name in learnt else tensor for name, tensor in weights.items()}


def _labels(metrics: Tensor) -> list[str]:
    """The metrics of each token in words."""
    return [f"log-probability {own:.2f}, {own + entropy:+.2f} over its expectation; "
            f"{100 * share:.2g} % of the vocabulary, with {100 * mass:.0f} % of the probability, at least as probable"
            for entropy, _, own, share, mass in metrics.tolist()]


def continued(texts, openings: list[list[int]], seed: int) -> list[list[int]]:
    """The openings with the model's continuations, sampled by `RULES` in turn and never ended."""
    chances = [torch.Generator().manual_seed(seed * len(openings) + number) for number in range(len(openings))]
    ends = sorted(texts.end_ids)

    def pick(number: int, logits: Tensor) -> int:
        scores = logits.index_fill(0, torch.tensor(ends, dtype=torch.long), -torch.inf) if ends else logits
        return sampled(scores, RULES[number % len(RULES)], chances[number])

    return texts.continued(openings, LENGTH, pick)


def sampled(logits: Tensor, rule: str, chance: torch.Generator) -> int:
    """A token by one of `RULES` from logits [V]."""
    if rule == "argmax":
        return int(logits.argmax())
    p = (logits.float() / WARMTH.get(rule, 1.0)).softmax(0)
    if rule == "top-p 0.9":
        ordered, order = p.sort(descending=True)
        p = p.index_fill(0, order[ordered.cumsum(0) - ordered >= TOP_P], 0.0)
    return int(p.multinomial(1, generator=chance))


def evidence_in(texts, ids: list[int]) -> ScoredTokens:
    """ScoredTokens about the tokens of a text after its opening."""
    depth = texts.model.depth
    logits, states = texts.states(ids, (depth,))
    metrics = metrics_of(logits[OPENING - 1:-1], torch.tensor(ids[OPENING:], device=logits.device))
    inputs = texts.model.normed(states[depth])[OPENING - 1:]
    return evidence_of(metrics.cpu().clone(), inputs.float().cpu().clone())


def _loss(weights: dict[str, Tensor], machine: list[ScoredTokens], human: list[ScoredTokens], seed: int
          ) -> Callable[[int], Tensor]:
    """The loss of a step: cross-entropy of texts of both kinds, of which random tokens are left out."""

    def loss(step: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed * DESCENT.steps + step)
        drawn = [kind[number] for kind in (machine, human)
                 for number in torch.randint(len(kind), (PER_STEP,), generator=chance).tolist()]
        batch = ScoredTokens(*(torch.stack(parts) for parts in zip(*drawn)))
        seen = torch.rand(batch.metrics.shape[:2], generator=chance) >= HIDDEN_SHARE
        labels = torch.tensor([1.0] * PER_STEP + [0.0] * PER_STEP)
        return binary_cross_entropy_with_logits(judge(weights, batch, seen).logit, labels)

    return loss


def _measured(weights: dict[str, Tensor], machine: list[ScoredTokens], human: list[ScoredTokens]) -> Iterator[Note]:
    """The AUC on held-out texts, beside that of the mean log-probability, for each way of sampling."""
    with torch.no_grad():
        scores = [[float(judge(weights, text).logit) for text in kind] for kind in (machine, human)]
    plain = [[float(text.metrics[:, 2].mean()) for text in kind] for kind in (machine, human)]
    for at, rule in enumerate(RULES):
        found, baseline = (area(kinds[0][at::len(RULES)], kinds[1]) for kinds in (scores, plain))
        yield Note(f"AUC on held-out texts of {LENGTH} tokens, {rule}: {found:.3f}; of the mean log-probability: "
                   f"{baseline:.3f}.")
