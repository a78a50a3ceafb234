"""Shared pieces of KV cache policies."""
