// The bookkeeping: what was committed, against what a screen received. No I/O and no clock here.

/** Messages younger than this are on their way, not missing. */
export const ON_THE_WAY_MS = 2000;
/** Changes that both sides agree on are kept this many, to know them again; older ones by offset. */
const AGREED_KEPT = 20_000;
/** A skipped range longer than this is counted, not listed. */
const SKIPPED_KEPT = 10_000;

/** What one screen received, held against what was committed. */
export class Ledger {
  /** `since`: {offset, epoch}, the position at which this screen starts. */
  constructor(since) {
    this.offset = since.offset;
    this.epoch = since.epoch;
    /** Different changes received, whether Postgres is known to have committed them or not yet. */
    this.received = 0;
    this.duplicated = 0;
    this.outOfOrder = 0;
    /** How often the server said that continuity was lost. */
    this.unrecovered = 0;
    /** Received although Postgres did not commit it. */
    this.phantoms = 0;
    /** Change id → when the truth named it (ms): committed, not received. */
    this.expected = new Map();
    /** Change ids received before the truth named them. */
    this.early = new Set();
    /** Change ids both received and committed, oldest first. */
    this.agreed = new Set();
    /** Offsets that were passed over: proof of a loss, unless they still come. */
    this.skipped = new Set();
    this.skippedBeyond = 0;
    /** Order id → its latest version seen. */
    this.versions = new Map();
  }

  /** Postgres committed these changes; `nowMs` is any clock that the caller always uses. */
  commit(changes, nowMs) {
    for (const change of changes) {
      if (this.early.delete(change)) this.#agree(change);
      else this.expected.set(change, nowMs);
    }
  }

  /** A message arrived. Returns whether it is new to this screen. */
  receive(change, offset, order, version) {
    const known = this.early.has(change) || this.agreed.has(change);
    const late = offset <= this.offset;
    if (known || (late && !this.skipped.has(offset))) {
      this.duplicated += 1;
      return false;
    }
    this.received += 1;
    if (late) {
      this.skipped.delete(offset);
      this.outOfOrder += 1;
    } else {
      if ((this.versions.get(order) ?? 0) >= version) this.outOfOrder += 1;
      this.#skip(this.offset + 1, offset);
      this.offset = offset;
    }
    this.versions.set(order, Math.max(version, this.versions.get(order) ?? 0));
    if (this.expected.delete(change)) this.#agree(change);
    else this.early.add(change);
    return true;
  }

  /** A message arrived that the board showed already when it was loaded: it only moves the offset. */
  passOver(offset) {
    if (offset <= this.offset) {
      this.duplicated += this.skipped.delete(offset) ? 0 : 1;
      return;
    }
    this.#skip(this.offset + 1, offset);
    this.offset = offset;
  }

  /** An order left the board; its versions need not be remembered. */
  forget(order) {
    this.versions.delete(order);
  }

  /** The server said "not recovered" and goes on at `position`. What was missed stays missing. */
  restart(position) {
    this.unrecovered += 1;
    this.offset = position.offset;
    this.epoch = position.epoch;
    this.skipped.clear();
  }

  /** Received, but unknown to a look at Postgres that began later: not committed. */
  accuse(changes) {
    for (const change of changes) if (this.early.delete(change)) this.phantoms += 1;
  }

  /** Committed and received. */
  get delivered() {
    return this.received - this.early.size - this.phantoms;
  }

  /** Committed and not received, youngest included. */
  get onTheWay() {
    return this.expected.size;
  }

  /** Later messages came, these did not. */
  get lost() {
    return this.skipped.size + this.skippedBeyond;
  }

  /** Committed more than ON_THE_WAY_MS ago and not received, or passed over. */
  missing(nowMs) {
    return Math.max(this.overdue(nowMs, ON_THE_WAY_MS), this.lost);
  }

  /** Committed more than `ageMs` ago and not received. */
  overdue(nowMs, ageMs) {
    let count = 0;
    for (const since of this.expected.values()) {
      if (nowMs - since < ageMs) break; // the map is in order of time
      count += 1;
    }
    return count;
  }

  #agree(change) {
    this.agreed.add(change);
    if (this.agreed.size > AGREED_KEPT) this.agreed.delete(this.agreed.values().next().value);
  }

  #skip(from, to) {
    for (let offset = from; offset < to; offset += 1) {
      if (this.skipped.size >= SKIPPED_KEPT) {
        this.skippedBeyond += to - offset;
        return;
      }
      this.skipped.add(offset);
    }
  }
}
