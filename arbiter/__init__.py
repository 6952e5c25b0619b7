"""Owns every byte of device memory: a pure core of rules, and the Ray shell around it."""
