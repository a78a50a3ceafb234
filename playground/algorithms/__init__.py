"""Code shared by several strategies, by family."""
