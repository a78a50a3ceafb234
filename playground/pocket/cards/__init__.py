"""What the bundled models can do, measured, and their model cards."""
