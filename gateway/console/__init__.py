"""Holds what people see: templates, one stylesheet, scripts from files; no build step."""
