"""A ticket's life as all rules share it: loads, reclaim, leases, quotas."""
