"""WeDLM: a window of masks after the text, on a model with causal attention; its solved start becomes text at once."""
from collections.abc import Iterator

from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.engine.sampling import entropy, in_float64
from playground.events import Figure, Note


class WeDLM(CanvasDecoder):
    """Fill the positions of a sliding window whose entropy is low, nearer ones first, and commit its filled start. No
    bundled model is trained for it: load a WeDLM checkpoint; the library shows a recorded run of a tiny one.

    Known tokens are read before the masks, with causal attention, so the key and value states of the window's leading
    filled positions are final and enter the cache in the forward that reads them; as many masks are then appended.
    Filled positions behind a gap are read again. A position is filled if its entropy, plus a penalty for every position
    between it and the first mask, is below the threshold, and at least the one with the lowest sum. Threshold 0 fills
    one position per forward; with the largest penalty that is from left to right, whatever the window. Unlike in the
    released engine the run stops without the forward that would only commit its last tokens. Checkpoints of 8 B
    parameters are on the hub. Liu et al. 2025, arXiv 2512.22737.
    """

    name, title, paper, sheet = "wedlm", "WeDLM", "2512.22737", "diffusion/wedlm"
    guarantee, attention = ("heuristic",), ("known_first",)

    window: int = knob(16, 1, 32, step=1, help="positions that are read from the first mask on")
    threshold: float = knob(0.4, 0.0, 2.0, step=0.05, help="entropy in nats below which a position is filled")
    penalty: float = knob(0.02, 0.0, 0.5, step=0.01, help="nats added per position after the first mask")
    temperature: float = knob(0.2, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        prompt, states = -lm.everything.start, lm.new_states()
        cached = -prompt  # the first position without final states
        while lm.masked:
            leading = lm.masked[0]
            stop = min(leading + self.window, lm.length)
            masked = [position for position in lm.masked if position < stop]
            rows = yield lm.read(masked, range(cached, stop), states)
            states.drop(range(prompt + leading, prompt + stop))
            yield _cacheability(leading, max(cached, 0), stop)
            cached = leading
            yield from self._fill(lm, rows, masked)

    def _fill(self, lm, rows, masked: list[int]) -> Iterator:
        """Fill what is certain enough, and everything after an end token that has no mask before it."""
        nats = {position: float(entropy(rows.raw[position][None])) for position in masked}
        sums = {position: nats[position] + self.penalty * (position - masked[0]) for position in masked}
        chosen = [position for position in masked if sums[position] < self.threshold] or [min(masked, key=sums.get)]
        yield _window(lm, sums, self.threshold)
        tokens = [lm.pick(rows, position) for position in chosen]
        confidences = in_float64(rows.raw[chosen]).softmax(-1)[range(len(chosen)), tokens].tolist()
        yield lm.fill(chosen, tokens, confidences)
        yield from self._end(lm)

    def _end(self, lm) -> Iterator:
        first = min(lm.masked, default=0)
        ends = [token for token in lm.ids[:first] if lm.ends(token)]
        if ends:
            yield Note("The text has ended: its end token fills all later positions, without a forward.")
            yield lm.fill(lm.masked, [ends[0]] * len(lm.masked), [1.0] * len(lm.masked))


def _window(lm, sums: dict[int, float], threshold: float) -> Figure:
    """The masks of the window with what their entropy and distance add up to."""
    labels = [f"{position + 1} {'certain' if value < threshold else 'open'}" for position, value in sums.items()]
    return Figure("bars", "entropy and penalty in the window, nats", {"labels": labels, "values": [*sums.values()]})


def _cacheability(leading: int, cached: int, stop: int) -> Figure:
    """The share of the positions read, prompt left out, that entered the cache: those before the first mask."""
    share = (leading - cached) / (stop - cached)
    return Figure("scalar", "read positions that enter the cache", {"x": leading, "series": {"share": share}})
