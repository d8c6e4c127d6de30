"""The page of the account in a real browser: it shows, folds and searches, in light and dark, and asks for nothing.

`tests/unit/test_page.py` holds the structure of the same page, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend.report import Explanation
from tests.support import accounts

SCHEMES = ("light", "dark")


@dataclass
class Shown:
    """A page in the browser, with all that it asked for and complained of."""

    page: Any
    url: str
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {"rich": accounts.rich(), "hostile": accounts.hostile(), "empty": Explanation()}
    for name, account in made.items():
        account.to_html(folder / f"{name}.html", title="what serve.py compiled and ran")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def show(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def shown(name: str, width: int = 1280, **how: Any) -> Shown:
        context = browser.new_context(viewport={"width": width, "height": 900}, **how)
        contexts.append(context)
        result = Shown(context.new_page(), files[name].as_uri())
        result.page.on("request", lambda request: result.asked.append(request.url))
        result.page.on("console", lambda message: result.said.append(message.text))
        result.page.on("pageerror", lambda error: result.said.append(str(error)))
        result.page.on("dialog", lambda dialog: (result.said.append("a dialog"), dialog.dismiss()))
        result.page.goto(result.url)
        return result

    yield shown
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["rich", "hostile", "empty"])
def test_a_page_asks_for_nothing_and_complains_of_nothing(show: Any, name: str) -> None:
    """Also when everything in it is unfolded and pointed at; the policy stops nothing of the page's own."""
    shown = show(name)
    shown.ask("document.querySelectorAll('details').forEach(entry => { entry.open = true; })")
    for element in shown.page.query_selector_all("summary, a, svg.memory rect")[:40]:
        element.hover(force=True)
    shown.page.wait_for_timeout(200)
    assert (shown.asked, shown.said) == ([shown.url], [])
    assert shown.page.title() == "what serve.py compiled and ran"


def test_hostile_names_are_seen_as_text(show: Any) -> None:
    shown = show("hostile")
    assert "<script>document.title='taken'</script>" in shown.page.inner_text("main")
    assert shown.ask("document.querySelectorAll('img, main script, [onmouseover], [onerror]').length") == 0
    assert shown.ask("document.scripts.length") == 1


def test_a_script_that_got_into_the_page_would_not_run(show: Any) -> None:
    """The policy knows the page's own script by its digest: the second line of defence."""
    shown = show("rich")
    shown.ask(
        "(() => { const script = document.createElement('script'); script.textContent = 'window.taken = 1';"
        " document.body.append(script);"
        " const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x.png';"
        " document.body.append(image); })()"
    )
    shown.page.wait_for_timeout(200)
    assert shown.ask("window.taken === undefined")
    assert len(shown.said) == 2
    assert all("Content Security Policy" in line for line in shown.said)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read_in_light_and_dark(show: Any, scheme: str) -> None:
    """Every text stands out from what is behind it, as the accessibility guidelines ask (4.5)."""
    shown = show("rich", color_scheme=scheme)
    behind = shown.ask("getComputedStyle(document.body).backgroundColor")
    assert (behind == "rgb(255, 255, 255)") == (scheme == "light")
    worst = shown.ask(
        """() => {
        const parts = (colour) => colour.match(/[\\d.]+/g).slice(0, 4).map(Number);
        const luminance = (colour) => {
            const [r, g, b] = parts(colour).map((part) => part / 255)
                .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const background = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const colour = getComputedStyle(at).backgroundColor;
                if ((parts(colour)[3] ?? 1) > 0) return colour;
            }
            return 'rgb(255, 255, 255)';
        };
        document.querySelectorAll('details').forEach((entry) => { entry.open = true; });
        let least = [99, ''];
        const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const element = walker.currentNode.parentElement;
            if (!walker.currentNode.data.trim() || element.closest('title')) continue;
            const style = getComputedStyle(element);
            const text = luminance(element.closest('svg') ? style.fill : style.color);
            const [darker, lighter] = [text, luminance(background(element))].sort((one, other) => one - other);
            const ratio = (lighter + 0.05) / (darker + 0.05);
            if (ratio < least[0]) least = [ratio, walker.currentNode.data.trim()];
        }
        return least;
    }"""
    )
    assert worst[0] >= 4.5, worst


@pytest.mark.parametrize("name", ["rich", "hostile"])
@pytest.mark.parametrize("width", [380, 800, 1600])
def test_the_page_fits_its_window(show: Any, name: str, width: int) -> None:
    """Wide tables and pictures scroll by themselves, the page does not; also with everything unfolded."""
    shown = show(name, width)
    shown.ask("document.querySelectorAll('details').forEach(entry => { entry.open = true; })")
    assert shown.ask("document.documentElement.scrollWidth") <= width


def test_long_conditions_are_folded_until_one_looks(show: Any) -> None:
    shown = show("rich")
    fold = shown.page.locator("details.long", has_text="batch['input_ids'][4]").first
    whole = fold.locator(":scope > code")
    assert not whole.is_visible()
    fold.locator("summary").click()
    assert whole.is_visible()
    assert "batch['input_ids'][4] % 1024 == 0" in whole.inner_text()
    shown.page.click("#fold")
    assert not whole.is_visible()
    shown.page.click("#unfold")
    assert whole.is_visible()


def test_graphs_can_be_searched(show: Any) -> None:
    shown = show("rich")
    for wanted, found in (("sampler", ["graph-1"]), ("OutOfMemory", ["graph-0"]), ("nowhere", []), ("", None)):
        shown.page.fill("#search", wanted)
        seen = [entry.get_attribute("id") for entry in shown.page.query_selector_all(".graph") if entry.is_visible()]
        assert seen == (["graph-0", "graph-1"] if found is None else found)


def test_without_scripts_everything_can_be_read(show: Any) -> None:
    shown = show("rich", java_script_enabled=False)
    assert not shown.page.is_visible("#search")
    shown.page.click("article details.long summary")
    assert shown.page.is_visible("article details.long > code")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_is_drawn_in_three_colours_and_to_scale(show: Any, scheme: str) -> None:
    shown = show("rich", color_scheme=scheme)
    picture = shown.page.locator("svg.memory").first
    assert picture.is_visible()
    blocks = shown.ask(
        "[...document.querySelector('svg.memory').querySelectorAll('rect:not(.band)')].map((block) => {"
        " const box = block.getBoundingClientRect();"
        " const bytes = block.textContent.match(/: ([\\d.]+) (B|KiB) at 0x\\w+, in columns? (\\d+)(?: to (\\d+))?/);"
        " return [block.getAttribute('class'), getComputedStyle(block).fill, box.width, box.height,"
        "   bytes[1] * (bytes[2] === 'B' ? 1 : 1024), (bytes[4] ?? bytes[3]) - bytes[3] + 1]; })"
    )
    assert len({colour for _, colour, *_ in blocks}) == len({kind for kind, *_ in blocks}) == 3
    (per_byte, per_column), *others = [
        (height / size, width / columns) for kind, _, width, height, size, columns in blocks if kind != "input"
    ]
    for height, width in others:
        assert height == pytest.approx(per_byte, rel=0.02)
        assert width == pytest.approx(per_column, rel=0.02)


def test_the_page_is_painted_in_each_scheme(show: Any) -> None:
    """A blank page compresses to a few kilobytes."""
    pictures = [show("rich", color_scheme=scheme).page.screenshot(full_page=True) for scheme in SCHEMES]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 100_000 for picture in pictures)
    assert pictures[0] != pictures[1]
