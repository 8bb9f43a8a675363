// Builds elements. Every text becomes a text node, so nothing in a message is ever read as markup.

// Characters that have no picture of their own, or that change the direction or the order of text.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\u{e0000}-\u{e0fff}]/gu;

export function visible(text) {
  return String(text ?? "").replace(
    HIDDEN,
    (character) => "\\u" + character.codePointAt(0).toString(16).padStart(4, "0"),
  );
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, visible(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child))));
}

// Replaces the content of an element. The focus stays on the same link, button or field.
export function replace(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const key = focused && focusKey(focused);
  element.replaceChildren(...nodes(children));
  if (key) [...element.querySelectorAll("a,button,input,select,summary")].find((one) => focusKey(one) === key)?.focus();
}

function focusKey(element) {
  return [element.tagName, element.getAttribute("href"), element.dataset.key, element.name, element.textContent].join("|");
}

// A table with a caption. A column is a label and a function of the row, and "number" aligns it to the right.
export function table(caption, columns, rows, { empty = "None.", hideCaption = false } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, hideCaption ? "" : caption + ": ", empty);
  return h(
    "div",
    { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: hideCaption ? "quiet" : "" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([label, , kind]) => h("th", { scope: "col", class: kind }, label)))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.rowClass, "data-id": row.message_id }, columns.map((column) => cell(column, row))))),
    ),
  );
}

function cell([label, value, kind], row) {
  return h("td", { "data-label": label, class: kind }, value(row));
}

export function section(title, ...children) {
  const id = "section-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

// ---- words -------------------------------------------------------------------------------------------

const NUMBER = new Intl.NumberFormat("en");

export function number(value) {
  return NUMBER.format(value ?? 0);
}

export function time(value) {
  const moment = typeof value === "number" ? new Date(value / 1000) : new Date(value);
  if (!value || Number.isNaN(moment.getTime())) return "";
  return h("time", { datetime: moment.toISOString(), title: moment.toISOString() }, timeText(moment));
}

function timeText(moment) {
  const clock = moment.toLocaleTimeString("en-GB");
  const day = moment.toLocaleDateString("en-CA");
  return day === new Date().toLocaleDateString("en-CA") ? clock : day + " " + clock;
}

export function seconds(value) {
  if (value < 1) return Math.round(value * 1000) + " ms";
  if (value < 120) return value.toFixed(value < 10 ? 1 : 0) + " s";
  if (value < 7200) return Math.round(value / 60) + " min";
  return Math.round(value / 3600) + " h";
}

export function state(value) {
  return h("span", { class: "state " + String(value).toLowerCase() }, value);
}

export function link(hash, text, attributes = {}) {
  return h("a", { href: hash, ...attributes }, text);
}

export function messageLink(id) {
  return link("#/messages/" + encodeURIComponent(id), id, { class: "id" });
}

export function taskLink(id) {
  return link("#/tasks/" + encodeURIComponent(id), id, { class: "id" });
}

// Text that is data: it keeps its lines and is never markup.
export function code(text, label) {
  return h("pre", { class: "data", tabindex: "0", "aria-label": label + " as text", dir: "ltr" }, text);
}

let drawn = 0;

// A flame graph of the server. It is fetched again for each drawing of a view; alone, it has tooltips.
export function flame(path) {
  const alt = "Flame graph: the time of each type of message, below that of its parent";
  return h("p", {}, h("a", { href: path, target: "_blank", rel: "noopener" }, h("img", { class: "flame", src: path + "#" + ++drawn, alt })));
}

const SELDOM_MS = 2500;

// Calls a function that loads something, but not again before a while has passed since it ended.
export function seldom(load, fail) {
  let due = performance.now() + SELDOM_MS;
  return () => {
    if (performance.now() < due) return;
    due = Infinity;
    load().catch(fail).finally(() => (due = performance.now() + SELDOM_MS));
  };
}

// Loads something soon after the first of several calls.
export function soon(load, fail, wait_ms) {
  let timer = 0;
  return {
    ask() {
      timer ||= setTimeout(() => {
        timer = 0;
        load().catch(fail);
      }, wait_ms);
    },
    cancel: () => clearTimeout(timer),
  };
}

// ---- notices and dialogs -----------------------------------------------------------------------------

export function notify(text) {
  document.getElementById("alert").textContent = "";
  document.getElementById("notice").textContent = visible(text);
}

export function complain(error) {
  document.getElementById("notice").textContent = "";
  document.getElementById("alert").textContent = visible(error?.message ?? error);
}

export function quiet() {
  document.getElementById("alert").textContent = "";
  document.getElementById("notice").textContent = "";
}

// Asks in a dialog. Resolves to what `confirm` returns, or null when the person leaves it.
// Each question has a dialog of its own: the late "close" event of one must not answer the next.
export function ask(title, content, confirmLabel, value = () => true) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" });
  return new Promise((resolve) => {
    let answer = null;
    const submit = (event) => {
      event.preventDefault();
      answer = value(event.target);
      dialog.close();
    };
    dialog.append(
      h(
        "form",
        { onsubmit: submit },
        h("h2", { id: "dialog-title" }, title),
        content,
        h(
          "p",
          { class: "buttons" },
          confirmLabel && h("button", { type: "submit", class: "primary", "data-key": "confirm" }, confirmLabel),
          h("button", { type: "button", onclick: () => dialog.close() }, confirmLabel ? "Leave it as it is" : "Close"),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
