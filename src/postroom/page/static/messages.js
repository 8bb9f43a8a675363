// The list of messages: filters, pages by cursor, and new messages as they come.

import { get } from "./api.js";
import { h, messageLink, number, replace, state, time } from "./dom.js";

const STATES = ["QUEUED", "SCHEDULED", "PROCESSING", "RETRYING", "COMPLETED", "EXECUTING", "DONE", "DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED"];
const REFRESH_MS = 400;
const SEARCH_MS = 250;
const NAMES = ["org_id", "state", "type", "text"];

export async function show(content, { parameters, session, isCurrent, fail }) {
  const filters = Object.fromEntries(NAMES.map((name) => [name, parameters.get(name) ?? ""]));
  const list = new List(filters, isCurrent, fail);
  content.append(h("h1", {}, "Messages"), form(filters, session, (name, value) => list.change(name, value)), list.element);
  await list.load();
  return {
    events: (events, skipped) => list.events(events, skipped),
    reset: () => list.load(),
    close: () => list.close(),
    overview: (found) => organizations(content, found),
  };
}

function form(filters, session, change) {
  let timer = 0;
  const later = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => change(event.target.name, event.target.value), SEARCH_MS);
  };
  const now = (event) => change(event.target.name, event.target.value);
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "Search", h("input", { name: "text", type: "search", value: filters.text, placeholder: "an id, or any text", oninput: later })),
    !session.org_id && h("label", {}, "Organization", h("input", { name: "org_id", value: filters.org_id, list: "organizations", placeholder: "all", onchange: now }), h("datalist", { id: "organizations" })),
    h("label", {}, "State", h("select", { name: "state", onchange: now }, h("option", { value: "" }, "all"), STATES.map((one) => h("option", { value: one, selected: one === filters.state }, one)))),
    h("label", {}, "Type", h("input", { name: "type", value: filters.type, placeholder: "all", onchange: now })),
  );
}

function organizations(content, found) {
  const options = content.querySelector("#organizations");
  const names = found.organizations.map((one) => one.org_id);
  if (options && options.childElementCount !== names.length) options.replaceChildren(...names.map((name) => h("option", { value: name })));
}

class List {
  constructor(filters, isCurrent, fail) {
    this.filters = filters;
    this.isCurrent = isCurrent;
    this.fail = fail;
    this.rows = [];
    this.before = 0;
    this.turn = 0;
    this.timer = 0;
    this.refreshed = 0;
    this.body = h("tbody");
    this.foot = h("p", { class: "buttons" });
    this.element = h(
      "div",
      {},
      h(
        "table",
        { class: "cards" },
        h("caption", {}, "The newest first"),
        h("thead", {}, h("tr", {}, ["submitted", "state", "priority", "type", "organization", "agent", "attempt", "id"].map((label) => h("th", { scope: "col" }, label)))),
        this.body,
      ),
      this.foot,
    );
  }

  change(name, value) {
    if (this.filters[name] === value) return;
    this.filters[name] = value;
    this.rows = []; // A refresh that overtakes the load would keep rows of the earlier filter.
    this.before = 0;
    const query = new URLSearchParams(Object.entries(this.filters).filter(([, one]) => one));
    history.replaceState(null, "", "#/messages" + (query.size ? "?" + query : ""));
    this.load();
  }

  async load() {
    await this.read(0, (found) => {
      this.rows = found.messages;
      this.before = found.before;
    });
  }

  async more() {
    await this.read(this.before, (found) => {
      const known = new Set(this.rows.map((one) => one.message_id));
      this.rows.push(...found.messages.filter((one) => !known.has(one.message_id)));
      this.before = found.before;
      this.reached = found.reached;
    });
  }

  // New messages come before those that are shown. When none of the latter is in the first page, others lie
  // between them, and the list begins again.
  async refresh() {
    this.refreshed = performance.now();
    await this.read(0, (found) => {
      const fresh = new Map(found.messages.map((one) => [one.message_id, one]));
      const rest = this.rows.filter((one) => !fresh.has(one.message_id));
      const isJoined = rest.length < this.rows.length || !this.rows.length;
      const last = found.messages.at(-1)?.seq ?? 0;
      const older = isJoined ? rest.filter((one) => one.seq < last) : [];
      this.rows = [...found.messages, ...older];
      if (!older.length) this.before = found.before;
    });
  }

  async read(before, use) {
    const turn = ++this.turn;
    this.element.setAttribute("aria-busy", "true");
    try {
      const found = await get("/page/messages", { ...this.filters, before: before || "" });
      if (turn !== this.turn || !this.isCurrent()) return;
      this.reached = found.reached;
      use(found);
      this.draw();
    } catch (error) {
      this.fail(error);
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  events(events, skipped) {
    if (!skipped && !events.some((one) => this.concerns(one))) return;
    if (this.timer) return;
    const wait = Math.max(0, this.refreshed + REFRESH_MS - performance.now());
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.refresh();
    }, wait);
  }

  concerns(event) {
    const { org_id: orgId } = this.filters;
    return event.org_id && (!orgId || orgId === event.org_id);
  }

  draw() {
    replace(this.body, this.rows.map((one) => row(one)));
    const isSearched = this.before > 0 && this.rows.length === 0;
    replace(
      this.foot,
      !this.rows.length && !this.before ? "No message fits." : "",
      isSearched ? "No message fits so far. " : "",
      this.before > 0 &&
        h("button", { type: "button", "data-key": "more", onclick: () => this.more() }, isSearched ? "Search further back" : "Older messages"),
      this.before > 0 && this.reached ? [" searched back to ", time(this.reached)] : "",
    );
  }

  close() {
    clearTimeout(this.timer);
  }
}

function row(one) {
  const cells = [
    ["submitted", time(one.created_at)],
    ["state", [state(one.state), one.error_type ? h("small", { class: "bad" }, " ", one.error_type) : ""]],
    ["priority", "P" + one.priority],
    ["type", one.type],
    ["organization", one.org_id],
    ["agent", one.agent_id],
    ["attempt", number(one.attempt)],
    ["id", messageLink(one.message_id)],
  ];
  return h("tr", { "data-id": one.message_id }, cells.map(([label, value]) => h("td", { "data-label": label }, value)));
}
