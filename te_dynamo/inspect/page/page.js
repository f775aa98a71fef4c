"use strict";
// The page of explain(): tabs, the tree of modules, the graphs, the tables. The data is the JSON in #data, as data.py makes it.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const drawn = {}; // what each tab shows is made when it is first opened

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Tabs

function openTab(name) {
  for (const button of document.querySelectorAll("nav button")) {
    const chosen = button.dataset.tab === name;
    button.setAttribute("aria-selected", chosen);
    byId(button.dataset.tab).hidden = !chosen;
  }
  history.replaceState(null, "", "#" + name);
  drawn[name] ??= { modules: drawTree, graphs: startGraphs, details: drawTables, numerics: drawTables }[name]?.() ?? true;
}

// Modules

const total = data.modules.reduce((sum, row) => sum + row.flops, 0);

function prepared(row) {
  const rows = row.rows.map(prepared);
  const own = [row.path, row.name, row.kind, row.runs, row.reason, row.source].join(" ").toLowerCase();
  return { ...row, own, ...(rows.length ? { _children: rows } : {}) };
}

function isShown(row, wanted) {
  const fits = row.own.includes(wanted.text) && (!wanted.state || row.state === wanted.state);
  return fits || (row._children ?? []).some((child) => isShown(child, wanted));
}

function shareOfFlops(cell) {
  const row = cell.getData();
  if (!row.flops) return "";
  const percent = (100 * row.flops) / total;
  const bar = element("span", "", "bar");
  bar.append(document.createElement("i"));
  bar.firstChild.style.width = (100 * row.covered) / row.flops + "%";
  bar.title = ((100 * row.covered) / row.flops).toFixed(1) + "% of it in a recipe";
  const box = element("span", "");
  box.append(bar, percent.toFixed(percent < 0.1 ? 3 : 1) + "%");
  return box;
}

function whatRuns(cell) {
  const row = cell.getData();
  const of = row.linears ? `${row.taken} of ${row.linears} linears` : "";
  return element("span", row.state ? row.runs : of, "runs");
}

const asText = (className) => (cell) => element("span", cell.getValue() ?? "", className);

function drawTree() {
  const tree = new Tabulator("#tree", {
    data: data.modules.map(prepared),
    dataTree: true,
    dataTreeFilter: true,
    dataTreeStartExpanded: (row) => !row.getData().count && row.getData().name.split(".").length < 3 && row.getData().rows.some((r) => r.rows.length),
    layout: "fitColumns",
    responsiveLayout: "hide",
    maxHeight: "70vh",
    rowFormatter: (row) => {
      row.getElement().classList.toggle("left", row.getData().state === "left");
      row.getElement().classList.toggle("folded", Boolean(row.getData().count));
    },
    columns: [
      { title: "Module", field: "name", formatter: asText("name"), widthGrow: 3, minWidth: 200, responsive: 0 },
      { title: "Kind", field: "kind", formatter: asText(), width: 110, responsive: 4 },
      { title: "M x N x K", field: "shape", formatter: asText("number"), widthGrow: 2, minWidth: 165, responsive: 3 },
      { title: "dtype", field: "dtype", formatter: asText(), width: 80, responsive: 5 },
      { title: "Runs as", field: "runs", formatter: whatRuns, widthGrow: 2, minWidth: 165, responsive: 0 },
      { title: "Linear FLOPs", field: "flops", formatter: shareOfFlops, sorter: "number", width: 150, responsive: 1 },
      { title: "Reason", field: "reason", formatter: asText(), widthGrow: 4, minWidth: 180, responsive: 2, visible: data.reasons.length > 0, variableHeight: true },
      { title: "Line", field: "source", formatter: asText(), widthGrow: 2, minWidth: 190, responsive: 6 },
    ],
  });
  const filter = () => {
    const wanted = { text: byId("search").value.toLowerCase(), state: byId("state").value };
    tree.setFilter(isShown, wanted);
    if (wanted.text || wanted.state) everyRow((row) => row.treeExpand());
  };
  const everyRow = (act) => {
    const walk = (row) => {
      act(row);
      row.getTreeChildren().forEach(walk);
    };
    tree.blockRedraw();
    tree.getRows().forEach(walk);
    tree.restoreRedraw();
  };
  byId("search").addEventListener("input", filter);
  byId("state").addEventListener("change", filter);
  byId("open-all").addEventListener("click", () => everyRow((row) => row.treeExpand()));
  byId("close-all").addEventListener("click", () => everyRow((row) => row.treeCollapse()));
  return tree;
}

// Graphs

const colours = { te: "#2563c9", fused: "#7a3fc4", product: "#d97706", attention: "#0f766e", other: "#e3e7ec", layers: "#4b5563", input: "#ffffff", output: "#ffffff" };
const onDark = new Set(["te", "fused", "product", "attention", "layers"]);

function elementsOf(graph) {
  const nodes = graph.nodes.map((node) => {
    const lines = node.label.split("\n");
    return {
      data: {
        id: node.id, label: node.label, node,
        colour: colours[node.kind], text: onDark.has(node.kind) ? "#fff" : "#1c2430",
        width: Math.max(70, 7.2 * Math.max(...lines.map((line) => line.length)) + 18), height: 14 + 15 * lines.length,
      },
      classes: node.kind,
    };
  });
  const arrows = graph.edges.map((edge) => ({ data: { source: edge.split(" ")[0], target: edge.split(" ")[1] } }));
  return [...nodes, ...arrows];
}

const graphStyle = [
  { selector: "node[node]", style: { shape: "round-rectangle", "background-color": "data(colour)", label: "data(label)", color: "data(text)", width: "data(width)", height: "data(height)", "font-size": 12, "font-family": "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace", "text-wrap": "wrap", "text-valign": "center", "min-zoomed-font-size": 5 } },
  { selector: "node.input, node.output", style: { "border-width": 1, "border-color": "#9aa5b3" } },
  { selector: "node.layers", style: { shape: "cut-rectangle" } },
  { selector: "node:selected", style: { "border-width": 3, "border-color": "#111827" } },
  { selector: "edge", style: { width: 1.3, "line-color": "#aab4c0", "target-arrow-color": "#aab4c0", "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "bezier" } },
];

const mostNodes = 600; // the layout of more takes a browser a minute

function drawGraph(id, graph) {
  drawn[id]?.destroy();
  drawn[id] = null;
  byId(id).replaceChildren();
  if (graph.nodes.length > mostNodes) {
    byId(id).append(element("pre", graph.nodes.flatMap((node) => node.lines).join("\n")));
    return;
  }
  const view = cytoscape({
    container: byId(id), elements: elementsOf(graph), style: graphStyle, maxZoom: 2.5, boxSelectionEnabled: false,
    autoungrabify: true, layout: { name: "dagre", rankDir: "TB", nodeSep: 14, edgeSep: 2, rankSep: 26, edgeWeight: (edge) => (edge.source().data("node").kind === "other" ? 1 : 8), fit: false, animate: false },
  });
  view.on("tap", "node", (event) => event.target.data("node") && showNode(event.target.data("node")));
  drawn[id] = view;
  startAtTop(view);
}

function startAtTop(view) {
  const box = view.elements().boundingBox();
  const zoom = Math.min(1, Math.max(0.6, view.width() / (box.w + 40)));
  const ours = view.nodes(".te, .fused");
  const first = (ours.length ? ours : view.nodes()).min((node) => node.position("y")).ele;
  if (!first) return;
  view.zoom(zoom);
  view.pan({ x: view.width() / 2 - zoom * first.position("x"), y: 90 - zoom * first.position("y") });
}

function showStage() {
  const stage = data.stages[byId("stage").value];
  const sideBySide = Boolean(stage.before) && byId("show-before").checked;
  byId("show-before").disabled = !stage.before;
  byId("before-pane").hidden = !sideBySide;
  const count = (graph) => (graph.nodes.length > mostNodes ? `${graph.nodes.length} nodes are too many to draw, so here is the text` : `${graph.nodes.length} nodes drawn`);
  if (sideBySide) {
    byId("before-pane").firstChild.textContent = `before ${stage.stage}: ${count(stage.before)}`;
    drawGraph("before", stage.before);
  }
  byId("after-pane").firstChild.textContent = `after ${stage.stage}: ${count(stage.after)}`;
  drawGraph("after", stage.after);
}

function showNode(node) {
  const facts = { module: node.module, line: node.source, result: node.type, "runs as": node.runs, "reads and writes": node.bytes && size(node.bytes) };
  const list = document.createElement("dl");
  for (const [name, value] of Object.entries(facts)) {
    if (!value) continue;
    list.append(element("dt", name));
    const shown = document.createElement("dd");
    shown.append(element("code", value));
    list.append(shown);
  }
  byId("node").replaceChildren(element("h3", node.label.split("\n")[0]), list, element("pre", node.lines.join("\n")));
}

function size(bytes) {
  const power = Math.min(3, Math.floor(Math.log2(bytes) / 10));
  return (bytes / 1024 ** power).toFixed(power ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB"][power];
}

function startGraphs() {
  const several = data.stages.some((stage) => stage.graph > 0);
  data.stages.forEach((stage, index) => byId("stage").append(new Option(several ? `graph ${stage.graph}: ${stage.stage}` : stage.stage, index)));
  const first = data.stages.findIndex((stage) => ["forward", "inference"].includes(stage.stage));
  byId("stage").value = Math.max(0, first);
  byId("stage").addEventListener("change", showStage);
  byId("show-before").addEventListener("change", showStage);
  showStage();
  return true;
}

// Tables: the rows say what columns there are

function drawTables() {
  for (const place of document.querySelectorAll("section:not([hidden]) .table")) {
    const rows = place.dataset.table === "numerics" ? data.numerics.rows : data.tables[place.dataset.table];
    const columns = [...new Set(rows.flatMap(Object.keys))].map((field) => {
      const numeric = rows.every((row) => row[field] == null || typeof row[field] === "number");
      const shown = (value) => (numeric && value != null && !Number.isInteger(value) ? value.toPrecision(5) : String(value ?? ""));
      return { title: field.replaceAll("_", " "), field, formatter: (cell) => element("span", shown(cell.getValue())), sorter: numeric ? "number" : "string", hozAlign: numeric ? "right" : "left", headerFilter: numeric ? undefined : "input", minWidth: 90, widthGrow: numeric ? 1 : 3, variableHeight: true, responsive: numeric ? 1 : 0 };
    });
    new Tabulator(place, { data: rows, columns, layout: "fitColumns", maxHeight: "60vh", nestedFieldSeparator: false });
  }
  return true;
}

document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => openTab(button.dataset.tab)));
openTab(byId(location.hash.slice(1))?.matches("section") ? location.hash.slice(1) : "overview");
document.documentElement.dataset.ready = "yes";
