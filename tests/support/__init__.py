"""What several test files share: models, runs, oracles, pages, and the choice of tests to run."""
