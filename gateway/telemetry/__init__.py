"""Measures what a gateway does, in memory that its workers share, and writes it for Prometheus"""
