// The overview: one snapshot a second, and the newest events as they happen.

import { h, link, messageLink, number, replace, seconds, section, state, svg, table, taskLink, time } from "./dom.js";

const FEED_MAX = 30;
const STAGES = ["none", "more workers", "P3 is throttled", "P2 and P3 are throttled", "only P0 is accepted"];

export async function show(content) {
  const places = Object.fromEntries(Object.keys(SECTIONS).map((name) => [name, h("div", { class: "part " + name })]));
  const feed = h("ol", { class: "feed", "aria-label": "The newest events" });
  content.append(
    h("h1", {}, "Overview"),
    ...Object.values(places),
    section("What happens now", feed),
  );
  const drawn = {};
  function add(found) {
    feed.prepend(...found.slice(-FEED_MAX).reverse().map(line));
    while (feed.children.length > FEED_MAX) feed.lastChild.remove();
  }
  return {
    overview(found) {
      for (const [name, [pick, draw]] of Object.entries(SECTIONS)) {
        const data = pick(found);
        const text = JSON.stringify(data);
        if (drawn[name] === text) continue;
        drawn[name] = text;
        replace(places[name], draw(data));
      }
    },
    recent: add,
    events: add,
  };
}

function line(event) {
  return h(
    "li",
    { "data-id": event.message_id },
    time(event.ts_us),
    " ",
    h("b", {}, event.kind.replaceAll("_", " ")),
    " ",
    event.org_id,
    " ",
    event.type ?? "",
    " ",
    event.message_id ? (event.org_id ? messageLink : taskLink)(event.message_id) : "",
    event.error_type ? h("span", { class: "bad" }, " ", event.error_type) : "",
  );
}

const SECTIONS = {
  needs: [(all) => [all.needs, all.verdict.reasons, held(all.breakers)], needs],
  rates: [(all) => [all.rates, all.history, all.depth, all.delayed, all.stage], rates],
  waits: [(all) => all.waits, waits],
  organizations: [(all) => all.organizations, organizations],
  workers: [(all) => [all.workers, all.wanted_workers, all.org_id], workers],
  agents: [(all) => [all.health, all.agents], agents],
  breakers: [(all) => [all.breakers, all.pauses], breakers],
  tokens: [(all) => all.tokens.providers, tokens],
};

// The services whose breaker holds some organizations, with these. One that holds all of them is in the verdict.
function held(breakers) {
  return Object.entries(breakers).filter(([, one]) => one.state !== "closed" && one.organizations.length).map(([service, one]) => [service, one.organizations]);
}

function needs([counts, reasons, open]) {
  const items = [
    [counts.decisions, "decision", "#/decisions"],
    [counts.dead_letters, "dead letter", "#/dead-letters"],
    [counts.quarantined, "quarantined message", "#/dead-letters"],
  ].filter(([count]) => count);
  return section(
    "Needs a person",
    !items.length && !reasons.length && !open.length && h("p", { class: "empty" }, "Nothing waits for a person."),
    items.length > 0 && h("ul", { class: "todo" }, items.map(([count, what, hash]) => h("li", {}, link(hash, [h("b", {}, number(count)), " ", what, count === 1 ? "" : "s"])))),
    reasons.map((one) => h("p", { class: "bad" }, one.level, ": ", one.what, "; ", one.why)),
    open.map(([service, organizations]) => h("p", { class: "bad" }, "The breaker of the service ", service, " is open for ", organizations.join(", "), ": messages that call it are delayed.")),
  );
}

export function rates([now, history, depth, delayed, stage]) {
  return section(
    "Throughput",
    h(
      "dl",
      { class: "figures" },
      figure("submitted a second", now.submitted),
      figure("completed a second", now.completed),
      figure("failed a second", now.failed, now.failed ? "bad" : ""),
      figure("waiting", depth),
      figure("delayed", delayed),
      h("div", {}, h("dt", {}, "backpressure"), h("dd", { class: stage ? "bad" : "" }, "stage ", stage, h("small", {}, " ", STAGES[stage] ?? ""))),
    ),
    spark(history),
  );
}

function figure(label, value, kind = "") {
  return h("div", {}, h("dt", {}, label), h("dd", { class: kind }, number(value)));
}

function spark(history) {
  const most = Math.max(1, ...history.map((one) => Math.max(one.submitted, one.completed)));
  const points = (name) => history.map((one, index) => `${index * 5},${40 - (38 * one[name]) / most}`).join(" ");
  return h(
    "figure",
    {},
    svg(
      "svg",
      { viewBox: "0 0 300 42", class: "spark", preserveAspectRatio: "none", role: "img", "aria-label": `Messages in each of the last ${history.length} seconds, at most ${most}` },
      svg("polyline", { points: points("submitted"), class: "submitted" }),
      svg("polyline", { points: points("completed"), class: "completed" }),
    ),
    h("figcaption", {}, h("span", { class: "key submitted" }, "submitted"), " ", h("span", { class: "key completed" }, "completed"), ` in each of the last ${history.length} seconds, at most ${number(most)}`),
  );
}

function waits(found) {
  const columns = [
    ["priority", (one) => "P" + one.priority],
    ["delivered", (one) => number(one.count), "number"],
    ["p50", (one) => seconds(one.p50_ms / 1000), "number"],
    ["p90", (one) => seconds(one.p90_ms / 1000), "number"],
    ["p99", (one) => seconds(one.p99_ms / 1000), "number"],
    ["target of p99", (one) => seconds(one.target_ms / 1000), "number"],
    ["", (one) => (one.count ? h("span", { class: one.is_within_target ? "good" : "bad" }, one.is_within_target ? "within" : "missed") : "")],
  ];
  return section("Waiting time", table("Waiting time of the last minute", columns, found));
}

function organizations(found) {
  const columns = [
    ["organization", (one) => [link("#/messages?org_id=" + encodeURIComponent(one.org_id), one.org_id), one.paused ? h("span", { class: "bad" }, " paused") : ""]],
    ...[0, 1, 2, 3].map((lane) => ["P" + lane, (one) => number(one.lanes[lane]), "number"]),
    ["waiting", (one) => number(one.depth), "number"],
    ["running", (one) => number(one.states.PROCESSING), "number"],
    ["delayed", (one) => number(one.delayed), "number"],
    ["dead", (one) => number((one.states.DEAD_LETTER ?? 0) + (one.states.QUARANTINED ?? 0)), "number"],
    ["submitted/s", (one) => number(one.rates.submitted), "number"],
    ["completed/s", (one) => number(one.rates.completed), "number"],
    ["stage", (one) => h("span", { class: one.stage ? "bad" : "" }, one.stage), "number"],
  ];
  return section("Organizations", table("Depth of each organization and lane", columns, found, { empty: "No messages yet." }));
}

function workers([found, wanted, orgId]) {
  if (orgId !== null) return "";
  const columns = [
    ["worker", (one) => one.worker_id],
    ["running", (one) => number(one.in_flight), "number"],
    ["slots", (one) => number(one.slots), "number"],
    ["claims in 30 s", (one) => number(one.claims), "number"],
    ["silent", (one) => seconds(one.silent_s), "number"],
  ];
  const more = wanted > found.length ? h("p", { class: "bad" }, `The backlog asks for ${wanted} worker${wanted === 1 ? "" : "s"}.`) : "";
  return section("Workers", table("Workers that reported lately", columns, found, { empty: "No worker is running." }), more);
}

function agents([health, found]) {
  const order = ["alive", "registered", "asleep", "suspect", "dead"];
  const sick = found.filter((one) => one.health === "suspect" || one.health === "dead");
  return section(
    "Agents",
    Object.keys(health).length
      ? h("p", {}, order.filter((one) => health[one]).map((one) => h("span", { class: "health " + one }, number(health[one]), " ", one, " ")), link("#/agents", "all agents"))
      : h("p", { class: "empty" }, "No agent is registered."),
    sick.length > 0 &&
      table("Agents that are not well", [
        ["agent", (one) => one.org_id + "/" + one.agent_id],
        ["health", (one) => h("span", { class: "health " + one.health }, one.health)],
        ["silent", (one) => seconds(one.silent_s), "number"],
      ], sick.slice(0, 10)),
  );
}

function breakers([found, pauses]) {
  const rows = Object.entries(found).map(([service, one]) => ({ service, ...one }));
  const columns = [
    ["service", (one) => one.service],
    ["breaker", (one) => state(one.state)],
    ["for", (one) => (one.state === "closed" ? "" : one.organizations.length ? one.organizations.join(", ") : "all")],
    ["open for", (one) => (one.opens_again_s ? seconds(one.opens_again_s) : ""), "number"],
  ];
  return section(
    "Breakers and pauses",
    table("Breakers", columns, rows, { empty: "No service has a breaker." }),
    pauses.length > 0 && h("ul", {}, pauses.map((one) => h("li", { class: "bad" }, (one.type ? "type " + one.type : "every type") + " of " + (one.org_id || "all organizations") + " is paused"))),
  );
}

function tokens(providers) {
  const rows = Object.entries(providers).flatMap(([provider, { models }]) => Object.entries(models).map(([model, one]) => ({ provider, model, ...one })));
  if (!rows.length) return "";
  const columns = [
    ["model", (one) => one.provider + "/" + one.model],
    ["window", (one) => one.window.replaceAll("_", " ")],
    ["used", (one) => number(one.used), "number"],
    ["reserved", (one) => number(one.reserved), "number"],
    ["free", (one) => number(one.free), "number"],
    ["", (one) => h("progress", { max: one.limit || 1, value: one.used + one.reserved, "aria-label": "used and reserved tokens of " + one.model })],
    ["filled again in", (one) => seconds(Math.max(0, one.resets_in_s)), "number"],
  ];
  return section("Tokens", table("Token budgets of models", columns, rows));
}
