"""Recurrent cells: each maps [B, T, H, W, C] to [B, T, H, W, C].

A cell is a Flax module with the fields of `cssm.cells.core.CellOptions` and the call
`cell(x, num_steps=None, last_only=False)`:

    x          [B, T, H, W, C], or [B, 1, H, W, C] for a still image that is shown num_steps times
    last_only  return [B, 1, H, W, C], the last step alone
"""

from cssm.cells.add_kqv import AddKQV
from cssm.cells.attention import AttentionBlock
from cssm.cells.conv_ssm import ConvSSM
from cssm.cells.gated import Gated
from cssm.cells.gdn import GatedDeltaNet
from cssm.cells.hgru import HGRU
from cssm.cells.hgru_bi import HGRUBilinear
from cssm.cells.mult_transformer import MultTransformer
from cssm.cells.no_fft import NoFFT
from cssm.cells.no_gate import NoGate
from cssm.cells.opponent import Opponent
from cssm.cells.s4nd import S4ND
from cssm.cells.standard import Standard
from cssm.cells.transformer import Transformer

CELLS = {
    "hgru_bi": HGRUBilinear,
    "hgru": HGRU,
    "gated": Gated,
    "gdn": GatedDeltaNet,
    "no_gate": NoGate,
    "no_fft": NoFFT,
    "conv_ssm": ConvSSM,
    "transformer": Transformer,
    "mult_transformer": MultTransformer,
    "opponent": Opponent,
    "standard": Standard,
    "add_kqv": AddKQV,
    "s4nd": S4ND,
    "spatial_attn": AttentionBlock,
    "spatiotemporal_attn": AttentionBlock,
}
