// Agents, their tasks in numbers, and mailboxes. The server never sends the id of a private mailbox.

import { get } from "./api.js";
import { h, link, messageLink, number, replace, seconds, section, seldom, table, time } from "./dom.js";

export async function show(content, { isCurrent, fail }) {
  const place = h("div");
  let known = "";
  let after = "";
  content.append(h("h1", {}, "Agents"), place);

  async function load() {
    const asked = after;
    const [found, tasks] = await Promise.all([get("/page/agents"), get("/page/tasks", { after: asked })]);
    const text = JSON.stringify([found, tasks]);
    if (!isCurrent() || asked !== after || text === known) return;
    known = text;
    replace(
      place,
      section("Registered agents", agentTable(found.agents)),
      section("Tasks", taskTable(tasks.queues), pages(asked, tasks.after, turnTo)),
      mailboxes(found.mail),
      owners(found.registered),
    );
  }
  const turnTo = (name) => {
    after = name;
    load().catch(fail);
  };

  await load();
  return { overview: seldom(load, fail), reset: () => load().catch(fail) };
}

function agentTable(agents) {
  const ids = (list) => (list.length ? [number(list.length), ": ", list.slice(0, 3).map((id) => [messageLink(id), " "]), list.length > 3 ? "…" : ""] : "");
  const columns = [
    ["agent", (one) => one.agent_id],
    ["organization", (one) => one.org_id],
    ["health", (one) => h("span", { class: "health " + one.health }, one.health)],
    ["silent", (one) => seconds(one.silent_s), "number"],
    ["coordinator", (one) => one.coordinator],
    ["waits for answers", (one) => ids(one.waits_for)],
    ["in its inbox", (one) => ids(one.waited_for_by)],
    ["registered", (one) => time(one.registered_at)],
  ];
  return table("Agents of the global queue", columns, agents, { empty: "No agent is registered." });
}

function taskTable(queues) {
  const count = (...states) => (one) => number(states.reduce((sum, state) => sum + (one.states[state] ?? 0), 0));
  const columns = [
    ["agent", (one) => link("#/agents/" + encodeURIComponent(one.agent), one.agent)],
    ["waiting", count("QUEUED", "SCHEDULED", "RETRYING"), "number"],
    ["oldest", (one) => (one.oldest_age_s === null ? "" : seconds(one.oldest_age_s)), "number"],
    ["claimed", count("PROCESSING"), "number"],
    ["completed", count("COMPLETED", "EXECUTING", "DONE"), "number"],
    ["failed", count("DEAD_LETTER", "QUARANTINED"), "number"],
    ["cancelled or expired", count("CANCELLED", "EXPIRED"), "number"],
    ["leases that ran out", (one) => number(one.lapses), "number"],
  ];
  return table("Tasks of agents", columns, queues, { empty: "No agent whose tasks you may read has any." });
}

function pages(after, next, turnTo) {
  if (!after && !next) return "";
  return h(
    "p",
    { class: "buttons" },
    after && h("button", { type: "button", "data-key": "first", onclick: () => turnTo("") }, "First agents"),
    next && h("button", { type: "button", "data-key": "next", onclick: () => turnTo(next) }, "Further agents"),
  );
}

function mailboxes(mail) {
  if (!mail) return "";
  const columns = [
    ["mailbox", (one) => h("span", { class: "id" }, one.mail_id)],
    ["organization", (one) => one.org_id],
    ["description", (one) => one.desc],
    ["messages", (one) => number(one.messages), "number"],
    ["made", (one) => time(one.created_us)],
  ];
  return section(
    "Mailboxes",
    h("p", {}, `Mailboxes: ${number(mail.mailboxes)}, with ${number(mail.messages)} messages. Private ones, whose ids are not shown: ${number(mail.private)}.`),
    table("Public mailboxes", columns, mail.public, { empty: "There is none." }),
  );
}

function owners(registered) {
  if (!registered.length) return "";
  return section("Agents and operators with a token of their own", table("Agents and operators", [
    ["name", (one) => one.name],
    ["role", (one) => one.role],
    ["organization", (one) => one.org_id],
  ], registered, { hideCaption: true }));
}
