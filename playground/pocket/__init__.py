"""The pocket models: small language models of a synthetic world, trained by this package and bundled with the page.

`world/` generates tasks with known answers, `corpus.py` reads natural text, `data.py` mixes both into training windows.
`model_roles.py` lists the models, `train.py` and `distill.py` train them, `target_samples.py` samples training texts
for the drafts from the target, `evaluate.py` and `draft_acceptance.py` measure the models, `card.py` writes the model
cards. `pipeline.py` implements the commands of `python -m playground.pocket --help`.
"""
