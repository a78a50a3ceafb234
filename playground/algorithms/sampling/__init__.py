"""Code shared by samplers and sampling decoders."""
