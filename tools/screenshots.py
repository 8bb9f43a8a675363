"""Writes a picture of each view of the live page to docs/page, from a real server in a real browser."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.pageworld import PageWorld, page_world  # noqa: E402 - tests are not an installed package

OUT = ROOT / "docs" / "page"
SIZE = {"width": 1000, "height": 560}
PHONE = {"width": 375, "height": 700}
FLAGS = ["--no-sandbox", "--disable-lcd-text"]  # coloured edges of letters make pictures larger
BYTES_MAX = 100_000
TIMEOUT_MS = 30_000


def views(world: PageWorld) -> dict[str, tuple[str, str]]:
    """The name of each picture: the address of the view, and a text that is there once it is drawn."""
    return {
        "overview": ("overview", "Waiting time of the last minute"),
        "messages": ("messages", "COMPLETED"),
        "message": (f"messages/{world.parent_id}", "execution completed"),
        "dead-letters": ("dead-letters", "ValidationError"),
        "decisions": ("decisions", "the adviser is not sure"),
        "goals": ("goals", "Goals and their states"),
        "goal": ("goals/launch", "draft"),
        "agents": ("agents", "Public mailboxes"),
        "tasks": ("agents/ada", "ada-2"),
        "task": ("tasks/translate-0", "420"),
        "buses": ("buses", "team"),
        "bus": ("buses/team", "Shall we ship?"),
        "report": ("report", "Open it alone"),
    }


def take(page: Page, world: PageWorld, out: Path, name: str, place: str, text: str) -> None:
    page.goto(f"{world.url}/#/{place}")
    expect(page.locator("main")).to_contain_text(text, timeout=TIMEOUT_MS)
    if name == "report":
        expect(page.frame_locator("iframe").locator("svg").first).to_be_visible(timeout=TIMEOUT_MS)
    save(page, out / f"{name}.png")


def save(page: Page, path: Path) -> None:
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    if size > BYTES_MAX:
        raise SystemExit(f"{path} has {size} bytes, and at most {BYTES_MAX} are kept in the repository")


def sign_in(page: Page, world: PageWorld) -> None:
    page.goto(world.url)
    page.get_by_label("Token").fill(world.token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("main")).to_contain_text("Throughput", timeout=TIMEOUT_MS)


def main(out: Path, names: Collection[str]) -> None:
    """Take the pictures of these names, or all."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        raise SystemExit("screenshots need a browser: apt-get install chromium")
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="postroom-screenshots-") as folder,
        page_world(Path(folder) / "run") as world,
        sync_playwright() as playwright,
    ):
        world.seed()
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(world.url)
        expect(page.get_by_label("Token")).to_be_visible(timeout=TIMEOUT_MS)
        if not names or "sign-in" in names:
            save(page, out / "sign-in.png")
        sign_in(page, world)
        for name, (place, text) in views(world).items():
            if not names or name in names:
                take(page, world, out, name, place, text)
        if not names or "phone-dark" in names:
            phone = browser.new_page(viewport=PHONE, color_scheme="dark")  # type: ignore[arg-type]
            sign_in(phone, world)
            take(phone, world, out, "phone-dark", "messages", "COMPLETED")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the pictures")
    parser.add_argument("names", nargs="*", help="pictures, such as buses; all without a name")
    options = parser.parse_args()
    main(options.out, options.names)
