// The page: sign-in, navigation and the stream. Each view is a module of its own.

import { known, session, signIn, signOut, SignedOut, Stream } from "./api.js";
import { complain, h, link, number, quiet, replace } from "./dom.js";

const VIEWS = [
  { path: /^overview$/, view: () => import("./overview.js"), nav: "overview", label: "Overview" },
  { path: /^messages$/, view: () => import("./messages.js"), nav: "messages", label: "Messages" },
  { path: /^messages\/(.+)$/, view: () => import("./message.js"), nav: "messages" },
  { path: /^dead-letters$/, view: () => import("./letters.js"), nav: "dead-letters", label: "Dead letters", count: (needs) => needs.dead_letters + needs.quarantined },
  { path: /^decisions$/, view: () => import("./decisions.js"), nav: "decisions", label: "Decisions", operators: true, count: (needs) => needs.decisions },
  { path: /^goals$/, view: () => import("./goals.js"), nav: "goals", label: "Goals", operators: true },
  { path: /^goals\/(.+)$/, view: () => import("./goals.js"), show: "showOne", nav: "goals", operators: true },
  { path: /^agents$/, view: () => import("./agents.js"), nav: "agents", label: "Agents" },
  { path: /^agents\/(.+)$/, view: () => import("./tasks.js"), nav: "agents" },
  { path: /^tasks\/(.+)$/, view: () => import("./tasks.js"), show: "showOne", nav: "agents" },
  { path: /^buses$/, view: () => import("./buses.js"), nav: "buses", label: "Buses" },
  { path: /^buses\/(.+)$/, view: () => import("./buses.js"), show: "showOne", nav: "buses" },
  { path: /^report$/, view: () => import("./report.js"), nav: "report", label: "Report", everywhere: true },
];
const FIRST = "#/overview";
const RECENT_MAX = 30;

const main = document.getElementById("main");
const nav = document.getElementById("nav");
let current = {};
let shown = 0;
let snapshot = null;
let recent = [];
let isConnected = false;

const stream = new Stream({
  overview(found) {
    snapshot = found;
    drawNav();
    current.overview?.(found);
  },
  events(found, skipped) {
    recent = [...recent, ...found].slice(-RECENT_MAX);
    current.events?.(found, skipped);
  },
  reset() {
    current.reset?.();
  },
  connected(value) {
    isConnected = value;
    drawAccount();
  },
  signedOut: () => showSignIn("Your session has ended. Sign in again."),
});

// ---- navigation --------------------------------------------------------------------------------------

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").map(decodeURIComponent).join("/"), parameters: new URLSearchParams(query) };
}

async function navigate() {
  if (!session.csrf) return;
  const { path, parameters } = place();
  const found = VIEWS.find((one) => one.path.test(path));
  if (!found) {
    location.hash = FIRST;
    return;
  }
  const turn = ++shown;
  current.close?.();
  current = {};
  quiet();
  drawNav(found.nav);
  const content = h("div", { class: "view" });
  const context = { session, parameters, argument: path.match(found.path)[1], isCurrent: () => turn === shown, fail };
  main.replaceChildren(content);
  try {
    const module = await found.view();
    const view = (turn === shown && (await module[found.show ?? "show"](content, context))) || {};
    if (turn !== shown) {
      view.close?.();
      return;
    }
    current = view;
    if (snapshot) current.overview?.(snapshot);
    if (recent.length) current.recent?.(recent);
  } catch (error) {
    fail(error);
  }
  focusHeading(content);
}

function focusHeading(content) {
  const heading = content.querySelector("h1");
  document.title = (heading ? heading.textContent + " · " : "") + "postroom";
  if (heading && !content.contains(document.activeElement)) {
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
}

function fail(error) {
  if (error instanceof SignedOut) showSignIn(error.message);
  else complain(error);
}

function drawNav(active = nav.dataset.active) {
  nav.dataset.active = active ?? "";
  const needs = snapshot?.needs;
  replace(
    nav,
    VIEWS.filter((one) => one.label && (session.role !== "agent" || !one.operators) && (session.is_operator || !one.everywhere)).map((one) => {
      const count = needs && one.count ? one.count(needs) : 0;
      return link("#/" + one.nav, [one.label, count ? h("span", { class: "count", "aria-label": number(count) + " waiting" }, number(count)) : ""], {
        "aria-current": one.nav === active ? "page" : null,
      });
    }),
  );
}

function drawAccount() {
  replace(
    document.getElementById("account"),
    h("span", { id: "connection", class: isConnected ? "on" : "off", role: "status" }, isConnected ? "Live" : "Connecting"),
    h("span", { class: "who" }, session.name, " (", session.role, session.org_id ? " of " + session.org_id : "", ")"),
    themeChoice(),
    h("button", { type: "button", onclick: leave, "data-key": "sign-out" }, "Sign out"),
  );
}

// ---- the colours -------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function themeChoice() {
  const chosen = localStorage.getItem("theme") ?? "system";
  const change = (event) => {
    localStorage.setItem("theme", event.target.value);
    drawTheme();
  };
  return h(
    "label",
    { class: "theme" },
    h("span", { class: "quiet" }, "Colours"),
    h("select", { name: "theme", onchange: change }, THEMES.map((one) => h("option", { value: one, selected: one === chosen }, one))),
  );
}

function drawTheme() {
  const chosen = localStorage.getItem("theme");
  if (chosen && chosen !== "system") document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

// ---- sign-in -----------------------------------------------------------------------------------------

function showSignIn(text = "") {
  shown += 1;
  stream.close();
  stream.last = "";
  snapshot = null;
  recent = [];
  current.close?.();
  current = {};
  session.csrf = "";
  nav.hidden = true;
  document.getElementById("account").replaceChildren();
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  quiet();
  if (text) complain(text);
  document.title = "Sign in · postroom";
  const field = h("input", { id: "token", name: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await signIn(field.value);
      start();
    } catch (error) {
      complain(error);
      field.focus();
    }
  };
  main.replaceChildren(
    h(
      "form",
      { class: "sign-in", onsubmit: submit },
      h("h1", {}, "Sign in"),
      h("label", { for: "token" }, "Token"),
      field,
      h("p", { class: "hint" }, h("code", {}, "postroom up"), " prints the first token; ", h("code", {}, "postroom token create"), " makes more."),
      h("button", { type: "submit", class: "primary" }, "Sign in"),
    ),
  );
  field.focus();
}

async function leave() {
  try {
    await signOut();
  } catch (error) {
    if (!(error instanceof SignedOut)) complain(error);
  }
  showSignIn();
}

function start() {
  nav.hidden = false;
  drawNav();
  drawAccount();
  stream.open();
  if (location.hash) navigate();
  else location.hash = FIRST;
}

drawTheme();
window.addEventListener("hashchange", navigate);
if (known()) start();
else showSignIn();
