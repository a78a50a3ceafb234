"""What the rows of a forward attend to, and how it is computed."""
