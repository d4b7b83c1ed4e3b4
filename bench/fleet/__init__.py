"""Simulates a fleet of engines on virtual time, with the routing code that a gateway runs"""
