"""Starts engines that join on the nodes of a Ray cluster, and keeps them there."""
