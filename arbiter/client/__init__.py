"""A holder's side of the ticket protocol, and calls of the arbiter by hand."""
