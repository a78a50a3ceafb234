"""Shared pieces for programs that a model writes."""
