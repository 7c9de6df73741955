"""Settings of the cells."""

import dataclasses
from functools import partial

from cssm import recipes
from cssm.knobs import TRAINING, knob
from cssm.settings.family import GATES, RECURRENT, cells, spectral

_model = partial(knob, group="model", resume="fixed", verbs=TRAINING)


@dataclasses.dataclass(frozen=True)
class CellSettings:
    """What cells may be told; each applies to some of them."""

    # fmt: off
    kernel_size: int | None = _model(None, "side of the spatial kernels", bounds="[1,)",
        applies=spectral("conv_ssm"))
    kernel_domain: str = _model("spatial", "where kernels are learnt; spectral means complex parameters",
        choices=("spatial", "spectral"), applies=spectral())
    kernel_origin: str = _model("origin", "where the centre of a kernel lies; image_center shifts the map",
        choices=("origin", "image_center"), applies=spectral(kernel_domain=("spatial",)))
    spectral_clip: bool = _model(True, "bound the magnitude of kernels; mult_transformer was published without",
        applies=cells("transformer", "mult_transformer", "gdn"))
    stable_transition: bool = _model(False, "keep states bounded for any number of steps: rows of the transition whose "
        "magnitudes sum up to more than 1 are divided by that", applies=RECURRENT)
    gate_type: str | None = _model(None, "gates: a value a frequency, or rows and columns (few parameters); gdn: also "
        "one a head, or one", choices=("dense", "factored", "channel", "scalar"), applies=GATES)
    gate_time_code: bool = _model(True, "gates know the time step", applies=cells("hgru_bi", "hgru", "opponent", "gdn",
        "transformer", "mult_transformer", "add_kqv"))
    gate_activation: str = _model("sigmoid", "of the couplings", choices=("sigmoid", "softplus_clamped", "tanh_scaled"),
        applies=cells("opponent"))
    gate_rank: int = _model(0, "width of a hidden layer of the gates, 0 for none", bounds="[0,)",
        applies={**cells("opponent"), "gate_type": ("dense",)})
    readout_state: str | None = _model(None, "states that are read out, such as xy", unset="all of the cell's",
        aliases=("transformer_readout",), applies=cells(*recipes.STATES))
    pre_output_act: str = _model("none", "activation of each state that is read, in space",
        choices=("none", "gelu", "silu"), applies=cells(*recipes.STATES))
    short_conv_size: int = _model(4, "taps of the short convolution over time, 0 for none", bounds="[0,)",
        applies=cells("gated", "gdn", "no_fft"))
    short_conv_spatial_size: int = _model(3, "side of the short convolution over space, 0 for none",
        bounds="[0,)", applies=cells("gated", "no_fft"))
    delta_key_dim: int = _model(2, "size of a key, a divisor of embed_dim", bounds="[1,)", applies=cells("gdn"))
    output_norm: str = _model("rms", "norm of what is read", choices=("rms", "layer", "none"), applies=cells("gdn"))
    input_gates: bool = _model(True, "gate keys and values in space", applies=cells("gdn"))
    output_gate_act: str = _model("silu", "activation of the output's gate", choices=("silu", "sigmoid"),
        applies=cells("gdn"))
    spectral_l2_norm: bool = _model(True, "unit norm of queries and keys over frequencies", applies=cells("gdn"))
    qkv_conv_size: int = _model(1, "side of a convolution before the projection, 1 for none", bounds="[1,)",
        applies=cells("gdn"))
    qkv_conv_full: bool = _model(False, "that convolution mixes channels, and is the projection", applies=cells("gdn"))
    cross_freq_conv_size: int = _model(0, "taps of a convolution along frequencies, 0 for none", bounds="[0,)",
        applies=cells("gdn"))
    asymmetric_qk: bool = _model(False, "a gate for each direction between Q and K", applies=cells("transformer"))
    feedback: bool = _model(True, "A reaches Q", applies=cells("transformer"))
    k_state: bool = _model(True, "K has a state of its own", applies=cells("transformer"))
    use_layernorm: bool = _model(False, "standardise magnitudes of what is read", applies=cells("transformer"))
    transition: str = _model("kernel", "what carries the state: a kernel, or one decay a channel",
        choices=("kernel", "scalar"), applies=cells("standard"))
    chain: str = _model("qkv", "the states; add_kqv_2 is qv, add_kqv_1 is q", choices=("qkv", "qv", "q", "qk"),
        applies=cells("add_kqv"))
    s4nd_d_state: int = _model(64, "states along each axis", bounds="[2,)", multiple_of=2, applies=cells("s4nd"))
    s4nd_bidirectional: bool = _model(False, "later frames reach earlier ones", applies=cells("s4nd"))
    # fmt: on
