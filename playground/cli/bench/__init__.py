"""The benchmarks of `python -m playground bench`."""
