// The page: two screens, the truth to hold them against, and the buttons.

import { setText } from "./board.js";
import { Incidents } from "./incidents.js";
import { Chart, duration, Latency } from "./latency.js";
import { Pane } from "./pane.js";
import { Server } from "./server.js";

const TRUTH_EVERY_MS = 400;
const RENDER_EVERY_MS = 250;
/** From here on cards come too fast to be moved in gently. */
const FAST_PER_S = 50;
/** A run of failed looks at the truth that is worth a line. */
const SILENT_AFTER = 5;
/** Messages of this age have not come as usual: something is the matter. */
const LATE_MS = 800;

const config = JSON.parse(document.getElementById("config").textContent);
const server = new Server(config);
const incidents = new Incidents(document.getElementById("feed"));
const latency = new Latency();
const chart = new Chart(document.getElementById("chart"));
const truth = { committed: 0, rolledBack: 0, last: null, failures: 0 };
const clock = { offsetMs: 0, bestRoundTripMs: Infinity };
let gateways = config.gateways;
let relaysAlive = true;
let calmSince = null;
/** Presses of this page under way, and ended. A look at the truth that one overlaps may tell an old state. */
const presses = { open: 0, ended: 0 };

/** The server's clock, as well as it is known here; the same clock if it runs on this machine. */
function now() {
  return Date.now() + clock.offsetMs;
}

const page = {
  room: config.room,
  now,
  gateways: () => gateways,
  clientToken: () => server.clientToken(),
  loadBoard: () => server.board(),
  report: (text, tone) => incidents.report(text, tone),
  measure: (screen, latencyMs, replayed) => latency.add(screen, now(), latencyMs, replayed),
};

const panes = config.gateways.map(({ name }) => {
  const element = document.getElementById("pane-template").content.cloneNode(true).firstElementChild;
  element.dataset.screen = name;
  element.setAttribute("aria-labelledby", `screen-${name}`);
  const title = element.querySelector("h2");
  title.id = `screen-${name}`;
  title.textContent = `Screen ${name}`;
  document.querySelector(".panes").append(element);
  const pane = new Pane(name, page, element);
  const button = element.querySelector("[data-press=offline]");
  button.setAttribute("aria-label", `Screen ${name}: go offline`);
  button.addEventListener("click", () => toggleOffline(pane, button));
  return pane;
});

// ── The truth ────────────────────────────────────────────────────────────────────────────────────

async function lookAtTruth() {
  // What was received before this look began must be in its answer: its commit came first.
  const suspects = panes.map((pane) => [...pane.ledger.early]);
  const startedAt = Date.now();
  const endedBefore = presses.ended;
  const answer = await server.truth(truth.last);
  const roundTripMs = Date.now() - startedAt;
  if (roundTripMs < clock.bestRoundTripMs) {
    const offsetMs = answer.now_ms - (startedAt + roundTripMs / 2);
    // Below what the round trip can tell it is the same clock.
    clock.offsetMs = Math.abs(offsetMs) <= Math.max(roundTripMs, 20) ? 0 : offsetMs;
    clock.bestRoundTripMs = roundTripMs;
  }
  truth.last = { snapshot: answer.snapshot, rolled_back_number: answer.rolled_back_number };
  truth.committed += answer.committed.length;
  truth.rolledBack += answer.rolled_back.length;
  panes.forEach((pane, index) => {
    pane.ledger.commit(answer.committed, now());
    pane.ledger.accuse(suspects[index]);
  });
  if (presses.open > 0 || presses.ended !== endedBefore) return;
  tellOfOthers(answer.gateways);
  applyState(answer);
}

/** What another page did to the gateways, or somebody by hand: its effect is seen here too. */
function tellOfOthers(latest) {
  for (const { name, alive } of latest) {
    if (alive === gateways.find((gateway) => gateway.name === name).alive) continue;
    if (alive) incidents.report(`Gateway ${name} runs again`);
    else incidents.open(`Gateway ${name} went down`, now(), counters());
  }
}

async function followTruth() {
  for (;;) {
    try {
      await lookAtTruth();
      truth.failures = 0;
    } catch (error) {
      truth.failures += 1;
      if (truth.failures === SILENT_AFTER) incidents.report(`The demo's server: ${error.message}`, "bad");
    }
    await new Promise((resume) => setTimeout(resume, TRUTH_EVERY_MS));
  }
}

function applyState(state) {
  gateways = state.gateways;
  relaysAlive = state.relays_alive;
  for (const { name, alive } of gateways) {
    const button = document.querySelector(`[data-press=gateway][data-name="${name}"]`);
    button.dataset.alive = alive;
    setText(button.querySelector(".label"), `${alive ? "Kill" : "Restart"} gateway ${name}`);
    button.querySelector("use").setAttribute("href", alive ? "#icon-kill" : "#icon-restart");
    if (alive) panes.find((pane) => pane.name === name).goHome();
  }
  showRate(state.rate_per_s);
}

// ── Counters ─────────────────────────────────────────────────────────────────────────────────────

/** Everything that is shown, for the page itself and for tests. */
function counters() {
  const nowMs = now();
  const each = panes.map((pane) => ({
    screen: pane.name,
    state: pane.state,
    gateway: pane.gateway,
    delivered: pane.ledger?.delivered ?? 0,
    onTheWay: pane.ledger?.onTheWay ?? 0,
    offline: pane.offline,
    late: pane.ledger?.overdue(nowMs, LATE_MS) ?? 0,
    missing: pane.missing,
    lost: pane.ledger?.lost ?? 0,
    duplicated: pane.ledger?.duplicated ?? 0,
    outOfOrder: pane.ledger?.outOfOrder ?? 0,
    unrecovered: pane.ledger?.unrecovered ?? 0,
    phantoms: pane.ledger?.phantoms ?? 0,
    offset: pane.ledger?.offset ?? 0,
    board: pane.board.state(),
  }));
  const sum = (name) => each.reduce((total, pane) => total + pane[name], 0);
  const totals = {};
  for (const name of ["delivered", "missing", "lost", "duplicated", "outOfOrder", "unrecovered", "phantoms"]) {
    totals[name] = sum(name);
  }
  const away = each.some((pane) => pane.state !== "live");
  return {
    committed: truth.committed,
    rolledBack: truth.rolledBack,
    ...totals,
    onTheWay: Math.max(...each.map((pane) => pane.onTheWay)),
    clean: totals.duplicated + totals.outOfOrder + totals.unrecovered + totals.phantoms + totals.lost === 0,
    away,
    settled: !away && totals.missing === 0,
    latency: latency.figures(nowMs),
    gateways,
    relaysAlive,
    panes: each,
  };
}

/** Whether messages are missing where they could be: on a screen that was not sent away. */
function isCatchingUp({ panes: each }) {
  return each.some(({ missing, offline }) => missing > 0 && !offline);
}

function verdict(counts) {
  if (truth.last === null) return ["starting", "Starting"];
  if (counts.unrecovered > 0) return ["bad", "Told: continuity lost"];
  if (!counts.clean) return ["bad", "Something was lost or came twice"];
  if (!counts.gateways.some(({ alive }) => alive)) return ["waiting", "No gateway is running: press Restart"];
  if (counts.panes.every((pane) => pane.state === "connecting")) return ["starting", "Connecting"];
  if (isCatchingUp(counts)) return ["waiting", "Catching up"];
  if (counts.away) return ["waiting", "A screen is away"];
  return ["good", "Nothing lost"];
}

const figure = (name) => document.querySelector(`[data-figure="${name}"]`);
const number = (value) => value.toLocaleString("en");

function render() {
  const nowMs = now();
  const counts = counters();
  const calm = !counts.away && counts.panes.every((pane) => pane.late === 0);
  calmSince = calm ? (calmSince ?? nowMs) : null;
  incidents.observe(nowMs, counts, calmSince);

  for (const name of ["committed", "delivered", "missing", "duplicated", "outOfOrder", "rolledBack"]) {
    setText(figure(name), number(counts[name]));
  }
  const perPane = (name) => counts.panes.map((pane) => `${pane.screen} ${number(pane[name])}`).join(" · ");
  for (const name of ["delivered", "missing", "duplicated", "outOfOrder"]) setText(figure(`${name}Note`), perPane(name));
  setText(figure("rolledBackNote"), counts.phantoms ? `${counts.phantoms} announced!` : "never announced");
  const tone = (name, value) => (document.getElementById(`tile-${name}`).dataset.tone = value);
  tone("missing", counts.lost || (counts.unrecovered && counts.missing) ? "bad" : isCatchingUp(counts) ? "waiting" : counts.missing ? "plain" : "good");
  tone("duplicated", counts.duplicated ? "bad" : "good");
  tone("outOfOrder", counts.outOfOrder ? "bad" : "good");
  tone("rolledBack", counts.phantoms ? "bad" : "plain");
  for (const name of ["now", "p50", "p99"]) setText(figure(name), duration(counts.latency[name]));

  const [state, text] = verdict(counts);
  const pill = document.getElementById("verdict");
  pill.dataset.state = state;
  // A live region: its text changes with the state only, not with each number.
  setText(document.getElementById("verdict-text"), text);
  for (const pane of panes) pane.render();
  chart.draw(latency.recent(nowMs), incidents.marks, nowMs);
}

// ── Buttons ──────────────────────────────────────────────────────────────────────────────────────

async function press(button, path, text) {
  presses.open += 1;
  button.setAttribute("aria-busy", "true");
  button.disabled = true;
  if (path.startsWith("restart-")) incidents.report(text);
  else incidents.open(text, now(), counters());
  try {
    applyState(await server.control(path));
  } catch (error) {
    incidents.report(`${text}: ${error.message}`, "bad");
  } finally {
    presses.open -= 1;
    presses.ended += 1;
    button.disabled = false;
    button.removeAttribute("aria-busy");
  }
}

function toggleOffline(pane, button) {
  const offline = !pane.offline;
  if (offline) incidents.open(`Screen ${pane.name} went offline`, now(), counters());
  pane.setOffline(offline);
  button.setAttribute("aria-pressed", String(offline));
  button.setAttribute("aria-label", `Screen ${pane.name}: ${offline ? "come back" : "go offline"}`);
  setText(button.querySelector(".label"), offline ? "Come back" : "Go offline");
}

for (const button of document.querySelectorAll("[data-press=gateway]")) {
  button.addEventListener("click", () => {
    const { name } = button.dataset;
    const alive = gateways.find((gateway) => gateway.name === name).alive;
    if (alive) press(button, `kill-gateway/${name}`, `Gateway ${name} killed`);
    else press(button, `restart-gateway/${name}`, `Gateway ${name} is started again`);
  });
}
document.querySelector("[data-press=relay]").addEventListener("click", ({ currentTarget }) => {
  press(currentTarget, "kill-relay", "Relay killed");
});
document.querySelector("[data-press=redis]").addEventListener("click", ({ currentTarget }) => {
  press(currentTarget, "flush-redis", "Redis flushed");
});

const rate = document.getElementById("rate");
rate.max = String(config.rates.length - 1);
let rateHeld = false;

function showRate(perSecond) {
  document.body.dataset.pace = perSecond >= FAST_PER_S ? "fast" : "calm";
  if (!rateHeld) rate.value = String(config.rates.indexOf(perSecond));
  const text = perSecond === 0 ? "paused" : `${perSecond} per second`;
  rate.setAttribute("aria-valuetext", text);
  if (!rateHeld) setText(document.getElementById("rate-text"), text);
}

rate.addEventListener("input", () => {
  rateHeld = true;
  const perSecond = config.rates[Number(rate.value)];
  setText(document.getElementById("rate-text"), perSecond === 0 ? "paused" : `${perSecond} per second`);
});
rate.addEventListener("change", async () => {
  try {
    const state = await server.control("rate", { per_s: config.rates[Number(rate.value)] });
    rateHeld = false;
    applyState(state);
  } catch (error) {
    rateHeld = false;
    incidents.report(`The rate stays: ${error.message}`, "bad");
  }
});

// ── Start ────────────────────────────────────────────────────────────────────────────────────────

/** How the screens are connected when the page opens. */
function ways() {
  const alive = gateways.filter((gateway) => gateway.alive);
  if (alive.length === gateways.length) return "each through its own gateway";
  if (alive.length === 0) return "and no gateway is running";
  return `both through gateway ${alive[0].name} as the other is not running`;
}

async function start() {
  for (;;) {
    try {
      const loaded = await server.board();
      truth.last = { snapshot: loaded.snapshot, rolled_back_number: loaded.rolled_back_number };
      for (const pane of panes) pane.start(loaded);
      break;
    } catch (error) {
      incidents.report(`The board could not be loaded: ${error.message}`, "bad");
      await new Promise((resume) => setTimeout(resume, 2000));
    }
  }
  incidents.report(`Two screens, ${ways()}, from offset ${number(panes[0].ledger.offset)}`);
  setInterval(render, RENDER_EVERY_MS);
  followTruth();
}

window.orderboard = { counters };
start();
