"""Alerts tell once per period and threshold that a scope has used much of what it may."""
