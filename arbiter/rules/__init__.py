"""The arbiter's rules, one subject a module: pure functions on what the arbiter has in mind.

`arbiter.core` is the only door to them. Nothing here knows Ray, a clock, a thread or a file.
"""
