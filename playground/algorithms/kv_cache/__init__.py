"""Code shared by KV cache policies."""
