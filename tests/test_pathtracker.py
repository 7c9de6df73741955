"""PathTracker: the same clips everywhere, right labels, and no cue to the class but the way of a dot."""

import hashlib

import numpy as np
import pytest
from cues import excess
from scipy.stats import ks_2samp
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from cssm.config import UserError
from cssm.data import pathtracker
from cssm.data.draw import UNIT
from cssm.data.pathtracker import DIFFICULTIES, generate, spec
from cssm.settings.data import DataSettings

HASHES = {  # of 16 clips and their labels
    ("easy", "train", 0): "3c94fecac19e08feafb72057",
    ("14", "val", 2018): "7c05193ec9b46bf595566cf4",
    ("25", "test", 18446744073709551615): "47e35aa1202c64f8842ce282",
}


@pytest.mark.parametrize("difficulty, split, seed", HASHES)
def test_clips_are_the_same_to_the_bit_on_every_machine(difficulty, split, seed):
    chosen = spec(difficulty, 32)
    clips, labels, _ = generate(chosen, seed, split, np.arange(16))
    assert clips.shape == (16, chosen.frames, 32, 32, 3) and clips.dtype == np.uint8
    digest = hashlib.sha256(clips.tobytes() + labels.astype("<i4").tobytes()).hexdigest()
    assert digest[:24] == HASHES[difficulty, split, seed]


def test_a_clip_depends_on_its_index_alone(monkeypatch):
    indices = np.array([7, 3, 1234567, 7])
    whole, labels, geometry = generate(spec("14", 32), 1, "val", indices)
    monkeypatch.setattr(pathtracker, "CHUNK", 2)
    for i, index in enumerate(indices):
        clip, label, alone = generate(spec("14", 32), 1, "val", np.array([index]))
        np.testing.assert_array_equal(clip[0], whole[i])
        assert (label[0], alone.attempts[0]) == (labels[i], geometry.attempts[i])
    np.testing.assert_array_equal(generate(spec("14", 32), 1, "val", indices)[0], whole)
    assert len(generate(spec("14", 32), 1, "val", np.zeros(0, np.int64))[0]) == 0


def test_no_clip_occurs_twice_in_splits_or_seeds():
    sets = [
        generate(spec("easy", 32), seed, split, np.arange(50))[0] for split in pathtracker.SPLITS for seed in (0, 1)
    ]
    assert len({clip.tobytes() for clips in sets for clip in clips}) == 6 * 50


@pytest.fixture(scope="module", params=["easy", "14"])
def drawn(request):
    chosen = spec(request.param, 32)
    return chosen, *generate(chosen, 3, "test", np.arange(200))


def test_the_geometry_proves_the_labels(drawn):
    chosen, _, labels, geometry = drawn
    first, last = geometry.dots[:, 0], geometry.dots[:, -1]
    assert labels.sum() == 100 and geometry.dots.shape[2] == 2 + chosen.others
    np.testing.assert_array_equal(geometry.red, first[:, 0])
    np.testing.assert_array_equal((geometry.blue == last[:, 0]).all(1), labels == 1)
    np.testing.assert_array_equal((geometry.blue == last[:, 1]).all(1), labels == 0)
    # In floored pixels a distance may seem less by one and a half.
    apart, clear = chosen.apart / UNIT - 1.5, chosen.clear / UNIT - 1.5
    for frame, square, owner in ((first, geometry.red, np.zeros(200, int)), (last, geometry.blue, 1 - labels)):
        gaps = np.linalg.norm(frame - square[:, None], axis=-1)
        assert gaps[np.arange(200), owner].max() == 0
        assert gaps[np.arange(200), 1 - owner].min() >= apart
        assert chosen.others == 0 or gaps[:, 2:].min() >= clear


def test_dots_stay_inside_and_move_steadily(drawn):
    chosen, _, _, geometry = drawn
    assert geometry.dots.min() >= 1 and geometry.dots.max() <= 29
    steps = np.linalg.norm(np.diff(geometry.dots, axis=1), axis=-1)
    assert steps.max() <= chosen.step / UNIT + 1.5
    speed = np.linalg.norm(geometry.dots[:, 4::4] - geometry.dots[:, :-4:4], axis=-1).mean() / 4
    assert 0.6 * chosen.step < speed * UNIT <= 1.1 * chosen.step


def test_frames_show_the_geometry(drawn):
    chosen, clips, _, geometry = drawn
    for i in range(20):
        for t in (0, chosen.frames // 2, chosen.frames - 1):
            expected = np.zeros((32, 32, 3), np.uint8)
            for x, y in geometry.dots[i, t]:
                expected[y : y + 2, x : x + 2, 1] = 255
            for channel, (x, y) in ((0, geometry.red[i]), (2, geometry.blue[i])):
                expected[y - 1 : y + 3, x - 1 : x + 3, channel] = 255
                expected[y : y + 2, x : x + 2, channel] = 0
            np.testing.assert_array_equal(clips[i, t], expected)


def check_no_cue(difficulty: str, n: int) -> None:
    chosen = spec(difficulty, 32)
    clips, labels, geometry = generate(chosen, 11, "train", np.arange(n))
    across, middle = (geometry.blue - geometry.red).astype(float), (geometry.blue + geometry.red) / 2 - 15
    dots = geometry.dots.astype(float)
    rng = np.random.default_rng(0)
    found = {
        "distance": np.hypot(*across.T),
        "middle x": middle[:, 0],
        "middle y": middle[:, 1],
        "middle radius": np.hypot(*middle.T),
        "border": np.minimum(np.minimum(geometry.red, 30 - geometry.red), geometry.blue).min(1).astype(float),
        "attempts": geometry.attempts.astype(float),
        **{f"sum of {c}": clips[..., i].sum((1, 2, 3), dtype=float) for i, c in enumerate(("red", "green", "blue"))},
        "spread": dots.std((1, 2)).sum(1),
    }
    for name, values in found.items():
        assert ks_2samp(values[labels == 1], values[labels == 0], method="asymp").pvalue > 1e-3, name
    table = np.stack(list(found.values()), 1)
    # What the squares' own dots do in the frames that both classes share.
    starts = dots[:, : chosen.shared, 0] - geometry.red[:, None]
    owner = (1 - labels)[:, None, None, None]
    ends = np.take_along_axis(dots[:, -chosen.shared :], owner, 2)[:, :, 0] - geometry.blue[:, None]
    near = np.concatenate([starts.reshape(n, -1), ends.reshape(n, -1), across], 1)
    shuffled = rng.permuted(clips.mean(-1), axis=1)[:, ::4]
    telling = {
        "first frame": excess(clips[:, 0].reshape(n, -1), labels),
        "last frame": excess(clips[:, -1].reshape(n, -1), labels),
        "mean of all frames": excess(clips.mean(1).reshape(n, -1), labels),
        "frames in any order": excess(shuffled.reshape(n, -1), labels),
        "squares only": excess(clips[:, 0][..., ::2].reshape(n, -1), labels),
        "dots only": excess(clips[:, 0][..., 1].reshape(n, -1), labels),
        "products": excess(PolynomialFeatures(2).fit_transform(StandardScaler().fit_transform(table)), labels),
        "how dots leave and arrive": excess(
            PolynomialFeatures(2).fit_transform(StandardScaler().fit_transform(near)), labels
        ),
    }
    assert {name: round(value, 2) for name, value in telling.items() if abs(value) > 3} == {}


def test_no_trivial_cue_tells_the_classes_apart():
    check_no_cue("easy", 400)


@pytest.mark.slow
@pytest.mark.parametrize("difficulty, n", [("easy", 4_000), ("14", 1_500)])
def test_no_trivial_cue_at_full_size(difficulty, n):
    check_no_cue(difficulty, n)


def test_dots_and_the_red_square_do_not_depend_on_the_label(monkeypatch):
    _, labels, geometry = generate(spec("5", 32), 0, "train", np.arange(40))
    balanced = pathtracker.balanced
    monkeypatch.setattr(pathtracker, "balanced", lambda *args: 1 - balanced(*args))
    _, turned, other = generate(spec("5", 32), 0, "train", np.arange(40))
    np.testing.assert_array_equal(turned, 1 - labels)
    np.testing.assert_array_equal(other.dots, geometry.dots)
    np.testing.assert_array_equal(other.red, geometry.red)
    assert (other.blue != geometry.blue).any(1).all()


def test_only_one_size_and_the_difficulties_of_the_setting():
    with pytest.raises(UserError, match="32 pixels wide, leave it out"):
        spec("easy", 64)
    choices = next(f for f in DataSettings.__dataclass_fields__.values() if f.name == "pathtracker_difficulty").metadata
    assert tuple(DIFFICULTIES) == choices["choices"]
