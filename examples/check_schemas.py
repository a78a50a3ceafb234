# %% [markdown]
# # Check your JSON Schemas
#
# Each schema is compiled and enforced while the model writes: which are refused and why, whether the text is complete,
# and what the token masks cost. `python -m playground bench schemas FOLDER` does the same for a folder, with random
# texts and an independent validator.

# %%
import json

import playground
from playground import Refusal

MODEL = None  # the bundled model; or a hub id such as "Qwen/Qwen3-0.6B", or a folder
PROMPT = "How much is 12 + 7?"
TOKENS = 64
SCHEMAS = {
    "answer": {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]},
    "choice": {"enum": ["yes", "no"]},
    "not enforced": {"type": "object", "not": {"required": ["a"]}},
}

# %%
models = playground.load(MODEL, draft="none")


def outcome(schema):
    """What happens to one schema, in a sentence."""
    try:
        result = playground.run("greedy", PROMPT, models=models, chat=True, max_new_tokens=TOKENS,
                                extras=[("json_schema", {"source": schema})])
    except Refusal as refusal:
        return f"refused: {refusal}"
    if result.reason == "failed":
        return f"failed: {result.message}"
    mask = 1000 * (result.metrics["mask_seconds_per_token"] or 0)
    try:
        return f"{json.dumps(json.loads(result.text))}, masks took {mask:.2f} ms per token"
    except ValueError:
        return f"cut off after {len(result.token_ids)} tokens: {result.text!r}"


# %%
for name, schema in SCHEMAS.items():
    print(f"{name}: {outcome(schema)}")
