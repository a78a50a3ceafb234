"""Networks with an encoder, which reads the prompt, and a decoder, which writes the answer."""
