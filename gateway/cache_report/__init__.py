"""cache_report."""
