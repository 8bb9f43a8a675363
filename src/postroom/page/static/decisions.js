// Decisions that wait for a person, and the rules that are in force.

import { get, post } from "./api.js";
import { code, complain, h, messageLink, notify, number, replace, seconds, section, seldom, table } from "./dom.js";

export async function show(content, { isCurrent, fail, session }) {
  const place = h("div");
  let known = "";
  content.append(h("h1", {}, "Decisions"), place);

  async function load() {
    const { decisions, rules } = await get("/page/decisions");
    const text = JSON.stringify([decisions, rules]);
    if (!isCurrent() || text === known) return;
    known = text;
    const cards = decisions.length ? decisions.map((one) => card(one, answer, session.operates)) : h("p", { class: "empty" }, "No decision waits for a person.");
    replace(place, cards, rules.length > 0 && section("Rules in force", ruleTable(rules, forget, session.operates)));
  }

  async function forget(rule) {
    try {
      await post("/page/rules/" + encodeURIComponent(rule.rule_id) + "/forget", {});
      await load();
      notify("The rule is removed.");
    } catch (error) {
      complain(error);
    }
  }

  async function answer(id, choice) {
    try {
      await post("/page/decisions/" + encodeURIComponent(id), { choice });
      await load();
      notify("You decided: " + choice + ".");
    } catch (error) {
      complain(error);
    }
  }

  await load();
  return { overview: seldom(load, fail), reset: () => load().catch(fail) };
}

function card(one, answer, operates) {
  const title = "decision-" + one.decision_id;
  const left = one.deadline_us / 1e6 - Date.now() / 1000;
  return h(
    "section",
    { class: "card", "aria-labelledby": title },
    h("h2", { id: title }, one.kind.replaceAll("_", " "), " of ", one.org_id),
    one.reasoning && h("p", {}, one.reasoning),
    h("dl", { class: "facts" }, Object.entries(one.subject).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, name === "message_id" ? messageLink(value) : value)))),
    code(one.question, "Facts of the question"),
    one.state === "waiting"
      ? choices(one, answer, operates)
      : h("p", {}, "The adviser is being asked."),
    one.deadline_us ? h("p", { class: "hint" }, left > 0 ? `Without an answer in ${seconds(left)}, the safe choice is taken: ${one.default}.` : `The safe choice is about to be taken: ${one.default}.`) : "",
  );
}

function ruleTable(rules, forget, operates) {
  const columns = [
    ["organization", (one) => one.org_id],
    ["decides about", (one) => one.kind.replaceAll("_", " ")],
    ["pattern", (one) => one.pattern],
    ["payloads with", (one) => one.payload],
    ["choice", (one) => one.choice],
    ["held messages", (one) => number(one.held), "number"],
    operates && ["remove", (one) => h("button", { type: "button", "data-key": one.rule_id, onclick: () => forget(one) }, "Remove")],
  ].filter(Boolean);
  return table("Rules in force", columns, rules, { hideCaption: true });
}

function choices(one, answer, operates) {
  if (!operates) return h("p", { class: "hint" }, "Your token may only read. The choices are: ", one.options.join(", "), ".");
  return h("p", { class: "buttons" }, one.options.map((option) => h("button", { type: "button", "data-key": one.decision_id + option, onclick: () => answer(one.decision_id, option) }, option === one.proposed ? [option, " (proposed)"] : option)));
}
