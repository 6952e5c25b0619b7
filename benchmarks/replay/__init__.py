"""Public traces through the real core: every eviction policy at every budget, on the half of each
trace that nothing was tuned on. `python -m benchmarks.replay --help`."""
