"""explain's page in headless Chromium: a Llama of 32 layers.

SCREENSHOTS=1 pytest tests/inspect/test_page_browser.py writes the pictures of docs/inspect.md.
"""

import os
import pathlib
import shutil

import pytest
import torch
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


class Comparison:
    def to_dict(self):
        rows = [{"module": f"layers.{i}", "snr_output_db": 30 - i / 7} for i in range(32)]
        return {"rows": rows, "summary": {"modules": 32}}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = Logits(transformers.LlamaForCausalLM(config).bfloat16())
        tokens = torch.zeros(2, 4096, dtype=torch.long)
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = te_dynamo.explain(model, tokens, device="h200", options={"rules": [("lm_head", None)]})
    found.to_html(path, comparison=Comparison())
    return path


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
    yield browser
    browser.quit()


@pytest.fixture
def opened(browser, page):
    resize(browser, 1280, 860)
    browser.get("about:blank")
    browser.get(page.as_uri())
    return browser


def resize(browser, width, height):
    """By the developer tools: WebDriver's own command waits for a window manager."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


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
    entry = "performance.getEntriesByType('navigation')[0]"
    assert opened.execute_script(f"return {entry}.domComplete") < 3000
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
    screenshot(opened, "explain-modules")
    click(opened, "#close-all")
    assert names(opened) == ["llama"]


def test_it_filters(opened):
    click(opened, "[data-tab=modules]")
    opened.find_element("id", "search").send_keys("down_proj")
    assert "down_proj" in names(opened) and "lm_head" not in names(opened) and "q_proj" not in names(opened)
    opened.find_element("id", "search").clear()
    opened.find_element("css selector", "#state option[value=left]").click()
    assert "lm_head" in names(opened) and "down_proj" not in names(opened)


def test_it_sorts(opened):
    click(opened, "[data-tab=numerics]")
    column = '#numerics [tabulator-field="snr_output_db"]'
    for first in ("layers.31", "layers.0"):
        click(opened, f"{column} .tabulator-col-title")
        assert opened.find_element("css selector", '#numerics .tabulator-row [tabulator-field="module"]').text == first


def test_stages_are_drawn_and_a_node_tells_its_line(opened):
    click(opened, "[data-tab=graphs]")
    for stage in ("match", "joint", "backward", "forward"):
        opened.find_element("xpath", f"//*[@id='stage']/option[.='{stage}']").click()
        assert opened.execute_script("return document.querySelector('#after-pane figcaption').textContent").startswith(
            f"after {stage}"
        )
        assert opened.execute_script("return drawn.after.nodes('.layers').length") >= 1
    opened.execute_script("drawn.after.nodes('[label *= \"te.gemm\"]')[0].emit('tap')")
    shown = opened.find_element("id", "node").text
    assert "modeling_llama.py:" in shown and "= te.gemm" in shown
    screenshot(opened, "explain-graphs")


@pytest.mark.parametrize("tab", ["overview", "modules", "graphs", "details", "numerics"])
def test_it_fits_a_narrow_window(opened, tab):
    resize(opened, 700, 900)
    click(opened, f"[data-tab={tab}]")
    assert opened.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
