"""Draft models that learn from the verdicts on their drafts while they run."""
