"""Recurrent cells: each maps [B, T, H, W, C] to [B, T, H, W, C].

A cell is a Flax module with the fields of `cssm.cells.core.CellOptions` and the call
`cell(x, num_steps=None, last_only=False)`:

    x          [B, T, H, W, C], or [B, 1, H, W, C] for a still image that is shown num_steps times
    last_only  return [B, 1, H, W, C], the last step alone
"""

from cssm.cells.gated import Gated
from cssm.cells.hgru_bi import HGRUBilinear

CELLS = {"hgru_bi": HGRUBilinear, "gated": Gated}
