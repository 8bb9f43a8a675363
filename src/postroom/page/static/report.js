// The report of the Spark pipeline below the live numbers, where its tables exist.

import { get } from "./api.js";
import { code, h, link, replace, seldom, time } from "./dom.js";
import { rates } from "./overview.js";

export async function show(content, { isCurrent, fail }) {
  const live = h("div");
  const words = h("div");
  const frame = h("div");
  let written = null;
  content.append(h("h1", {}, "Report"), live, words, frame);

  async function load() {
    const found = await get("/page/report");
    if (!isCurrent()) return;
    replace(words, about(found));
    if (found.written === written) return;
    written = found.written;
    replace(frame, written && h("iframe", { src: "/page/report.html", title: "The report of the pipeline", sandbox: "", class: "report" }));
  }

  await load();
  const again = seldom(load, fail);
  return {
    overview(found) {
      replace(live, rates([found.rates, found.history, found.depth, found.delayed, found.stage]));
      again();
    },
    reset: () => load().catch(fail),
  };
}

function about(found) {
  const fault = found.fault && h("p", { class: "bad" }, "The report could not be written: ", found.fault);
  if (found.is_writing) return h("p", {}, found.written ? "The tables are newer than the report, which is being written again." : "The report is being written.");
  if (found.written) return [h("p", {}, "Written at ", time(found.written * 1e6), ". ", link("/page/report.html", "Open it alone")), fault];
  const why = found.has_tables ? "There are tables, and no report yet. This command writes it:" : "There are no tables yet. The first command writes them, and the second one the report:";
  return [fault, h("p", {}, why), code(found.commands.join("\n"), "Commands")];
}
