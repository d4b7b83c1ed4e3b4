"""step_inputs."""
