"""Model loading, forwards, KV caches, attention, layer hooks and sampling primitives."""
