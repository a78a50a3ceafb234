"""Overhead of strategies outside forwards: CPU time and recorded events, at a large vocabulary and a long context."""
