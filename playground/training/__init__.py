"""What is learnt before a text is written: model variants, fitted knobs and weights."""
