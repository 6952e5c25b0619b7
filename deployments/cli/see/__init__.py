"""What shows and changes nothing: status, events, plans, memory over time."""
