"""Shared pieces of constraints."""
