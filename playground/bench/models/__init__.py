"""Which causal language models of the transformers library work here, tried on tiny random networks of every type."""
