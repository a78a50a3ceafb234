"""What overlays share: figures about the tokens of a text."""
