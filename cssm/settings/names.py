"""Names that are no settings: what they stand for here, or why they are refused and what takes their place."""

from typing import Any

# A flag that stands for a setting and its value.
SHORTHANDS: dict[str, tuple[str, str]] = {
    "bf16": ("dtype", "bf16"),
    "no_amp": ("dtype", "f32"),
    "multi_device": ("multi_gpu", "auto"),
    "no_multi_device": ("multi_gpu", "off"),
}

_TEXT = "this program trains vision models; there is no text and no tokenizer to set, leave it out"
# Names known from similar programs that are refused, and what to do instead.
REFUSED: dict[str, str] = {
    "mode": "it names two different things elsewhere; devices are chosen with --multi_gpu auto, dp or off",
    "force_multi_gpu": "nothing falls back to one device silently here, leave it out",
    "checkpointer": "there is one checkpoint format, leave it out",
    "no_goom": "choose how time is scanned with --scan auto, reference or associative",
    "no_log": "choose how time is scanned with --scan auto, reference or associative",
    "use_complex32": "for lower precision type --dtype bf16",
    "use_complex16": "for lower precision type --dtype bf16",
    "no_wandb": "nothing is sent to Weights & Biases, leave it out",
    **dict.fromkeys(("vocab_size", "tokenizer", "tokenizer_path", "dataset_id", "prompt", "max_length"), _TEXT),
    **dict.fromkeys(("temperature", "top_p", "max_seq_len", "kv_heads", "text_column"), _TEXT),
}
# Other names of a value: the settings that they stand for.
VALUE_ALIASES: dict[tuple[str, str], dict[str, Any]] = {
    ("cssm", "kqv"): {"cssm": "transformer"},
    ("cssm", "gdn_d2"): {"cssm": "gdn", "delta_key_dim": 2},
    ("cssm", "gdn_d3"): {"cssm": "gdn", "delta_key_dim": 3},
    ("cssm", "add_kqv_1"): {"cssm": "add_kqv", "chain": "q"},
    ("cssm", "add_kqv_2"): {"cssm": "add_kqv", "chain": "qv"},
}
# Likewise for a value of a setting.
REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("dtype", "f16"): "its range is too small for spectra, type --dtype bf16",
    ("dataset", "girik"): "there is no such data set here, type --dataset pathfinder",
}
