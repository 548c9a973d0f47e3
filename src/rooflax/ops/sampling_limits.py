"""Fixed sizes of the sampler's inputs and outputs; apart, so that no jax is needed to know them."""

MAX_LOGIT_BIAS = 1024
"""Of logit_bias and banned_token_ids together."""
MAX_ALLOWED_IDS = 1024
MAX_STOP_IDS = 32
"""Stop ids that the device knows; min_tokens needs all of them there."""
MAX_LOGPROBS = 20
