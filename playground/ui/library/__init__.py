"""The library page: every strategy, with a link that runs it."""
