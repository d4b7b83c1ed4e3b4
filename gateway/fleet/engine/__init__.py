"""Makes an engine of ours a replica: renders prompts, sends jobs to it, and reads its outputs."""
