"""Layers that remember a state instead of keys and values."""
