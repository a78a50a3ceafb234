"""The page of the studies of a run."""
