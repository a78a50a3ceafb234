"""Shared pieces of speculative decoding."""
