"""The library holds the device code that these sources compile to, all of it."""

from pathlib import Path

FOLDER = Path("native/cuda")  # a test starts in its runfiles
IMAGES = sorted([*FOLDER.glob("*.cubin"), *FOLDER.glob("*.ptx")])


def test_the_library_embeds_every_image():
    library = Path("native/libflashverify.so.4").read_bytes()
    assert len(IMAGES) > 100
    missing = [path.name for path in IMAGES if path.read_bytes() not in library]
    assert not missing, f"{len(missing)} of {len(IMAGES)}, as {missing[:4]}"
