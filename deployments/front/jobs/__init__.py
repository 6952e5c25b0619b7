"""Calls that outlive their client, and responses that are stored: the front's part in both."""
