"""What several strategies share, by family."""
