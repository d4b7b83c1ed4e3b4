"""One Alembic history for the tables of all rooms. `runner.migrate` applies it; foreign keys across
rooms live here.
"""
