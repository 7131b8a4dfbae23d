// What users did with an answer, reported to Rollmill's gateway. Node 19 or newer; no packages.
//
//   const signals = new Signals("http://127.0.0.1:8000", key);
//   await signals.accepted(answer);              // an answer of /v1/chat/completions, or the name of a session
//   await signals.edited(answer, 0.8);           // the share that survived
//
// The key is the one that asked for the answer, so it belongs on your server, not into a page.

export class Signals {
  constructor(url, key) {
    this.url = url.replace(/\/+$/, "").replace(/\/v1$/, "") + "/v1/feedback";
    this.key = key;
  }

  accepted(about, accepted = true) { return this.send(about, { kind: "accepted", value: accepted ? 1 : 0 }); }
  edited(about, survived) { return this.send(about, { kind: "edited", value: survived }); }
  reverted(about) { return this.send(about, { kind: "reverted", value: 1 }); }
  retried(about) { return this.send(about, { kind: "retried", value: 1 }); }
  sentiment(about, value) { return this.send(about, { kind: "sentiment", value }); }
  thumbs(about, up) { return this.send(about, { kind: "thumbs", value: up ? 1 : -1 }); }
  latency(about, seconds) { return this.send(about, { kind: "latency", value: seconds }); }
  task(about, label) { return this.send(about, { kind: "task", label }); }
  kept(about, base, commit) { return this.send(about, { kind: "kept", label: `${base}..${commit}` }); }

  // The id makes a signal that is sent again count once.
  async send(about, signal) {
    const named = typeof about === "string" ? { session: about } : { answer: (about.rollmill ?? about).answers[0] };
    const body = JSON.stringify({ ...named, ...signal, id: crypto.randomUUID() });
    const headers = { Authorization: `Bearer ${this.key}`, "Content-Type": "application/json" };
    for (let attempt = 1; ; attempt++) {
      const response = await fetch(this.url, { method: "POST", headers, body, keepalive: true }).catch(() => null);
      if (response?.ok) return (await response.json()).feedback;
      if (attempt === 3 || (response && response.status < 500 && response.status !== 429)) {
        const said = response ? `answered ${response.status}: ${await response.text()}` : "cannot be reached";
        throw new Error(`${this.url} ${said}`);
      }
      await new Promise((resolve) => setTimeout(resolve, 200 * 2 ** attempt));
    }
  }
}
