// Which transactions a Postgres snapshot saw. The text form is "xmin:xmax:xip,xip…"
// (PostgreSQL manual, "pg_snapshot Components"): below xmin all are over, from xmax on none had
// ended, between them all but the listed. Ids are 64 bits wide, hence BigInt.

/** A function that tells whether the snapshot saw the transaction `txid` (decimal text) committed.
 *  It must be the id of a transaction that committed at some time. */
export function parseSnapshot(text) {
  const [xmin, xmax, list] = text.split(":");
  const low = BigInt(xmin);
  const high = BigInt(xmax);
  const inProgress = new Set(list ? list.split(",") : []);
  return (txid) => {
    const id = BigInt(txid);
    return id < low || (id < high && !inProgress.has(id.toString()));
  };
}
