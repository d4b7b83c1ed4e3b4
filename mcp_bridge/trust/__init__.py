"""Decides by pins, rules, approvals and scans whether a request may go out."""
