"""Training ahead of decoding: model variants, fitted knobs and weights."""
