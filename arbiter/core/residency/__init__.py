"""What is resident and what is to be: heartbeats, readings, floors, growth, prefetch."""
