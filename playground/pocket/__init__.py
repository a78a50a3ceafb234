"""The pocket models: small language models of a small world, trained by this package and bundled with the page.

`world/` makes tasks with known answers, `corpus.py` reads natural text, `data.py` mixes both into training windows.
`roles.py` names the models, `train.py` and `distill.py` teach them, `samples.py` lets the target write texts for its
drafts, `evaluate.py` and `speculation.py` measure them, `card.py` writes it down. `steps.py` are the commands of
`python -m playground.pocket --help`.
"""
