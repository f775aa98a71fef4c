"use strict";
// The tab Graphs: a stage's graph beside the one it started from, zoom and search, and the details of a node.

const onDark = new Set(["te", "fused", "product", "attention", "layers"]);
const mostNodes = 600; // the layout of more takes a browser a minute
const panes = ["before", "after"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function elementsOf(graph) {
  const nodes = graph.nodes.map((node) => {
    const lines = node.label.split("\n");
    return {
      data: {
        id: node.id, label: node.label, node,
        colour: colour(node.kind), text: onDark.has(node.kind) ? "#fff" : colour("text"),
        width: Math.max(70, 7.2 * Math.max(...lines.map((line) => line.length)) + 18), height: 14 + 15 * lines.length,
      },
      classes: node.kind,
    };
  });
  const arrows = graph.edges.map((edge) => ({ data: { source: edge.split(" ")[0], target: edge.split(" ")[1] } }));
  return [...nodes, ...arrows];
}

const graphStyle = () => [
  { selector: "node[node]", style: { shape: "round-rectangle", "background-color": "data(colour)", label: "data(label)", color: "data(text)", width: "data(width)", height: "data(height)", "font-size": 12, "font-family": "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace", "text-wrap": "wrap", "text-valign": "center", "min-zoomed-font-size": 5 } },
  { selector: "node.input, node.output", style: { "border-width": 1, "border-color": colour("arrow") } },
  { selector: "node.layers", style: { shape: "cut-rectangle" } },
  { selector: "node:selected, node.found", style: { "border-width": 3, "border-color": colour("text") } },
  { selector: "edge", style: { width: 1.3, "line-color": colour("arrow"), "target-arrow-color": colour("arrow"), "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "bezier" } },
  { selector: ".missed", style: { opacity: 0.2 } },
];

function drawGraph(id, graph) {
  drawn[id]?.destroy();
  drawn[id] = null;
  byId(id).replaceChildren();
  byId(`${id}-pane`).querySelector(".zoom").hidden = graph.nodes.length > mostNodes;
  if (graph.nodes.length > mostNodes) {
    byId(id).append(element("pre", graph.nodes.flatMap((node) => node.lines).join("\n")));
    return;
  }
  const view = cytoscape({
    container: byId(id), elements: elementsOf(graph), style: graphStyle(), minZoom: 0.02, maxZoom: 2.5, boxSelectionEnabled: false,
    autoungrabify: true, layout: { name: "dagre", rankDir: "TB", nodeSep: 14, edgeSep: 2, rankSep: 26, edgeWeight: (edge) => (edge.source().data("node").kind === "other" ? 1 : 8), fit: false, animate: false },
  });
  view.on("tap", "node", (event) => showNode(event.target.data("node")));
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

function zoom(view, factor) {
  if (factor) view.zoom({ level: view.zoom() * factor, renderedPosition: { x: view.width() / 2, y: view.height() / 2 } });
  else view.fit(undefined, 20);
}

// Search: what matches stands out in both graphs, Enter goes from one to the next

let matches = [];
let current = -1;

function find() {
  const text = byId("find").value.toLowerCase();
  const contains = ({ label, module, source, lines }) => [label, module, source, ...lines].join("\n").toLowerCase().includes(text);
  matches = [];
  current = -1;
  for (const view of panes.map((id) => drawn[id]).filter(Boolean)) {
    view.elements().removeClass("found missed");
    if (!text) continue;
    const found = view.nodes().filter((node) => contains(node.data("node")));
    found.addClass("found");
    view.elements().difference(found).addClass("missed");
    matches.push(...found.map((node) => node));
  }
  byId("found").textContent = text && (matches.length ? `${matches.length} found; Enter goes to the next` : "nothing found");
}

function nextFound() {
  if (!matches.length) return;
  current = (current + 1) % matches.length;
  const node = matches[current];
  node.cy().zoom(Math.max(node.cy().zoom(), 0.8));
  node.cy().center(node);
  showNode(node.data("node"));
}

function showStage() {
  const stage = data.stages[byId("stage").value];
  const sideBySide = Boolean(stage.before) && byId("show-before").checked;
  byId("show-before").disabled = !stage.before;
  byId("before-pane").hidden = !sideBySide;
  drawn.before?.destroy();
  drawn.before = null;
  for (const id of sideBySide ? panes : ["after"]) {
    const graph = stage[id];
    const count = graph.nodes.length > mostNodes ? `${graph.nodes.length} nodes are too many to draw, so here is the text` : `${graph.operations} operations, equal layers drawn once`;
    byId(`${id}-pane`).querySelector("figcaption span").textContent = `${id} ${stage.stage}: ${count}`;
    drawGraph(id, graph);
  }
  byId("node").replaceChildren(byId("node-hint").content.cloneNode(true)); // a node of another stage says nothing of this one
  find();
}

function showNode(node) {
  const facts = { module: element("span", node.module), line: lineOf(node.source), result: element("span", node.type), "runs as": element("span", node.runs), "reads and writes": element("span", node.bytes ? size(node.bytes) : "") };
  const list = document.createElement("dl");
  for (const [name, value] of Object.entries(facts)) {
    if (!value.textContent) continue;
    const shown = document.createElement("dd");
    shown.append(element("code", ""));
    shown.firstChild.append(value);
    list.append(element("dt", name), shown);
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
  byId("find").addEventListener("input", find);
  byId("find").addEventListener("keydown", (event) => event.key === "Enter" && nextFound());
  for (const id of panes)
    for (const button of byId(`${id}-pane`).querySelectorAll(".zoom button"))
      button.addEventListener("click", () => zoom(drawn[id], Number(button.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showStage);
  showStage();
  return true;
}
