# %% [markdown]
# # Record a trace for a paper's figure
#
# Records a run once, and draws from the recording: the figure can be drawn again without the model. The trace is the
# file that the page opens, and `figure.svg` and `figure.pdf` hold vectors with editable text. Needs matplotlib.

# %%
import matplotlib
import matplotlib.pyplot as plt

import playground
from playground.trace import Trace
from playground.trace.plot_style import COLOURS
from playground.trace.result import Result

MODEL = None  # the bundled model; or a hub id such as "Qwen/Qwen3-0.6B", or a folder
DRAFT = None  # the draft that belongs to it
PROMPT = "Tell me a story about Mia."
LANES = ["greedy", "sample"]
TOKENS = 64

# %%
models = playground.load(MODEL, DRAFT)
for result in playground.compare(LANES, PROMPT, models=models, chat=True, max_new_tokens=TOKENS):
    result.trace.save(f"{result.strategy}.jsonl")

# %% [markdown]
# From here on only the recordings are read.

# %%
matplotlib.rcParams.update({"svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 8})
figure, axes = plt.subplots(figsize=(3.4, 2.0), layout="constrained")  # one column of two
for strategy, colour in zip(LANES, COLOURS):
    result = Result(Trace.load(f"{strategy}.jsonl"))
    tokens = result.to_dataframe()
    axes.plot(tokens["position"], tokens["entropy"], color=colour, linewidth=1, label=strategy)
axes.set(xlabel="position in the text", ylabel="entropy (nats)", ylim=(0, None))
axes.legend(frameon=False)
for form in ("svg", "pdf"):
    figure.savefig(f"figure.{form}", metadata={"Date": None} if form == "svg" else {"CreationDate": None})
print("wrote figure.svg and figure.pdf")
