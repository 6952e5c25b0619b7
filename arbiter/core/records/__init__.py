"""Plain data beneath the rules: tickets, ledger, queue, timers, learned figures."""
