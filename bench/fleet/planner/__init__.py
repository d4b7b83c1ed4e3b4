"""Measures how many replicas a planner keeps, and what of the objectives they meet."""
