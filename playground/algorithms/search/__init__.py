"""Shared pieces of searches over several sequences."""
