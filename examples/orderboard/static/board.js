// One screen's board: the open orders, as the messages left them.

const LANES = ["received", "preparing", "ready"];
const CARDS_PER_LANE = 8;
const CARDS_PER_LANE_NARROW = 4;
/** Ten times per second is as lively as every frame, at a tenth of the work. */
const DRAW_EVERY_MS = 100;
const NARROW = window.matchMedia("(max-width: 700px)"); // as in style.css

/** The state of the board and its drawing into `element` (a pane's `.lanes`). */
export class Board {
  #orders = new Map();
  #lanes = new Map();
  #cards = new Map();
  #due = false;
  #drawnAtMs = 0;

  constructor(element) {
    for (const lane of LANES) {
      const section = element.querySelector(`[data-lane="${lane}"]`);
      this.#lanes.set(lane, {
        list: section.querySelector("ul"),
        count: section.querySelector(".count"),
        more: section.querySelector(".more"),
      });
    }
    NARROW.addEventListener("change", () => this.#draw());
  }

  /** Replace everything with rows as /board gives them. */
  load(orders) {
    this.#orders = new Map(orders.map((order) => [order.order, order]));
    this.#draw();
  }

  /** One change. Returns whether the order is still open. */
  apply(order) {
    const open = LANES.includes(order.status);
    if (open) this.#orders.set(order.order, order);
    else this.#orders.delete(order.order);
    this.#draw();
    return open;
  }

  /** [[order, status, version]…], for comparing two boards. */
  state() {
    return [...this.#orders.values()]
      .map(({ order, status, version }) => [order, status, version])
      .sort((a, b) => a[0] - b[0]);
  }

  #draw() {
    if (this.#due) return;
    this.#due = true;
    const waitMs = Math.max(this.#drawnAtMs + DRAW_EVERY_MS - performance.now(), 0);
    setTimeout(() => requestAnimationFrame(() => this.#redraw()), waitMs);
  }

  #redraw() {
    this.#due = false;
    this.#drawnAtMs = performance.now();
    this.#render();
  }

  #render() {
    const wanted = new Map();
    const shown = NARROW.matches ? CARDS_PER_LANE_NARROW : CARDS_PER_LANE;
    for (const lane of LANES) {
      const orders = [...this.#orders.values()].filter((order) => order.status === lane);
      orders.sort((a, b) => b.order - a.order);
      const { count, more } = this.#lanes.get(lane);
      setText(count, String(orders.length));
      const rest = orders.length - shown;
      setText(more, rest > 0 ? `and ${rest} more` : "");
      for (const order of orders.slice(0, shown)) wanted.set(`${lane}/${order.order}`, order);
    }
    // Take away first, then add at the right places: a card that stays is never moved, since moving
    // it in the document would start its animation anew.
    for (const [key, card] of this.#cards) {
      if (wanted.has(key)) continue;
      card.remove();
      this.#cards.delete(key);
    }
    const next = new Map([...this.#lanes].map(([lane, { list }]) => [lane, list.firstChild]));
    for (const [key, order] of wanted) {
      const card = this.#cards.get(key);
      if (card === undefined) {
        const made = makeCard(order);
        this.#cards.set(key, made);
        this.#lanes.get(order.status).list.insertBefore(made, next.get(order.status));
      } else {
        next.set(order.status, card.nextSibling);
      }
    }
  }
}

/** Set the text of an element if it differs: an unchanged text costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function makeCard({ order, dish, customer, status }) {
  const card = document.createElement("li");
  card.className = "order";
  card.dataset.status = status;
  const what = document.createElement("span");
  what.className = "dish";
  what.textContent = dish;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = `#${order} ${customer}`;
  card.append(what, who);
  return card;
}
