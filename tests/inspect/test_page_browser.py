"""explain's page in headless Chromium: a Llama of 32 layers.

SCREENSHOTS=1 pytest tests/inspect/test_page_browser.py writes the pictures of docs/inspect.md.
"""

import os
import pathlib
import re
import shutil

import filelock
import pytest
import torch
from helpers.comparisons import comparison
from torch import nn

import te_dynamo

pytestmark = pytest.mark.slow

DOCS = pathlib.Path(__file__).parents[2] / "docs"


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.llama = model

    def forward(self, tokens):
        return self.llama(tokens).logits


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run's processes one makes it: explaining 32 layers takes half a minute."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "report.html"
    with filelock.FileLock(f"{path}.lock"):
        if not path.is_file():
            make_page(path)
    return path


def make_page(path):
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = Logits(transformers.LlamaForCausalLM(config).bfloat16())
        tokens = torch.zeros(2, 4096, dtype=torch.long)
    found = te_dynamo.explain(model, tokens, device="h200", options={"rules": [("lm_head", None)]})
    modules = [f"llama.model.layers.{i}.mlp.down_proj" for i in range(32)]
    found.to_html(path, comparison=comparison(modules, worst=modules[:1]))


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.implicitly_wait(5)  # tables are built after the click that opens their tab
    yield browser
    browser.quit()


WIDTHS = (1400, 800, 390)
TABS = ("overview", "modules", "graphs", "details", "numerics")


@pytest.fixture
def opened(browser, page):
    resize(browser, 1400, 860)
    scheme(browser, "light")
    browser.get("about:blank")
    browser.get(page.as_uri())
    return browser


def resize(browser, width, height):
    """By the developer tools: WebDriver's own command waits for a window manager."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def scheme(browser, value):
    media = [{"name": "prefers-color-scheme", "value": value}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def eventually(browser, condition):
    """Listeners of sizes and color schemes run before the next frame, not before the command that changes one returns."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: condition())


def background(browser, selector):
    """The brightness that is seen at the middle of it, 0 to 255."""
    return browser.execute_script(
        """
        const box = document.querySelector(arguments[0]).getBoundingClientRect();
        let place = document.elementFromPoint(box.x + box.width / 2, box.y + Math.min(box.height / 2, 20));
        let color = "rgba(0, 0, 0, 0)";
        for (; place && color === "rgba(0, 0, 0, 0)"; place = place.parentElement) color = getComputedStyle(place).backgroundColor;
        const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
        return (r + g + b) / 3;
        """,
        selector,
    )


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def choose(browser, stage):
    browser.find_element("xpath", f"//*[@id='stage']/option[.='{stage}']").click()


def click(browser, selector):
    browser.find_element("css selector", selector).click()


def names(browser):
    """Of the rows of the tree that are on the screen."""
    return [
        cell.text for cell in browser.find_elements("css selector", '#tree .tabulator-row [tabulator-field="name"]')
    ]


def screenshot(browser, name):
    if os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(str(DOCS / f"{name}.png"))


def test_the_file_is_small(page):
    assert page.stat().st_size < 5_000_000


def test_it_opens_soon_and_without_an_error(opened):
    assert opened.execute_script("return document.getElementsByTagName('*').length") < 1000, (
        "built before it is looked at"
    )
    assert opened.execute_script("return document.documentElement.dataset.ready") == "yes"
    for tab in opened.find_elements("css selector", "nav button"):
        tab.click()
    assert [entry for entry in opened.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_a_layer_opens(opened):
    click(opened, "[data-tab=modules]")
    assert "0-31, alike (32)" in names(opened)
    assert "q_proj" not in names(opened)
    click(opened, "#open-all")
    assert "q_proj" in names(opened)
    click(opened, "#close-all")
    assert names(opened) == ["llama"]


def test_it_filters(opened):
    click(opened, "[data-tab=modules]")
    opened.find_element("id", "search").send_keys("down_proj")
    assert "down_proj" in names(opened) and "lm_head" not in names(opened) and "q_proj" not in names(opened)
    opened.find_element("id", "search").clear()
    opened.find_element("css selector", "#state option[value=left]").click()
    assert "lm_head" in names(opened) and "down_proj" not in names(opened)


def test_an_empty_filter_says_so_without_an_empty_table(opened):
    click(opened, "[data-tab=modules]")
    search = opened.find_element("id", "search")
    search.send_keys("no such module")
    assert opened.find_element("id", "nothing").text == "No row matches “no such module”."
    assert not opened.find_element("id", "tree").is_displayed()
    search.clear()
    search.send_keys("down_proj")
    assert "down_proj" in names(opened) and not opened.find_element("id", "nothing").is_displayed()


def test_line_numbers_do_not_break(opened):
    resize(opened, 1000, 844)  # the lines have a narrow column
    for tab in ("modules", "graphs", "numerics"):
        click(opened, f"[data-tab={tab}]")
        if tab == "modules":
            click(opened, "#open-all")
        if tab == "numerics":
            click(opened, "#all-columns")
        if tab == "graphs":
            opened.execute_script("drawn.after.nodes('[label *= \"te.gemm\"]')[0].emit('tap')")
        heights = (
            "return [...document.querySelectorAll(`#${arguments[0]} .whole`)].map((e) => e.getClientRects().length)"
        )
        assert max(opened.execute_script(heights, tab)) <= 1
    assert text(opened, "#node .whole").startswith(":")


def test_numerics_is_the_terminals_table(opened):
    click(opened, "[data-tab=numerics]")
    first = opened.find_element("css selector", "#numerics .tabulator-row")  # waits for the table
    titles = "return [...document.querySelectorAll('#numerics .tabulator-col')].filter((c) => c.offsetWidth).map((c) => c.querySelector('.tabulator-col-title').textContent)"
    shown = opened.execute_script(titles)
    assert shown[:4] == ["module", "output", "dx", "x"] and "x flushed" not in shown
    assert first.find_element("css selector", '[tabulator-field="snr_output_db"]').text == "12.0"
    click(opened, "#all-columns")
    assert "x flushed" in opened.execute_script(titles)
    dots = opened.find_elements("css selector", "#numerics .plot circle.output")
    assert len(dots) == 32 and all(dot.is_displayed() for dot in dots)
    assert "down_proj$" in text(opened, ".rules")


def test_it_sorts(opened):
    click(opened, "[data-tab=numerics]")
    column = '#numerics [tabulator-field="snr_output_db"]'
    for first in (0, 1):  # the lowest, then the highest
        click(opened, f"{column} .tabulator-col-title")
        module = opened.find_element("css selector", '#numerics .tabulator-row [tabulator-field="module"]').text
        assert module == f"llama.model.layers.{first}.mlp.down_proj"


def test_stages_are_drawn_and_a_node_tells_its_line(opened):
    click(opened, "[data-tab=graphs]")
    for stage in ("match", "joint", "backward", "forward"):
        choose(opened, stage)
        assert text(opened, "#after-pane figcaption").strip().startswith(f"after {stage}: ")
        assert opened.execute_script("return drawn.after.nodes('.layers').length") >= 1
    opened.execute_script("drawn.after.nodes('[label *= \"te.gemm\"]')[0].emit('tap')")
    shown = opened.find_element("id", "node").text
    assert "modeling_llama.py:" in shown and "= te.gemm" in shown


def test_fusing_has_fewer_operations(opened):
    click(opened, "[data-tab=graphs]")
    before, after = (
        int(re.search(r": (\d+) op", text(opened, f"#{at}-pane figcaption"))[1]) for at in ("before", "after")
    )
    assert after < before


def test_details_of_a_node_go_with_its_stage(opened):
    click(opened, "[data-tab=graphs]")
    opened.execute_script("drawn.after.nodes('[label *= \"te.gemm\"]')[0].emit('tap')")
    assert "te.gemm" in text(opened, "#node")
    choose(opened, "backward")
    assert text(opened, "#node").startswith("Click a node")


def test_graphs_zoom_fit_and_find(opened):
    click(opened, "[data-tab=graphs]")
    zoom = "return drawn.after.zoom()"
    start = opened.execute_script(zoom)
    click(opened, "#after-pane [aria-label='Zoom in']")
    assert opened.execute_script(zoom) > start
    click(opened, "#after-pane [value='0']")
    shown = opened.execute_script(
        "const b = drawn.after.elements().renderedBoundingBox(); return b.h <= drawn.after.height() && b.w <= drawn.after.width()"
    )
    assert shown
    search = opened.find_element("id", "find")
    search.send_keys("q_proj")
    count = int(text(opened, "#found").split()[0])
    assert (
        count
        == opened.execute_script("return drawn.before.nodes('.found').length + drawn.after.nodes('.found').length")
        > 0
    )
    search.send_keys("\n")
    assert "q_proj" in text(opened, "#node")
    search.send_keys("no such thing")
    assert text(opened, "#found") == "nothing found"


def test_the_legend_has_every_colour_that_is_drawn(opened):
    click(opened, "[data-tab=graphs]")
    kinds = opened.execute_script(
        "return data.stages.flatMap((s) => [s.before, s.after]).flatMap((g) => g ? g.nodes : []).map((n) => n.kind)"
    )
    legend = opened.execute_script("return [...document.querySelectorAll('#graphs .legend i')].map((i) => i.className)")
    assert "attention" in kinds and set(kinds) - {"input", "output"} <= set(legend)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_graphs_have_a_height(opened, width):
    resize(opened, width, 844)
    click(opened, "[data-tab=graphs]")
    for pane in opened.find_elements("css selector", ".panes figure"):
        assert pane.size["height"] > 300
    eventually(opened, lambda: opened.execute_script("return drawn.before.height()") > 300)
    screenshot(opened, f"explain-graphs-{width}")


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits(opened, tab, width):
    resize(opened, width, 844)
    click(opened, f"[data-tab={tab}]")
    eventually(
        opened, lambda: opened.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    )
    assert text(opened, "h1").startswith("Logits") and opened.find_element("id", "head").is_displayed()


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_the_tree_and_the_numbers(opened, width):
    """Rows stand beside their numbers at each width."""
    resize(opened, width, 844)
    click(opened, "[data-tab=modules]")
    click(opened, "#open-all")
    row = opened.find_element("css selector", "#tree .tabulator-row")
    assert "225" in row.text and "llama" in row.text
    screenshot(opened, f"explain-modules-{width}")
    click(opened, "[data-tab=numerics]")
    table = opened.find_element("css selector", "#numerics .table")
    output = table.find_element("css selector", '.tabulator-row [tabulator-field="snr_output_db"]')
    assert output.rect["x"] + output.rect["width"] <= table.rect["x"] + table.rect["width"]
    screenshot(opened, f"explain-numerics-{width}")


@pytest.mark.parametrize(
    ("tab", "place"),
    [
        ("overview", ".cards article"), ("modules", "#tree .tabulator-row"), ("modules", "#tree .tabulator-header"),
        ("graphs", "#after-pane figcaption"), ("details", "#details .tabulator-row"), ("numerics", "#numerics .plot"),
    ],
)  # fmt: skip
def test_the_dark_page_is_dark(opened, tab, place):
    click(opened, f"[data-tab={tab}]")
    opened.find_element("css selector", place)
    eventually(opened, lambda: background(opened, place) > 200)
    scheme(opened, "dark")
    eventually(opened, lambda: background(opened, place) < 80)
    if tab == "graphs":
        color = "return drawn.after.nodes('.other').first().style('background-color')"
        eventually(opened, lambda: max(map(int, re.findall(r"\d+", opened.execute_script(color)))) < 100)
