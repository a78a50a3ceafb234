"""Model loading, forwards, KV caches, attention and layer hooks, grammars and sampling primitives."""
