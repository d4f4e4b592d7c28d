"""Draws docs/report.png: the page of a real model's plan, as headless Chromium shows
it.

    python docs/draw_report.py

Needs selenium (`pip install '.[browser]'`), and Debian's `chromium` and
`chromium-driver`.
"""

import base64
import importlib
import shutil
import sys
import tempfile
from pathlib import Path

from shardfx import MeshSpec, ShardPlan, html_report, plan
from shardfx.presets import models


PICTURE = Path(__file__).parent / "report.png"
MODEL, MESH, CHIP = "gemma3-12b", "data=2,fsdp=8,tensor=16", "v5e"
WIDTH, HEIGHT = 1240, 900


def planned() -> ShardPlan:
    """The plan that the picture shows: 16 pieces are more than there are heads for keys
    and values.
    """
    return plan(
        models.tree(MODEL),
        MeshSpec.parse(MESH),
        paths=models.rules_for(MODEL, "fsdp_tp"),
        unused="allow",
    )


def page() -> str:
    """Its page."""
    return html_report(planned(), title=MODEL, chip=CHIP)


def drawn(text: str) -> bytes:
    """What the top of a page looks like, as a PNG."""
    webdriver = importlib.import_module("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        size = {
            "width": WIDTH,
            "height": HEIGHT,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "page.html")
            file.write_text(text)
            driver.get(file.as_uri())
            driver.execute_script(SHOWN)
            return base64.b64decode(
                driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
            )
    finally:
        driver.quit()


# The largest array that got less than its rule asked for is chosen, as a click does.
SHOWN = """
const labels = [...document.querySelectorAll('#treemap .cell')];
const cell = labels.find((one) => one.textContent.includes('k_proj')) || labels[0];
cell.dispatchEvent(new MouseEvent('click', { bubbles: true }));
document.activeElement.blur();
document.getElementById('tip').hidden = true;
"""


def main() -> int:
    """Writes the picture."""
    PICTURE.write_bytes(drawn(page()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
