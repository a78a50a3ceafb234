# %% [markdown]
# # Measure the acceptance of your own draft model
#
# Speculative decoding pays off if the target accepts many of the tokens that the draft proposes. This runs your prompts
# with and without a draft: acceptance by position in the draft, tokens per forward of the target, and wall-clock time.
# The texts are those of the target in either case.

# %%
from statistics import fmean

import playground

MODEL = None  # the bundled model; or a hub id such as "Qwen/Qwen3-1.7B", or a folder
DRAFT = None  # the draft that belongs to it; or one with the same tokenizer, such as "Qwen/Qwen3-0.6B"
PROMPTS = ["Tell me a story about Mia.", "How much is 12 + 7?", "Put down 17."]
DEPTHS = [2, 4, 8]  # draft tokens per round
TOKENS = 64

# %%
models = playground.load(MODEL, DRAFT)
playground.run("greedy", PROMPTS[0], models=models, chat=True, max_new_tokens=2)  # a warm-up, which is not measured


def lanes(depth):
    """A plain lane, and one that drafts `depth` tokens per round and accepts what greedy decoding would choose."""
    return ["greedy", {"strategy": "speculative", "extras": [("draft_model", {"depth": depth}), "greedy_match"]}]


# %%
for depth in DEPTHS:
    plain, drafted = zip(*(playground.compare(lanes(depth), prompt, models=models, chat=True, max_new_tokens=TOKENS)
                           for prompt in PROMPTS))
    rates = [result.metrics["acceptance_rate"] for result in drafted]
    forwards = [result.metrics["tokens_per_target_forward"] for result in drafted]
    seconds = [sum(result.metrics["seconds"] for result in results) for results in (plain, drafted)]
    print(f"{depth} draft tokens: {fmean(rate for rate in rates if rate is not None):.2f} accepted, "
          f"{fmean(number for number in forwards if number is not None):.2f} tokens per forward, "
          f"{seconds[0] / seconds[1]:.2f} times as fast")
    assert all(one.token_ids == other.token_ids for one, other in zip(plain, drafted)), "a lossless method differs"

# %% [markdown]
# Acceptance by position, of the last depth: where it falls off, longer drafts are wasted.

# %%
for prompt, result in zip(PROMPTS, drafted):
    positions = result.metrics["acceptance_by_position"] or []
    print(prompt, [None if rate is None else round(rate, 2) for rate in positions])
