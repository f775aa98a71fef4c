"use strict";
// The tab Modules: the tree, its filter, and what its cells show.

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
  const percent = (100 * row.flops) / data.modules.reduce((sum, top) => sum + top.flops, 0);
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
      { title: "Line", field: "source", formatter: (cell) => lineOf(cell.getValue()), widthGrow: 2, minWidth: 190, responsive: 6 },
    ],
  });
  const filter = () => {
    const wanted = { text: byId("search").value.toLowerCase(), state: byId("state").value };
    tree.setFilter(isShown, wanted);
    const found = tree.getDataCount("active") > 0;
    byId("tree").hidden = !found;
    byId("nothing").hidden = found;
    byId("nothing").textContent = `No row${wanted.state && ` that is ${byId("state").selectedOptions[0].text}`} matches ${wanted.text ? `“${byId("search").value}”` : "this"}.`;
    if (found && (wanted.text || wanted.state)) everyRow((row) => row.treeExpand());
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
