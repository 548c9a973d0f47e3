"""The command line: one file per verb. What `--help` needs imports no jax."""
