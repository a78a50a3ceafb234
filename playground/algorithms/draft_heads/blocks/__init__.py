"""Drafters that fill a whole block of masks in one forward, and the trees that are made of it."""
