"""The limits on what a tenant may spend: plans, caps, credits, top-ups and suspension."""
