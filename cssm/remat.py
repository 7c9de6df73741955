"""Rematerialisation: what of a block is kept for its backward pass, the rest of which is computed again in it."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from cssm import spectral
from cssm.config import Config
from parallel.sharded import ShardedParams, gather
from parallel.sync import Replicated

# By value of --remat_keep. Costly is what products with weights and inverse transforms give. Norms, activations, gates,
# sums, forward transforms and the recurrence are computed again: they take little time for the size of what they give.
# An inverse transform would have the product before it kept in its place.
KEPT = {
    "costly": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(spectral.NAME),
    ),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def choices(config: Config) -> list[str | None]:
    """What --remat and --remat_keep leave open, the fastest first: one of KEPT, or None for no rematerialisation."""
    if config.remat is False:
        return [None]
    if config.remat:
        return [config.remat_keep or "nothing"]
    return [None, *([config.remat_keep] if config.remat_keep else KEPT)]


def wrapper(strategy: Replicated, kept: str | None) -> Callable[[type[nn.Module]], Any]:
    """How the steps wrap each block (models.build): gather its parameters, and run it again in the backward pass, but
    for what is kept.

    Blocks that are alike are traced and lowered once.
    """
    if isinstance(strategy, ShardedParams):
        # Without remat, what was gathered in the forward pass would be kept for the backward pass.
        return lambda block: nn.jit(nn.remat(nn.map_variables(block, "params", trans_in_fn=gather)))
    return (lambda block: nn.jit(nn.remat(block, policy=KEPT[kept]))) if kept else nn.jit
