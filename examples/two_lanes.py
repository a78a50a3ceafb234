# %% [markdown]
# # Two lanes in fifteen lines
#
# The entropy of plain and speculative decoding over one text, and how many draft tokens are accepted at each depth.
# Needs matplotlib.

# %%
import playground

PROMPT = "Tell me a story about Mia."
TOKENS = 48

models = playground.load(progress=False)
lanes = playground.compare(["greedy", "speculative"], PROMPT, models=models, chat=True, max_new_tokens=TOKENS)
for kind in ("entropy", "acceptance"):
    playground.figure(kind, lanes, library="matplotlib").savefig(f"{kind}.svg")
print(lanes[1].drafts().query("tested").groupby("depth")["accepted"].mean())
print(lanes[1].tokens()[["text", "entropy", "origin", "round"]].head(8))
