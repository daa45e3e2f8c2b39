// Latency of each message, from its transaction to the screen: figures and a small chart.

const WINDOW_MS = 60_000;
/** A sample older than this is not "now". */
const NOW_WITHIN_MS = 3000;
const SAMPLES_KEPT = 15_000;
const LOW_MS = 1;
const HIGH_MS = 30_000;
const DOT_RADIUS = 1.6;
const TICKS = [[1, "1 ms"], [10, "10"], [100, "100"], [1000, "1 s"], [10_000, "10 s"]];

/** The last minute of samples of all screens. */
export class Latency {
  #samples = [];

  /** `replayed`: it came late because the screen was away; drawn, not counted. */
  add(screen, nowMs, latencyMs, replayed) {
    this.#samples.push({ screen, at: nowMs, ms: Math.max(latencyMs, 0), replayed });
    if (this.#samples.length > SAMPLES_KEPT) this.#samples.splice(0, SAMPLES_KEPT / 10);
  }

  /** Samples of the last minute, oldest first. */
  recent(nowMs) {
    const first = this.#samples.findIndex((sample) => sample.at >= nowMs - WINDOW_MS);
    this.#samples.splice(0, first < 0 ? this.#samples.length : first);
    return this.#samples;
  }

  /** {now, p50, p99} in ms: the latest, and ranks of the last minute. Null where there is nothing to
   *  say; "now" also when nothing has come for some seconds. */
  figures(nowMs) {
    const live = this.recent(nowMs).filter((sample) => !sample.replayed);
    if (live.length === 0) return { now: null, p50: null, p99: null };
    const sorted = Float64Array.from(live, (sample) => sample.ms).sort();
    const rank = (share) => sorted[Math.min(Math.ceil(share * sorted.length), sorted.length) - 1];
    const { at, ms } = live[live.length - 1];
    return { now: nowMs - at <= NOW_WITHIN_MS ? ms : null, p50: rank(0.5), p99: rank(0.99) };
  }
}

/** "4 ms", "1.2 s". */
export function duration(ms) {
  if (ms === null) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}

/** Draws samples and marks on a canvas; colours come from the style sheet. */
export class Chart {
  #canvas;
  #width = 0;
  #height = 0;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#resize();
  }

  #resize() {
    const scale = window.devicePixelRatio || 1;
    this.#width = this.#canvas.clientWidth;
    this.#height = this.#canvas.clientHeight;
    this.#canvas.width = Math.round(this.#width * scale);
    this.#canvas.height = Math.round(this.#height * scale);
    this.#canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  }

  /** `marks`: [{at, ended}], when something was broken and when all was well again (or null). */
  draw(samples, marks, nowMs) {
    const context = this.#canvas.getContext("2d");
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [left, right, top, bottom] = [34, this.#width - 4, 6, this.#height - 16];
    const x = (at) => right - ((nowMs - at) / WINDOW_MS) * (right - left);
    const share = (ms) => Math.log(Math.min(Math.max(ms, LOW_MS), HIGH_MS) / LOW_MS) / Math.log(HIGH_MS / LOW_MS);
    const y = (ms) => bottom - share(ms) * (bottom - top);

    context.clearRect(0, 0, this.#width, this.#height);
    context.font = `10px ${style.fontFamily}`;
    context.textBaseline = "middle";
    for (const [ms, label] of TICKS) {
      context.fillStyle = colour("--grid");
      context.fillRect(left, Math.round(y(ms)), right - left, 1);
      context.fillStyle = colour("--muted");
      context.textAlign = "right";
      context.fillText(label, left - 5, y(ms));
    }
    context.textBaseline = "alphabetic";
    for (const [seconds, align] of [[60, "left"], [30, "center"], [0, "right"]]) {
      context.textAlign = align;
      context.fillText(seconds ? `−${seconds} s` : "now", x(nowMs - seconds * 1000), this.#height - 3);
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, right - left, this.#height);
    context.clip();
    for (const mark of marks) {
      const start = x(mark.at);
      const end = x(mark.ended ?? nowMs);
      context.fillStyle = colour("--mark-area");
      context.fillRect(start, top, Math.max(end - start, 2), bottom - top);
      context.fillStyle = colour("--mark");
      context.fillRect(start, top, 1.5, bottom - top);
    }
    // One path for each look, and one dot for each place: thousands of samples are cheap so.
    const paths = { A: new Path2D(), B: new Path2D(), replayedA: new Path2D(), replayedB: new Path2D() };
    const taken = new Set();
    for (const { screen, at, ms, replayed } of samples) {
      const [column, row] = [Math.round(x(at)), Math.round(y(ms))];
      const place = `${replayed}${column},${row}`;
      if (taken.has(place)) continue;
      taken.add(place);
      const path = paths[replayed ? `replayed${screen}` : screen];
      path.moveTo(column + DOT_RADIUS, row);
      path.arc(column, row, DOT_RADIUS, 0, 2 * Math.PI);
    }
    context.lineWidth = 0.8;
    for (const screen of ["A", "B"]) {
      context.fillStyle = context.strokeStyle = colour(screen === "A" ? "--a" : "--b");
      context.fill(paths[screen]);
      context.stroke(paths[`replayed${screen}`]);
    }
    context.restore();
  }
}
