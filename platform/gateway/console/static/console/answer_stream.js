// One answer over the API's own websocket: opened with a ticket, watched for silence, resumed where it was lost.
// Knows frames and connections; refuses to know what is shown.

const PING_MS = 5_000;
const DEAD_AFTER_MS = 12_000; // the server answers a ping at once
const RETRY_MS = [250, 500, 1_000, 2_000, 4_000, 8_000];
const LAST_WORD_MS = 2_000; // between the last event and the account of it
const UNUSED_MS = 60_000; // that a line is kept ready while nothing is asked
const FRESH_MS = PING_MS + 2_000; // of silence, and a line that was kept ready is still trusted
const CONNECTING = "Connecting …";
const ENDS = new Set(["response.completed", "response.incomplete", "response.failed"]);

export class AnswerStream {
  // hear(event): each event of the answer, once and in order. tell(state, words): connecting, open, lost, over, refused,
  // and unused for a line that was kept ready and is gone.
  constructor({ ticketUrl, csrf, project, hear, tell }) {
    Object.assign(this, { ticketUrl, csrf, project, hear, tell });
    this.responseId = null;
    this.lastNumber = -1;
    this.request = null;
    this.failures = 0;
    this.isAsked = false;
    this.isUnwanted = false;
    this.isOver = false;
    this.hasEnded = false;
    this.socket = null;
    this.attempt = 0;
    this.wake = () => !document.hidden && this.check(true);
    document.addEventListener("visibilitychange", this.wake);
    window.addEventListener("online", this.wake);
    this.timer = setInterval(() => this.check(false), 1_000);
  }

  // Ticket and socket before there is anything to ask, so that asking is one frame. Again: keep them longer.
  prepare() {
    this.wantedAtMs = performance.now();
    if (!this.attempt) this.connect();
  }

  start(request) {
    this.request = request;
    const isOpen = this.socket?.readyState === WebSocket.OPEN;
    if (isOpen && performance.now() - this.heardAtMs < FRESH_MS) this.opened();
    else if (isOpen || !this.attempt) this.connect();
    else this.tell("connecting", CONNECTING);
  }

  resume(responseId) {
    this.responseId = responseId;
    this.connect();
  }

  // Kept ready, with nothing asked. Always: what happens to such a line is told as "unused" and nothing else.
  get isIdle() {
    return !this.isAsked && !this.request && !this.responseId;
  }

  // A wish that is not lost with a connection: it is said again when there is one.
  cancel() {
    this.isUnwanted = true;
    if (this.request) this.finish("over", "Stopped before it was sent.");
    else this.sayCancel();
  }

  sayCancel() {
    if (this.isUnwanted && this.responseId) this.send({ type: "response.cancel", response_id: this.responseId });
  }

  send(frame) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(frame));
  }

  async connect() {
    const attempt = ++this.attempt; // a newer one makes this one void
    this.retryAtMs = null;
    this.heardAtMs = this.pingedAtMs = performance.now();
    this.socket?.close();
    this.socket = null;
    if (!this.isIdle) this.tell("connecting", CONNECTING);
    const ticket = await this.ticket();
    if (attempt !== this.attempt || this.isOver) return;
    if (!ticket) return this.lose();
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/v1/responses`, [ticket.protocol, ticket.ticket]);
    this.socket = socket;
    socket.addEventListener("open", () => socket === this.socket && this.opened());
    socket.addEventListener("message", (message) => socket === this.socket && this.take(JSON.parse(message.data)));
    socket.addEventListener("close", () => socket === this.socket && this.lose());
  }

  async ticket() {
    const body = new URLSearchParams({ project: this.project });
    try {
      const options = { method: "POST", body, headers: { "X-CSRFToken": this.csrf }, redirect: "manual" };
      const answer = await fetch(this.ticketUrl, options);
      if (answer.ok) return await answer.json();
      if (answer.type === "opaqueredirect" || answer.status === 403 || answer.status === 404) {
        this.finish("refused", "You are signed out, or may not use the playground any more. Reload this page.");
      }
    } catch {
      // the network is away
    }
    return null;
  }

  opened() {
    this.heardAtMs = performance.now();
    if (this.isIdle) return;
    this.tell("open", "Waiting for the first token …");
    if (this.responseId) {
      this.send({ type: "response.resume", response_id: this.responseId, starting_after: this.lastNumber });
      this.sayCancel();
    } else {
      this.send({ type: "response.create", background: true, ...this.request });
      this.isAsked = true;
      this.request = null; // asked once: what is lost before it has a name is not asked again by itself
    }
  }

  take(event) {
    this.heardAtMs = performance.now();
    if (event.type === "pong" || event.type === "keepalive") return;
    if (event.type === "error") return this.finish("refused", event.error.message, event);
    this.failures = 0;
    if (event.type === "rubato.account") {
      this.hear(event);
      if (this.hasEnded) this.finish("over", "");
      return;
    }
    if (event.sequence_number <= this.lastNumber) return;
    this.lastNumber = event.sequence_number;
    if (event.type === "response.created" && !this.responseId) {
      this.responseId = event.response.id;
      this.sayCancel();
    }
    this.hear(event);
    if (ENDS.has(event.type)) {
      this.hasEnded = true;
      setTimeout(() => this.finish("over", ""), LAST_WORD_MS);
    }
  }

  lose() {
    this.socket = null;
    if (this.isOver) return;
    if (this.hasEnded) return this.finish("over", "");
    if (!this.responseId && !this.request) {
      return this.finish("refused", "The connection was lost before the answer had a name. Please send it again.");
    }
    this.retryAtMs = performance.now() + RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
    this.failures += 1;
    this.tell("lost", "The connection is lost; the answer goes on and is picked up again …");
  }

  check(isEager) {
    const nowMs = performance.now();
    if (this.isIdle && (document.hidden || nowMs - this.wantedAtMs > UNUSED_MS)) return this.finish("unused", "");
    if (!this.socket) {
      if (this.retryAtMs !== null && (isEager || nowMs >= this.retryAtMs)) this.connect();
      return;
    }
    const silentMs = nowMs - this.heardAtMs;
    if (silentMs > DEAD_AFTER_MS) {
      const left = this.socket;
      this.lose();
      left.close(); // half open: its own close may come minutes later
      if (this.retryAtMs !== null) this.retryAtMs = nowMs;
    } else if (isEager || nowMs - this.pingedAtMs > PING_MS) {
      this.pingedAtMs = nowMs;
      this.send({ type: "ping" });
    }
  }

  finish(state, words, event = null) {
    if (this.isOver) return;
    const isIdle = this.isIdle;
    this.isOver = true;
    clearInterval(this.timer);
    document.removeEventListener("visibilitychange", this.wake);
    window.removeEventListener("online", this.wake);
    this.socket?.close();
    this.socket = null;
    this.tell(isIdle ? "unused" : state, words, event);
  }
}
