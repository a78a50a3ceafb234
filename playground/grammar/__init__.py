"""Constraints, without a network: read, compiled in a confined child, and matched token by token."""
