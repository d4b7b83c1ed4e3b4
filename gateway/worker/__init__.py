"""Holds what one worker process opens before its services"""
