"""The schema study: which JSON Schemas are refused, and whether everything written under the others is valid.

Every schema is compiled; the model writes a text under it, and so does a scribbler that knows nothing; instances that
come with the schema are followed token by token. What is written and what is let through is held against an independent
validator, the jsonschema library, and every mask on the way is timed. After JSONSchemaBench and its MaskBench, Geng et
al. 2025, arXiv 2501.10868.
"""
