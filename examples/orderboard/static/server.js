// What the page asks its own server.

/** Requests to the demo's server; each throws an Error with one line for the visitor. */
export class Server {
  #headers;

  constructor(config) {
    this.#headers = { [config.tokenHeader]: config.token };
  }

  /** {snapshot, epoch, offset, orders, rolled_back_number} */
  board() {
    return this.#request("/board");
  }

  /** {snapshot, committed, rolled_back, rolled_back_number, gateways, relays_alive, rate_per_s, now_ms} */
  truth(last) {
    return this.#request(`/truth?${new URLSearchParams(last)}`);
  }

  /** The token with which this visitor connects to a gateway. */
  async clientToken() {
    return (await this.#request("/client-token", {})).token;
  }

  /** Press a button: `path` is what stands after /control/. Answers with the state. */
  control(path, body = {}) {
    return this.#request(`/control/${path}`, body);
  }

  async #request(path, body) {
    const options = { headers: { ...this.#headers }, signal: AbortSignal.timeout(20_000) };
    if (body !== undefined) {
      options.method = "POST";
      options.headers["Content-Type"] = "application/json";
      options.body = JSON.stringify(body);
    }
    const response = await fetch(path, options);
    if (response.ok) return response.json();
    const text = await response.text();
    let reason = text.trim();
    try {
      reason = JSON.parse(text).error;
    } catch {
      // Plain text: say it as it is.
    }
    throw new Error(reason || `status ${response.status}`);
  }
}
