// The report of the Spark pipeline, where its tables exist.

import { get } from "./api.js";
import { code, h, link, time } from "./dom.js";

export async function show(content) {
  const found = await get("/page/report");
  content.append(h("h1", {}, "Report"));
  if (found.written) {
    content.append(
      h("p", {}, "Written at ", time(found.written * 1e6), ". ", link("/page/report.html", "Open it alone")),
      h("iframe", { src: "/page/report.html", title: "The report of the pipeline", sandbox: "", class: "report" }),
    );
    return;
  }
  const why = found.has_tables ? "There are tables, and no report yet. This command writes it:" : "There are no tables yet. After `postroom pipeline run` has written them into this folder, this command writes the report:";
  content.append(h("p", {}, why), code(found.command, "Command"));
}
