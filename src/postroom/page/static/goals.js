// Goals with checkpoints, branches and rollback, and operations that hold each other up.

import { get, post } from "./api.js";
import { ask, code, complain, flame, h, link, messageLink, notify, number, replace, section, seldom, state, table, time } from "./dom.js";

export async function show(content, { isCurrent, fail }) {
  const place = h("div");
  let known = "";
  content.append(h("h1", {}, "Goals"), place);

  async function load() {
    const found = await get("/page/goals");
    const text = JSON.stringify(found);
    if (!isCurrent() || text === known) return;
    known = text;
    replace(place, section("All goals", goalTable(found.goals)), section("Conflicts", conflicts(found.conflicts)));
  }

  await load();
  return { overview: seldom(load, fail), reset: () => load().catch(fail) };
}

function goalTable(goals) {
  const columns = [
    ["goal", (one) => link("#/goals/" + encodeURIComponent(one.goal_id), one.goal_id)],
    ["organization", (one) => one.org_id],
    ["state", (one) => state(one.state)],
    ["open messages", (one) => number(one.open_messages), "number"],
    ["checkpoints", (one) => number(one.checkpoints), "number"],
    ["effects", (one) => number(one.effects), "number"],
    ["decisions", (one) => (one.decisions ? link("#/decisions", number(one.decisions)) : "0"), "number"],
    ["started", (one) => time(one.created_us)],
  ];
  return table("Goals and their states", columns, goals, { hideCaption: true, empty: "No goal was started." });
}

function conflicts({ active, waiting }) {
  return [
    table("Operations under way", [
      ["message", (one) => messageLink(one.message_id)],
      ["organization", (one) => one.org_id],
      ["operation", (one) => JSON.stringify(one.operation)],
      ["since", (one) => time(one.since_us)],
    ], active, { empty: "No operation is under way." }),
    waiting.length > 0 &&
      table("Messages that wait for another operation", [
        ["message", (one) => messageLink(one.message_id)],
        ["waits for", (one) => messageLink(one.other)],
        ["conflict", (one) => one.kind],
        ["on", (one) => one.what],
      ], waiting),
  ];
}

export async function showOne(content, { argument, isCurrent, fail, session }) {
  const place = h("div");
  let known = "";
  content.append(h("h1", {}, "Goal ", h("span", { class: "id" }, argument)), place);

  async function load() {
    const found = await get("/page/goals/" + encodeURIComponent(argument));
    const text = JSON.stringify(found);
    if (!isCurrent() || text === known) return;
    known = text;
    replace(place, draw(found, rollback, session.operates));
  }

  async function rollback(checkpoint) {
    const path = "/page/goals/" + encodeURIComponent(argument) + "/rollback";
    const body = { checkpoint_id: checkpoint.checkpoint_id };
    try {
      const seen = await post(path, { ...body, is_preview: true });
      const accepted = (form) => [...form.querySelectorAll("input:checked")].map((one) => one.value);
      const chosen = await ask("Roll back to " + checkpoint.checkpoint_id, preview(seen), "Roll back", accepted);
      if (chosen === null) return;
      await post(path, { ...body, accept_irreversible: chosen, is_preview: false });
      await load();
      notify("The goal is rolled back to " + checkpoint.checkpoint_id + ".");
    } catch (error) {
      complain(error);
    }
  }

  await load();
  return { overview: seldom(load, fail), reset: () => load().catch(fail) };
}

function draw({ goal, checkpoints, effects, context, branch }, rollback, operates) {
  const facts = [
    ["organization", goal.org_id],
    ["state", state(goal.state)],
    ["open messages", number(goal.open_messages)],
    ["effects", number(goal.effects)],
    ["started", time(goal.created_us)],
    ["ended", goal.ended_us ? time(goal.ended_us) : "not yet"],
    goal.tried.length > 0 && ["recovery tools used", goal.tried.join(", ")],
    goal.undoing.length > 0 && ["compensations under way", goal.undoing.map((id) => [messageLink(id), " "])],
  ].filter(Boolean);
  const columns = [
    ["checkpoint", (one) => h("span", { class: "id" }, one.checkpoint_id)],
    ["reason", (one) => one.reason],
    ["taken", (one) => time(one.created_us)],
    ["effects", (one) => number(one.effects), "number"],
    ["", (one) => goal.state === "ACTIVE" && operates && h("button", { type: "button", "data-key": one.checkpoint_id, onclick: () => rollback(one) }, "Roll back to here")],
  ];
  const undone = [
    ["effect", (one) => one.key],
    ["class", (one) => one.reversal_class.toLowerCase()],
    ["undone by", (one) => (one.reversal ? code(one.reversal, "What undoes " + one.key) : "nothing that is known")],
  ];
  const changes = [
    ["node", (one) => h("span", { class: "id" }, one.node_id)],
    ["changes", (one) => code(one.changes, "Changes of " + one.node_id)],
    ["edges", (one) => number(one.edges), "number"],
  ];
  return [
    h("dl", { class: "facts" }, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    section("Time", flame("/page/goals/" + encodeURIComponent(goal.goal_id) + "/flame.svg")),
    section("Checkpoints", table("Checkpoints, the oldest first", columns, checkpoints, { hideCaption: true, empty: "The goal has ended, and its checkpoints are gone." })),
    section("Effects", table("Effects that were not undone, the oldest first", undone, effects, { hideCaption: true, empty: "There is no effect." })),
    section("Branch", table("Changes that the main graph does not have yet", changes, branch, { empty: "none." })),
    section("Context", code(context, "Context of the goal")),
  ];
}

function preview(seen) {
  return h(
    "div",
    {},
    h("p", {}, `Open messages that are later than the checkpoint are cancelled; the goal has ${number(seen.open_messages)} open messages. The branch and the context become what they were.`),
    seen.undone.length > 0 && h("p", {}, "These effects are undone: ", seen.undone.join(", "), "."),
    seen.irreversible.length > 0 && [
      h("p", { class: "bad" }, "These effects cannot be undone. Choose those that may stay:"),
      h("ul", {}, seen.irreversible.map((key) => h("li", {}, h("label", {}, h("input", { type: "checkbox", value: key }), " ", key)))),
    ],
  );
}
