"""The runtime: session, lanes, streams, sequences, rows, the cache manager, random numbers and shared prefixes."""
