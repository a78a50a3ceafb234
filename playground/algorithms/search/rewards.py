"""The rewards that a search can use, and the base class of decoders that use one.

`fitted` reads the target's own hidden states with a small network (`reward_head`), `classifier` any
sequence-classification model of the transformers library, and `likelihood` the target's own probabilities: it needs
nothing, and judges how usual a text is, not how good.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from playground.algorithms.search.reward_head import RewardHead
from playground.contract import Decoder, RewardedText, knob
from playground.errors import Refusal
from playground.events import Event, Forward, Note
from playground.request_limits import is_public

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.engine.sequence_classifier import ClassifiedAnswer, SequenceClassifier

REWARDS = ("fitted", "classifier", "likelihood")
OWNER = "a_star"  # the strategy whose name the fitted reward models are stored under


def reward_knob(default: str = "fitted", *more: str) -> str:
    """The menu of rewards, with further choices in front."""
    return knob(
        default,
        choices=(*more, *REWARDS),
        help="fitted: the small reward model trained for this target; classifier: any sequence-classification model; "
        "likelihood: the target's probability per token, an untrained stand-in",
    )


def classifier_knob() -> str:
    """The model of the reward `classifier`."""
    return knob("", help="folder or Hugging Face id of a sequence-classification model, for the reward of that name")


class Rewarded(Decoder):
    """A decoder with a reward; it has the knobs `reward` and `classifier`, or overrides `reward_name`."""

    fitted_to_target, weights_of = True, OWNER
    judge: ClassVar[str] = "process"  # network of the fitted reward: "process" for beginnings, "outcome" for answers
    falls_back: ClassVar[bool] = True  # to likelihood, if nothing is fitted to the target; otherwise it is refused
    _reward = None  # opened at its first use

    @property
    def reward_name(self) -> str:
        """One of REWARDS; anything else for none."""
        return self.reward

    @property
    def rewarded(self) -> bool:
        """Whether it uses a reward."""
        return self.reward_name in REWARDS

    @property
    def trained(self) -> str:
        fitted = self.reward_name == "fitted" and not self.falls_back
        return f"choose another {self._chosen_by}" if fitted else ""

    @property
    def prefers_trained(self) -> bool:
        return self.reward_name == "fitted" and self.falls_back

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        reads = self.reward_name == "fitted" and (self.found_trained or not self.falls_back)
        return ("target",) if reads else ()

    def check(self) -> None:
        if self.reward_name != "classifier":
            return
        if is_public():
            raise Refusal(
                f"Reward models are not loaded for visitors of a public page: choose another {self._chosen_by}.",
                self._chosen_by,
            )
        if not self.classifier.strip():
            raise Refusal(
                "The reward is a sequence-classification model: name one in classifier, as a folder or Hugging Face "
                "id, or choose another reward.",
                "classifier",
            )

    @property
    def _chosen_by(self) -> str:
        """The knob that names the reward."""
        names = {k.name for k in self.knobs()}
        return next(name for name in ("reward", "score", "vote") if name in names)

    def rewards(self, lm: Lane, texts: list[RewardedText]) -> Iterator:
        """Score texts, 0 to 1 each; returns the list."""
        if self._reward is None:
            self._reward = yield from self._opened(lm)
        return (yield from self._reward.scores(lm, texts)) if texts else []

    def _opened(self, lm: Lane) -> Iterator:
        if self.reads_hidden:
            return FittedReward(RewardHead.of(lm.fitted[self.name]), self.judge)
        if self.reward_name != "classifier":
            yield Note("The reward is a stand-in: the target's own probability per token.")
            if self.reward_name == "fitted":
                name = lm.target_model.name
                yield Note(f"No reward model is fitted to {name}: run `python -m playground fit {OWNER}` with it.")
            return LikelihoodReward()
        return ClassifierReward((yield lm.classifier(self.classifier)))


class LikelihoodReward:
    """The geometric mean of the probabilities of the tokens after the prompt; 1 for none."""

    def scores(self, lm: Lane, texts: list[RewardedText]) -> Iterator:
        yield from ()
        return [math.exp(text.logp / max(1, len(text.tokens) - lm.prompt_length)) for text in texts]


class FittedReward:
    """A network on the input of the target's lm_head after the last token that does not end the text.

    A text whose state is not at hand is read once more, from an empty cache.
    """

    def __init__(self, head: RewardHead, judge: str):
        self._head, self._judge = head, judge

    def scores(self, lm: Lane, texts: list[RewardedText]) -> Iterator:
        missing = [text for text in texts if text.state is None]
        found = iter((yield from _states(lm, [_judged(lm, text) for text in missing])))
        states = [next(found) if text.state is None else text.state for text in texts]
        return self._head(self._judge, torch.stack(states).float().cpu()).double().sigmoid().tolist()


def _judged(lm: Lane, text: RewardedText) -> list[int]:
    """The tokens of a text without the end token."""
    return text.tokens[:-1] if lm.ends(text.tokens[-1]) else text.tokens


def _states(lm: Lane, texts: list[list[int]]) -> Iterator:
    """Read texts side by side; returns the input of the lm_head after the last token of each, [hidden_size]."""
    waiting: dict[int, list] = {number: lm.reading(tokens) for number, tokens in enumerate(texts)}
    states: dict[int, Tensor] = {}
    while waiting:
        pieces = yield lm.together(*(requests.pop(0) for requests in waiting.values()))
        states |= {number: piece.hidden[-1] for number, piece in zip(waiting, pieces)}
        waiting = {number: requests for number, requests in waiting.items() if requests}
    return [states[number] for number in range(len(texts))]


class ClassifierReward:
    """A sequence-classification model that reads the question and the answer as plain text."""

    def __init__(self, model: SequenceClassifier):
        self._model = model

    def scores(self, lm: Lane, texts: list[RewardedText]) -> Iterator:
        question = lm.question or lm.text_of(lm.tokens[:lm.prompt_length], after=[])
        answers = [lm.text_of(text.tokens[lm.prompt_length:]) for text in texts]
        judged = yield lm.background(self._judging(question, answers))
        for answer in judged:
            yield self._forward(answer)
        return [answer.probability for answer in judged]

    def _judging(self, question: str, answers: list[str]) -> Callable:
        return lambda: [self._model.judge(question, answer) for answer in answers]

    def _forward(self, answer: ClassifiedAnswer) -> Event:
        return Forward(
            "reward", "prefill", answer.tokens, 0, self._model.layers, seconds=answer.seconds, flops=answer.flops
        )
