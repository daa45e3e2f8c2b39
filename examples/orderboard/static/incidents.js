// What was done and what became of it: the list at the side, and the marks in the chart.

import { duration } from "./latency.js";

const ENTRIES_KEPT = 60;
/** A fault's effect shows within this time, or there is none. */
const SHOWS_WITHIN_MS = 2500;
/** So long must all be well before it counts as over. */
const CALM_MS = 500;

/** The event feed. An incident is open from the press of a button until every screen has caught up. */
export class Incidents {
  #list;
  #open = [];
  #marks = [];

  constructor(list) {
    this.#list = list;
  }

  /** [{at, ended}] of the last minutes, for the chart. */
  get marks() {
    return this.#marks;
  }

  /** Add a line. `tone`: "info", "fault" (done on purpose), "good" or "bad". */
  report(text, tone = "info") {
    const entry = document.createElement("li");
    entry.dataset.tone = tone;
    const time = document.createElement("time");
    time.textContent = new Date().toLocaleTimeString("en-GB");
    const what = document.createElement("span");
    what.textContent = text;
    entry.append(time, what);
    this.#list.prepend(entry);
    while (this.#list.childElementCount > ENTRIES_KEPT) this.#list.lastChild.remove();
  }

  /** Something was broken. `counts`: the page's at this moment. */
  open(text, nowMs, counts) {
    this.report(text, "fault");
    const mark = { at: nowMs, ended: null };
    this.#marks.push(mark);
    if (this.#marks.length > 50) this.#marks.shift();
    this.#open.push({ text, mark, start: counts, worst: 0, noticed: false });
  }

  /** Look at the open incidents. `counts` are the page's; `calmSince`: since when (ms) all screens
   *  are there and nothing is late, or null. */
  observe(nowMs, counts, calmSince) {
    this.#open = this.#open.filter((incident) => {
      incident.worst = Math.max(incident.worst, counts.onTheWay);
      if (calmSince === null) incident.noticed = true;
      const flows = counts.delivered > incident.start.delivered;
      const early = nowMs - incident.mark.at < SHOWS_WITHIN_MS;
      if (early || !flows || calmSince === null || nowMs - calmSince < CALM_MS) return true;
      incident.mark.ended = Math.max(calmSince, incident.mark.at);
      this.report(summary(incident, counts), counts.clean ? "good" : "bad");
      return false;
    });
  }
}

function summary({ text, mark, worst, noticed }, { missing, duplicated, outOfOrder }) {
  const result = `Missing ${missing}, duplicated ${duplicated}, out of order ${outOfOrder}.`;
  if (!noticed) return `${text}: nothing had to wait. ${result}`;
  const waited = worst > 0 ? `; up to ${worst} messages had to wait` : "";
  return `${text}: all well after ${duration(mark.ended - mark.at)}${waited}. ${result}`;
}
