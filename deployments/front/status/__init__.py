"""What the front reads of arbiter, models and Serve, and how it shows that."""
