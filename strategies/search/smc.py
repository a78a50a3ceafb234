"""Sequential Monte Carlo under a grammar."""
from playground.algorithms.search.particle_filter import Redrawn


class SMC(Redrawn):
    """Sample several particles under a grammar, weight each by the probability mass that the grammar allowed at each
    step, and resample by weight.

    A token mask that is renormalised at every step overweights prefixes after which the grammar allows only improbable
    text. Here the allowed mass is multiplied into a particle's weight. If the effective sample size, (sum w)^2 / sum
    w^2, falls below `threshold` times the number of particles, all are resampled by weight and their weights equalised.
    Finished particles take part as well; one truncated by the length limit has weight 0. The answer is sampled by
    weight: with more particles its distribution converges to the model's, conditioned on the grammar, and the mean
    weight is an unbiased estimate of the mass of all texts that the grammar allows. One particle is a plain token mask.
    Lew et al. 2023, arXiv 2306.03081, in the plain form of its library with multinomial resampling; `smc_steering`
    resamples without replacement. `awrs` estimates the weights from a few tokens, not from the whole mask.
    """

    name, title, paper, sheet = "smc", "Sequential Monte Carlo", "2306.03081", "search/self-consistency-bestofn"
