"""What a worker tells of itself: gauges, fairness, and why a request stands where it does."""
