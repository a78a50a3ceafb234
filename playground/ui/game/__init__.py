"""The game for classes."""
