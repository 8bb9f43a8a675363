// Buses: a bus as a conversation. A message that names a parent stands below it.

import { get } from "./api.js";
import { h, link, replace, time } from "./dom.js";

const SHOWN_MAX = 500;

export async function show(content) {
  const { buses, organizations = {} } = await get("/page/buses");
  const ofOrganizations = Object.entries(organizations).flatMap(([org, names]) => names.map((name) => org + "/" + name));
  const all = [...buses, ...ofOrganizations];
  content.append(
    h("h1", {}, "Buses"),
    all.length
      ? h("ul", { class: "names" }, all.map((name) => h("li", {}, link("#/buses/" + name, name))))
      : h("p", { class: "empty" }, "There is no bus."),
  );
}

export async function showOne(content, { argument, isCurrent, fail }) {
  const conversation = new Conversation();
  const [name, org_id = ""] = argument.split("/").reverse();
  const path = "/page/buses/" + encodeURIComponent(name);
  content.append(h("h1", {}, "Bus ", h("span", { class: "id" }, argument)), conversation.element);

  async function load() {
    const { messages } = await get(path, { org_id });
    if (!isCurrent()) return "";
    conversation.begin(messages);
    return messages.at(-1)?.msg_id ?? "";
  }

  const last = await load();
  const source = new EventSource(path + "/stream?" + new URLSearchParams({ since: last, org_id }));
  source.addEventListener("message", (event) => conversation.add(JSON.parse(event.data)));
  source.addEventListener("reset", () => load().catch(fail));
  source.addEventListener("removed", (event) => {
    source.close();
    fail(new Error(JSON.parse(event.data).message));
  });
  return { close: () => source.close() };
}

class Conversation {
  constructor() {
    this.element = h("ul", { class: "conversation", "aria-label": "Messages, the oldest first", "aria-live": "polite" });
    this.items = new Map();
  }

  begin(messages) {
    this.items.clear();
    replace(this.element);
    for (const message of messages) this.add(message);
  }

  add(message) {
    if (this.items.has(message.msg_id)) return;
    const replies = h("ul");
    const item = h(
      "li",
      { "data-id": message.msg_id },
      h("article", {}, h("p", { class: "meta" }, h("b", {}, message.type), " ", time(message.ts), " ", [message.project_id, message.task_id, message.run_id].filter(Boolean).join(" / ")), h("p", { class: "body", dir: "ltr" }, message.body)),
      replies,
    );
    this.items.set(message.msg_id, { item, replies });
    const parent = message.parents.map((id) => this.items.get(id)).find(Boolean);
    (parent ? parent.replies : this.element).append(item);
    if (this.items.size > SHOWN_MAX) this.removeOldest();
  }

  // The oldest thread goes as a whole.
  removeOldest() {
    const oldest = this.element.firstElementChild;
    for (const one of [oldest, ...oldest.querySelectorAll("li")]) this.items.delete(one.dataset.id);
    oldest.remove();
  }
}
