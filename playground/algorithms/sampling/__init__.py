"""Shared pieces of samplers and sampling decoders."""
