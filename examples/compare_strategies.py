# %% [markdown]
# # Compare decoding strategies on your own model
#
# Every lane continues the same prompt with the same seed. The last cell shows the run in the player of the page: pause,
# step back, or continue from any token.

# %%
import playground

MODEL = None  # the bundled model; or a hub id such as "Qwen/Qwen3-0.6B", or a folder
DRAFT = None  # the draft that belongs to it; or a smaller model with the same tokenizer, or "none"
PROMPT = "Tell me a story about Mia."
LANES = ["greedy", ("sample", {"temperature": 0.8, "top_p": 0.9}), "contrastive_search", "speculative"]
TOKENS = 64

# %%
models = playground.load(MODEL, DRAFT)
results = playground.compare(LANES, PROMPT, models=models, chat=True, max_new_tokens=TOKENS)

# %%
for result in results:
    found = result.metrics
    print(f"{result.strategy:20} {found['tokens']:4} tokens  {found['tokens_per_second'] or 0:6.1f} tokens/s  "
          f"{found['tokens_per_target_forward'] or 0:5.2f} per forward  entropy {found['mean_entropy'] or 0:.2f} nats")
    print(f"    {result.text!r}")

# %%
difference = results[-1].difference(results[0])
print(difference.sentence() if difference else f"{results[-1].strategy} wrote the same text as {results[0].strategy}.")

# %%
results[-1].to_html("speculative.html")  # plays without a server
results[-1]
