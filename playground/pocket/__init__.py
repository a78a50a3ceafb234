"""The pocket models: small language models of a synthetic world, trained by this package and bundled with the page.

`questions/world` generates tasks with known answers, `corpus.py` reads natural text, and `data.py` mixes both into
training windows. `model_roles.py` lists the models, `training/` trains them, `cards/` measures them and writes their
model cards. `pipeline.py` implements the commands of `python -m playground.pocket --help`.
"""
