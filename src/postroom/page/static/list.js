// A list with filters, pages by cursor, the newest first, and new rows as they come.

import { get } from "./api.js";
import { h, replace, time } from "./dom.js";

const REFRESH_MS = 400;

// The rows of an answer are in `<noun>s`, each with its `<noun>_id`. `columns` are a label and a function of the
// row. `place` is the address of the view, which gets the filters when they change. `concerns` says whether an
// event may change the list.
export class List {
  constructor({ noun, path, place, columns, filters, concerns }, { isCurrent, fail }) {
    this.noun = noun;
    this.path = path;
    this.place = place;
    this.columns = columns;
    this.filters = filters;
    this.concerns = concerns;
    this.isCurrent = isCurrent;
    this.fail = fail;
    this.rows = [];
    this.cursor = "";
    this.turn = 0;
    this.timer = 0;
    this.refreshed = 0;
    this.isPaging = false;
    this.isStale = false;
    this.body = h("tbody");
    this.foot = h("p", { class: "buttons" });
    this.element = h(
      "div",
      {},
      h(
        "table",
        { class: "cards" },
        h("caption", {}, "The newest first"),
        h("thead", {}, h("tr", {}, columns.map(([label]) => h("th", { scope: "col" }, label)))),
        this.body,
      ),
      this.foot,
    );
  }

  change(name, value) {
    if (this.filters[name] === value) return;
    this.filters[name] = value;
    this.rows = []; // A refresh that overtakes the load would keep rows of the earlier filter.
    this.cursor = "";
    const query = new URLSearchParams(Object.entries(this.filters).filter(([, one]) => one));
    history.replaceState(null, "", this.place + (query.size ? "?" + query : ""));
    this.load();
  }

  async load() {
    await this.read("", (found) => {
      this.rows = this.found(found);
      this.cursor = found.cursor;
    });
  }

  // A refresh meanwhile would overtake the answer, and the click would have no effect, so it waits.
  async more() {
    this.isPaging = true;
    await this.read(this.cursor, (found) => {
      const known = new Set(this.rows.map((one) => this.id(one)));
      this.rows.push(...this.found(found).filter((one) => !known.has(this.id(one))));
      this.cursor = found.cursor;
      this.reached = found.reached;
    });
    this.isPaging = false;
    if (this.isStale) await this.refresh();
  }

  found(answer) {
    return answer[this.noun + "s"];
  }

  id(row) {
    return row[this.noun + "_id"];
  }

  // New rows come before those that are shown. When none of the latter is in the first page, others lie
  // between them, and the list begins again.
  async refresh() {
    this.isStale = this.isPaging;
    if (this.isPaging) return;
    this.refreshed = performance.now();
    await this.read("", (found) => {
      const newest = this.found(found);
      const fresh = new Set(newest.map((one) => this.id(one)));
      const joint = this.rows.findLastIndex((one) => fresh.has(this.id(one)));
      const older = joint < 0 ? [] : this.rows.slice(joint + 1);
      this.rows = [...newest, ...older];
      if (!older.length) this.cursor = found.cursor;
    });
  }

  async read(cursor, use) {
    const turn = ++this.turn;
    this.element.setAttribute("aria-busy", "true");
    try {
      const found = await get(this.path, { ...this.filters, cursor });
      if (turn !== this.turn || !this.isCurrent()) return;
      this.reached = found.reached;
      use(found);
      this.draw();
    } catch (error) {
      this.fail(error);
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  events(events, skipped) {
    if (!skipped && !events.some((one) => this.concerns(one))) return;
    if (this.timer) return;
    const wait = Math.max(0, this.refreshed + REFRESH_MS - performance.now());
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.refresh();
    }, wait);
  }

  draw() {
    replace(this.body, this.rows.map((one) => this.row(one)));
    const isSearched = this.cursor && this.rows.length === 0;
    replace(
      this.foot,
      !this.rows.length && !this.cursor ? `No ${this.noun} fits.` : "",
      isSearched ? `No ${this.noun} fits so far. ` : "",
      this.cursor &&
        h("button", { type: "button", "data-key": "more", onclick: () => this.more() }, isSearched ? "Search further back" : `Older ${this.noun}s`),
      this.cursor && this.reached ? [" searched back to ", time(this.reached)] : "",
    );
  }

  row(one) {
    return h("tr", { "data-id": this.id(one) }, this.columns.map(([label, value]) => h("td", { "data-label": label }, value(one))));
  }

  close() {
    clearTimeout(this.timer);
  }
}
