// One screen: a stock Centrifuge client, connected through one gateway, and what it shows.
//
// This is what an application's page does (the rest of the demo checks it):
//
//   1. Load the state together with the position that it is true for (GET /board: one snapshot).
//   2. Subscribe with `since` = that position. The gateway replays what came after, then goes live.
//   3. Skip messages whose transaction (the tag `txid`) the snapshot saw: the state has them already.
//   4. After a disconnect do nothing. The SDK reconnects, to any gateway, and resumes from the last
//      offset it saw. Only if the server says `recovered: false`, load the state again.

import { Board, setText } from "./board.js";
import { Ledger } from "./ledger.js";
import { parseSnapshot } from "./snapshot.js";

const STATES = {
  connecting: "Connecting",
  live: "Live",
  replaying: "Catching up",
  away: "Reconnecting",
  offline: "Offline",
  ended: "Ended",
};

const ATTEMPTS_BEFORE_HINT = 5;

export class Pane {
  /** `room`: what this pane may use of the page: {name, gateways(), clientToken(), loadBoard(),
   *  now(), report(text, tone), measure(screen, latencyMs, replayed)}. */
  constructor(name, page, element) {
    this.name = name;
    this.offline = false;
    this.state = "connecting";
    /** The gateway that the current or the next connection goes through. */
    this.gateway = name;
    this.ledger = null;
    this.board = new Board(element.querySelector(".lanes"));
    this.#page = page;
    this.#element = element;
  }

  #page;
  #element;
  #client = null;
  /** Whether the snapshot of the first load, and of the latest, saw a transaction. */
  #before = () => false;
  #shown = () => false;
  /** Messages that wait for a board being loaded anew; null when none is. */
  #waiting = null;
  #subscribedAtMs = 0;
  #attempts = 0;
  #replay = { count: 0, lastAtMs: 0, state: "none" };

  /** Start from `loaded`, an answer of /board. */
  start(loaded) {
    this.ledger = new Ledger(loaded);
    this.#before = parseSnapshot(loaded.snapshot);
    this.#show(loaded);
    const pane = this;
    this.#client = new Centrifuge(this.#url(), {
      name: "orderboard",
      getToken: () => this.#page.clientToken(),
      minReconnectDelay: 200,
      maxReconnectDelay: 2000,
      // Which gateway to dial is decided anew for each attempt, as a load balancer would.
      websocket: class extends WebSocket {
        constructor() {
          super(pane.#url());
        }
      },
    });
    this.#client.on("connecting", () => this.#away());
    this.#client.on("error", ({ type }) => this.#failed(type));
    this.#client.on("disconnected", ({ code, reason }) => this.#ended(code, reason));
    const subscription = this.#client.newSubscription(this.#page.room, {
      since: { offset: loaded.offset, epoch: loaded.epoch },
      recoverable: true,
    });
    subscription.on("subscribed", (context) => this.#subscribed(context));
    subscription.on("publication", (publication) => this.#received(publication));
    subscription.on("unsubscribed", ({ code, reason }) => this.#ended(code, reason));
    subscription.subscribe();
    this.#client.connect();
  }

  /** The button: leave the network, or come back. */
  setOffline(offline) {
    this.offline = offline;
    if (offline) this.#client.disconnect();
    else this.#client.connect();
  }

  /** Go back through the own gateway, after it was away: an ordinary reconnect. */
  goHome() {
    if (this.offline || this.gateway === this.name || this.state !== "live") return;
    this.#client.disconnect();
    this.#client.connect();
  }

  #url() {
    const gateways = this.#page.gateways();
    const home = gateways.find((gateway) => gateway.name === this.name);
    const chosen = home.alive ? home : (gateways.find((gateway) => gateway.alive) ?? home);
    this.gateway = chosen.name;
    return `ws://${location.hostname}:${chosen.port}/connection/websocket`;
  }

  #show(loaded) {
    this.#shown = parseSnapshot(loaded.snapshot);
    this.board.load(loaded.orders);
    for (const { order, version } of loaded.orders) this.ledger.versions.set(order, version);
  }

  #subscribed({ wasRecovering, recovered, streamPosition }) {
    // Replayed messages follow this event, then live ones.
    this.#subscribedAtMs = this.#page.now();
    this.#setState("live");
    if (streamPosition && (!wasRecovering || recovered)) {
      const back = this.#replay.state === "away";
      this.#replay = { count: 0, lastAtMs: this.#subscribedAtMs, state: back ? "due" : "none" };
      return;
    }
    this.#flag("The server said: continuity lost. The board was loaded anew.");
    this.#page.report(`Screen ${this.name} was told that continuity was lost`, "bad");
    this.ledger.restart(streamPosition ?? { offset: 0, epoch: "" });
    this.#reload();
  }

  async #reload() {
    if (this.#waiting !== null) return;
    this.#waiting = [];
    try {
      this.#show(await this.#page.loadBoard());
    } catch (error) {
      this.#page.report(`Screen ${this.name} could not load the board: ${error.message}`, "bad");
    }
    const waiting = this.#waiting;
    this.#waiting = null;
    for (const publication of waiting) this.#received(publication);
  }

  #received(publication) {
    if (this.#waiting !== null) {
      this.#waiting.push(publication);
      return;
    }
    const { data, offset, tags } = publication;
    if (this.#before(tags.txid)) {
      this.ledger.passOver(offset);
      return;
    }
    if (!this.ledger.receive(data.change, offset, data.order, data.version)) return;
    const nowMs = this.#page.now();
    const replayed = data.at_ms < this.#subscribedAtMs;
    if (replayed) {
      this.#replay.count += 1;
      this.#replay.lastAtMs = nowMs;
    }
    this.#page.measure(this.name, nowMs - data.at_ms, replayed);
    if (this.#shown(tags.txid)) return;
    if (!this.board.apply(data)) this.ledger.forget(data.order);
  }

  /** Tell of a replay once it is over: it may come in several pages. */
  #reportReplay() {
    const { count, lastAtMs, state } = this.#replay;
    if (state !== "due" || this.#page.now() - lastAtMs < 300) return;
    this.#replay.state = "none";
    const what = count === 0 ? "nothing was missed" : `${count} missed message${count === 1 ? "" : "s"} replayed`;
    this.#page.report(`Screen ${this.name} is back through gateway ${this.gateway}: ${what}`, "good");
  }

  /** An attempt failed; the SDK tries again. Worth a line only if no attempt ever succeeded, and it
   *  was not to a gateway that was killed. */
  #failed(type) {
    if (this.#subscribedAtMs !== 0 || type !== "transport") return;
    if (!this.#page.gateways().find(({ name }) => name === this.gateway).alive) return;
    this.#attempts += 1;
    if (this.#attempts !== ATTEMPTS_BEFORE_HINT) return;
    this.#page.report(`Screen ${this.name} cannot reach ${this.#url()}: is its port open to this browser?`, "bad");
  }

  #away() {
    if (this.#subscribedAtMs === 0) return;
    this.#replay.state = "away";
    this.#setState("away");
  }

  #ended(code, reason) {
    if (this.offline) {
      this.#setState("offline");
    } else if (code !== 0) {
      this.#setState("ended");
      this.#flag(`The connection ended for good: ${reason} (${code}). Reload the page.`);
      this.#page.report(`Screen ${this.name} was closed: ${reason} (${code})`, "bad");
    }
  }

  #setState(state) {
    this.state = state;
    this.render();
  }

  #flag(text) {
    const flag = this.#element.querySelector(".flag");
    flag.hidden = false;
    setText(flag, `⚑ ${text}`);
  }

  /** Draw what changes seldom and the counters; called by the page some times per second. */
  render() {
    const set = (name, text) => setText(this.#element.querySelector(`[data-pane="${name}"]`), text);
    const catchingUp = this.state === "live" && this.missing > 0;
    const state = catchingUp ? "replaying" : this.state;
    const element = this.#element.querySelector(".state");
    element.dataset.state = state;
    const through = state === "live" || state === "replaying" ? ` · gateway ${this.gateway}` : "";
    setText(element.querySelector(".state-text"), STATES[state] + through);
    if (this.ledger === null) return;
    this.#reportReplay();
    set("offset", this.ledger.offset.toLocaleString("en"));
    set("delivered", this.ledger.delivered.toLocaleString("en"));
    for (const name of ["missing", "duplicated", "outOfOrder"]) {
      const value = name === "missing" ? this.missing : this.ledger[name];
      set(name, value.toLocaleString("en"));
      // A screen that was sent away lacks messages, and should.
      const bad = value > 0 && !(name === "missing" && this.offline);
      this.#element.querySelector(`[data-pane="${name}"]`).parentElement.dataset.bad = bad;
    }
  }

  get missing() {
    return this.ledger === null ? 0 : this.ledger.missing(this.#page.now());
  }
}
