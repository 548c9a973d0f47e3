"""Fixed sizes of the sampler's inputs and outputs; apart, so that no jax is needed to know them."""

MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
