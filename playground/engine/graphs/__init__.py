"""Forwards recorded once and replayed."""
