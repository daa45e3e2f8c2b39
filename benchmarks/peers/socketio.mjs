/* socket.io with its Redis Streams adapter, as a program of two roles.

   node socketio.mjs ROLE REDIS_URL STREAM
     serve   holds the connections; prints {"port":N}, then {"event":"listening"} as soon as it
             hears of the other process
     send    has none; prints {"event":"ready"}, and emits "news" to all clients for each text that
             comes on standard input as a line `send BYTES` with the text behind */

import { createServer } from "node:http";
import process from "node:process";
import { createAdapter } from "@socket.io/redis-streams-adapter";
import { createClient } from "redis";
import { Server } from "socket.io";

const LOOK_MS = 20;

const [role, url, streamName] = process.argv.slice(2);
const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);

const client = createClient({ url });
await client.connect();
const http = createServer();
const io = new Server(http, {
  adapter: createAdapter(client, { streamName, channelPrefix: streamName }),
  serveClient: false,
  // Pings have a cost of their own, which is not that of a delivery.
  pingInterval: 3_600_000,
});

/* Whether the two processes know of each other. */
async function both() {
  const count = await io.of("/").adapter.serverCount();
  if (count < 2) setTimeout(both, LOOK_MS);
  else say({ event: role === "serve" ? "listening" : "ready" });
}

if (role === "serve") http.listen(0, "127.0.0.1", () => say({ port: http.address().port }));
both();

let held = Buffer.alloc(0);
process.stdin.on("data", (part) => {
  held = Buffer.concat([held, part]);
  for (;;) {
    const feed = held.indexOf("\n");
    if (feed < 0) return;
    const end = feed + 1 + Number(held.subarray(0, feed).toString().split(" ")[1]);
    if (held.length < end) return;
    io.emit("news", JSON.parse(held.subarray(feed + 1, end).toString()));
    held = held.subarray(end);
  }
});
process.stdin.on("end", () => process.exit(0));
