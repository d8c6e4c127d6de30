"""The account as a page: whole, closed, with nothing from outside in it, and with every text as text.

Here by its structure; tests/browser has the same page in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import multigraph_backend
from multigraph_backend import page
from multigraph_backend.cudagraphs.memory_map import Block, Lifetime
from multigraph_backend.page import contents, drawing, figures
from multigraph_backend.report import Explanation
from tests.support import accounts
from tests.support.pages import Element, parse

FOLDER = Path(page.__file__).parent
#: every attribute that the page may have; none of them loads anything or runs anything
ATTRIBUTES = {
    "aria-hidden", "aria-label", "charset", "class", "content", "height", "hidden", "href", "http-equiv", "id", "lang",
    "name", "open", "placeholder", "preserveaspectratio", "role", "type", "viewbox", "width", "x", "x1", "x2", "y",
    "y1", "y2",
}  # fmt: skip
LOADING = {"audio", "base", "embed", "form", "iframe", "image", "img", "link", "object", "source", "use", "video"}


def checked(text: str) -> Element:
    """The page's elements, after what must hold for every page."""
    root, wrong = parse(text)
    assert wrong == []
    elements = root.all()
    assert {element.tag for element in elements} & LOADING == set()
    assert {name for element in elements for name in element.attributes} <= ATTRIBUTES
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(set(ids)) == len(ids)
    links = [element.attributes["href"] for element in elements if "href" in element.attributes]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    (style,), (script,) = root.all("style"), root.all("script")
    assert (style.text, script.text) == tuple((FOLDER / name).read_text() for name in ("style.css", "script.js"))
    return root


@pytest.fixture(scope="module")
def rich() -> Element:
    return checked(accounts.rich().to_html(title="what serve.py compiled and ran"))


def test_the_page_loads_nothing_and_says_so_to_browsers(rich: Element) -> None:
    """The policy names the one style and the one script by their digests, and allows nothing else."""
    (policy,) = (meta.attributes["content"] for meta in rich.all("meta") if "http-equiv" in meta.attributes)
    digests = [
        base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        for element in (*rich.all("style"), *rich.all("script"))
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )
    for name in ("style.css", "script.js"):
        assert not re.search(
            r"url\(|@import|https?:|fetch|XMLHttp|import\(|eval|innerHTML", (FOLDER / name).read_text()
        )
    assert sum((FOLDER / name).stat().st_size for name in ("style.css", "script.js")) < 12_000


def test_light_and_dark_have_the_same_colours_by_name() -> None:
    style = (FOLDER / "style.css").read_text()
    light, dark = (dict(re.findall(r"(--\w+): (#\w{6})", block)) for block in style.split("@media (prefers-color")[:2])
    assert set(light) == set(dark) == set(re.findall(r"var\((--\w+)\)", style))
    for colours in (light, dark):
        for name in ("--text", "--faint", "--link", "--blue", "--orange", "--green", "--red"):
            for behind in ("--page", "--panel"):
                assert contrast(colours[name], colours[behind]) >= 4.5, (name, behind)


def contrast(one: str, other: str) -> float:
    """As the accessibility guidelines compute it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_graphs_and_variants_with_calls_gains_and_seconds(rich: Element) -> None:
    first, second = rich.all("article", class_="graph")
    rows = [[cell.words for cell in row.all("td")] for row in first.all("table", class_="variants")[0].all("tr")]
    by_condition = {row[0]: row[1:] for row in rows if row}
    assert by_condition["input_ids[0] == 8"] == ["ready", "18,210", "21.4 s", "1.43 \N{MULTIPLICATION SIGN} 256 calls"]
    assert [row.attributes["class"] for row in first.all("tr") if "class" in row.attributes] == [
        "inactive", "ready", "ready", "declared", "failed", "ready", "ready"
    ]  # fmt: skip
    assert "OutOfMemoryError: CUDA out of memory" in first.text
    assert "h = self.up(h)" in first.all("details", class_="stack")[0].text
    assert "input_ids[1] <= 4096" in first.all("details", class_="guards")[0].text
    assert second.all("a", href="#graph-0")
    assert "sampler" in second.all("h3")[0].text


def test_long_conditions_are_folded_and_whole_inside(rich: Element) -> None:
    whole = accounts.rich().regions[0].variants[3].condition
    (fold,) = (fold for fold in rich.all("details", class_="long") if whole in fold.text)
    (summary,) = fold.all("summary")
    assert len(summary.text) <= contents.LONG
    assert "open" not in fold.attributes
    assert [
        cell.text.strip() for cell in rich.all("td") if cell.text.strip() == "input_ids[0] == 8"
    ]  # a short one is not


def test_what_to_look_at_comes_with_its_reason_worst_first(rich: Element) -> None:
    (section,) = rich.all("section", id="look")
    entries = section.all("ul")[0].children
    levels = [entry.attributes["class"] for entry in entries]
    assert levels == sorted(levels, key=["bad", "look", "note"].index)
    said = [entry.words for entry in entries]
    for expected in (
        "input_ids[0] == 64: no compiled code graph 0, Decoder.forward OutOfMemoryError",
        "the stance eager_on_recompile is in force",
        "MULTIGRAPH_DISABLE turns off saved_tensors",
        "input_ids[0] == 16 is slower than generic (0.94 times as fast)",
        "mask is a tensor subclass: compiled at once, without variants",
        "nothing of it is recorded Sampler.forward: generic it spans 2 devices",
        "cut by device copy Decoder.forward: generic aten.copy_, aten._to_copy",
        "8 calls ran as code Sampler.forward: generic recording failed",
        "a mark has met no graph /srv/server.py:88",
    ):
        assert any(expected in line for line in said), expected


def test_saved_tensors_before_and_after_packing(rich: Element) -> None:
    (saved,) = rich.all("section", class_="saved")
    (bars,) = saved.all("div", class_="before-after")
    assert [entry.text for entry in bars.all("span", class_="figure")] == ["128.8 MiB", "10.2 MiB"]
    widths = [bar.attributes["width"] for kind in ("before", "after") for bar in bars.all("rect", class_=kind)]
    assert widths == ["100.00", "7.96"]
    rows = [row.words for row in saved.all("table", class_="tensors")[0].all("tr")[1:]]
    assert rows[0].startswith(
        "relu_3 float32[8, s0, 4096] aten.relu in layers.3.mlp 64.0 MiB 2.0 MiB bits packed before"
    )
    assert "in the memory of gelu_1" in rows[2]
    assert "offload as int8, scaled per row, 128.0 KiB on the host it is an input: its memory is free" in rows[3]
    assert "kept: a statistic of attention" in rows[4]


def test_the_tree_is_nested_as_recordings_follow_one_another(rich: Element) -> None:
    (tree,) = rich.all("ul", class_="tree")

    def shape(listed: Element) -> list[object]:
        return [
            [entry.children[0].all("code")[0].text, *(shape(inner) for inner in entry.children[1:])]
            for entry in listed.children
        ]

    assert shape(tree) == [
        ["Decoder.forward: generic, piece 0", [
            ["Decoder.forward: generic, piece 1", [["Head.forward: x[0] == 8"], ["Scorer.forward: x[0] == 64"]]],
        ]],
    ]  # fmt: skip


def test_memory_is_drawn_for_each_path(rich: Element) -> None:
    pictures = rich.all("svg", class_="memory")
    assert len(pictures) == 2
    for picture in pictures:
        kinds = {block.attributes["class"] for block in picture.all("rect")}
        assert {"band", "output", "inside", "input"} <= kinds
        assert len(picture.all("text", class_="number")) == 3
        titles = [title.text for title in picture.all("title")]
        assert any(
            re.search(r"inside of .*piece 0: 256 B at 0x\w+, in columns 1 to [23]", title) for title in titles
        ), titles


def test_whatever_comes_from_the_program_is_text() -> None:
    """Not one element or attribute more than without it, and all of it to be read."""
    plain, spoiled = (checked(account.to_html()) for account in (accounts.rich(), accounts.hostile()))
    visible = "</code></details><script>document.title='taken'</script><img src=http://example.org/x onerror=alert(1)>"
    assert spoiled.text.count(visible) > 100
    assert "{{ 7*7 }} {% raw %} </style></script><!-- " in spoiled.text
    assert not set(spoiled.text) & {"\x00", "\x1b", "\u202e", "\ud800"}
    tags = [{element.tag for element in root.all()} for root in (plain, spoiled)]
    assert tags[0] == tags[1]


def test_a_page_is_a_file_that_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the last one")
    text = accounts.hostile().to_html(path)
    assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with ThreadPoolExecutor(8) as pool:  # a server's handlers
        list(pool.map(lambda _: accounts.hostile().to_html(path), range(64)))
    assert path.read_text().endswith(text[-100:])
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    for place, error in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "page.html", FileNotFoundError)):
        with pytest.raises(error, match=re.escape(f"'{place}'")):
            accounts.rich().to_html(place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_nothing_compiled_is_a_page_too() -> None:
    root = checked(Explanation().to_html(said=["pass backend=<multigraph>"]))
    assert [paragraph.text for paragraph in root.all("section", id="nothing")[0].all("p")] == [
        "Nothing was compiled by multigraph.",
        "pass backend=<multigraph>",
    ]


def test_the_page_of_a_program_that_runs() -> None:
    import torch

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.shape[0]

    compiled = torch.compile(
        f, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "eager"}
    )
    for rows in (8, 8, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), f(x))
    root = checked(multigraph_backend.explain(f).to_html())
    (graph,) = root.all("article", class_="graph")
    rows = [[cell.text.strip() for cell in row.all("td")][:3] for row in graph.all("tr")]
    assert rows[1:] == [["x[0] == 8", "ready", "2"], ["generic", "ready", "1"]]
    totals = {entry.all("dt")[0].text: entry.all("dd")[0].text for entry in root.all("dl", class_="totals")[0].children}
    assert totals["calls"] == "3 67% by variants"


def test_fields_that_are_not_known_yet_are_shown_by_name() -> None:
    account = accounts.rich().to_dict()
    account["recordings"][0] |= {"driver_bytes": 3 << 20, "room": {"held_bytes": 1 << 10, "lent_bytes": 0}, "list": [1]}
    account["recordings"][0]["nodes"][0]["graph_bytes"] = 5 << 10
    account["regions"][0]["variants"][1]["recorded_bytes"] = 7 << 20
    said = checked(page.render(account)).words
    for expected in (
        "driver bytes 3.0 MiB",
        "room, held bytes 1.0 KiB",
        "graph bytes 5.0 KiB",
        "recorded bytes: 7.0 MiB",
    ):
        assert expected in said
    assert "lent bytes" not in said


# ---------------------------------------------------------------- the picture


def test_addresses_that_nothing_uses_take_no_room() -> None:
    far = 1 << 46
    blocks = [Block(0, 64, "output"), Block(64, 32, "output"), Block(far, 32, "inside"), Block(far, 0, "output")]
    picture = drawing.draw([Lifetime(block, 0, 1) for block in blocks], 2)
    low, high = picture.bands
    assert ((low.low, low.high), (high.low, high.high)) == ((0, 96), (far, far + 32))
    assert picture.bytes == 128
    assert low.height == pytest.approx(3 * high.height)
    assert high.y == pytest.approx(0)
    assert low.y + low.height == pytest.approx(drawing.HEIGHT)
    assert [entry.y + entry.height for entry in picture.rectangles[:2]] == pytest.approx([240, low.at(64)])


def test_blocks_lie_inside_of_the_picture_and_can_be_seen() -> None:
    blocks = [Block(0, 1 << 30, "output"), Block(1 << 30, 1, "inside"), Block(1 << 40, 1, "input")]
    many = [Block(number << 32, 1, "output") for number in range(2, 200)]
    picture = drawing.draw([Lifetime(block, 1, 3) for block in (*blocks, *many)], 4)
    for entry in picture.rectangles:
        assert entry.height >= 1.5
        assert -0.01 <= entry.y <= entry.y + entry.height <= drawing.HEIGHT + 0.01
        assert entry.x == pytest.approx(160)
        assert entry.width == pytest.approx(160 / 3 if entry.lifetime.block.kind == "input" else 480)
    assert drawing.draw([], 0).bands == ()


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 41, "10.0 TiB")]
)
def test_bytes(value: int, shown: str) -> None:
    assert figures.size(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0 ms"), (0.0126, "13 ms"), (0.9999, "1.0 s"), (3.21, "3.2 s"), (4000.4, "4,000 s")]
)
def test_seconds(value: float, shown: str) -> None:
    assert figures.seconds(value) == shown
