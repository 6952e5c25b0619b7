"""The pure core: events in, decisions out. Imports only `arbiter.units` and `arbiter.errors`."""
