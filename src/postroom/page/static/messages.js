// The list of messages: filters, pages by cursor, and new messages as they come.

import { h, messageLink, number, state, time } from "./dom.js";
import { List } from "./list.js";

const STATES = ["QUEUED", "SCHEDULED", "PROCESSING", "RETRYING", "COMPLETED", "EXECUTING", "DONE", "DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED"];
const SEARCH_MS = 250;
const NAMES = ["org_id", "state", "type", "text"];
const COLUMNS = [
  ["submitted", (one) => time(one.created_at)],
  ["state", (one) => [state(one.state), one.error_type ? h("small", { class: "bad" }, " ", one.error_type) : ""]],
  ["priority", (one) => "P" + one.priority],
  ["type", (one) => one.type],
  ["organization", (one) => one.org_id],
  ["agent", (one) => one.agent_id],
  ["attempt", (one) => number(one.attempt)],
  ["id", (one) => messageLink(one.message_id)],
];

export async function show(content, { parameters, session, isCurrent, fail }) {
  const filters = Object.fromEntries(NAMES.map((name) => [name, parameters.get(name) ?? ""]));
  const concerns = (event) => event.org_id && (!filters.org_id || filters.org_id === event.org_id);
  const list = new List({ noun: "message", path: "/page/messages", place: "#/messages", columns: COLUMNS, filters, concerns }, { isCurrent, fail });
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
