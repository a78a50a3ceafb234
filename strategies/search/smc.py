"""Sequential Monte Carlo under a grammar."""
from playground.algorithms.search.particle_filter import Redrawn


class SMC(Redrawn):
    """Grow several texts under a grammar, weigh each by how much of the model's law was legal on its way, and let heavy
    ones take the place of light ones.

    A mask renormalised at every token favours beginnings after which hardly anything legal is likely. Here the mass
    that was legal is multiplied into a text's weight, and where the effective number of texts, (sum w)^2 / sum w^2,
    falls below `threshold` times their number, as many are drawn anew from all by their weights, which are then made
    equal. A text that ended goes on taking part; one cut off by the length is no legal text and weighs nothing. The
    answer is drawn by weight: with more texts its law tends to the model's own law given the grammar, and the mean
    weight is right on average for the mass of all that is legal. One text is a plain mask. Lew et al. 2023, arXiv
    2306.03081, in the plain form of its library with multinomial draws; `smc_steering` is its drawing without
    replacement. `awrs` weighs by a few tries, not by the whole mask.
    """

    name, title, paper, sheet = "smc", "Sequential Monte Carlo", "2306.03081", "search/self-consistency-bestofn"
