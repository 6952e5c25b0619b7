"""Metrics (K2): one table of names, and the values of a scrape."""
