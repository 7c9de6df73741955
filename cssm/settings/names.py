"""Names that are no settings: what they stand for here, or why they are refused and what takes their place."""

from typing import Any

# A flag that stands for a setting and its value.
SHORTHANDS: dict[str, tuple[str, str]] = {
    "bf16": ("dtype", "bf16"),
    "no_amp": ("dtype", "f32"),
    "multi_device": ("multi_gpu", "auto"),
    "no_multi_device": ("multi_gpu", "off"),
    "no_pos_embed": ("pos_embed", "none"),
    "no_jit_cache": ("compile_cache", "false"),
    "position_independent_gates": ("gate_time_code", "false"),
    "no_spectral_clamp": ("spectral_clip", "false"),
    "no_temporal_attn": ("temporal_attn_every", "0"),
}

_TEXT = "this program trains vision models; there is no text and no tokenizer to set, leave it out"
# Names known from similar programs that are refused, and what to do instead.
REFUSED: dict[str, str] = {
    "mode": "it names two different things elsewhere; devices are chosen with --multi_gpu auto, dp or off",
    "force_multi_gpu": "nothing falls back to one device silently here, leave it out",
    "checkpointer": "there is one checkpoint format, leave it out",
    **dict.fromkeys(
        ("no_goom", "no_log"), "time is scanned without logarithms unless --scan goom is typed, leave it out"
    ),
    **dict.fromkeys(
        ("use_ssd", "scan_mode"),
        "choose how time is scanned with --scan reference, chunked, associative, goom or fused",
    ),
    "ssd_chunk_size": "type --scan chunked, whose chunks are of sqrt(seq_len) steps",
    **dict.fromkeys(
        ("mixing", "block_size"), "kernels act on each channel, and projections mix channels: leave it out"
    ),
    "use_complex32": "for lower precision type --dtype bf16",
    "use_complex16": "for lower precision type --dtype bf16",
    **dict.fromkeys(("aa", "auto_augment"), "type --rand_augment with a magnitude and a number, such as m9-n2"),
    **dict.fromkeys(("project", "wandb_project"), "set the variable WANDB_PROJECT, and type --wandb"),
    **dict.fromkeys(("entity", "wandb_entity"), "set the variable WANDB_ENTITY, and type --wandb"),
    **dict.fromkeys(("save_best_only", "no_save_best_only"), "the best and the newest --max_checkpoints are kept"),
    "resume_epoch": "type --resume with the path of a run: it goes on at the newest checkpoint that is whole",
    "early_stopping_patience": "a run ends by --max_steps or --epochs, and its best checkpoint is kept: leave it out",
    "bn_train_mode": "evaluation uses the running statistics; where they do not fit, type --norm_type layer",
    **dict.fromkeys(("stem_norm", "body_norm"), "stem and body have one norm, type --norm_type"),
    "stem_norm_order": "in a stem the norm follows the activation, leave it out",
    "readout_norm": "at the end the norm comes before the activation, leave it out",
    **dict.fromkeys(
        ("variable_seq_len", "seq_len_min"), "all images take --seq_len steps; train a run for each length"
    ),
    "max_seq_len": "positions are computed for every --seq_len, and there is no text to be cut: leave it out",
    "no_concat_xy": "choose the states that are read with --readout_state, for example x",
    "learned_init": "states start at zero; for learned first steps type --n_register_tokens",
    "shared_kernel": "transformer has one kernel, mult_transformer one for each state: choose with --cssm",
    "additive_kv": "type --cssm add_kqv",
    **dict.fromkeys(("q_temporal", "q_spatial"), "short convolutions are --short_conv_size and --qkv_conv_size of gdn"),
    **dict.fromkeys(
        ("attn_kernel_size", "int_attn_dim"), "gdn has no integrated attention here, type --cssm gdn alone"
    ),
    **dict.fromkeys(
        ("state_dim", "expand_factor", "flatten_mode"), "for sequences of pixels; the states of s4nd are --s4nd_d_state"
    ),
    **dict.fromkeys(
        ("convs5_state_dim", "convs5_num_groups"), "there is no convs5 here; near to it is --cssm conv_ssm"
    ),
    **dict.fromkeys(("vocab_size", "tokenizer", "tokenizer_path", "dataset_id", "prompt", "max_length"), _TEXT),
    **dict.fromkeys(("temperature", "top_p", "kv_heads", "text_column"), _TEXT),
}
# Other names of a value: the settings that they stand for.
VALUE_ALIASES: dict[tuple[str, str], dict[str, Any]] = {
    ("cssm", "kqv"): {"cssm": "transformer"},
    ("cssm", "gdn_d2"): {"cssm": "gdn", "delta_key_dim": 2},
    ("cssm", "gdn_d3"): {"cssm": "gdn", "delta_key_dim": 3},
    ("cssm", "add_kqv_1"): {"cssm": "add_kqv", "chain": "q"},
    ("cssm", "add_kqv_2"): {"cssm": "add_kqv", "chain": "qv"},
    ("cssm", "linear"): {"cssm": "standard", "transition": "scalar"},
}
_DELTANET = ("deltanet", "deltanet_d2", "deltanet_d3")
_INTEGRATED = ("gdn_int", "gdn_int_elem", "gdn_int_qk")
_TRANSFORMERS = ("g_transformer", "mg_transformer", "spectral_transformer")
# Likewise for a value of a setting.
REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("dtype", "f16"): "its range is too small for spectra, type --dtype bf16",
    ("cssm", "s4nd_full"): "type --cssm s4nd",
    **{
        ("cssm", name): "it is gdn without its extras, type --cssm gdn with those that you want off"
        for name in _DELTANET
    },
    **{("cssm", name): "gdn has no integrated attention here, type --cssm gdn" for name in _INTEGRATED},
    **{("cssm", name): "type --cssm transformer or mult_transformer" for name in _TRANSFORMERS},
    **{("cssm", name): "pixels are no sequence here, type --cssm gdn" for name in ("gdn_seq", "mamba2_seq")},
    ("cssm", "add_delta"): "type --cssm gdn, the delta rule with gates",
    ("cssm", "convs5"): "near to it is conv_ssm, type --cssm conv_ssm",
    ("cssm", "linear_opponent"): "type --cssm opponent",
    ("cssm", "bilinear"): "type --cssm hgru_bi",
    **{
        ("norm_type", name): "type --norm_type global_layer or instance"
        for name in ("temporal_layer", "global_instance")
    },
    ("dataset", "girik"): "it is PathTracker with larger frames, type --dataset pathtracker",
}
