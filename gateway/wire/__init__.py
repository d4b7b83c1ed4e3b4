"""The vendors' wire formats: structs and their conversions `from_x` / `to_x`. Knows no Litestar."""
