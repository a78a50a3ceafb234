"""Models that fill masks: denoisers and their canvas."""
