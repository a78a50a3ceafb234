"""The folder of a Hugging Face Space."""
