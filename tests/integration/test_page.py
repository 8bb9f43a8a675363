"""The live page in a real Chromium, by real clicks and keys, on a real server."""

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import pytest
from playwright.sync_api import APIResponse, Browser, BrowserContext, Page, Route, expect, sync_playwright

from postroom import Breaker, Engine
from postroom.core.lifecycle import breaker
from postroom.engine.rules import holds
from postroom.engine.rules.cells import CIRCUITS, Likeness
from postroom.server.access.tokens import Permissions, TokenRegistry
from postroom.stores.transaction import Transaction
from tests import pagebudgets
from tests.integration.commandline import finish, postroom, start
from tests.integration.ups import running
from tests.pageworld import HOSTILE, PageWorld, page_world
from tests.tcpproxy import TcpProxy
from tests.waiting import HANG_GUARD_S, until

expect.set_options(timeout=1000 * HANG_GUARD_S)

VIEWS = {
    "overview": "Waiting time of the last minute",
    "messages": "QUEUED",
    "dead-letters": "Dead letters, the oldest first",
    "goals": "Goals and their states",
    "agents": "Agents of the global queue",
    "agents/%40acme%3Aada": "ada-2",
    "tasks/translate-0": "manual-0.md",
    "buses/team": "The build is green.",
    "report": "Open it alone",
}
"""What each view shows once it is drawn."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageWorld]:
    with page_world(tmp_path_factory.mktemp("page") / "run") as found:
        found.seed()
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, (
        "this test needs the browser of Debian's package chromium: apt-get install chromium"
    )
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def signed_in(world: PageWorld, browser: Browser) -> Iterator[BrowserContext]:
    """A browser that the admin has signed in with."""
    with opened(browser) as (context, page):
        sign_in(page, world.url, world.token)
        page.close()
        yield context


@pytest.fixture
def page(signed_in: BrowserContext) -> Iterator[Page]:
    found = signed_in.new_page()
    with no_errors(found):
        yield found
    found.close()


@contextmanager
def opened(browser: Browser, **options: Any) -> Iterator[tuple[BrowserContext, Page]]:
    context = browser.new_context(**options)
    try:
        yield context, context.new_page()
    finally:
        context.close()


@contextmanager
def no_errors(page: Page) -> Iterator[None]:
    """Nothing that the page runs raises, and its policy refuses nothing that it needs."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None
    )
    yield
    assert errors == []


def sign_in(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()


def call(
    world: PageWorld, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(world.url + path, data, named, method=method)  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
            return answer.status, answer.read(), dict(answer.headers.items())
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers.items())


# ---- sessions --------------------------------------------------------------------------------------


def test_a_token_is_exchanged_for_a_cookie_that_no_script_can_read(
    world: PageWorld, browser: Browser
) -> None:
    with opened(browser) as (context, page):
        page.goto(world.url)
        page.get_by_label("Token").fill("pr_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
        sign_in(page, world.url, world.token)
        [cookie] = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert context.cookies() == []
        page.reload()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def session(world: PageWorld, token: str) -> tuple[str, str]:
    """The cookie and the CSRF token of a new session."""
    status, body, headers = call(world, "POST", "/page/sign-in", {"token": token})
    assert status == 200
    return headers["set-cookie"].partition(";")[0], json.loads(body)["csrf"]


def test_a_change_needs_the_secret_against_forged_requests(world: PageWorld) -> None:
    cookie, csrf = session(world, world.token)
    message_id = world.submit()
    path = f"/page/messages/{message_id}/cancel"
    assert call(world, "POST", path)[0] == 401
    assert call(world, "POST", path, cookie=cookie)[0] == 403
    assert call(world, "POST", path, cookie=cookie, x_csrf_token="0" * 64)[0] == 403
    elsewhere = {"cookie": cookie, "x_csrf_token": csrf, "origin": "http://elsewhere.example"}
    assert call(world, "POST", path, **elsewhere)[0] == 403
    assert (
        call(world, "POST", "/page/sign-in", {"token": world.token}, origin="http://elsewhere.example")[0]
        == 403
    )
    assert call(world, "POST", path, cookie=cookie, x_csrf_token=csrf)[0] == 200


def test_a_session_ends_with_its_token(world: PageWorld) -> None:
    made = world.agents.tokens.create("operator")
    cookie, _ = session(world, made.token)
    assert call(world, "GET", "/page/messages", cookie=cookie)[0] == 200
    world.agents.tokens.revoke(made.token_id)
    until(lambda: call(world, "GET", "/page/messages", cookie=cookie)[0] == 401)


def test_the_policy_of_the_page_allows_nothing_from_elsewhere(world: PageWorld) -> None:
    script = re.search(r'src="([^"]+)"', call(world, "GET", "/")[1].decode())
    assert script is not None
    assert call(world, "GET", script[1])[0] == 200
    for path in ("/", script[1], "/page/overview", "/page/nothing"):
        headers = call(world, "GET", path)[2]
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
    files = Path("src/postroom/page/static")
    for file in files.iterdir():
        text = file.read_text()
        assert "innerHTML" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file


def test_callers_of_one_organization_see_only_that_one(world: PageWorld, browser: Browser) -> None:
    token = world.agents.tokens.create("operator", org="beta").token
    cookie, csrf = session(world, token)

    def seen(path: str) -> Any:
        status, body, _ = call(world, "GET", path, cookie=cookie)
        return json.loads(body) if status == 200 else status

    assert {one["org_id"] for one in seen("/page/messages")["messages"]} == {"beta"}
    assert seen("/page/messages?org_id=acme")["messages"] == []
    assert seen(f"/page/messages/{world.parent_id}") == 404
    assert {one["org_id"] for one in seen("/page/dead-letters")["letters"]} == {"beta"}
    assert [one["org_id"] for one in seen("/page/overview")["organizations"]] == ["beta"]
    assert (seen("/page/goals")["goals"], seen("/page/goals/launch")) == ([], 404)
    assert seen("/page/goals/launch/flame.svg") == seen(f"/page/messages/{world.parent_id}/flame.svg") == 404
    assert (seen("/page/decisions")["decisions"], seen("/page/agents")["mail"]) == ([], None)
    forged = {"message_ids": [world.parent_id], "is_preview": False}
    assert call(world, "POST", "/page/replay", forged, cookie=cookie, x_csrf_token=csrf)[0] == 404
    agent = world.agents.tokens.create("agent", org="acme", agent="ada").token
    cookie, _ = session(world, agent)
    assert {one["org_id"] for one in seen("/page/messages")["messages"]} == {"acme"}
    assert (seen("/page/decisions"), seen("/page/report")) == (403, 403)
    with opened(browser) as (_, page):
        sign_in(page, world.url, agent)
        expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(5)


def test_the_permissions_of_a_token_hold_on_the_page(world: PageWorld) -> None:
    only = Permissions(is_read_only=True, only_buses=("team",))
    cookie, csrf = session(world, world.agents.tokens.create("operator", permissions=only).token)
    status, body, _ = call(world, "GET", f"/page/messages/{world.hostile_id}", cookie=cookie)
    assert (status, json.loads(body)["can_cancel"]) == (200, False)
    refused = call(
        world, "POST", f"/page/messages/{world.hostile_id}/cancel", cookie=cookie, x_csrf_token=csrf
    )
    assert (refused[0], "may only read" in refused[1].decode()) == (403, True)
    assert json.loads(call(world, "GET", "/page/buses", cookie=cookie)[1]) == {"buses": ["team"]}
    assert call(world, "GET", "/page/buses/other", cookie=cookie)[0] == 403
    assert call(world, "GET", "/page/buses/other/stream", cookie=cookie)[0] == 403
    assert call(world, "POST", "/page/sign-out", cookie=cookie)[0] == 403
    assert call(world, "POST", "/page/sign-out", cookie=cookie, x_csrf_token=csrf)[0] == 204
    assert call(world, "GET", "/page/buses", cookie=cookie)[0] == 401


def test_read_only_operator_sees_every_view_and_changes_nothing(world: PageWorld, browser: Browser) -> None:
    token = world.agents.tokens.create("operator", permissions=Permissions(is_read_only=True)).token
    with opened(browser) as (_, page), no_errors(page):
        sign_in(page, world.url, token)
        links = page.get_by_role("navigation").get_by_role("link")
        expect(links).to_have_count(8)
        links.filter(has_text="Decisions").click()
        expect(page.get_by_text("Your token may only read. The choices are: ").first).to_be_visible()
        page.goto(f"{world.url}/#/goals/launch")
        expect(page.get_by_role("table", name="Checkpoints")).to_be_visible()
        expect(page.get_by_role("button", name=re.compile("Roll back"))).to_have_count(0)


# ---- views -----------------------------------------------------------------------------------------


@pytest.mark.statement("system-view")
def test_the_overview_shows_every_part_of_the_server(world: PageWorld, page: Page) -> None:
    page.goto(world.url)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="acme"))
    expect(row).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("3 dead letters"))).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("1 decision$"))).to_be_visible()
    for title in (
        "Throughput",
        "Waiting time",
        "Workers",
        "Agents",
        "Breakers and pauses",
        "What happens now",
    ):
        expect(page.get_by_role("heading", name=title)).to_be_visible()
    expect(page.get_by_role("table", name="Waiting time of the last minute")).to_contain_text("500 ms")
    expect(page.locator("#connection")).to_have_text("Live")


def test_an_open_breaker_is_named_where_persons_are_needed(world: PageWorld, page: Page) -> None:
    def open_breaker(transaction: Transaction) -> None:
        CIRCUITS.put(transaction, breaker.opened(Breaker(), transaction.steady_ns), "acme", "calendar")

    def close_breaker(transaction: Transaction) -> None:
        CIRCUITS.put(transaction, None, "acme", "calendar")

    page.goto(world.url)
    delayed = world.submit(delay_s=600)
    world.engine.store.write(open_breaker)
    needs = page.locator(".needs")
    expect(needs).to_contain_text("The breaker of the service calendar is open for acme")
    figures = page.locator(".rates .figures div").filter(has_text="delayed")
    expect(figures).to_have_text(re.compile("delayed *[1-9]"))
    world.engine.store.write(close_breaker)
    expect(needs).not_to_contain_text("calendar")
    world.wait(world.engine.cancel(delayed))


def test_a_message_submitted_outside_appears_by_itself(world: PageWorld, page: Page) -> None:
    """Nobody reloads. How soon it appears is measured by `bench/bench_up.py`."""
    page.goto(f"{world.url}/#/messages")
    expect(page.get_by_role("row").nth(1)).to_be_visible()
    message_id = world.submit(payload={"body": "from outside"})
    expect(page.get_by_role("link", name=message_id)).to_be_visible()
    page.goto(f"{world.url}/#/overview")
    message_id = world.submit()
    expect(page.get_by_role("list", name="The newest events")).to_contain_text(message_id)


def test_an_event_is_pushed_to_the_screen(world: PageWorld, browser: Browser) -> None:
    """Nothing is asked for again: the clock of the page stands still, so no interval can end.

    A stopped clock is that of the whole context, so this page has one of its own.
    """
    with opened(browser) as (_, page):
        sign_in(page, world.url, world.token)
        expect(page.locator("#connection")).to_have_text("Live")
        feed = page.get_by_role("list", name="The newest events")
        expect(feed.locator("li").first).to_be_visible()
        page.clock.install()
        page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
        page.evaluate("window.isTheSamePage = true")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        message_id = world.submit()
        expect(feed).to_contain_text(message_id)
        assert (asked, page.evaluate("window.isTheSamePage")) == ([], True)


def test_a_refresh_during_a_search_keeps_no_row_of_the_earlier_filter(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages")
    rows = page.locator("tbody tr")
    expect(page.get_by_role("link", name=world.hostile_id)).to_be_visible()
    held: list[Route] = []

    def hold_the_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route(re.compile(r"/page/messages\?.*text="), hold_the_first)
    with page.expect_request(re.compile("text=")):
        page.get_by_label("Search").fill("COLLECT the reviews")
    with page.expect_response(re.compile("text=")):
        world.submit()
    expect(rows).to_have_count(1)
    held[0].abort()


def test_a_new_message_does_not_undo_a_click_on_older_messages(world: PageWorld, browser: Browser) -> None:
    many = [{"type": "agent_message", "org_id": "clicked", "payload": {}}] * 60
    world.post("/engine/messages", {"messages": many})
    with opened(browser) as (_, page), no_errors(page):
        page.add_init_script(
            """window.EventSource = class extends EventSource {
              constructor(url) {
                super(url);
                const html = document.documentElement;
                this.addEventListener("events", (event) => (html.dataset.news += event.data));
              }
            };"""
        )
        sign_in(page, world.url, world.token)
        page.goto(f"{world.url}/#/messages?org_id=clicked")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        page.clock.install()
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route(re.compile(r"/page/messages\?.*cursor=[0-9]"), hold)
        with page.expect_request(re.compile("cursor=[0-9]")):
            page.get_by_role("button", name="Older messages").click()
        newest = world.submit(org_id="clicked")
        expect(page.locator("html")).to_have_attribute("data-news", re.compile(newest))
        page.clock.run_for(60_000)  # the refresh is due by then
        held[0].continue_()
        expect(rows).to_have_count(61)
        expect(rows.first).to_contain_text(newest)


def test_messages_are_filtered_searched_and_paged(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages")
    rows = page.locator("tbody tr")
    page.get_by_label("State").select_option("DEAD_LETTER")
    expect(rows).to_have_count(3)
    page.get_by_label("Organization").fill("beta")
    page.get_by_label("Organization").press("Enter")
    expect(rows).to_have_count(1)
    page.get_by_label("State").select_option("all")
    page.get_by_label("Organization").fill("")
    page.get_by_label("Organization").press("Enter")
    page.get_by_label("Search").fill("COLLECT the reviews")
    expect(rows).to_have_count(1)
    page.get_by_label("Search").fill(world.hostile_id)
    expect(page.get_by_role("link", name=world.hostile_id)).to_be_visible()
    expect(rows).to_have_count(1)
    page.get_by_label("Search").fill("")
    many = [{"type": "agent_message", "org_id": "paged", "payload": {}}] * 120
    world.post("/engine/messages", {"messages": many})
    page.get_by_label("Organization").fill("paged")
    page.get_by_label("Organization").press("Enter")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Older messages").click()
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Older messages").click()
    expect(rows).to_have_count(120)
    assert len(set(page.locator("tbody a.id").all_text_contents())) == 120


def test_one_message_has_its_life_its_tree_and_its_words(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages/{world.parent_id}")
    expect(page.locator(".lead")).to_contain_text("it is done")
    timeline = page.locator(".timeline")
    expect(timeline).to_contain_text("dequeued")
    expect(timeline).to_contain_text("by worker-1")
    expect(timeline).to_contain_text("execution completed")
    tree = page.locator(".tree li")
    expect(tree).to_have_count(4)
    expect(page.get_by_label("Payload as text")).to_contain_text("collect the reviews")
    tree.nth(1).get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).not_to_contain_text(world.parent_id)
    expect(page.locator(".tree a.id").first).to_have_text(world.parent_id)


def test_a_question_is_not_answered_by_the_end_of_the_one_before(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages/{world.submit()}")
    page.get_by_role("button", name="Cancel").click()
    page.evaluate(
        """() => {
          document.querySelector("dialog button:not(.primary)").click();
          document.querySelector("[data-key=cancel]").click();
        }"""
    )
    page.get_by_role("dialog").get_by_role("button", name="Cancel this message").click()
    expect(page.locator(".lead .state")).to_have_text("CANCELLED")


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages/{world.submit()}")
    state = page.locator(".lead .state")
    expect(state).to_have_text("QUEUED")
    late: list[tuple[Route, APIResponse]] = []

    def hold_the_first_that_says_cancelled(route: Route) -> None:
        if late or route.request.method == "POST":
            route.continue_()
            return
        answer = route.fetch()
        if answer.json()["state"] == "CANCELLED":
            late.append((route, answer))
        else:  # an event of the submit came late
            route.fulfill(response=answer)

    page.route(re.compile("/page/messages/"), hold_the_first_that_says_cancelled)
    for button, shown in (("Cancel", "CANCELLED"), ("Retry", "QUEUED")):
        page.get_by_role("button", name=button).click()
        page.get_by_role("dialog").get_by_role("button", name=f"{button} this message").click()
        expect(state).to_have_text(shown)
    [(route, answer)] = late
    page.evaluate(
        """() => {
          window.states = [];
          const note = () => window.states.push(document.querySelector(".lead .state").textContent);
          const everything = { childList: true, subtree: true };
          new MutationObserver(note).observe(document.querySelector("main"), everything);
        }"""
    )
    route.fulfill(response=answer)
    expect(page.locator("#notice")).to_have_text("The message is cancelled.")
    assert "CANCELLED" not in page.evaluate("window.states")


def test_a_waiting_message_is_cancelled_and_retried(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages/{world.submit()}")
    expect(page.locator(".lead")).to_contain_text("no worker is running")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Leave it as it is").click()
    expect(page.locator(".lead .state")).to_have_text("QUEUED")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel this message").click()
    expect(page.locator(".lead .state")).to_have_text("CANCELLED")
    page.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry this message").click()
    expect(page.locator(".lead .state")).to_have_text("QUEUED")


def test_late_answer_of_an_earlier_filter_is_not_shown(world: PageWorld, page: Page) -> None:
    failing = {"payload": {"fail": "x"}, "max_retries": 0}
    hidden, shown = world.run({"org_id": "earlier", **failing}, {"org_id": "later", **failing})
    late: list[tuple[Route, APIResponse]] = []

    def hold_earlier(route: Route) -> None:
        if "org_id=earlier" in route.request.url:
            late.append((route, route.fetch()))
        else:
            route.continue_()

    def held() -> bool:
        page.wait_for_timeout(1)  # handlers of routes run while the page is waited for
        return bool(late)

    page.goto(f"{world.url}/#/dead-letters?org_id=later")
    expect(page.get_by_label(f"choose {shown}")).to_be_visible()
    page.route(re.compile("/page/dead-letters"), hold_earlier)
    organization = page.get_by_label("Organization")
    for name in ("earlier", "later"):
        with page.expect_request(re.compile(f"org_id={name}")):
            organization.fill(name)
            organization.blur()
    expect(page.get_by_label(f"choose {shown}")).to_be_visible()
    until(held)
    [(route, answer)] = late
    assert [letter["message_id"] for letter in answer.json()["letters"]] == [hidden]
    with page.expect_response(re.compile("org_id=earlier")) as answered:
        route.fulfill(response=answer)
    answered.value.finished()
    page.evaluate("() => new Promise((done) => setTimeout(done, 0))")  # the page has taken the answer
    expect(page.get_by_label(f"choose {hidden}")).to_have_count(0)
    expect(page.get_by_label(f"choose {shown}")).to_be_visible()


def test_a_dead_letter_is_replayed_after_a_preview(world: PageWorld, page: Page) -> None:
    [dead] = world.run({"org_id": "replays", "payload": {"fail": "once"}, "max_retries": 0})
    page.goto(f"{world.url}/#/dead-letters?org_id=replays")
    pattern = page.get_by_role("row").filter(has_text="ValidationError").first
    expect(pattern).to_contain_text("once")
    page.get_by_label(f"choose {dead}").check()
    page.get_by_role("button", name="Preview a replay of the chosen").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1 of replays: tool_call")
    expect(dialog).to_contain_text("no worker is running")
    assert world.wait(world.engine.get(dead)).state == "DEAD_LETTER"
    dialog.get_by_role("button", name="Replay 1 message").click()
    expect(page.locator("#notice")).to_contain_text("1 message is queued again")
    assert world.wait(world.engine.get(dead)).state == "QUEUED"
    expect(page.get_by_text("No dead letter fits.")).to_be_visible()


def test_a_failed_attempt_that_was_not_retried_is_not_a_retry(world: PageWorld, page: Page) -> None:
    [dead] = world.run({"org_id": "failed", "payload": {"fail": "once"}})
    page.goto(f"{world.url}/#/messages/{dead}")
    expect(page.locator(".facts div").filter(has_text="failed attempts")).to_have_text(
        re.compile("failed attempts *1")
    )
    expect(page.locator(".facts")).not_to_contain_text("retries")


def test_hostile_payloads_are_shown_as_text(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/messages/{world.hostile_id}")
    payload = page.get_by_label("Payload as text")
    expect(payload).to_contain_text("<script>document.title = 'owned'</script>")
    expect(payload).to_contain_text("\\u202etxt.exe\\u202c")
    expect(payload).to_contain_text("\\u0007")
    assert "\u202e" not in page.content()
    world.post(
        "/bus/hostile/messages", {"type": "FACT", "project_id": "p", "body": "".join(HOSTILE.values())}
    )
    page.goto(f"{world.url}/#/tasks/hostile")
    expect(payload).to_contain_text("<script>document.title = 'owned'</script>")
    expect(payload).to_contain_text("\\u202etxt.exe\\u202c")
    page.goto(f"{world.url}/#/tasks/translate-1")
    expect(page.get_by_role("table", name="Errors")).to_contain_text("<img src=x")
    page.goto(f"{world.url}/#/buses/hostile")
    expect(page.locator(".conversation .body")).to_contain_text("<img src=x")
    expect(page.locator(".conversation .body")).to_contain_text("\\u202etxt.exe")
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def test_a_person_decides(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/decisions")
    card = page.locator("section.card")
    expect(card).to_contain_text("merge of acme")
    expect(card).to_contain_text("the adviser is not sure")
    card.get_by_role("button", name="branch").click()
    expect(page.get_by_text("No decision waits for a person.")).to_be_visible()
    [taken] = [one for one in world.wait(world.engine.decisions.list(decided=True)) if one.kind == "merge"]
    assert (taken.by, taken.choice) == ("person", "branch")


def test_a_rule_that_holds_messages_is_shown_and_removed(world: PageWorld, page: Page) -> None:
    likeness = Likeness("rule-1", "ValueError", payload={"tool": "fax"})
    store = world.engine.store
    store.write(lambda transaction: holds.begin(transaction, "acme", "tool_call", likeness))
    page.goto(f"{world.url}/#/decisions")
    rules = page.get_by_role("table", name="Rules in force")
    expect(rules).to_contain_text("tool_call ValueError")
    expect(rules).to_contain_text('"tool": "fax"')
    rules.get_by_role("button", name="Remove").click()
    expect(page.get_by_text("The rule is removed.")).to_be_visible()
    expect(rules).to_have_count(0)
    assert world.wait(world.engine.decisions.rules()) == []


def test_views_of_goals_and_messages_show_where_the_time_went(world: PageWorld, page: Page) -> None:
    def frames(path: str) -> set[str]:
        status, body, headers = call(world, "GET", path, authorization=f"Bearer {world.token}")
        assert (status, headers["content-type"]) == (200, "image/svg+xml")
        assert "script-src" not in headers["content-security-policy"]
        hints = [one.text or "" for one in ET.fromstring(body).iter() if one.tag.endswith("}title")]  # noqa: S314 - ours
        return {hint.partition("\n")[0] for hint in hints}

    parent = world.parent_id
    assert frames("/page/goals/launch/flame.svg") >= {"launch", "tool_call"}
    assert frames(f"/page/messages/{parent}/flame.svg") >= {parent, "tool_call", "model_call"}
    for view in ("goals/launch", f"messages/{parent}"):
        page.goto(f"{world.url}/#/{view}")
        image = page.get_by_role("img", name="Flame graph")
        expect(image).to_be_visible()
        assert image.evaluate("image => image.decode().then(() => image.naturalHeight > 0)")


def test_a_goal_is_rolled_back_after_a_preview(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/goals")
    page.get_by_role("link", name="launch").click()
    expect(page.get_by_role("table", name="Changes that the main graph")).to_contain_text("draft")
    expect(page.get_by_label("Context of the goal")).to_contain_text("engineers")
    expect(page.get_by_role("table", name="Effects")).to_contain_text("send-newsletterirreversiblenothing")
    page.get_by_role("button", name="Roll back to here").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("cannot be undone")
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("send-newsletter")
    page.get_by_role("button", name="Roll back to here").first.click()
    dialog.get_by_label("send-newsletter").check()
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    expect(page.locator("#notice")).to_contain_text("rolled back to launch#1")
    assert world.wait(world.engine.graph.branch("launch").get("plan")) is None


def test_agents_and_mailboxes_are_shown_without_private_ids(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/agents")
    agents = page.get_by_role("table", name="Agents of the global queue")
    expect(agents.get_by_role("row").filter(has_text="grace")).to_contain_text("acme")
    expect(page.get_by_role("table", name="Public mailboxes")).to_contain_text("What everybody may read")
    expect(page.get_by_text("whose ids are not shown: 1.")).to_be_visible()
    body = call(world, "GET", "/page/agents", authorization=f"Bearer {world.token}")[1].decode()
    assert world.private_id not in body + page.content() + (world.data / "mail" / "status.json").read_text()


def test_the_tasks_of_an_agent_are_listed_and_opened(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/agents")
    queue = page.get_by_role("table", name="Tasks of agents").get_by_role("row").filter(has_text="ada")
    expect(queue.get_by_role("cell")).to_have_text(
        ["@acme:ada", "1", re.compile("s$"), "1", "1", "1", "0", "0"]
    )
    queue.get_by_role("link", name="ada").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.locator(".state")).to_have_text(["QUEUED", "PROCESSING", "DEAD_LETTER", "COMPLETED"])
    expect(rows.nth(1)).to_contain_text("ada-2")
    expect(rows.nth(2)).to_contain_text(HOSTILE["html"])
    page.get_by_label("State").select_option("COMPLETED")
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="translate-0").click()
    expect(page.get_by_label("Payload as text")).to_contain_text("manual-0.md")
    expect(page.get_by_label("Result as text")).to_contain_text("420")
    expect(page.locator(".timeline")).to_contain_text("by ada-1")
    page.goto(f"{world.url}/#/tasks/translate-2")
    expect(page.locator(".facts")).to_contain_text(re.compile("held byada-2 until .* unless it renews"))


def test_tasks_are_paged_and_new_ones_appear_by_themselves(world: PageWorld, page: Page) -> None:
    many = [{"agent": "paged", "payload": number} for number in range(120)]
    world.post("/queue/enqueue", {"tasks": many})
    page.goto(f"{world.url}/#/agents/paged")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(50)
    for count in (100, 120):
        page.get_by_role("button", name="Older tasks").click()
        expect(rows).to_have_count(count)
    assert len(set(page.locator("tbody a.id").all_text_contents())) == 120
    task_id = world.enqueue("paged", "the newest")
    expect(rows.first).to_contain_text(task_id)
    page.goto(f"{world.url}/#/overview")
    page.get_by_role("list", name="The newest events").get_by_role("link", name=task_id).first.click()
    expect(page.locator(".lead .state")).to_have_text("QUEUED")
    world.post(f"/tasks/{task_id}/cancel", {})
    expect(page.locator(".lead .state")).to_have_text("CANCELLED")


def test_agents_with_tasks_are_paged_by_their_names(world: PageWorld, page: Page) -> None:
    names = [f"many-{number:03}" for number in range(120)]
    world.post("/queue/enqueue", {"tasks": [{"agent": name, "payload": 0} for name in names]})
    page.goto(f"{world.url}/#/agents")
    queues = page.get_by_role("table", name="Tasks of agents")
    expect(queues.get_by_role("link", name="ada")).to_be_visible()
    expect(queues.get_by_role("link", name="many-119")).to_have_count(0)
    page.get_by_role("button", name="Further agents").click()
    expect(queues.get_by_role("link", name="many-119")).to_be_visible()
    expect(queues.get_by_role("link", name="ada")).to_have_count(0)
    page.get_by_role("button", name="First agents").click()
    expect(queues.get_by_role("link", name="ada")).to_be_visible()


def test_a_caller_sees_the_tasks_that_its_token_reads(world: PageWorld, browser: Browser) -> None:
    grace = world.agents.tokens.create("agent", org="acme", agent="grace").token
    reader = world.agents.tokens.create(
        "agent", org="acme", agent="linus", permissions=Permissions(may_read=("ada",))
    ).token
    namesake = world.agents.tokens.create("agent", org="beta", agent="ada").token
    operator = world.agents.tokens.create("operator", org="acme").token

    def seen(token: str, path: str) -> Any:
        status, body, _ = call(world, "GET", path, authorization=f"Bearer {token}")
        return json.loads(body) if status == 200 else status

    def queues(token: str) -> list[str]:
        return [one["agent"] for one in seen(token, "/page/tasks")["queues"]]

    assert (queues(grace), queues(reader), queues(namesake), queues(operator)) == (["grace"], ["ada"], [], [])
    assert {"@acme:ada", "@acme:grace"} <= set(queues(world.token))
    found = {token: seen(token, "/page/agents/ada/tasks") for token in (grace, reader, namesake, operator)}
    assert (found[grace], found[namesake]["tasks"], found[operator]) == (403, [], 403)
    assert "translate-0" in [one["task_id"] for one in found[reader]["tasks"]]
    path = "/page/tasks/translate-0"
    assert (seen(grace, path), seen(namesake, path), seen(operator, path)) == (404, 404, 404)
    assert seen(reader, path)["state"] == "COMPLETED"
    assert seen(world.token, f"/page/tasks/{world.parent_id}") == 404  # a message is not a task
    with opened(browser) as (_, page), no_errors(page):
        sign_in(page, world.url, grace)
        page.goto(f"{world.url}/#/agents")
        expect(page.get_by_role("table", name="Tasks of agents").locator("tbody tr")).to_have_count(1)
        page.get_by_role("link", name="grace").click()
        expect(page.locator("tbody tr")).to_have_count(1)
        world.enqueue("grace", "later")
        expect(page.locator("tbody tr")).to_have_count(2)  # her page gets no events of tasks


def test_a_bus_is_a_live_conversation_with_threads(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/buses")
    page.get_by_role("link", name="team").click()
    thread = page.locator(".conversation > li").first
    expect(thread).to_contain_text("The build is green.")
    expect(thread.locator("ul li")).to_contain_text("Shall we ship?")
    parent = thread.get_attribute("data-id")
    answer = {"type": "ANSWER", "project_id": "p", "body": "Yes, today.", "parents": [parent]}
    world.post("/bus/team/messages", answer)
    expect(thread.locator("ul li")).to_have_count(2)
    expect(thread).to_contain_text("Yes, today.")


def test_the_report_is_shown_with_the_live_numbers(world: PageWorld, page: Page) -> None:
    page.goto(f"{world.url}/#/report")
    frame = page.frame_locator("iframe")
    plots = frame.locator("svg")
    expect(plots).to_have_count((world.data / "report.html").read_text().count("<svg"))
    box = plots.first.bounding_box()
    assert box is not None
    assert box["width"] > 200  # the policy of the report allows its own styles
    expect(page.get_by_role("heading", name="Throughput")).to_be_visible()


def test_both_commands_are_shown_before_there_is_a_table(world: PageWorld, page: Page) -> None:
    report = world.data / "report.html"
    kept = report.rename(world.data / "kept.html")
    try:
        page.goto(f"{world.url}/#/report")
        commands = page.get_by_label("Commands as text")
        expect(commands).to_contain_text(f"postroom pipeline run --events {world.data / 'audit'} --tables")
        expect(commands).to_contain_text("postroom pipeline report --tables")
        expect(page.get_by_role("main")).not_to_contain_text("`")
    finally:
        kept.rename(report)


# ---- faults, keys and screens ----------------------------------------------------------------------


def test_a_lost_connection_comes_back_without_a_gap(world: PageWorld, browser: Browser) -> None:
    with TcpProxy(int(urlsplit(world.url).port or 0)) as proxy, opened(browser) as (_, page), no_errors(page):
        sign_in(page, f"http://127.0.0.1:{proxy.port}/", world.token)
        feed = page.get_by_role("list", name="The newest events")
        expect(page.locator("#connection")).to_have_text("Live")
        first = world.submit(payload={"body": "before the cut"})
        expect(feed).to_contain_text(first)
        proxy.is_hole = True
        proxy.reset_all()
        expect(page.locator("#connection")).to_have_text("Connecting")
        missed = [world.submit(payload={"body": number}) for number in range(3)]
        proxy.is_hole = False
        proxy.reset_all()  # connections that were made while nothing was forwarded
        for message_id in missed:
            expect(feed).to_contain_text(message_id)
        expect(page.locator("#connection")).to_have_text("Live")
        shown = feed.locator("li").evaluate_all("all => all.map(one => one.dataset.id)")
        assert [one for one in shown if one in missed] == [one for one in reversed(missed) for _ in range(2)]


def test_the_keyboard_is_enough(world: PageWorld, browser: Browser) -> None:
    message_id = world.submit()
    with opened(browser) as (_, page), no_errors(page):
        page.goto(world.url)
        expect(page.get_by_label("Token")).to_be_focused()
        page.keyboard.type(world.token)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        tab_to(page, "Messages")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Messages", level=1)).to_be_focused()
        tab_to(page, message_id)
        page.keyboard.press("Enter")
        expect(page.locator(".lead .state")).to_have_text("QUEUED")
        tab_to(page, "Cancel")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")  # the first button of the dialog has the focus
        expect(page.locator(".lead .state")).to_have_text("CANCELLED")


def tab_to(page: Page, text: str) -> None:
    """Press Tab until something with this text has the focus, which has to be visible."""
    for _ in range(120):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "[document.activeElement.textContent, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if found[0].strip() == text:
            assert found[1] != "none"
            return
    raise AssertionError(f"Tab never reached {text}")


def test_the_page_fits_a_phone_and_has_light_and_dark_colours(world: PageWorld, browser: Browser) -> None:
    phone = {"width": 375, "height": 700}
    with opened(browser, viewport=phone, color_scheme="dark") as (_, page), no_errors(page):
        sign_in(page, world.url, world.token)
        expect(page.get_by_role("link", name="acme")).to_be_visible()
        for view, shown in VIEWS.items():
            page.goto(f"{world.url}/#/{view}")
            expect(page.locator("main")).to_contain_text(shown)
            assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"], view
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_label("Colours").select_option("light")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert brightness(dark) < 60
        assert brightness(light) > 200


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_the_cookie_of_a_session_is_secure_over_tls(tmp_path: Path, browser: Browser) -> None:
    made = postroom("tls", "self-signed", "--out", tmp_path / "tls").line
    tls = ("--tls-cert", made["cert"], "--tls-key", made["key"])
    with running(tmp_path / "run", "--no-audit", "--no-mail", *tls) as up:
        assert up.token is not None
        context = browser.new_context(ignore_https_errors=True)  # no authority has signed the certificate
        page = context.new_page()
        sign_in(page, up.http, up.token)
        expect(page.locator("#connection")).to_have_text("Live")
        [cookie] = context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        assert cookie["name"].startswith("__Host-")
        page.reload()  # the browser sends the cookie
        expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
        context.close()


# ---- what an engine at work adds -------------------------------------------------------------------


@contextmanager
def budgeted(data: Path) -> Iterator[tuple[str, str, str]]:
    """A server and a worker with a budget, an open breaker, a pause, and a message that the worker holds.

    Gives the address of the server, a token, and the id of the message.
    """
    data.mkdir()
    token = TokenRegistry(data).create("admin").token
    process = start(
        "postroom", "tasks", "serve", "--data", data, "--port", 0, "--app", "tests.pagebudgets:engine"
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    released = asyncio.Event()
    with pagebudgets.opened(f"sqlite:///{data / 'queue.db'}", released) as engine:
        held = engine.blocking.wait(worked(engine))
        until(lambda: engine.blocking.wait(engine.get(held)).state == "PROCESSING")
        try:
            yield url, token, held
        finally:
            released.set()
            engine.blocking.wait(engine.stop())
            process.terminate()
            finish(process)


async def worked(engine: Engine) -> str:
    calls = [await engine.submit(type="tool_call", org_id="acme", payload={}) for _ in range(3)]
    asyncio.get_running_loop().create_task(engine.run(worker_id="worker-7"))
    for call_handle in calls:
        with suppress(Exception):  # the service is down
            await call_handle.result(timeout_s=HANG_GUARD_S)
    await engine.pause(org_id="beta", type="agent_message")
    held = await engine.submit(type="model_call", org_id="acme", payload={}, tokens=400, models=["small"])
    return str(held.message_id)


def test_budgets_pauses_breakers_and_the_holder_of_a_message_are_drawn(
    tmp_path: Path, browser: Browser
) -> None:
    with budgeted(tmp_path / "run") as (url, token, held), opened(browser) as (_, page), no_errors(page):
        sign_in(page, url, token)
        budget = page.get_by_role("table", name="Token budgets of models").get_by_role("row").nth(1)
        expect(budget).to_contain_text("local/small")
        expect(budget.get_by_role("cell").nth(3)).to_have_text("400")
        expect(budget.get_by_role("cell").nth(4)).to_have_text("600")
        assert budget.get_by_role("progressbar").evaluate("one => one.value / one.max") == 0.4
        breaker = page.get_by_role("table", name="Breakers").get_by_role("row").nth(1)
        expect(breaker).to_contain_text("slack")
        expect(breaker).to_contain_text("open")
        expect(breaker).to_contain_text("acme")
        expect(page.get_by_text("type agent_message of beta is paused")).to_be_visible()
        expect(page.get_by_role("table", name="Workers that reported lately")).to_contain_text("worker-7")
        page.goto(f"{url}/#/messages/{held}")
        expect(page.locator(".lead .state")).to_have_text("PROCESSING")
        expect(page.locator(".lead")).to_contain_text("worker worker-7 holds its lease")
        expect(page.locator(".facts")).to_contain_text(re.compile("held byworker-7 for .* unless it renews"))


def test_all_links_to_views_stand_in_one_row_on_a_laptop(world: PageWorld, browser: Browser) -> None:
    with opened(browser, viewport={"width": 1280, "height": 800}) as (_, page), no_errors(page):
        sign_in(page, world.url, world.token)
        expect(page.locator("#connection")).to_have_text("Live")
        boxes = [link.bounding_box() for link in page.get_by_role("navigation").get_by_role("link").all()]
        assert len({box["y"] for box in boxes if box is not None}) == 1
