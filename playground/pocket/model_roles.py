"""The pocket models by what they are for: the shape of each, and where its files stand in the working folder.

`target` answers. `draft` guesses ahead for it with the same tokenizer. `other-draft` guesses ahead with a tokenizer of
its own, as a draft of another model family would, so that drafting across vocabularies has something to work on.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """One model of the family. taught: by what, in words; shapes: {size: key of `model.SHAPES`}; own_tokens: whether
    its tokenizer is its own.
    """
    name: str
    published: str
    title: str
    taught: str
    shapes: dict
    own_tokens: bool = False

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
            "on the data, with a little of the loss that an early layer would have",
            dict(nano="nano", small="target", large="large"),
        ),
        Role(
            "draft",
            "pocket-draft",
            "The draft of the bundled pair, distilled from the target",
            "first on the data, then on the target's full distributions, in part on texts the target wrote",
            dict(nano="nano", small="draft", large="large_draft"),
        ),
        Role(
            "other-draft",
            "pocket-other-draft",
            "A draft with a tokenizer of its own, for drafting across vocabularies",
            "on the data and on texts the target wrote",
            dict(nano="nano", small="tiny", large="large_tiny"),
            own_tokens=True,
        ),
    )
}
