"""FastDraft: a draft model made from its target, and trained on what the target writes."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import ModuleList
from torch.nn.functional import cross_entropy

from playground.contract import Variant, knob
from playground.errors import Refusal
from playground.events import Figure, Note

TEMPERATURES = (0.0, 0.6, 0.8, 1.0)  # of the target's answers, a quarter of them each
LAYERS, SCRATCH = "layers", "scratch"  # what the draft begins with


class Answers(NamedTuple):
    """Prompts with their answers, as token ids."""

    ids: Tensor  # [n, tokens]
    start: int  # tokens of a prompt
    written: Tensor  # bool [n, tokens]: part of an answer, its end token included

    def rows(self, index: Tensor) -> Answers:
        return Answers(self.ids[index], self.start, self.written[index])


class Passes(NamedTuple):
    """How often rows are trained on, and the learning rate."""

    count: int
    lr: float


class Acceptance(NamedTuple):
    """Draft tokens over greedy speculative decoding of some answers."""

    accepted: int
    drafted: int
    rounds: int
    tokens: int

    @property
    def rate(self) -> float:
        """Accepted per drafted token."""
        return self.accepted / max(1, self.drafted)

    @property
    def efficiency(self) -> float:
        """Tokens per forward of the target."""
        return self.tokens / max(1, self.rounds)


class FastDraft(Variant):
    """Make a draft model for a target: its first layers, or fresh ones that read the texts first, trained on answers
    that the target wrote.

    A draft has to be accepted rather than good, so it learns the target's own texts. The target continues the
    beginnings of the texts, a quarter of them greedily and the others at temperatures 0.6, 0.8 and 1, and the draft is
    trained with the cross-entropy of these answers alone. Acceptance on held-out beginnings is measured before and
    after: accepted per drafted token and tokens per target forward, over greedy speculative decoding with `gamma` draft
    tokens. Load the result with --draft. In the paper the draft begins from scratch and reads 5 billion tokens of text,
    and then code, before the answers: start = scratch with `pretraining` does that with the texts that are given,
    which are few here, and in layers as wide as the target's. With start = layers the target's first layers stand in
    for it. data = texts trains on the texts instead of the answers. Zafrir et al. 2024, arXiv 2411.11055.
    """

    name, title, paper, sheet = "fastdraft", "FastDraft", "2411.11055", "speculative/fastdraft"
    adjective, guarantee, needs = "fastdraft", ("heuristic",), ("corpus",)
    reconstruction, sure = True, "medium"

    layers: int = knob(2, 1, 32, step=1, help="layers of the draft")
    start: str = knob(
        LAYERS, choices=(LAYERS, SCRATCH), help="weights the draft begins with: of the target's first layers, or fresh"
    )
    pretraining: int = knob(0, 0, 60, step=1, help="passes over the texts before the answers, on every next token")
    pretraining_lr: float = knob(2e-3, 1e-6, 1e-2, help="learning rate of those passes")
    answers: int = knob(256, 1, 4096, step=1, help="answers to train on; all beginnings if there are fewer")
    held_out: int = knob(32, 1, 512, step=1, help="greedy answers to measure on")
    prompt: int = knob(32, 1, 256, step=1, help="tokens of a beginning")
    length: int = knob(64, 2, 512, step=1, help="tokens of an answer")
    epochs: int = knob(4, 0, 60, step=1, help="passes over the answers")
    lr: float = knob(5e-4, 1e-6, 1e-2, help="learning rate")
    batch: int = knob(16, 1, 64, step=1, help="answers per update")
    gamma: int = knob(3, 1, 16, step=1, help="draft tokens per round in the measurements")
    data: str = knob(
        "target", choices=("target", "texts"), help="what the draft learns: the target's answers, or the texts"
    )

    def make(self, network, texts, seed) -> Iterator[Figure | Note]:
        network.eval()
        chance, size = torch.Generator().manual_seed(seed), network.num_parameters()
        pool, held = (part.to(network.device) for part in self._split(texts))
        chosen = pool[torch.randperm(len(pool), generator=chance)[:self.answers]]
        measured = self.answered(network, held, 0.0, chance)
        training = self._answers(network, chosen, chance)
        yield Note(f"{len(training.ids)} answers, {int(training.written.sum())} tokens of them to train on.")
        keep_layers(network, self.layers)
        if self.start == SCRATCH:
            begin_anew(network, seed)
        cost = network.num_parameters() / size
        yield self._figure(0, network, measured, {})
        yield from self._pretrain(network, pool, measured, chance)
        before = acceptance(network, measured, self.gamma, self.batch)
        for epoch, loss in enumerate(self._epochs(network, training, Passes(self.epochs, self.lr), chance), 1):
            yield self._figure(self.pretraining + epoch, network, measured, {"training loss": loss})
        yield Note(self._judgement(before, acceptance(network, measured, self.gamma, self.batch), cost))

    def _split(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Windows of the texts to train on, and the last ones, which are held out."""
        size = self.prompt + self.length
        found = [text[at:at + size] for text in texts for at in range(0, len(text) - size + 1, size)]
        rest = len(found) - self.held_out
        if rest < 1:
            raise Refusal(
                f"The texts have {len(found)} windows of {size} tokens, and {self.held_out} have to be held out: add "
                "text, or lower length or held_out.",
                "texts",
            )
        windows = torch.tensor(found)
        return windows[:rest], windows[rest:]

    def _pretrain(self, network, pool: Tensor, measured: Answers, chance: torch.Generator) -> Iterator[Figure | Note]:
        """The first stage of the paper: next tokens of plain text, in place."""
        texts = Answers(pool, 0, torch.ones_like(pool, dtype=torch.bool))
        passes = Passes(self.pretraining, self.pretraining_lr)
        for epoch, loss in enumerate(self._epochs(network, texts, passes, chance), 1):
            yield self._figure(epoch, network, measured, {"pretraining loss": loss})
        if self.pretraining:
            yield Note(f"{self.pretraining} passes over {pool.numel()} tokens of the texts come before the answers.")

    def _answers(self, network, windows: Tensor, chance: torch.Generator) -> Answers:
        """What the draft is trained on."""
        if self.data == "texts":
            return Answers(windows, self.prompt, torch.arange(windows.shape[1]).expand(windows.shape) >= self.prompt)
        parts = [
            self.answered(network, windows[number::len(TEMPERATURES)], temperature, chance)
            for number, temperature in enumerate(TEMPERATURES)
        ]
        return Answers(torch.cat([part.ids for part in parts]), self.prompt, torch.cat([p.written for p in parts]))

    @torch.inference_mode()
    def answered(self, network, windows: Tensor, temperature: float, chance: torch.Generator) -> Answers:
        """The target's answers to the beginnings of the windows; temperature 0 is greedy."""
        parts = [
            continued(network, prompts, self.length, temperature, chance)
            for prompts in windows[:, :self.prompt].split(self.batch) if len(prompts)
        ]
        ids = torch.cat([windows[:0], *parts]).clone()
        ended = torch.isin(ids, torch.tensor(sorted(ends_of(network)), device=ids.device, dtype=ids.dtype))
        ended[:, :self.prompt] = False
        before = ended.int().cumsum(1) - ended.int()
        return Answers(ids, self.prompt, (before == 0) & (torch.arange(ids.shape[1]) >= self.prompt).to(ids.device))

    def _epochs(self, network, training: Answers, passes: Passes, chance: torch.Generator) -> Iterator[float]:
        """Train, and yield the mean loss of each epoch."""
        optimizer = torch.optim.AdamW(network.parameters(), passes.lr)
        for _ in range(passes.count):
            losses = []
            for rows in torch.randperm(len(training.ids), generator=chance).split(self.batch):
                loss = answer_loss(network, training.rows(rows.to(training.ids.device)))
                if not torch.isfinite(loss):
                    raise Refusal("The training loss is not finite: lower lr, or pretraining_lr.", "lr")
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            yield sum(losses) / len(losses)

    def _figure(self, epoch: int, network, measured: Answers, series: dict[str, float]) -> Figure:
        found = acceptance(network, measured, self.gamma, self.batch)
        with torch.inference_mode():
            loss = float(answer_loss(network, measured))
        held = {"held-out loss": loss, "accepted / drafted": found.rate, "tokens per forward": found.efficiency}
        return Figure("scalar", self.name, {"x": epoch, "axis": "epoch", "series": {**series, **held}})

    def _judgement(self, before: Acceptance, after: Acceptance, cost: float) -> str:
        bound = after.efficiency / (cost * self.gamma + 1)
        return (
            f"With {self.gamma} draft tokens per round, {before.rate:.1%} of them were accepted before the training on "
            f"answers and {after.rate:.1%} after it, and a forward of the target gave {before.efficiency:.2f} and "
            f"{after.efficiency:.2f} tokens. The draft has {cost:.0%} of the target's weights, so where reading the "
            f"weights takes the time, the speed-up is {bound:.2f} at most; it is not measured here."
        )


def begin_anew(network, seed: int) -> None:
    """Give a network fresh weights, as before any training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network.load_state_dict(type(network)(network.config).state_dict())


def keep_layers(network, count: int) -> None:
    """Remove all but the first layers from a network. Raises Refusal if it has no more than that."""
    depth = network.config.num_hidden_layers
    if count >= depth:
        raise Refusal(
            f"The target has {depth} layers, so a draft with {count} of them is no smaller: lower layers.", "layers"
        )
    name = next(name for name, part in network.named_modules() if isinstance(part, ModuleList) and len(part) == depth)
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, network.get_submodule(name)[:count])
    network.config.num_hidden_layers = count
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = network.config.layer_types[:count]


def continued(network, prompts: Tensor, count: int, temperature: float, chance: torch.Generator) -> Tensor:
    """Prompts [n, c] with `count` tokens after each, [n, c + count]; end tokens do not stop it."""
    ids, unread, cache = prompts, prompts, None
    for _ in range(count):
        answer = network(input_ids=unread, past_key_values=cache, use_cache=True)
        logits, cache = answer.logits[:, -1], answer.past_key_values
        if temperature:
            drawn = (logits.float().cpu() / temperature).softmax(-1).multinomial(1, generator=chance)
        unread = drawn.to(ids.device) if temperature else logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, unread], 1)
    return ids


def ends_of(network) -> set[int]:
    """Tokens that end a text."""
    found = network.generation_config.eos_token_id if network.generation_config else network.config.eos_token_id
    return {token for token in (found if isinstance(found, list) else [found]) if token is not None}


def answer_loss(network, answers: Answers) -> Tensor:
    """Mean cross-entropy [] of the answers; prompts and what follows an end token do not count."""
    logits = network(input_ids=answers.ids, use_cache=False).logits[:, :-1]
    wanted = answers.written[:, 1:]
    return cross_entropy(logits[wanted].float(), answers.ids[:, 1:][wanted])


@torch.inference_mode()
def acceptance(draft, greedy: Answers, gamma: int, batch: int) -> Acceptance:
    """What greedy speculative decoding of the target's greedy answers accepts of a draft.

    A draft token is accepted while it is the answer's, so the draft's most probable tokens after the answer itself
    tell everything.
    """
    found = Acceptance(0, 0, 0, 0)
    for rows in torch.arange(len(greedy.ids)).split(batch):
        part = greedy.rows(rows.to(greedy.ids.device))
        best = draft(input_ids=part.ids, use_cache=False).logits[:, part.start - 1:-1].argmax(-1)
        hits = (best == part.ids[:, part.start:]).tolist()
        lengths = part.written.sum(1).tolist()
        for answer, length in zip(hits, lengths):
            found = Acceptance(*map(sum, zip(found, rounds(answer[:length], gamma))))
    return found


def rounds(hits: list[bool], gamma: int) -> Acceptance:
    """Speculative decoding of one answer, by whether the draft's token at each place is the answer's."""
    at = accepted = drafted = count = 0
    while at < len(hits):
        depth = min(gamma, len(hits) - at - 1)
        run = next((i for i in range(depth) if not hits[at + i]), depth)
        at, accepted, drafted, count = at + run + 1, accepted + run, drafted + depth, count + 1
    return Acceptance(accepted, drafted, count, len(hits))
