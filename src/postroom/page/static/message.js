// One message: its life, its tree, its payload, its errors, who holds it, and what can be done with it.

import { get, post } from "./api.js";
import { ask, code, complain, flame, h, link, messageLink, notify, number, replace, seconds, section, soon, state, table, time } from "./dom.js";

const REFRESH_MS = 300;

export async function show(content, { argument, isCurrent, fail }) {
  const body = h("div");
  let ids = new Set([argument]);
  let turn = 0;
  content.append(h("h1", {}, "Message ", h("span", { class: "id" }, argument)), body);

  async function load() {
    const mine = ++turn;
    const found = await get("/page/messages/" + encodeURIComponent(argument));
    if (mine !== turn || !isCurrent()) return;
    ids = new Set([argument, ...found.tree.map((one) => one.message_id)]);
    replace(body, draw(found, load));
  }
  const again = soon(load, fail, REFRESH_MS);
  await load();
  return {
    events(events, skipped) {
      if (skipped || events.some((one) => ids.has(one.message_id) || ids.has(one.parent_message_id))) again.ask();
    },
    reset: again.ask,
    close: again.cancel,
  };
}

function draw(found, load) {
  return [
    h("p", { class: "lead" }, state(found.state), " ", found.explanation),
    buttons(found, load),
    section("Facts", facts(found)),
    section("Timeline", timeline(found)),
    found.errors.length > 0 && section("Errors", errors(found)),
    section("Tree", tree(found)),
    section("Time", flame("/page/messages/" + encodeURIComponent(found.message_id) + "/flame.svg")),
    section("Payload", code(found.payload, "Payload")),
    found.result !== null && section("Result", code(found.result, "Result")),
    found.free !== null && section("Context and metadata", code(found.free, "Context and metadata")),
    section("Other fields", code(found.message, "Other fields")),
  ];
}

function facts(found) {
  const lines = [
    ["organization", found.org_id],
    ["type", found.type],
    ["priority", "P" + found.priority + (found.priority === found.accepted_priority ? "" : " (accepted as P" + found.accepted_priority + ")")],
    ["attempt", number(found.attempt)],
    ["failed attempts", number(found.retry_count)],
    ["crashes", number(found.crashes)],
    ["submitted", time(found.created_at)],
    ["ended", found.ended_at ? time(found.ended_at) : "not yet"],
    ["held by", found.lease_left_s === null ? "nobody" : [found.worker_id, " for ", seconds(Math.max(0, found.lease_left_s)), " unless it renews its lease"]],
    found.has_goal && ["goal", link("#/goals/" + encodeURIComponent(found.goal_id), found.goal_id)],
    found.parent_message_id && ["parent", messageLink(found.parent_message_id)],
  ].filter(Boolean);
  return h("dl", { class: "facts" }, lines.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
}

export function timeline(found) {
  let before = null;
  return h(
    "ol",
    { class: "timeline" },
    found.history.map((event) => {
      const passed = before === null ? "" : "+" + seconds(Math.max(0, event.ts_us - before) / 1e6);
      before = event.ts_us;
      return h(
        "li",
        {},
        time(event.ts_us),
        " ",
        h("b", {}, event.kind.replaceAll("_", " ")),
        " ",
        h("small", {}, passed),
        " ",
        event.worker_id ? "by " + event.worker_id : "",
        event.error_type ? h("span", { class: "bad" }, " ", event.error_type, ": ", event.error) : "",
      );
    }),
  );
}

export function errors(found) {
  return table("Errors", [
    ["attempt", (one) => number(one.attempt), "number"],
    ["error", (one) => one.error_type],
    ["text", (one) => one.error],
  ], found.errors, { hideCaption: true });
}

function tree(found) {
  if (found.tree.length === 1) return h("p", { class: "empty" }, "It has no parent and no children that are stored.");
  return h(
    "ul",
    { class: "tree" },
    found.tree.map((one) =>
      h(
        "li",
        { class: "depth-" + Math.min(one.depth, 8), "aria-current": one.message_id === found.message_id ? "true" : null },
        state(one.state),
        " ",
        one.type,
        " ",
        one.message_id === found.message_id ? h("span", { class: "id" }, one.message_id) : messageLink(one.message_id),
      ),
    ),
  );
}

function buttons(found, load) {
  const act = async (verb, title, text, done) => {
    if (!(await ask(title, h("p", {}, text), title))) return;
    try {
      await post("/page/messages/" + encodeURIComponent(found.message_id) + "/" + verb);
      await load();
      notify(done);
    } catch (error) {
      complain(error);
    }
  };
  return h(
    "p",
    { class: "buttons" },
    found.can_retry &&
      h("button", { type: "button", "data-key": "retry", onclick: () => act("retry", "Retry this message", "It is queued again as a new attempt with all its retries.", "The message is queued again.") }, "Retry"),
    found.can_cancel &&
      h("button", { type: "button", "data-key": "cancel", onclick: () => act("cancel", "Cancel this message", "It ends without a result. A running handler is asked to stop.", "The message is cancelled.") }, "Cancel"),
  );
}
