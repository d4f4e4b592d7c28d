"""The page of a report in headless Chromium, as someone uses it: mouse, keyboard,
hostile names.
"""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report_data import HOSTILE, embedded, fitted, hostile, of_many, paths

from shardfx import MeshSpec, PathRules, ShardPlan, html_report, plan
from shardfx.cost import traffic
from shardfx.results import Finding
from tests.structs import leaf


pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no `chromium` and `chromedriver` on the path", allow_module_level=True)
webdriver = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed"
)
Keys = webdriver.Keys
support = pytest.importorskip("selenium.webdriver.support.ui")
HLO = Path(__file__).parents[1] / "data" / "hlo"
# The browser may reach nothing: every name that it looks up is unknown to it.
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE 127.0.0.1",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()
    assert service.process.poll() is not None


class Page:
    """A page in the browser: what a person sees and does there."""

    def __init__(
        self,
        driver: Any,
        text: str,
        file: Path,
        width: int = 1440,
        scheme: str = "light",
    ):
        self.driver = driver
        file.write_text(text)
        self.resize(width)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get(file.as_uri())

    def resize(self, width: int) -> None:
        size = {
            "width": width,
            "height": 900,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        (element,) = self.all(selector)
        return element

    def text(self, selector: str) -> str:
        return self.run(
            "return document.querySelector(arguments[0]).textContent", selector
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    @property
    def paths(self) -> list[str]:
        """The paths in the table, from the top."""
        return self.run(
            "return [...document.querySelectorAll('#table button.row')].map((one) =>"
            " one.textContent)"
        )

    @property
    def trail(self) -> list[str]:
        return self.run(
            "return [...document.querySelectorAll('#trail li')].map((one) =>"
            " one.textContent)"
        )

    def search(self, text: str) -> list[str]:
        field = self.one("#search")
        field.send_keys(Keys.CONTROL + "a")
        field.send_keys(Keys.DELETE + text)
        return self.paths

    def complaints(self) -> list[str]:
        """What the browser logged, and what the page fetched: nothing, if all is well."""
        fetched = self.run(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        return [entry["message"] for entry in self.driver.get_log("browser")] + fetched


def finding(**fields: Any) -> Finding:
    arguments = {
        "code": "corrected",
        "severity": "warning",
        "where": "embed",
        "bytes": 4096,
        "message": "",
        "fix": "f()",
    }
    return Finding(**{**arguments, **fields})


def model() -> ShardPlan:
    layer = {
        "attn": {"qkv": leaf(1024, 3072), "out": leaf(1024, 1024)},
        "mlp": {"up": leaf(1024, 4096), "down": leaf(4096, 1024)},
        "norm": leaf(1024),
    }
    tree = {"embed": leaf(50257, 1024), "layers": [layer] * 24}
    rules = PathRules.parse(
        "embed->tensor.fsdp, qkv|up->fsdp.tensor, out|down->tensor.fsdp,"
        " norm->replicate"
    )
    axes = {"data": 2, "fsdp": 8, "tensor": 8}
    mesh = MeshSpec(axes, dcn={"data": 2})
    return plan(
        tree,
        mesh,
        paths=rules,
    )


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Page]:
    mesh = MeshSpec({"data": 2, "tensor": 4})
    sent = traffic(
        (HLO / "tpu_gathered_weights.txt").read_text(),
        mesh,
    )
    findings = [
        finding(),
        finding(
            code="cut-head",
            severity="error",
            where="layers/3/attn/qkv",
            fix="",
        ),
    ]
    report = html_report(
        model(),
        title="A model",
        findings=findings,
        traffic=sent,
        chip="v5e",
    )
    page = Page(browser, report, tmp_path / "page.html")
    yield page
    assert page.complaints() == []


def test_the_page_says_what_the_plan_says(page):
    sharding_plan = model()
    assert page.driver.title == page.text("h1") == "A model"
    tiles = [tile.text.split("\n")[0] for tile in page.all("#tiles li")]
    assert tiles[:2] == [f"{len(sharding_plan):,}", "128"]
    assert page.paths[:3] == [
        "embed",
        "layers/{0..23}/mlp/down",
        "layers/{0..23}/mlp/up",
    ]
    assert "121 arrays in 6 rows" in page.text("#count")
    assert "that a program may use on v5e" in page.text("#memory .verdict")
    assert (
        page.one("#mesh [role=img]").get_attribute("aria-label")
        == "128 devices in a mesh of data=2(dcn=2),fsdp=8,tensor=8, in 2 slices"
    )
    parts = [row.text.split()[1] for row in page.all("#mesh tbody th")]
    assert parts == [
        "data",
        "fsdp",
        "tensor",
    ]
    assert "nothing" in page.all("#mesh tbody tr")[0].text
    assert "160.0 MiB enter each of 8 devices" in page.text("#traffic")


def test_the_memory_of_a_step(browser, tmp_path):
    candidate = fitted(2**20)
    page = Page(browser, html_report(model(), fit=candidate), tmp_path / "page.html")
    assert not candidate.fits and "more than there is" in page.text(
        "#memory .verdict.bad"
    )
    expected = [row.group for row in candidate.rows if row.bytes]
    assert [cell.text for cell in page.all("#memory .parts th")] == expected
    assert "Foreseen" in page.text("#memory .note")
    expected = min(len(candidate.changes), 8)
    assert len(page.all("#memory .changes tr")) == expected > 0
    largest, second = candidate.peak_arrays[:2]
    if second.source:
        place = second.source.place
    else:
        place = ""
    assert largest.what in page.text("#step-inspector h3")
    page.one("#step-map .top[aria-label*='test_report_data.py'] .cell").click()
    details = page.text("#step-inspector")
    assert second.what in details
    assert place in details
    assert "jax.grad(" in details
    assert "axes from" in details
    (row,) = [
        row
        for row in page.all("#source tr")
        if row.get_attribute("textContent").startswith(place.split(":")[1])
    ]
    assert "f32[1048576,4096] data" in row.get_attribute("textContent")
    assert page.complaints() == []


def test_search_and_filter(page):
    assert page.search("MLP") == ["layers/{0..23}/mlp/down", "layers/{0..23}/mlp/up"]
    assert "48 arrays in 2 rows" in page.text("#count")
    assert page.search("layers/17/mlp/up") == ["layers/{0..23}/mlp/up"]
    assert page.search("layers/24/mlp/up") == []
    assert "No array matches" in page.text("#table tbody")
    assert page.search("indivisible padd") == []
    assert page.search("indivisible pad") == ["embed"]
    assert page.search("norm bf16[1024]") == ["layers/{0..23}/norm"]
    page.search("")
    choices = support.Select(page.one("#filter"))
    for name, shown_paths in [
        ("whole on every device", ["layers/{0..23}/norm"]),
        ("less than was asked", ["embed"]),
        ("cut by data", []),
    ]:
        choices.select_by_visible_text(name)
        assert page.paths == shown_paths, name
    assert page.all("#treemap .dimmed")


def test_the_numbers_filter_and_what_got_less_is_marked(page):
    assert page.text("#verdict").startswith("1 array got less than asked")
    less, whole = (page.all("#tiles button")[position] for position in (1, 0))
    less.click()
    assert page.paths == ["embed"] and page.all("#treemap .dimmed")
    less.click()
    whole.click()
    assert page.paths == ["layers/{0..23}/norm"]
    count = len(page.all("#treemap .less-mark"))
    assert count == 1 and "got less than was asked" in page.text("#legend")


def test_sorting_and_the_details_of_a_row(page):
    heads = {head.text.split("\n")[0]: head for head in page.all("#table thead th")}
    assert heads["bytes/device"].get_attribute("aria-sort") == "descending"
    heads["path"].find_element("tag name", "button").click()
    assert page.paths == sorted(page.paths)
    assert heads["path"].get_attribute("aria-sort") == "ascending"
    heads["path"].find_element("tag name", "button").click()
    assert page.paths == sorted(page.paths, reverse=True)
    row = page.one("#table [data-row='0'] button")
    row.click()
    assert page.focused.get_attribute("aria-expanded") == "true"
    details = page.one("#table .open")
    assert "indivisible" in details.text
    assert "size 50257 is not divisible by `tensor` (8)" in details.text
    cells = [
        cell.text
        for cell in details.find_elements(
            "css selector", ".dims tbody tr:first-child td"
        )
    ]
    assert cells == ["0", "50,257", "tensor", "-", "50,257"]
    page.focused.click()
    assert not page.all("#table .open")


def top(page: Page, name: str) -> Any:
    """The rectangle of a part of the tree that is drawn at the top of the map."""
    return page.one(f"#treemap .top[aria-label^='{name}']")


def test_a_click_on_the_map_zooms_and_shows_the_array(page):
    assert page.trail == ["all arrays"]
    assert "embed, 12.3 MiB on each device" in top(page, "embed").get_attribute(
        "aria-label"
    )
    cell = page.run(
        "return [...document.querySelectorAll('#treemap .cell')].find((one) =>"
        " one.textContent.startsWith('up'))"
    )
    cell.click()
    assert page.trail == ["all arrays", "layers/{0..23}/"]
    assert "layers/{0..23}/mlp/up" in page.text("#inspector") and "fsdp" in page.text(
        "#inspector .dims"
    )
    top(page, "mlp/").click()
    assert page.trail[-1] == "mlp/" and len(page.all("#treemap .top")) == 2
    page.all("#trail button")[0].click()
    assert page.trail == ["all arrays"]


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page):
    page.run("document.activeElement.blur()")
    reached = []
    seen = set()
    for _ in range(200):
        page.press(Keys.TAB)
        element = page.focused
        if element.tag_name == "body" or element.id in seen:
            break
        seen.add(element.id)
        reached.append(element)
        ring = page.run(
            "const one = arguments[0], ring = one.querySelector('.ring');"
            "const style = getComputedStyle(ring || one);"
            "if (!ring) return style.outlineStyle !== 'none';"
            "return style.stroke !== 'none' && parseFloat(style.strokeWidth) > 2",
            element,
        )
        assert ring, element.get_attribute("outerHTML")[:200]
    focusable = "a[href], button:not([hidden]), input, select, [tabindex='0']"
    ids = {
        element.id
        for element in page.all(focusable)
        if element.is_displayed() or element.get_attribute("class") == "skip"
    }
    assert ids <= seen
    assert len(reached) >= 20
    assert all(
        page.run(
            "return arguments[0].ariaLabel || arguments[0].textContent ||"
            " arguments[0].id",
            element,
        )
        for element in reached
    )


def test_the_map_by_keyboard(page):
    page.run("document.querySelector('#treemap .top').focus()")
    first = page.focused.get_attribute("aria-label")
    page.press(Keys.ARROW_RIGHT)
    assert page.focused.get_attribute("aria-label") != first
    page.press(Keys.ARROW_LEFT)
    assert page.focused.get_attribute("aria-label") == first
    page.run("arguments[0].focus()", top(page, "layers"))
    page.press(Keys.ENTER)
    assert page.trail == ["all arrays", "layers/{0..23}/"]
    assert page.focused.get_attribute("aria-label").startswith("mlp/")
    page.press(Keys.SPACE)
    assert page.trail[-1] == "mlp/"
    assert page.focused.get_attribute("aria-label").startswith("down")
    page.press(Keys.ENTER)
    assert "layers/{0..23}/mlp/down" in page.text("#inspector")
    assert page.focused.get_attribute("aria-label").startswith("down")
    page.press(Keys.ESCAPE)
    assert page.focused.get_attribute("aria-label").startswith("mlp/")
    page.press(Keys.ESCAPE, Keys.ESCAPE)
    assert page.trail == ["all arrays"]
    assert page.focused.get_attribute("aria-label").startswith("layers")


def test_a_finding_leads_to_its_arrays(page):
    first, second = page.all("#findings .finding")
    assert "warning" in first.text
    assert "f()" in first.find_element("tag name", "pre").text
    assert "error" in second.text
    assert not second.find_elements("tag name", "pre")
    second.find_element("css selector", "button").click()
    assert page.paths == ["layers/{0..23}/attn/qkv"]
    assert page.focused.get_attribute("id") == "search"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_widths_and_colours(browser, tmp_path, width, scheme):
    page = Page(
        browser,
        html_report(model(), chip="v5e"),
        tmp_path / "page.html",
        width,
        scheme=scheme,
    )
    assert page.run("return document.documentElement.scrollWidth") <= width
    every = "return [...document.querySelectorAll('main *')]"
    wide = "filter((one) => one.getBoundingClientRect().right > innerWidth)"
    assert page.run(f"{every}.{wide}.map((one) => one.outerHTML.slice(0, 80))") == []
    ink, paper = page.run(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    assert contrast(ink, paper) > 7
    soft = page.run("return getComputedStyle(document.getElementById('summary')).color")
    assert contrast(soft, paper) > 4.5
    assert (luminance(paper) > 0.5) == (scheme == "light")
    # The picture is drawn anew in another size.
    page.resize(800)
    drawn = (
        "return document.documentElement.scrollWidth <= 800 &&"
        " document.querySelector('#treemap svg').clientWidth"
    )
    support.WebDriverWait(page.driver, 5).until(
        lambda _: (page.run(drawn) or 0) in range(600, 800)
    )
    assert page.complaints() == []


def luminance(colour: str) -> float:
    parts = colour.removeprefix("rgb(").removesuffix(")").split(",")
    red, green, blue = [linear(int(part) / 255) for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(part: float) -> float:
    """The intensity of a part of an sRGB colour."""
    if part <= 0.03928:
        return part / 12.92
    return ((part + 0.055) / 1.055) ** 2.4


def contrast(colour: str, other: str) -> float:
    low, high = sorted([luminance(colour), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [390, 1440])
def test_hostile_names_stay_text(browser, tmp_path, width):
    title = "<script>window.pwned = 3</script>"
    bad = [
        finding(**{field: name})
        for name, field in itertools.product(
            HOSTILE, ("where", "message", "fix", "code")
        )
    ]
    source = html_report(hostile(), title=title, findings=bad)
    page = Page(browser, source, tmp_path / "page.html", width)
    assert page.driver.title == page.text("h1") == title
    assert page.run("return window.pwned") is None
    assert not page.all("main script, main img, main b > script, b[onerror]")
    assert page.run("return document.scripts.length") == 2
    assert page.run("return document.documentElement.scrollWidth") <= width
    shown = set(page.paths)
    for path in paths(embedded(source)):
        text = path or "(no name)"
        assert text in shown or len(text) > 300, path
    # The whole of a long one is in its details.
    page.search("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")
    page.one("#table button.row").click()
    assert "x" * 10_000 in page.text("#table .open")
    for cell in page.all("#treemap .top")[:4]:
        page.run("arguments[0].focus()", cell)
    assert page.run("return window.pwned") is None
    assert page.complaints() == []


def test_fifty_thousand_leaves_stay_usable(browser, tmp_path):
    def name_of(number: int) -> str:
        if number < 25_000:
            return f"model/layers/{number // 10}/experts/w{number % 10}"
        return f"{number * 7919 % 50021:05d}x{number:x}"

    _, text = of_many(name_of)
    page = Page(browser, text, tmp_path / "page.html")
    assert "50,000 arrays" in page.text("#count") and len(page.paths) <= 100
    assert len(page.run("return document.querySelectorAll('*')")) < 8000
    # Of many numbers a range shows the ends: what may hold this one is found, and
    # nothing else.
    candidates = page.search("layers/2321/experts/w3")
    assert 0 < len(candidates) <= 7
    for path in candidates:
        assert path.endswith("/experts/w3")
    assert page.search("layers/2500/experts/w3") == []
    page.search("")
    page.one("#more").click()
    assert len(page.paths) == 200
    # Names that are too many for one picture are in groups; each click shows fewer of
    # them.
    for _ in range(3):
        page.run("document.querySelector('#treemap .top').focus()")
        page.press(Keys.ENTER)
    assert len(page.all("#treemap .top")) > 1
    assert page.complaints() == []
