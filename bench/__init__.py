"""Benchmarks of kvcore: `python -m bench`, `kvcore bench` or `pytest bench --benchmark-only`."""
