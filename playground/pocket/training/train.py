"""The training loop shared by all models, and the loss of the target.

A run has a budget, in minutes or in steps. Its schedules follow `progress`, the used share of the budget: the learning
rate warms up, stays constant, and decays over the last part; the context grows in stages. Muon trains the matrices,
AdamW the embeddings and norms; matmuls are in bfloat16 where that is fast, weights in float32. A checkpoint holds
everything needed to resume exactly, including the plan; Ctrl-C ends a run between two steps, with a checkpoint.

The target's loss includes a small share of the loss at an early layer through the final norm and lm_head, so that early
exits are meaningful (logit lens, self-speculation).
"""
import math
import random
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from playground.errors import Refusal
from playground.pocket.atomic_files import read_checkpoint, write_checkpoint
from playground.pocket.data import STAGES, Windows
from playground.pocket.training.muon import Muon
from playground.pocket.training.precision import mixed_precision

EXIT_WEIGHT, EXIT_EVERY = 0.15, 4           # weight of the early-exit loss, computed on every fourth token
CHECKPOINT = "checkpoint.pt"
NOTED = 25                                  # steps averaged for one point of the loss curve


@dataclass(frozen=True)
class TrainingPlan:
    """Budget and hyperparameters of a run. Give `minutes`, or `steps` for an exactly reproducible run."""
    minutes: float = 0
    steps: int = 0
    tokens: int = 2048            # per step
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    warm_up: int = 100            # steps
    decay: float = 0.45           # of the budget
    save_minutes: float = 5
    seed: int = 0
    stages: dict = field(default_factory=lambda: dict(STAGES))   # context lengths and their shares of the budget


@dataclass(frozen=True)
class Earlier:
    """Earlier training of the weights that a run started from: tokens seen, and minutes."""
    tokens: int = 0
    minutes: float = 0.0


@dataclass
class TrainingState:
    """State of a run, stored in the checkpoint."""
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    taken: dict = field(default_factory=dict)       # context length -> windows used
    losses: list = field(default_factory=list)      # (tokens, mean loss of the last steps)
    place: str = ""                                 # the machine, in words
    earlier: dict = field(default_factory=dict)     # fields of `Earlier` if it did not start from random weights


class Trainer:
    """Trains `model` with `loss(model, batch, trainer)`. folders: (training windows, checkpoints)."""

    def __init__(self, model, loss, plan, folders):
        data, self.out = map(Path, folders)
        self.model, self.loss, self.plan, self.state = model, loss, plan, TrainingState(place=_place(model.device))
        self.windows = {width: Windows.load(data / f"train_{width}.npz") for width in plan.stages}
        self.optimisers = optimisers(model, plan)
        self.recent = []

    @property
    def progress(self):
        """Used share of the budget, 0 to 1."""
        plan, state = self.plan, self.state
        return state.step / plan.steps if plan.steps else state.seconds / (60 * plan.minutes)

    def run(self, until=1.0, minutes=math.inf):
        """Train until the given progress, for `minutes`, or until Ctrl-C, with regular checkpoints and a final one."""
        started = time.monotonic() - self.state.seconds
        saved = begun = self.state.seconds
        with _progress_bar() as bar, interruption() as asked:
            while self.progress < until and self.state.seconds - begun < 60 * minutes and not asked:
                self.step()
                self.state.seconds = time.monotonic() - started
                self._show(bar)
                if self.state.seconds - saved > 60 * self.plan.save_minutes:
                    self.save()
                    saved = self.state.seconds
        self.save()

    def step(self):
        """One training step: loss, gradient, update."""
        batch = self.batch()
        set_rates(self.optimisers, self.plan, self.rate())
        loss = self.loss(self.model, batch, self)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._note(loss.detach(), batch.ids[:, 1:].numel())

    def rate(self):
        """Learning-rate factor: warm-up, constant, decay to 0.02."""
        left = (1 - self.progress) / self.plan.decay
        return min(1, (self.state.step + 1) / self.plan.warm_up) * min(1, max(0.02, left))

    def width(self):
        """Current context length: short for most of the run, long at its end."""
        passed = 0
        for width, share in self.plan.stages.items():
            passed += share
            if self.progress < passed - 1e-9:
                return width
        return width

    def batch(self):
        """The next windows of the current context length, as a `Batch`."""
        width = self.width()
        windows, at = self.windows[width], self.state.taken.get(width, 0)
        rows = np.arange(at, at + max(1, self.plan.tokens // width)) % len(windows.ids)
        self.state.taken[width] = at + len(rows)
        return windows[rows].tensors(self.model.device)

    def rng(self):
        """Random generator for this step, the same after a resume."""
        return random.Random(self.plan.seed * 1_000_003 + self.state.step)

    def report(self):
        """One line for the progress bar."""
        state = self.state
        loss = state.losses[-1][1] if state.losses else float("nan")
        speed = state.tokens / max(1, state.seconds)
        seen = f"{state.tokens / 1e6:.2f} M tokens, {speed:.0f}/s"
        return f"step {state.step}, {seen}, context {self.width()}, loss {loss:.3f}"

    def _show(self, bar):
        bar.n = round(100 * min(1, self.progress), 1)
        bar.set_postfix_str(self.report(), refresh=False)
        bar.update(0)

    def _note(self, loss, tokens):
        self.state.step += 1
        self.state.tokens += tokens
        self.recent.append(loss)
        if self.state.step % NOTED == 0:
            self.state.losses.append((self.state.tokens, float(sum(self.recent) / len(self.recent))))
            self.recent = []

    def begin(self):
        """Raise Refusal if there is already a checkpoint, which a new run would overwrite."""
        if (self.out / CHECKPOINT).exists():
            raise Refusal(
                f"{self.out} contains an unfinished training: add --resume to continue it, or choose another --out.",
                "resume",
            )

    def save(self):
        """Write the checkpoint; an interrupted write leaves the previous one intact."""
        stored = dict(
            model=self.model.state_dict(), optimisers=[o.state_dict() for o in self.optimisers], shape=shape(self.model)
        )
        stored |= dict(state=asdict(self.state), plan=asdict(self.plan), recent=list(map(float, self.recent)))
        write_checkpoint(stored, self.out / CHECKPOINT)

    def resume(self, minutes=None):
        """Resume from the checkpoint with its own plan, optionally with another budget in minutes.

        Raises Refusal if there is no checkpoint, or if its model has another shape.
        """
        stored = read_checkpoint(self.out / CHECKPOINT, self.model.device)
        if stored["shape"] != shape(self.model):
            raise Refusal(
                f"The checkpoint in {self.out} is of a model with {_in_words(stored['shape'])}, not with "
                f"{_in_words(shape(self.model))}: give the original --size, or choose another --out.",
                "size",
            )
        self.model.load_state_dict(stored["model"])
        for optimiser, values in zip(self.optimisers, stored["optimisers"]):
            optimiser.load_state_dict(values)
        self.state, self.recent, self.plan = (
            TrainingState(**stored["state"]),
            stored["recent"],
            TrainingPlan(**stored["plan"]),
        )
        if minutes:
            self.plan = replace(self.plan, minutes=minutes)


def _place(device):
    """The machine in words, for the model card."""
    threads = torch.get_num_threads()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} CPU core{'s' * (threads > 1)}"


def _progress_bar():
    return tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {postfix}", mininterval=20)


@contextmanager
def interruption():
    """Context manager that yields a list, which becomes non-empty on SIGINT (Ctrl-C) or SIGTERM.

    A step is never interrupted, since a partial update would leave the model in an inconsistent state.
    """
    asked, signals = [], (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: asked.append(True)) for number in signals]
    try:
        yield asked
    finally:
        for number, handler in zip(signals, before):
            signal.signal(number, handler)


def shape(model):
    """The sizes in which two models must agree to exchange weights."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    return {name: getattr(model.config, name) for name in names}


def _in_words(shape):
    return f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']} and {shape['vocab_size']} tokens"


def read_state(folder):
    """State and plan of the run in a folder, without its weights. Raises Refusal if there is no run."""
    stored = read_checkpoint(Path(folder) / CHECKPOINT)
    return TrainingState(**stored["state"]), TrainingPlan(**stored["plan"])


def optimisers(model, plan):
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    other = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    adam = torch.optim.AdamW(other, lr=plan.other_lr, betas=(0.9, 0.97), weight_decay=0.0, fused=True)
    return [Muon(inner, lr=plan.matrix_lr), adam]


def set_rates(optimisers, plan, factor):
    """Set both learning rates to the plan's, times the schedule's factor."""
    for optimiser, rate in zip(optimisers, (plan.matrix_lr, plan.other_lr)):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor


def target_loss(model, batch, trainer):
    """Next-token loss, plus a small share of the same loss at one random layer of the upper half."""
    early = early_layer(model.config.num_hidden_layers, trainer.rng())
    with mixed_precision(batch.ids.device):
        states = model.model(**batch.read, output_hidden_states=True).hidden_states     # the last is already normed
        logits = model.lm_head(states[-1])
        exit_logits = model.lm_head(model.model.norm(states[early][:, ::EXIT_EVERY]))
    exit_loss = weighted(exit_logits, *(x[:, ::EXIT_EVERY] for x in batch.predicted))
    return (1 - EXIT_WEIGHT) * weighted(logits, *batch.predicted) + EXIT_WEIGHT * exit_loss


def early_layer(layers, rng):
    """Layer after which to exit: one of the upper half, never the last."""
    return rng.randrange(layers // 2, layers)


def data_loss(model, batch, trainer):
    """Plain next-token loss."""
    with mixed_precision(batch.ids.device):
        logits = model(**batch.read).logits
    return weighted(logits, *batch.predicted)


def weighted(logits, ids, weights):
    """Weighted mean cross-entropy in nats. logits: (rows, tokens, vocabulary)."""
    total = weights.sum().clamp(min=1e-6)
    return CrossEntropy.apply(logits.flatten(0, 1), ids.flatten(), weights.flatten() / total)


class CrossEntropy(torch.autograd.Function):
    """Weighted sum of cross-entropies whose backward reuses the memory of the log-probabilities.

    Logits are the largest tensors of a step; on a CPU, page faults of a new allocation cost more than the arithmetic.
    """

    @staticmethod
    def forward(ctx, logits, ids, weights):
        log_probs = logits.float().log_softmax(-1)           # (tokens, vocabulary)
        ctx.save_for_backward(log_probs, ids, weights)
        ctx.dtype = logits.dtype
        return -(log_probs.gather(1, ids[:, None])[:, 0] * weights).sum()

    @staticmethod
    def backward(ctx, gradient):
        log_probs, ids, weights = ctx.saved_tensors
        difference = log_probs.exp_().scatter_add_(1, ids[:, None], -torch.ones_like(weights)[:, None])
        return difference.mul_((weights * gradient)[:, None]).to(ctx.dtype), None, None
