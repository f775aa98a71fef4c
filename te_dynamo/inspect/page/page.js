"use strict";
// The page of explain(): what its tabs share, and the tabs. It runs last. The data is the JSON in #data, as data.py makes it.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const drawn = {}; // what each tab shows is made when it is first opened

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function lineOf(source) {
  // "file.py:17": the path may break anywhere, the number may not.
  const [, path, number] = /^(.*?)(:\d+)?$/s.exec(source ?? "");
  const shown = element("span", path);
  shown.append(element("span", number ?? "", "whole"));
  return shown;
}

// Tabs

function openTab(name) {
  for (const button of document.querySelectorAll("nav button")) {
    const chosen = button.dataset.tab === name;
    button.setAttribute("aria-selected", chosen);
    byId(button.dataset.tab).hidden = !chosen;
  }
  history.replaceState(null, "", "#" + name);
  drawn[name] ??= { modules: drawTree, graphs: startGraphs, details: drawTables, numerics: drawNumerics }[name]?.() ?? true;
}

document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => openTab(button.dataset.tab)));
openTab(byId(location.hash.slice(1))?.matches("section") ? location.hash.slice(1) : "overview");
document.documentElement.dataset.ready = "yes";
