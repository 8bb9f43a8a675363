// Dead letters: patterns, filters, and a replay that first says what it would do.

import { get, post } from "./api.js";
import { ask, complain, h, messageLink, notify, number, replace, section, soon, state, table, time } from "./dom.js";

const REFRESH_MS = 1000;
const DEAD = ["dead_letter", "quarantined", "replayed", "deleted"];
const NAMES = ["org_id", "type", "error_type"];

export async function show(content, { parameters, session, isCurrent, fail }) {
  const filters = Object.fromEntries(NAMES.map((name) => [name, parameters.get(name) ?? ""]));
  const chosen = new Set();
  const patternPlace = h("div");
  const listPlace = h("div");
  let letters = [];
  let next = "";
  let turn = 0; // an answer that comes after that of a later call is not shown

  const change = (event) => {
    filters[event.target.name] = event.target.value;
    const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value));
    history.replaceState(null, "", "#/dead-letters" + (query.size ? "?" + query : ""));
    load().catch(fail);
  };
  const field = (name, label) => h("label", {}, label, h("input", { name, value: filters[name], placeholder: "all", onchange: change }));
  content.append(
    h("h1", {}, "Dead letters"),
    patternPlace,
    h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, !session.org_id && field("org_id", "Organization"), field("type", "Type"), field("error_type", "Error")),
    listPlace,
  );

  async function load(after = "") {
    const mine = ++turn;
    const found = await get("/page/dead-letters", { ...filters, after });
    if (mine !== turn || !isCurrent()) return;
    letters = after ? [...letters, ...found.letters] : found.letters;
    next = found.after;
    if (!after) replace(patternPlace, patterns(found));
    draw();
  }

  async function replay(body, title) {
    try {
      const seen = await post("/page/replay", { ...body, is_preview: true });
      const count = seen.message_ids.length;
      if (!(await ask(title, preview(seen), count ? `Replay ${number(count)} message${count === 1 ? "" : "s"}` : ""))) return;
      await post("/page/replay", { message_ids: seen.message_ids, is_preview: false });
      chosen.clear();
      await load();
      notify(`${number(count)} message${count === 1 ? " is" : "s are"} queued again.`);
    } catch (error) {
      complain(error);
    }
  }

  function patterns(found) {
    const columns = [
      ["messages", (one) => number(one.count), "number"],
      ["organization", (one) => one.org_id],
      ["type", (one) => one.type],
      ["error", (one) => [h("b", {}, one.error_type), " ", one.error]],
      ["quarantined", (one) => number(one.quarantined), "number"],
      ["newest", (one) => time(one.newest)],
      ["", (one) => session.operates && h("button", { type: "button", "data-key": [one.org_id, one.type, one.error_type].join("/"), onclick: () => replay(scope(one), "Replay this pattern") }, "Preview a replay")],
    ];
    const caption = found.sampled ? `Patterns of the first ${number(found.sampled)} dead letters` : "Patterns";
    return section("Patterns", table(caption, columns, found.patterns, { hideCaption: !found.sampled, empty: "There are no dead letters." }));
  }

  function draw() {
    const tick = (id) => (event) => {
      if (event.target.checked) chosen.add(id);
      else chosen.delete(id);
      draw();
    };
    const columns = [
      ["chosen", (one) => session.operates && h("input", { type: "checkbox", name: "choose-" + one.message_id, checked: chosen.has(one.message_id), disabled: !one.can_replay, "aria-label": "choose " + one.message_id, onchange: tick(one.message_id) })],
      ["died", (one) => time(one.at)],
      ["state", (one) => state(one.state)],
      ["organization", (one) => one.org_id],
      ["type", (one) => one.type],
      ["error", (one) => [h("b", {}, one.error_type), " ", one.error]],
      ["id", (one) => messageLink(one.message_id)],
    ];
    replace(
      listPlace,
      section(
        "Letters",
        session.operates &&
          h(
            "p",
            { class: "buttons" },
            h("button", { type: "button", "data-key": "chosen", disabled: !chosen.size, onclick: () => replay({ message_ids: [...chosen] }, "Replay the chosen messages") }, "Preview a replay of the chosen"),
            h("button", { type: "button", "data-key": "all", disabled: !letters.length, onclick: () => replay(scope(filters), "Replay all that fit the filters") }, "Preview a replay of all that fit"),
          ),
        table("Dead letters, the oldest first", columns, letters, { empty: "No dead letter fits." }),
        next && h("button", { type: "button", "data-key": "more", onclick: () => load(next).catch(fail) }, "More dead letters"),
      ),
    );
  }

  const again = soon(load, fail, REFRESH_MS);
  await load();
  return {
    events(events, skipped) {
      if (skipped || events.some((one) => DEAD.includes(one.kind))) again.ask();
    },
    reset: () => load().catch(fail),
    close: again.cancel,
  };
}

function scope(source) {
  return Object.fromEntries(NAMES.filter((name) => source[name]).map((name) => [name, source[name]]));
}

function preview(seen) {
  const left = Object.entries(seen.left_out);
  return h(
    "div",
    {},
    seen.message_ids.length
      ? h("p", {}, "Each of these messages is queued again as a new attempt with all its retries:")
      : h("p", {}, "Nothing would be replayed."),
    h("ul", {}, Object.entries(seen.kinds).map(([kind, count]) => h("li", {}, number(count), " of ", kind))),
    left.length > 0 && h("ul", {}, left.map(([why, count]) => h("li", {}, number(count), " stay: ", why))),
    seen.notes.map((note) => h("p", { class: "bad" }, note)),
  );
}
