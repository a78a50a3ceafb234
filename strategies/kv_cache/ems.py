"""First evict, then merge: each head with a mix of its own."""
import torch
from torch.nn.functional import avg_pool1d

from playground.algorithms.kv_cache.attention_scores import Lately, MergedTokens, Votes, heaviest
from playground.algorithms.kv_cache.prompt_compression import check_kernel
from playground.algorithms.kv_cache.slot_merging import TINY, Alike, averaged, nearest
from playground.contract import CachePolicy, knob
from playground.errors import Refusal
from playground.events import Figure


class EMS(CachePolicy):
    """Evict the tokens that matter least, and merge those in between into the tokens that stay, unless they are like
    none of them.

    A token matters by the attention it received from all rows that could see it, or from the last few, whichever is the
    larger share of its kind: the first alone favours what is old, the second what is near. In each head the best tokens
    before the window become centres, the next best are candidates, all others go. A candidate joins the centre whose
    key points most nearly the same way, and is lost where even that one's cosine stays below `likeness`, as if it
    belonged to a class of nothing, so heads with unlike mixes run in one step. A centre becomes the mean of what joined
    it, by what each of them matters, and matters as much as all of them. No candidate, or a likeness above 1, is plain
    eviction. A reconstruction: only what the method is to do could be read, so the larger of two shares, the weights
    and all defaults are choices. Li et al. 2024, arXiv 2412.08521.
    """

    name, title, paper, sheet = "ems", "Evict, then merge (EMS)", "2412.08521", "kv-cache/ems"
    guarantee = ("budget_respected", "collapses")
    reconstruction, sure = True, "low"
    row_wise, watches, merges = False, True, True

    size: int = knob(64, 2, 2048, step=1, help="tokens that stay in each head, the window included")
    window: int = knob(
        16, 1, 128, step=1, help="most recent tokens, which stay as they are and have a say of their own"
    )
    kernel: int = knob(
        5,
        1,
        15,
        step=2,
        help="neighbouring tokens whose recent attention is averaged, an odd number; 1 averages nothing",
    )
    candidates: float = knob(
        1.0, 0.0, 4.0, step=0.1, help="candidates for merging, for each token that stays before the window"
    )
    likeness: float = knob(
        0.6, -1.0, 1.1, step=0.05, help="cosine of keys below which a candidate is lost; above 1 all are"
    )

    def __post_init__(self):
        self.ever, self.lately = Votes(), Lately(self.window)
        self._cut = {}  # by layer: what slots matter, who are candidates, and for whom; from one question to the next
        # how many slots were kept, merged, unlike all centres, not even candidates
        self._fates, self._shown = {}, False

    def check(self):
        if self.size <= self.window:
            raise Refusal(f"size is {self.size} and the window alone takes {self.window}: raise size above it.", "size")
        check_kernel(self.kernel)

    @classmethod
    def holding(cls, tokens, prompt):
        return {"size": tokens, "window": min(cls.window, tokens // 2)}

    def attended(self, layer, weights, queries, keys):
        self.ever.add(layer, weights, keys)
        self.lately.add(layer, weights, keys)

    def retain(self, held):
        return self._retain([held])[0]

    def retain_all(self, held):
        """A look at all heads of all layers at once: each layer by itself would take half a hundred calls of torch a
        token.
        """
        as_wide = len({layer.positions.shape for layer in held}) == 1
        return self._retain(held) if as_wide else super().retain_all(held)

    def _retain(self, held):
        """Which slots of layers that hold equally many stay."""
        if held[0].next < held[0].prompt:
            return [layer.live for layer in held]
        heads = len(held[0].read("keys"))
        positions = torch.cat([layer.positions.expand(heads, -1) for layer in held])
        live = torch.cat([layer.live.expand(heads, -1) for layer in held])
        late = positions >= held[0].next - self.window
        matters = self.importance(held, positions, late | ~live)
        centres = heaviest(matters, self.size - self.window, live & ~late)
        stays = late | centres
        candidates = heaviest(matters, round(self.candidates * (self.size - self.window)), live & ~stays)
        self._pair_up(held, matters, centres, candidates)
        return stays.split(heads)

    def _pair_up(self, held, matters, centres, candidates):
        """Note for `merge` what slots matter, who are candidates, and which centre is most like each."""
        keys = [layer.read("keys") for layer in held]
        each = zip(*(part.split(len(keys[0])) for part in (matters, candidates, *nearest(keys, centres, candidates))))
        self._cut |= {layer.layer: (own, might, Alike(*alike)) for layer, (own, might, *alike) in zip(held, each)}

    def importance(self, held, positions, others):
        """What the slots at `positions` matter, all but the `others`: the larger of their shares of all attention and
        of the latest.

        All [heads of all layers, slots].
        """
        heads = len(positions) // len(held)
        ever, lately = (
            torch.cat([votes.of(layer.layer, layer.positions).expand(heads, -1) for layer in held])
            for votes in (self.ever, self.lately)
        )
        lately = avg_pool1d(lately.masked_fill(others, 0), self.kernel, 1, self.kernel // 2)
        return shares(torch.stack([ever / (held[0].next - positions), lately]), others).amax(0)

    def merge(self, held, stays, goes):
        matters, candidates, alike = self._cut.pop(held.layer)
        joins = alike.likeness >= self.likeness
        meeting = alike.meeting(joins, stays.shape[1])
        if not self._shown:
            self._note(held.layer, *(int(mask.sum()) for mask in (stays, goes, candidates, joins)))
        if meeting is None:
            return None
        moving = MergedTokens.of(meeting, held.positions.expand(len(stays), -1))
        for votes in (self.ever, self.lately):
            votes.move(held.layer, moving)
        return averaged(meeting, matters[meeting.sources], matters[meeting.targets])

    def _note(self, layer, stay, go, might, join):
        self._fates[layer] = [stay, join, might - join, go - might]

    def explain(self, prompt, layers):
        if self._fates and not self._shown:
            rows, fates = (
                [f"layer {layer}" for layer in self._fates],
                ["kept", "merged", "unlike any that stays", "no candidate"],
            )
            yield Figure(
                "matrix",
                "slots at the first cut",
                {"rows": rows, "columns": fates, "values": list(self._fates.values())},
            )
            self._shown = True

    def budget(self, generated):
        return self.size


def shares(received, others):
    """Numbers [..., kv_heads, slots] as shares of the sum over all but the `others`, which have none."""
    received = received.masked_fill(others, 0)
    return received.div_(received.sum(-1, keepdim=True).clamp_(min=TINY))
