"""What Prometheus and Grafana are given to watch an arbiter with (K2)."""
