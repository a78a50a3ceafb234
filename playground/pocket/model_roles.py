"""The roles of the pocket models: the shape of each model, and where its files are in the working folder.

`target` is the main model. `draft` drafts for it with the same tokenizer. `other-draft` drafts with its own tokenizer,
like a draft of another model family, for speculation across vocabularies. `diffusion` and `block-diffusion` fill masked
positions instead of continuing text; they start from the weights of the target and share its tokenizer. `experts` is a
mixture of experts made of the target's feed-forward networks, with its tokenizer.
"""
from dataclasses import dataclass

from playground.engine.checkpoint.catalogue import TEXT_MODEL


@dataclass(frozen=True)
class Role:
    """One model of the family.

    taught: the training in words, for the card; shapes: {size: key of `architecture.SHAPES`}; own_tokens: whether it
    has its own tokenizer; block_length: of a denoiser that attends block by block, 0 for all others.
    """
    name: str
    published: str
    title: str
    taught: str
    shapes: dict
    own_tokens: bool = False
    block_length: int = 0

    @property
    def tokenizer_in(self):
        """The published model in whose folder its tokenizer is stored."""
        return self.published if self.own_tokens else TEXT_MODEL

    def tokenizer(self, out):
        """The folder of its tokenizer."""
        return out / ("tokenizer-own" if self.own_tokens else "tokenizer")

    def data(self, out):
        """The folder of its training windows."""
        return out / f"data-{self.name}"

    def model(self, out):
        """The folder of its checkpoint and weights."""
        return out / self.name


ROLES = {
    role.name: role
    for role in (
        Role(
            "target",
            "pocket",
            "The target of the bundled pair",
            "on the data, with a small auxiliary loss at an early layer",
            dict(nano="nano", small="target", large="large"),
        ),
        Role(
            "draft",
            "pocket-draft",
            "The draft of the bundled pair, distilled from the target",
            "first on the data, then on the target's full distributions, partly on texts sampled from the target",
            dict(nano="nano", small="draft", large="large_draft"),
        ),
        Role(
            "other-draft",
            "pocket-other-draft",
            "A draft with its own tokenizer, for drafting across vocabularies",
            "on the data and on texts sampled from the target",
            dict(nano="nano", small="tiny", large="large_tiny"),
            own_tokens=True,
        ),
    )
}
DENOISER = Role(
    "diffusion",
    "pocket-diffusion",
    "A masked diffusion model, adapted from the target",
    "to fill masked positions of a canvas, with full attention",
    dict(nano="nano", small="target", large="large"),
)
BLOCK_DENOISER = Role(
    "block-diffusion",
    "pocket-block-diffusion",
    "A block-diffusion model, adapted from the target",
    "to fill masked positions of a block, which sees itself and what is before it",
    dict(nano="nano", small="target", large="large"),
    block_length=8,
)
EXPERTS = Role(
    "experts",
    "pocket-moe",
    "A mixture of experts, made of the target's feed-forward networks",
    "on the target's full distributions",
    dict(nano="nano", small="target", large="large"),
)
DENOISERS = {role.name: role for role in (DENOISER, BLOCK_DENOISER)}
EVERY = ROLES | DENOISERS | {EXPERTS.name: EXPERTS}       # those that can be trained
