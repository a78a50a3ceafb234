"""Figures of a run, and the page of its studies."""
