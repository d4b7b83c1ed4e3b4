"""Records requests as traces of OpenTelemetry and sends them to a collector."""
