"""The helpers of all wire formats: refusals, places in JSON, pages of lists, forms and batches."""
