"""HTTP: the OpenAI-compatible server. It stands on `AsyncLLM` and imports no jax itself."""
