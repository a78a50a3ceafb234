"""Lark and GBNF grammars: converted to one form, checked, and read as automata and tables."""
