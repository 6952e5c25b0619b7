"""Who may ask, for which tenant, and how many requests at once."""
