"""Figures of speed and size, as ratios in one run; see docs/performance.md."""
