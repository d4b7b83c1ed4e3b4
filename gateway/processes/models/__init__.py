"""Brings the models that the settings name to this machine, and looks over what is there."""
