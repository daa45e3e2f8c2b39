// Clients of the stock JavaScript SDK, driven by JSON lines.
//
// Input:  {"n": 1, "do": "subscribe", "client": "ann", "channel": "orders:1", …}
// Output: {"n": 1, "result": …} or {"n": 1, "error": {"code", "message"}} for each command, and
//         {"client": "ann", "channel": "orders:1", "event": "publication", …} for each event of the
//         SDK, in the order in which it happened. It ends when its input ends.

import { createInterface } from "node:readline";

import { Centrifuge } from "centrifuge";
import WebSocket from "ws";

const clients = new Map();

function say(line) {
  process.stdout.write(JSON.stringify(line) + "\n");
}

function position(of) {
  return of === undefined ? null : { offset: of.offset, epoch: of.epoch };
}

function open({ client: name, url, token = "", asks_for_tokens, min_delay_ms, max_delay_ms }) {
  const waiting = [];
  const options = {
    websocket: WebSocket,
    token,
    minReconnectDelay: min_delay_ms,
    maxReconnectDelay: max_delay_ms,
  };
  if (asks_for_tokens) {
    options.getToken = () =>
      new Promise((resolve) => {
        waiting.push(resolve);
        say({ client: name, event: "token_wanted" });
      });
  }
  const sdk = new Centrifuge(url, options);
  const tell = (event, fields = {}) => say({ client: name, event, ...fields });
  sdk.on("connecting", ({ code, reason }) => tell("connecting", { code, reason }));
  sdk.on("connected", ({ client }) => tell("connected", { id: client }));
  sdk.on("disconnected", ({ code, reason }) => tell("disconnected", { code, reason }));
  sdk.on("error", ({ error }) => tell("error", { code: error.code, message: error.message }));
  clients.set(name, { sdk, waiting, min_delay_ms, max_delay_ms });
}

function subscribe({ client: name, channel, since }) {
  const { sdk, min_delay_ms, max_delay_ms } = clients.get(name);
  const known = sdk.getSubscription(channel);
  if (known !== null) {
    known.subscribe();
    return;
  }
  const options = { minResubscribeDelay: min_delay_ms, maxResubscribeDelay: max_delay_ms };
  if (since) {
    options.since = since;
  }
  const sub = sdk.newSubscription(channel, options);
  const tell = (event, fields) => say({ client: name, channel, event, ...fields });
  sub.on("subscribing", ({ code, reason }) => tell("subscribing", { code, reason }));
  sub.on("subscribed", (ctx) =>
    tell("subscribed", {
      recoverable: ctx.recoverable,
      was_recovering: ctx.wasRecovering,
      recovered: ctx.recovered,
      position: position(ctx.streamPosition),
    }),
  );
  sub.on("unsubscribed", ({ code, reason }) => tell("unsubscribed", { code, reason }));
  sub.on("publication", ({ offset, data, tags }) =>
    tell("publication", { offset, data, tags: tags ?? {} }),
  );
  sub.on("error", ({ error }) => tell("error", { code: error.code, message: error.message }));
  sub.subscribe();
}

const commands = {
  open,
  subscribe,
  connect: ({ client }) => clients.get(client).sdk.connect(),
  disconnect: ({ client }) => clients.get(client).sdk.disconnect(),
  token: ({ client, token }) => clients.get(client).waiting.shift()(token),
  unsubscribe: ({ client, channel }) => clients.get(client).sdk.getSubscription(channel).unsubscribe(),
  publish: async ({ client, channel, data }) => {
    await clients.get(client).sdk.publish(channel, data);
  },
  history: async ({ client, channel, limit, since, reverse }) => {
    const options = { limit, reverse };
    if (since) {
      options.since = since;
    }
    const answer = await clients.get(client).sdk.history(channel, options);
    return {
      offset: answer.offset,
      epoch: answer.epoch,
      publications: answer.publications.map(({ offset, data, tags }) => ({
        offset,
        data,
        tags: tags ?? {},
      })),
    };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { n, do: name, ...fields } = JSON.parse(line);
  // Not awaited: a command that waits for the server must not hold back those after it.
  Promise.resolve()
    .then(() => commands[name](fields))
    .then(
      (result) => say({ n, result: result ?? null }),
      (error) => say({ n, error: { code: error.code ?? 0, message: error.message ?? String(error) } }),
    );
}
process.exit(0);
