"""The commands that train: `fit` and `variant`."""
