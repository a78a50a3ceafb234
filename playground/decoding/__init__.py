"""A run: scheduler, lanes, streams, sequences and rows, the cache manager, random numbers and what lanes share."""
