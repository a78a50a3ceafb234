"""The schema benchmark: which JSON Schemas are refused, and whether all texts constrained by the others are valid.

Every schema is compiled. The model writes a text constrained by it, and so does a random writer; instances that come
with the schema are matched token by token. Texts and accepted instances are checked with an independent validator, the
jsonschema library, and every token mask on the way is timed. After JSONSchemaBench and its MaskBench, Geng et al. 2025,
arXiv 2501.10868.
"""
