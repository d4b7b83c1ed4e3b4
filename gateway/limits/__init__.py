"""Two-phase limits: one Lua script reserves over every scope or none, one settles. Knows no
Litestar."""
