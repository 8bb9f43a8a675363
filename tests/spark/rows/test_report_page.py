"""The live page shows the tables of the pipeline: its server writes their report, and a browser draws it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.pageworld import PageWorld, page_world
from tests.spark.conftest import TablesOf

expect.set_options(timeout=60_000)  # a hang guard


@pytest.fixture
def world(tmp_path: Path, tables_of: TablesOf) -> Iterator[PageWorld]:
    """A server with tables in its folder, and a report that is older."""
    data = tmp_path / "run"
    shutil.copytree(tables_of(faults=True)[0].parent / "tables", data / "tables")
    (data / "report.html").write_text("<!doctype html><title>old</title><h1>The old report</h1>")
    os.utime(data / "report.html", (1, 1))
    with page_world(data) as found:
        yield found


@pytest.fixture
def page(world: PageWorld) -> Iterator[Page]:
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        assert path is not None, "this test needs Debian's package chromium: apt-get install chromium"
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        found = browser.new_page()
        refused: list[str] = []
        found.on("console", lambda said: refused.append(said.text) if "Policy" in said.text else None)
        found.goto(world.url)
        found.get_by_label("Token").fill(world.token)
        found.get_by_role("button", name="Sign in").click()
        expect(found.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        yield found
        assert refused == []
        browser.close()


def test_report_of_new_tables_is_shown_below_the_live_numbers(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/report")
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Throughput")).to_be_visible()
    expect(page.get_by_role("heading", name="Throughput")).to_be_visible()
    plots = frame.locator("svg")
    expect(plots).to_have_count((world.data / "report.html").read_text().count("<svg"))
    assert plots.count() > 3
    box = plots.first.bounding_box()
    assert box is not None
    assert box["width"] > 200
    styled = frame.locator(".bar span").first.evaluate("one => getComputedStyle(one).backgroundColor")
    assert styled != "rgba(0, 0, 0, 0)"  # its policy allows the styles that it brings
