"""The pocket models: two small language models of a small world, trained by this package and bundled with the page.

`world/` makes tasks with known answers, `corpus.py` reads natural text, `data.py` mixes both into training windows,
`train.py` and `distill.py` make the target and its draft, `evaluate.py` measures them.
Run `python -m playground.pocket --help`.
"""
