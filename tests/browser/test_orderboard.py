"""The demo as a visitor sees it: a real Chromium, real processes, every button."""

import json
import os
import re
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from playwright.sync_api import Browser, Page, expect, sync_playwright

from examples.orderboard import surroundings
from examples.orderboard.writer import RATES_PER_S
from gateway.embedded.process import free_port
from outbox import keys
from tests.processes import Process

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1280, "height": 800}
SETTLE_TIMEOUT_MS = 45_000
# What Chromium writes when a gateway is not there, and the only thing it may write.
EXPECTED_ERRORS = re.compile(r"WebSocket connection to 'ws://[^']+' failed")

COUNTERS = "window.orderboard.counters()"
CLEAN = (
    "(c => c.settled && !c.away && c.missing === 0 && c.lost === 0 && c.duplicated === 0"
    " && c.outOfOrder === 0 && c.unrecovered === 0 && c.phantoms === 0)"
)
STORED = """async () => {
  const config = JSON.parse(document.getElementById("config").textContent);
  const answer = await fetch("/board", {headers: {[config.tokenHeader]: config.token}});
  return (await answer.json()).orders.map(o => [o.order, o.status, o.version]);
}"""


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orderboard")


@pytest.fixture(scope="module")
def demo_settings(demo: str, demo_folder: Path) -> dict[str, str]:
    """The TIDEGATE_* settings of the running demo's processes."""
    lines = (demo_folder / "environment").read_text().splitlines()
    return dict(shlex.split(line)[0].split("=", 1) for line in lines)


SOMEBODY_ELSES = {
    "TIDEGATE_POSTGRES_DSN": "postgresql://app:secret@db.example.com/shop",
    "TIDEGATE_REDIS_URL": "redis://:secret@redis.example.com:6379/0",
    "TIDEGATE_TOKEN_HMAC_SECRET": "not of this demo, and 32 bytes long or longer",
}
"""What a shell may have exported; the demo under test runs in such a one."""


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Iterator[str]:
    """A running demo; its URL."""
    port = free_port()
    process = Process(
        "orderboard",
        [
            sys.executable,
            "-m",
            "examples.orderboard",
            "--port",
            str(port),
            "--data",
            str(demo_folder),
        ],
        {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **SOMEBODY_ELSES},
        demo_folder / "demo.log",
    )
    try:
        process.wait_log("The order board is open", 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()
    assert "Traceback" not in process.text(), process.text()[-8000:]


@pytest.fixture(scope="module")
def browser(require: Callable[[str], str]) -> Iterator[Browser]:
    path = require("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Visitor:
    """A page of the demo in its own browser context, and all that it complained of."""

    def __init__(self, browser: Browser, url: str, live: bool = True, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **context})
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.dialled: list[str] = []
        self.page.on("websocket", lambda socket: self.dialled.append(socket.url))
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.goto(url)
        if not live:
            return
        self.write(20)
        self.until("c => c.panes.every(p => p.state === 'live') && c.committed > 5")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not EXPECTED_ERRORS.search(message.text):
            self.complaints.append(f"{message.type}: {message.text}")

    def counters(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(COUNTERS)
        return found

    def until(self, condition: str, timeout_ms: int = SETTLE_TIMEOUT_MS) -> None:
        """Wait until a JavaScript function of the counters is true."""
        try:
            self.page.wait_for_function(f"() => ({condition})({COUNTERS})", timeout=timeout_ms)
        except Exception as error:
            counters = {**self.counters(), "panes": [_short(p) for p in self.counters()["panes"]]}
            feed = self.page.locator("#feed li").all_inner_texts()
            raise AssertionError(
                f"not within {timeout_ms} ms: {condition}\n{json.dumps(counters, indent=1)}\n"
                + "\n".join(feed)
            ) from error

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def settles(self) -> None:
        """All counters come to rest at zero while deliveries go on, on both screens."""
        delivered = [pane["delivered"] for pane in self.counters()["panes"]]
        self.until(f"c => {CLEAN}(c) && c.panes.every((p, i) => p.delivered > {delivered}[i] + 5)")

    def told(self, text: str) -> None:
        """The feed says so."""
        expect(self.page.locator("#feed li", has_text=text).first).to_be_visible(timeout=30_000)

    def stop_writing(self) -> None:
        self.write(0)
        # Two looks at Postgres later all that committed is known, and it has been delivered.
        self.until(f"c => {CLEAN}(c) && c.onTheWay === 0")
        committed = self.counters()["committed"]
        self.page.wait_for_timeout(1200)
        self.until(f"c => {CLEAN}(c) && c.onTheWay === 0 && c.committed >= {committed}")

    def write(self, per_s: int) -> None:
        """Move the slider."""
        slider = self.page.get_by_role("slider")
        slider.fill(str(RATES_PER_S.index(per_s)))
        text = f"{per_s} per second" if per_s else "paused"
        expect(slider).to_have_attribute("aria-valuetext", text)
        expect(self.page.locator("#rate-text")).to_have_text(text)

    def close(self) -> None:
        """Raises if anything went wrong unnoticed. May be repeated."""
        self.context.close()
        assert self.complaints == []


def _short(pane: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pane.items() if name != "board"}


@pytest.fixture
def visit(browser: Browser, demo: str) -> Iterator[Callable[..., Visitor]]:
    visitors: list[Visitor] = []

    def open_page(**context: Any) -> Visitor:
        visitors.append(Visitor(browser, demo, **context))
        return visitors[-1]

    yield open_page
    for visitor in visitors:
        visitor.close()


def test_boards_agree_with_the_database(visit: Callable[..., Visitor]) -> None:
    visitor = visit()
    visitor.write(100)
    visitor.until("c => c.committed > 150 && c.rolledBack > 10")
    visitor.stop_writing()
    counters = visitor.counters()
    stored = visitor.page.evaluate(STORED)
    assert stored
    for pane in counters["panes"]:
        assert pane["delivered"] == counters["committed"]
        assert pane["board"] == stored
    assert counters["delivered"] == 2 * counters["committed"]
    assert visitor.page.locator("[data-figure=rolledBackNote]").inner_text() == "never announced"


@pytest.mark.parametrize("name", ["A", "B"])
def test_offline_and_back(visit: Callable[..., Visitor], name: str) -> None:
    visitor = visit()
    visitor.write(100)
    visitor.press(f"Screen {name}: go offline")
    # The counters do not flatter: what an absent screen lacks is missing.
    # But it is no fault: this is what was asked for.
    visitor.until("c => c.missing > 20")
    expect(visitor.page.locator("#verdict")).to_have_text("A screen is away")
    expect(visitor.page.locator("#tile-missing")).to_have_attribute("data-tone", "plain")
    visitor.press(f"Screen {name}: come back")
    visitor.told(f"Screen {name} is back through gateway {name}")
    visitor.settles()
    visitor.told(f"Screen {name} went offline: all well after")
    expect(visitor.page.locator("#verdict")).to_have_text("Nothing lost")


@pytest.mark.parametrize("name", ["A", "B"])
def test_kill_and_restart_a_gateway(visit: Callable[..., Visitor], name: str) -> None:
    visitor = visit()
    other = {"A": "B", "B": "A"}[name]
    visitor.press(f"Kill gateway {name}")
    visitor.told(f"Screen {name} is back through gateway {other}")
    visitor.settles()
    visitor.press(f"Restart gateway {name}")
    visitor.told(f"Screen {name} is back through gateway {name}")
    visitor.settles()
    assert [pane["gateway"] for pane in visitor.counters()["panes"]] == ["A", "B"]


def test_no_gateway_at_all(visit: Callable[..., Visitor]) -> None:
    """Killed on one page, seen on another, and by a page that comes in the middle of it."""
    visitor, other = visit(), visit()
    for name in "AB":
        visitor.press(f"Kill gateway {name}")
        other.told(f"Gateway {name} went down")
    for witness in (visitor, other):
        verdict = witness.page.locator("#verdict")
        expect(verdict).to_have_text("No gateway is running: press Restart")
        expect(witness.page.locator("[data-figure=now]")).to_have_text("–")
    late = visit(live=False)
    expect(late.page.locator("#verdict")).to_have_text("No gateway is running: press Restart")
    late.told("Two screens, and no gateway is running, from offset")
    # More attempts than it takes to suspect the port.
    while len(late.dialled) < 2 * 7:
        late.page.wait_for_event("websocket", timeout=30_000)
    visitor.press("Restart gateway A")
    for witness in (visitor, other, late):
        witness.settles()
    middle = visit()
    middle.told("Two screens, both through gateway A as the other is not running, from offset")
    visitor.press("Restart gateway B")
    other.told("Gateway B runs again")
    for witness in (visitor, other, late, middle):
        witness.until("c => c.panes[0].gateway === 'A' && c.panes[1].gateway === 'B'")
        witness.settles()
    assert late.page.locator("#feed li", has_text="is its port open").count() == 0
    # Who pressed knows it already.
    assert (
        visitor.page.locator("#feed li", has_text=re.compile("went down|runs again")).count() == 0
    )


def test_kill_the_relay(visit: Callable[..., Visitor]) -> None:
    visitor = visit()
    # By keyboard, as every button can be.
    visitor.page.get_by_role("button", name="Kill the relay").press("Enter")
    visitor.told("Relay killed:")
    visitor.settles()


def test_flush_redis(visit: Callable[..., Visitor]) -> None:
    visitor = visit()
    visitor.press("Flush Redis")
    visitor.told("Redis flushed:")
    visitor.settles()


def test_everything_at_once(visit: Callable[..., Visitor]) -> None:
    visitor = visit()
    visitor.write(100)
    visitor.press("Screen A: go offline")
    visitor.until("c => c.panes[0].missing > 50")
    visitor.press("Flush Redis")
    visitor.press("Kill the relay")
    visitor.press("Kill gateway B")
    visitor.press("Screen A: come back")
    visitor.settles()
    visitor.press("Restart gateway B")
    visitor.told("Screen B is back through gateway B")
    visitor.settles()
    visitor.stop_writing()
    counters = visitor.counters()
    assert counters["delivered"] == 2 * counters["committed"]


def test_a_late_page_starts_at_its_own_moment(visit: Callable[..., Visitor]) -> None:
    visit().write(100)
    late = visit()
    first = late.counters()
    assert first["panes"][0]["offset"] > first["panes"][0]["delivered"]
    late.settles()
    late.stop_writing()
    counters = late.counters()
    assert counters["delivered"] == 2 * counters["committed"]


@pytest.mark.parametrize("width", [360, 390, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_small_screen(visit: Callable[..., Visitor], width: int, scheme: str) -> None:
    page = visit(viewport={"width": width, "height": 844}, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box is not None
        assert box["height"] >= 38
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    top = [page.locator(f"[data-screen={name}]").bounding_box() for name in "AB"]
    assert top[0] is not None
    assert top[1] is not None
    assert (top[1]["y"] > top[0]["y"]) == (width < 700)


def test_reduced_motion_is_respected(visit: Callable[..., Visitor]) -> None:
    page = visit(reduced_motion="reduce").page
    order = page.locator(".order").first
    assert order.evaluate("element => getComputedStyle(element).animationName") == "none"


def test_the_ledger_sees_each_kind_of_fault(visit: Callable[..., Visitor]) -> None:
    """Zeros mean something only if a fault would not be one."""
    found = visit().page.evaluate(
        """async () => {
          const { Ledger } = await import("/static/ledger.js");
          const run = (steps) => {
            const ledger = new Ledger({ offset: 10, epoch: "e" });
            ledger.commit([1, 2, 3, 4], 0);
            steps(ledger);
            const { delivered, duplicated, outOfOrder, phantoms, lost } = ledger;
            return [delivered, ledger.missing(5000), duplicated, outOfOrder, phantoms, lost];
          };
          const all = (ledger) => [1, 2, 3, 4].forEach((id) => ledger.receive(id, 10 + id, id, 1));
          return {
            well: run(all),
            young: run((l) => { all(l); l.commit([5], 4000); }),
            hole: run((l) => { l.receive(1, 11, 1, 1); l.receive(4, 14, 4, 1); }),
            twice: run((l) => { all(l); l.receive(2, 12, 2, 1); }),
            twiceAnew: run((l) => { all(l); l.receive(2, 15, 2, 1); }),
            swapped: run((l) => [[1, 11], [3, 13], [2, 12], [4, 14]]
              .forEach(([id, offset]) => l.receive(id, offset, id, 1))),
            versions: run((l) => [[1, 2], [2, 1], [3, 3], [4, 4]]
              .forEach(([id, version]) => l.receive(id, 10 + id, 7, version))),
            rolledBack: run((l) => { all(l); l.receive(99, 15, 9, 1); l.accuse([99]); }),
          };
        }"""
    )
    assert found == {
        # delivered, missing, duplicated, out of order, not committed, passed over
        "well": [4, 0, 0, 0, 0, 0],
        "young": [4, 0, 0, 0, 0, 0],
        "hole": [2, 2, 0, 0, 0, 2],
        "twice": [4, 0, 1, 0, 0, 0],
        "twiceAnew": [4, 0, 1, 0, 0, 0],
        "swapped": [4, 0, 0, 1, 0, 0],
        "versions": [4, 0, 0, 1, 0, 0],
        "rolledBack": [4, 0, 0, 0, 1, 0],
    }


def test_a_long_word_stays_inside_the_feed(visit: Callable[..., Visitor]) -> None:
    page = visit().page
    assert page.evaluate(
        """async () => {
          const { Incidents } = await import("/static/incidents.js");
          const list = document.getElementById("feed");
          new Incidents(list).report("x".repeat(400));
          return list.scrollWidth <= list.clientWidth;
        }"""
    )


# ── Whose servers ────────────────────────────────────────────────────────────────────────────────


def test_exported_settings_are_left_alone(demo_settings: dict[str, str], demo_folder: Path) -> None:
    assert "ignoring TIDEGATE_POSTGRES_DSN, TIDEGATE_REDIS_URL, TIDEGATE_TOKEN_HMAC_SECRET" in (
        demo_folder / "demo.log"
    ).read_text(encoding="utf-8")
    for name, value in SOMEBODY_ELSES.items():
        assert demo_settings[name] != value
    assert "@127.0.0.1" in demo_settings["TIDEGATE_POSTGRES_DSN"]


def test_with_the_option_they_are_used(migrated: str, redis_url: str, tmp_path: Path) -> None:
    process = Process(
        "orderboard",
        [
            sys.executable,
            "-m",
            "examples.orderboard",
            "--port",
            "0",
            "--data",
            str(tmp_path / "data"),
            "--use-environment",
        ],
        {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        | {"TIDEGATE_POSTGRES_DSN": migrated, "TIDEGATE_REDIS_URL": redis_url},
        tmp_path / "demo.log",
    )
    try:
        process.wait_log("The order board is open", 60)
    finally:
        process.stop()
    assert "Postgres: 127.0.0.1, Redis: 127.0.0.1" in process.text()
    with psycopg.connect(migrated) as connection:
        row = connection.execute("SELECT to_regclass('orderboard.orders') IS NOT NULL").fetchone()
    assert row == (True,)


def test_only_hosts_are_told() -> None:
    assert surroundings.describe(SOMEBODY_ELSES) == (
        "Postgres: db.example.com, Redis: redis.example.com"
    )
    assert surroundings.describe({}) == "Postgres: the demo's own, Redis: the demo's own"
    broken = {"TIDEGATE_POSTGRES_DSN": "secret", "TIDEGATE_REDIS_URL": "redis://:sec/ret@[host"}
    assert "sec" not in surroundings.describe(broken)


# ── Who may press the buttons ────────────────────────────────────────────────────────────────────


def _status(url: str, **headers: str) -> int:
    request = urllib.request.Request(
        url, b"{}", {k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def _page_token(demo: str) -> str:
    with urllib.request.urlopen(demo, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'"token": "([^"]+)"', text)
    assert found is not None
    return found[1]


def test_strangers_are_refused(demo: str) -> None:
    token = _page_token(demo)
    rate = f"{demo}/control/rate"
    assert _status(f"{demo}/control/flush-redis") == 403
    assert _status(f"{demo}/client-token") == 403
    assert _status(rate, X_Orderboard_Token="guess") == 403
    assert _status(rate, X_Orderboard_Token=token, Origin="https://evil.example") == 403
    assert _status(rate, X_Orderboard_Token=token, Host="evil.example") == 403
    # Let through, and refused for what it asks.
    assert _status(rate, X_Orderboard_Token=token) == 400


def test_another_page_cannot_press(visit: Callable[..., Visitor], demo: str) -> None:
    visitor = visit()
    elsewhere = visitor.context.new_page()
    # Another origin on the same machine: nothing but the demo's guard is between them.
    elsewhere.goto(f"http://127.0.0.1:{visitor.counters()['gateways'][1]['port']}/healthz")
    elsewhere.evaluate(
        """url => fetch(url, {method: "POST", mode: "no-cors", body: "{}"})""",
        f"{demo}/control/kill-gateway/A",
    )
    visitor.settles()
    assert all(gateway["alive"] for gateway in visitor.counters()["gateways"])
    assert visitor.counters()["panes"][0]["gateway"] == "A"


# ── Last, since it ends the history that the other tests go on with ──────────────────────────────


def test_lost_continuity_is_shown(
    visit: Callable[..., Visitor], demo_settings: dict[str, str]
) -> None:
    """Postgres with another epoch, as after a restored backup: told in red, board loaded anew."""
    visitor = visit()
    with psycopg.connect(demo_settings["TIDEGATE_POSTGRES_DSN"]) as connection:
        connection.execute("SELECT FROM tidegate.shard ORDER BY id FOR NO KEY UPDATE")
        connection.execute("UPDATE tidegate.meta SET epoch = '0123456789abcdef'")
    with redis.Redis.from_url(demo_settings["TIDEGATE_REDIS_URL"]) as server:
        server.delete(keys.EPOCH)
    visitor.until("c => c.panes.every(p => p.unrecovered === 1 && p.state === 'live')")
    for flag in visitor.page.locator(".flag").all():
        expect(flag).to_contain_text("continuity lost")
    expect(visitor.page.locator("#verdict")).to_have_text("Told: continuity lost")
    visitor.write(0)
    visitor.until("c => JSON.stringify(c.panes[0].board) === JSON.stringify(c.panes[1].board)")
    visitor.page.wait_for_function(
        f"""async () => {{
          const stored = await ({STORED})();
          return {COUNTERS}.panes.every(p => JSON.stringify(p.board) === JSON.stringify(stored));
        }}"""
    )
    visitor.write(20)
    visitor.close()
    # Who comes later starts on the new history.
    visit().settles()
