"""Commands about the installation itself: its settings, what keeps it from running, completion."""
