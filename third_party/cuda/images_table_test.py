"""The table's text: other for other images, so that whatever depends on it is made anew."""

from third_party.cuda import images_table


def test_other_images_make_another_text(tmp_path):
    path = tmp_path / "copy.sm_70.cubin"
    texts = []
    for content in (b"first", b"second"):
        path.write_bytes(content)
        texts.append(images_table.table("images", [("copy", "sm_70", str(path))]))
    assert texts[0] != texts[1]


def test_the_table_ends_with_a_null_source(tmp_path):
    path = tmp_path / "copy.sm_70.cubin"
    path.write_bytes(b"code")
    text = images_table.table("images", [("copy", "sm_70", str(path))] * 2)
    entries = [line for line in text.splitlines() if line.startswith(".quad")]
    assert len(entries) == 3 and entries[-1] == ".quad 0, 0, 0, 0"
    assert text.count(f'.incbin "{path}"') == 2
