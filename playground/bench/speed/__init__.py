"""Speed, compared with the transformers library on the same weights."""
