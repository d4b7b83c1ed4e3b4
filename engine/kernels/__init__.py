"""Device work behind plain functions: every operation has a torch reference, and one place that
chooses what runs on which device. Above: `engine.layers`. Below: torch. Knows no model."""
