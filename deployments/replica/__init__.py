"""What every capability replica shares: tickets, loading, unloading, use."""
