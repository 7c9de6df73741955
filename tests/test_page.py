"""Pages: what comes from outside is text in them, and they need nothing but themselves."""

import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from cssm.report import page


class Reader(HTMLParser):
    """Fails on a tag that is not closed; notes tags and text."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


HOSTILE = "<script>alert('1')</script> & \"it\""


def test_text_from_outside_stays_text():
    parts = [
        page.section(HOSTILE, page.pairs({HOSTILE: HOSTILE}), page.table([(HOSTILE,), (HOSTILE,)])),
        page.tiles([(HOSTILE, HOSTILE)]),
        page.folded(HOSTILE, HOSTILE),
        page.charts({HOSTILE: "<svg></svg>"}),
        page.picture(b"x", HOSTILE),
    ]
    read = Reader(page.document(HOSTILE, *parts))
    assert "script" not in [tag for tag, _ in read.tags]
    assert sum(text == HOSTILE for text in read.texts) == 12
    assert [attrs["alt"] for tag, attrs in read.tags if tag == "img"] == [HOSTILE]


def test_a_page_names_no_address_and_may_load_nothing():
    text = page.document("x", page.picture(b"x", "y"))
    assert not re.search(r"https?:|//|@import|url\(", text)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "width=device-width" in text


@pytest.mark.parametrize("channels, mode", [(1, "L"), (2, "L"), (3, "RGB"), (5, "RGB")])
def test_images_of_any_channels_are_shown(channels, mode):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 20, channels), np.uint8)
    image = Image.open(io.BytesIO(page.png(pixels)))
    assert (image.mode, image.size) == (mode, (20, 40))
    np.testing.assert_array_equal(np.asarray(image), pixels[..., 0] if mode == "L" else pixels[..., :3])
    assert Image.open(io.BytesIO(page.png(pixels, 10))).size == (5, 10)
