"""Names of a step's parts, written into compiled programs so that a profile can tell them apart.

`jax.named_scope` changes metadata only: neither the program nor its key in the compile cache.
"""

from __future__ import annotations

import jax

PARTS = ("attention", "matmuls", "experts", "norms", "rope", "cache_writes", "sampling")

attention = jax.named_scope("attention")
matmuls = jax.named_scope("matmuls")
experts = jax.named_scope("experts")
norms = jax.named_scope("norms")
rope = jax.named_scope("rope")
cache_writes = jax.named_scope("cache_writes")
sampling = jax.named_scope("sampling")
