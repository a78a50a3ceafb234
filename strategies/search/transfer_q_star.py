"""Transfer Q*: choose each token by the reward of the texts that a baseline makes of it."""
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from playground.algorithms.search.explored_prefixes import Explored
from playground.algorithms.search.rewards import ClassifierReward, Rewarded, classifier_knob, reward_knob
from playground.contract import Lane, RewardedText, Strategy, knob, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import REMOVED, ranked
from playground.errors import Refusal
from playground.events import Figure, Note

QUOTED = 24  # characters of a rollout in a figure


@dataclass(eq=False)
class Completion:
    """A candidate token and what the baseline wrote after it, as a path in the tree of all rollouts."""

    candidate: int  # index among the candidates
    number: int  # among the rollouts of this candidate
    node: int  # the last one
    tokens: list[int] = field(default_factory=list)  # the candidate first
    logp: float = 0.0  # under the model that writes it
    state: Tensor | None = None  # input of the lm_head after its last token that does not end the text


class TransferQStar(Rewarded):
    """Before each token, complete the text after each of the k most probable ones, score the completions with a reward
    model, and add the scores to the logits.

    The score of a token is logit + weight * Q: Q is the mean reward of `rollouts` completions of at most `horizon`
    tokens by a baseline that is already good at the task, whose return estimates that of the optimal policy. The text
    is greedy in the score, or sampled from the k tokens. The baseline is this model or the draft model; with `transfer`
    indirect it was aligned to another reward, given as a second classifier, and completions are weighted by
    exp((reward - other reward) / beta). horizon 0 scores the prefix itself, as in ARGS; weight 0 or k = 1 is plain
    decoding. Per token, the KL divergence from the model, on the same k tokens, is at most weight * (largest Q -
    smallest Q). Chakraborty et al. 2024, arXiv 2405.20495.
    """

    name, title, paper, sheet = "transfer_q_star", "Transfer Q*", "2405.20495", "search/transfer-q-star"
    guarantee, refuses, several = ("heuristic", "collapses"), ("sampler", "constraint"), True

    weight: float = knob(1.0, 0.0, 50.0, step=0.5, help="1 / alpha: weight of Q beside the logit; 0 ignores it")
    k: int = knob(8, 1, 40, step=1, help="candidates: the most probable tokens; 1 is greedy decoding")
    horizon: int = knob(16, 0, 64, step=1, help="tokens of a completion at most; 0 scores the prefix")
    rollouts: int = knob(1, 1, 8, step=1, help="completions of each candidate; the first is greedy, others are sampled")
    reward: str = reward_knob()
    classifier: str = classifier_knob()
    baseline: str = knob("target", choices=("target", "draft"), help="model that completes the candidates")
    transfer: str = knob(
        "direct",
        choices=("direct", "indirect"),
        help="whether the baseline was aligned to this reward, or to that of other_classifier",
    )
    other_classifier: str = knob("", help="sequence-classification model that the baseline was aligned to")
    beta: float = knob(2.0, 0.1, 20.0, step=0.1, help="temperature of the weights of indirect transfer")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="of the choice among the candidates; 0 takes the best")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)] if self.temperature else []

    def check(self) -> None:
        super().check()
        if self.transfer == "indirect" and not self.other_classifier.strip():
            raise Refusal(
                "Indirect transfer needs the reward that the baseline was aligned to: name a sequence-classification "
                "model in other_classifier, or choose direct.",
                "other_classifier",
            )

    def __post_init__(self):
        if self.baseline == "draft":
            self.needs = ("draft",)
        self._logp, self._divergence, self._other = 0.0, 0.0, None

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        while True:
            tokens = self._candidates(rows)
            values, texts = yield from self._values(lm, rows, tokens)
            base = rows.scores[0].clone()
            scores = torch.full_like(base, REMOVED)
            scores[tokens] = base[tokens] + (self.weight / (self.temperature or 1.0)) * values.to(base)
            rows.add_stage(self.name, scores[None])
            choice = lm.pick(rows)
            yield from self._shown(lm, rows, tokens, values, texts, choice.token)
            self._logp += float(rows.logp[0, choice.token])
            yield lm.keep(choice)
            rows = yield lm.extend()

    def _candidates(self, rows) -> list[int]:
        values, tokens = ranked(rows.raw[0], min(self.k, rows.raw.shape[1]))
        return tokens[values > REMOVED].tolist()

    def _values(self, lm: Lane, rows, tokens: list[int]) -> Iterator:
        """Q of each candidate [k], and the text of its first completion."""
        begun = [
            Completion(place, number, ROOT, [token], float(rows.logp[0, token]))
            for place, token in enumerate(tokens)
            for number in range(self.rollouts)
        ]
        yield from self._completed(lm, begun)
        texts = [RewardedText(lm.tokens + each.tokens, self._logp + each.logp, each.state) for each in begun]
        scores = torch.tensor((yield from self.rewards(lm, texts)), dtype=torch.float64)
        weights = torch.ones_like(scores)
        if self.transfer == "indirect":
            weights = ((scores - (yield from self._others(lm, texts))) / self.beta).exp()
        shape = (len(tokens), self.rollouts)
        scores, weights = scores.view(shape), weights.view(shape)
        firsts = [lm.text_of(each.tokens) for each in begun if each.number == 0]
        return (weights * scores).sum(1) / weights.sum(1), firsts

    def _others(self, lm: Lane, texts: list[RewardedText]) -> Iterator:
        """What the reward that the baseline was aligned to says of the texts, [texts]."""
        if self._other is None:
            self._other = ClassifierReward((yield lm.classifier(self.other_classifier)))
        return torch.tensor((yield from self._other.scores(lm, texts)), dtype=torch.float64)

    def _completed(self, lm: Lane, rollouts: list[Completion]) -> Iterator:
        """Let the baseline complete all candidates, each step in one forward; equal beginnings are read once."""
        stream = lm.target if self.baseline == "target" else lm.stream("draft")
        explored, horizon = Explored(TokenTree(self.name)), min(self.horizon, lm.remaining - 1)
        wants_state = bool(self.reads_hidden) and self.baseline == "target"
        active = [each for each in rollouts if not lm.ends(each.tokens[-1])]
        for depth in range(horizon + 1):
            if not active or depth == horizon and not wants_state:
                return
            for each in active:
                each.node = explored.place(each.tokens[-1], each.node)
            rows = yield stream.extend(explored.tree)
            for each in active:
                place = rows.row(each.node)
                each.state = rows.hidden[place] if wants_state else None
                if depth < horizon:
                    self._continue(lm, each, rows.raw[place])
            active = [each for each in active if not lm.ends(each.tokens[-1])]

    def _continue(self, lm: Lane, each: Completion, logits: Tensor) -> None:
        """Append the baseline's next token: the most probable one in the first rollout, a sampled one in the others."""
        token = int(ranked(logits, 1)[1][0])
        if each.number:
            position, purpose = len(lm.tokens) + len(each.tokens), f"rollout {each.candidate} {each.number}"
            token = lm.draw(logits.softmax(-1), position, purpose)
        each.logp += float(logits.log_softmax(-1)[token])
        each.tokens.append(token)

    def _shown(self, lm: Lane, rows, tokens: list[int], values: Tensor, texts: list[str], chosen: int) -> Iterator:
        """The candidates, and how far the choice among them is from the model's."""
        base = rows.stages[-2].scores[0][tokens].cpu().double().log_softmax(-1)
        final = rows.scores[0][tokens].cpu().double().log_softmax(-1)
        self._divergence += (kl := float((final.exp() * (final - base)).sum()))
        bound = self.weight / (self.temperature or 1.0) * float(values.max() - values.min())
        labels = [f"{'✓' if token == chosen else '–'} {text[:QUOTED]}" for token, text in zip(tokens, texts)]
        table = {
            "rows": labels,
            "columns": ["model's share", "Q", "final share"],
            "values": torch.stack([base.exp(), values, final.exp()], 1).tolist(),
        }
        yield Figure("matrix", "candidates with their completions", table)
        yield Figure(
            "scalar",
            "divergence from the model among the candidates, nats",
            {"x": lm.generated, "series": {"this token": kl, "sum": self._divergence, "bound of this token": bound}},
        )
        if chosen != tokens[0]:
            yield Note(f"{lm.piece(chosen)!r} instead of {lm.piece(tokens[0])!r}, the model's most probable token.")
