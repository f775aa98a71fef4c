"use strict";
// The tabs Details and Numerics: tables.

const forms = {
  text: (value) => String(value),
  number: (value) => (Number.isInteger(value) ? String(value) : value.toPrecision(4)),
  db: (value) => value.toFixed(1),
  percent: (value) => (100 * value).toFixed(1) + "%",
};

function drawTable(place, rows, columns) {
  return new Tabulator(place, {
    data: rows, layout: "fitColumns", maxHeight: "60vh", nestedFieldSeparator: false, placeholderHeaderFilter: "No row matches.",
    columns: columns.map(({ field, title, form, visible, frozen }) => {
      const numeric = form !== "text";
      const shown = (value) => (field === "source" ? lineOf(value) : element("span", value == null ? "" : forms[form](value)));
      return { title, field, visible, frozen, formatter: (cell) => shown(cell.getValue()), sorter: numeric ? "number" : "string", hozAlign: numeric ? "right" : "left", headerFilter: numeric ? undefined : "input", minWidth: numeric ? 78 : 120, widthGrow: numeric ? 1 : 3, variableHeight: true };
    }),
  });
}

function drawTables() {
  for (const place of document.querySelectorAll("#details .table")) {
    const rows = data.tables[place.dataset.table];
    const form = (field) => (rows.every((row) => row[field] == null || typeof row[field] === "number") ? "number" : "text");
    drawTable(place, rows, [...new Set(rows.flatMap(Object.keys))].map((field) => ({ field, title: field.replaceAll("_", " "), form: form(field) })));
  }
  return true;
}

function drawNumerics() {
  const table = drawTable(document.querySelector("#numerics .table"), data.numerics.rows, data.numerics.columns);
  const onDemand = data.numerics.columns.filter((column) => !column.visible);
  byId("all-columns").addEventListener("change", (event) => {
    for (const { field } of onDemand) table[event.target.checked ? "showColumn" : "hideColumn"](field);
  });
  return table;
}
