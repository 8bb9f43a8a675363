// The tasks of one agent, and one task with its life.

import { get } from "./api.js";
import { code, h, link, number, replace, seconds, section, seldom, soon, state, taskLink, time } from "./dom.js";
import { List } from "./list.js";
import { errors, timeline } from "./message.js";

const STATES = ["QUEUED", "SCHEDULED", "PROCESSING", "RETRYING", "COMPLETED", "EXECUTING", "DONE", "DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED"];
const REFRESH_MS = 300;
const COLUMNS = [
  ["enqueued", (one) => time(one.created_at)],
  ["age", (one) => seconds(one.age_s).replace(" ", "\u00a0")],
  ["state", (one) => state(one.state)],
  ["held by", (one) => one.worker],
  ["attempt", (one) => number(one.attempt)],
  ["type", (one) => one.type],
  ["last error", (one) => (one.error ? h("small", { class: "bad" }, one.error_type ? one.error_type + ": " : "", one.error) : "")],
  ["id", (one) => taskLink(one.task_id)],
];

// An event of a task has no organization. Pages of agents get none, so they look again with each overview.
const concerns = (event) => event.message_id && !event.org_id;

export async function show(content, { argument, parameters, isCurrent, fail }) {
  const filters = { state: parameters.get("state") ?? "" };
  const hash = "#/agents/" + encodeURIComponent(argument);
  const path = "/page/agents/" + encodeURIComponent(argument) + "/tasks";
  const list = new List({ noun: "task", path, place: hash, columns: COLUMNS, filters, concerns }, { isCurrent, fail });
  content.append(h("h1", {}, "Tasks of ", h("span", { class: "id" }, argument)), form(filters, list), list.element);
  await list.load();
  return {
    events: (events, skipped) => list.events(events, skipped),
    reset: () => list.load(),
    close: () => list.close(),
    overview: seldom(() => list.refresh(), fail),
  };
}

function form(filters, list) {
  const change = (event) => list.change("state", event.target.value);
  return h(
    "form",
    { class: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "State", h("select", { name: "state", onchange: change }, h("option", { value: "" }, "all"), STATES.map((one) => h("option", { value: one, selected: one === filters.state }, one)))),
  );
}

// ---- one task ----------------------------------------------------------------------------------------

export async function showOne(content, { argument, isCurrent, fail }) {
  const place = h("div");
  let known = "";
  let turn = 0;
  content.append(h("h1", {}, "Task ", h("span", { class: "id" }, argument)), place);

  async function load() {
    const mine = ++turn;
    const found = await get("/page/tasks/" + encodeURIComponent(argument));
    const text = JSON.stringify(found);
    if (mine !== turn || !isCurrent() || text === known) return;
    known = text;
    replace(place, draw(found));
  }
  const again = soon(load, fail, REFRESH_MS);
  await load();
  return {
    events(events, skipped) {
      if (skipped || events.some((one) => one.message_id === argument)) again.ask();
    },
    reset: again.ask,
    close: again.cancel,
    overview: seldom(load, fail),
  };
}

function draw(found) {
  return [
    h("p", { class: "lead" }, state(found.state)),
    section("Facts", facts(found)),
    section("Timeline", timeline(found)),
    found.errors.length > 0 && section("Errors", errors(found)),
    section("Payload", code(found.payload, "Payload")),
    found.result !== null && section("Result", code(found.result, "Result")),
  ];
}

function facts(found) {
  const lines = [
    ["agent", link("#/agents/" + encodeURIComponent(found.agent), found.agent)],
    ["enqueued", time(found.created_at)],
    found.sender && ["sent by", found.sender],
    found.type && ["type", found.type],
    found.parent && ["parent", found.parent],
    found.idempotency_key && ["idempotency key", found.idempotency_key],
    ["attempt", number(found.attempt)],
    ["retries", number(found.retry_count) + " of " + number(found.max_retries)],
    ["held by", found.lease_ends_at ? [found.worker, " until ", time(found.lease_ends_at), " unless it renews its lease"] : "nobody"],
    found.last_heartbeat && ["last sign of its worker", time(found.last_heartbeat)],
    ["ended", found.completed_at ? time(found.completed_at) : "not yet"],
  ].filter(Boolean);
  return h("dl", { class: "facts" }, lines.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
}
