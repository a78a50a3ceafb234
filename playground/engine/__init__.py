"""Where models live: loading, forwards, KV stores, the two seams, grammars, sampling primitives."""
