// Calls of the server. A session that has ended raises SignedOut.

export class SignedOut extends Error {}

export const session = { csrf: "", name: "", role: "", org_id: "", is_operator: false, operates: false };

export async function get(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return answer(await fetch(query.size ? path + "?" + query : path, { headers: { accept: "application/json" } }));
}

export async function post(path, body) {
  const headers = { "x-csrf-token": session.csrf };
  const options = { method: "POST", headers };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  return answer(await fetch(path, options));
}

async function answer(response) {
  if (response.status === 204) return null;
  const found = await response.json().catch(() => ({}));
  if (response.ok) return found;
  const message = found.message || "The server answered " + response.status + ".";
  throw response.status === 401 ? new SignedOut(message) : new Error(message);
}

// Whether somebody is signed in, as the page itself says when it is loaded.
export function known() {
  const text = document.querySelector("meta[name=session]").content;
  if (text) Object.assign(session, JSON.parse(text));
  return session.csrf !== "";
}

// Whether somebody is signed in now.
async function begin() {
  Object.assign(session, await get("/page/session"));
  return session.csrf !== "";
}

export async function signIn(token) {
  Object.assign(session, await post("/page/sign-in", { token }));
}

export async function signOut() {
  await post("/page/sign-out");
  session.csrf = "";
}

// ---- the stream --------------------------------------------------------------------------------------

const HIDDEN_CLOSE_MS = 30000;
const RETRY_MS = 1000;

// Follows the server. A lost connection is made again from the last event, so nothing is missed.
export class Stream {
  constructor(listener) {
    this.listener = listener;
    this.last = "";
    this.source = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.visibility());
  }

  open() {
    this.close();
    const source = (this.source = new EventSource("/page/stream" + (this.last ? "?after=" + this.last : "")));
    source.onopen = () => this.listener.connected(true);
    source.onerror = () => this.lost(source);
    source.addEventListener("overview", (event) => {
      this.note(event);
      this.listener.overview(JSON.parse(event.data));
    });
    source.addEventListener("events", (event) => this.events(event));
    source.addEventListener("reset", (event) => {
      this.note(event);
      this.listener.reset();
    });
  }

  note(event) {
    this.last = event.lastEventId;
  }

  events(event) {
    const batch = JSON.parse(event.data);
    this.note(event);
    this.listener.events(batch.events, batch.skipped);
  }

  lost(source) {
    this.listener.connected(false);
    if (source.readyState !== EventSource.CLOSED || source !== this.source) return; // the browser tries again
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      try {
        if (await begin()) this.open();
        else this.listener.signedOut();
      } catch {
        this.lost(source); // the server does not answer yet
      }
    }, RETRY_MS);
  }

  // A browser has few connections for one server, and hidden pages would use them up.
  visibility() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => this.close(), HIDDEN_CLOSE_MS);
    else if (session.csrf && (!this.source || this.source.readyState === EventSource.CLOSED)) this.open();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
}
