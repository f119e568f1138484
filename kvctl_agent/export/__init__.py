"""What an agent tells monitoring systems by itself: metrics for Prometheus, a span per room for OpenTelemetry."""
