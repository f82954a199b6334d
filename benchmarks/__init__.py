"""Benchmarks of speed and memory; see docs/performance.md."""
