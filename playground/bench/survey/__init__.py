"""Strategies answer questions; the results as tables and figures."""
