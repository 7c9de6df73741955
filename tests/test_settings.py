"""The declarations of settings: each once, and each condition one that can hold."""

import dataclasses
import re
from itertools import groupby

import pytest

from cssm import settings
from cssm.config import ARCHS, CELLS_NAMES, KNOBS
from cssm.knobs import VERBS
from cssm.settings.names import REFUSED, REFUSED_VALUES, SHORTHANDS, VALUE_ALIASES

TOPICS = [getattr(settings, name) for name in settings.__all__]


def test_names_are_those_of_the_cells_and_trunks():
    from cssm.cells import CELLS
    from cssm.models import MODELS

    assert set(CELLS_NAMES) == set(CELLS)
    assert set(ARCHS) == set(MODELS)


def test_every_setting_is_declared_once_and_groups_stay_together():
    names = [field.name for topic in TOPICS for field in dataclasses.fields(topic)]
    assert sorted(names) == sorted(KNOBS)
    groups = [group for group, _ in groupby(knob.group for knob in KNOBS.values())]
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize("name", KNOBS)
def test_what_a_setting_depends_on_exists(name):
    knob = KNOBS[name]
    assert set(knob.verbs) <= set(VERBS)
    for way in knob.applies:
        for cause, values in way.items():
            choices = KNOBS[cause].choices or (True, False)
            assert values and set(values) <= set(choices), f"{name} depends on --{cause} {values}"


# Every flag of the published program.
PUBLISHED = """
arch cssm mixing no_concat_xy gate_activation embed_dim depth patch_size stem_mode stem_layers stem_stride no_pos_embed
num_heads no_temporal_attn temporal_attn_every rope_mode block_size kernel_size position_independent_gates no_goom
no_log gate_type n_register_tokens learned_init use_complex32 use_complex16 use_ssd scan_mode ssd_chunk_size mlp_ratio
drop_path_rate short_conv_size short_conv_spatial_size output_norm no_input_gates output_gate_act no_spectral_l2_norm
qkv_conv_size qkv_conv_full cross_freq_conv_size delta_key_dim no_spectral_clamp inter_mlp_ratio attn_kernel_size
int_attn_dim state_dim expand_factor flatten_mode s4nd_d_state s4nd_bidirectional convs5_state_dim convs5_num_groups
label_smoothing bn_train_mode shared_kernel additive_kv spectral_clip q_temporal q_spatial asymmetric_qk no_feedback
no_spectral_clip use_layernorm no_k_state transformer_readout use_dwconv output_act layer_scale_init gate_rank
readout_state pre_output_act pooling_mode readout_act frame_readout pos_embed act_type pool_type norm_type stem_norm
body_norm readout_norm stem_norm_order batch_size num_workers prefetch_batches seq_len variable_seq_len seq_len_min
max_seq_len epochs early_stopping_patience lr weight_decay grad_clip optimizer force_multi_gpu bf16 no_jit_cache
xla_flags run_name project checkpoint_dir log_every eval_every save_every save_best_only no_save_best_only checkpointer
dataset data_dir imagenet_dir pathtracker_dir pathfinder_difficulty cabc_difficulty tfrecord_dir image_size resume
resume_epoch seed no_wandb
""".split()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_flag_is_a_setting_or_refused_with_a_sentence(name):
    switches = {f"no_{knob.name}" for knob in KNOBS.values() if knob.type is bool}
    names = {alias for knob in KNOBS.values() for alias in knob.aliases} | set(KNOBS) | set(SHORTHANDS) | switches
    assert (name in names) != (name in REFUSED)


@pytest.mark.parametrize("sentence", sorted({*REFUSED.values(), *REFUSED_VALUES.values()}))
def test_what_takes_the_place_of_a_refused_name_exists(sentence):
    assert all(name in KNOBS or name.removeprefix("no_") in KNOBS for name in re.findall(r"--(\w+)", sentence))
    for name, value in re.findall(r"--(\w+) (\w+)", sentence):
        assert not KNOBS[name].choices or value in (*KNOBS[name].choices, "with", "alone"), f"--{name} {value}"


def test_other_names_lead_to_settings_that_can_hold():
    for name, (setting, value) in SHORTHANDS.items():
        assert name not in KNOBS
        KNOBS[setting].coerce(value, name)
    for (name, value), meant in VALUE_ALIASES.items():
        assert value not in KNOBS[name].choices
        assert all(KNOBS[key].coerce(text, value) == text for key, text in meant.items())
