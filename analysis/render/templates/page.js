"use strict";

// Contents of charts and tables by id; those in files beside the page come when they are shown.
const items = new Map();
const waiting = new Map();
function addItem(id, content) {
  items.set(id, content);
  waiting.get(id)?.(content);
}
const itemOf = (id) => items.get(id) ?? new Promise((resolve, reject) => {
  waiting.set(id, resolve);
  const script = document.createElement("script");
  script.src = `data/${id}.js`;
  script.onerror = () => reject(new Error(`${script.src} is missing`));
  document.body.append(script);
});

const form = document.querySelector(".bar");
const selected = (menu) => form.elements[menu]?.value ?? "";
const menuNames = Object.keys(SETTINGS.menus);
const redraws = []; // one function for each drawn item

// The expression that filters a chart's rows: what has no value in a menu's column always passes.
const filterOf = (menu, initial) => {
  const value = initial ? `(menu_${menu} || ${JSON.stringify(initial)})` : `menu_${menu}`;
  const field = `datum.${menu}`;
  return `!${value} || !${field} || ${field} == ${value} || indexof(${field}, ${value} + ',') == 0`;
};

async function drawChart(box, content) {
  box.closest("figure").classList.toggle("wide", content.columns > 2);
  const width = box.clientWidth;
  let text = JSON.stringify(content);
  for (const [colour, variable] of Object.entries(SETTINGS.colours)) text = text.replaceAll(colour, variable);
  const spec = JSON.parse(text);
  const menus = menuNames.filter((menu) => menu in spec.data.values[0]);
  spec.params = menus.map((menu) => ({ name: `menu_${menu}`, value: selected(menu) }));
  spec.transform = menus.map((menu) => ({ filter: filterOf(menu, spec.usermeta[menu]) }));
  const labels = width < 600 ? 110 : 260;
  spec.config.axis.labelLimit = labels;
  spec.config.header.labelLimit = width;
  spec.config.legend.columns = Math.max(1, Math.floor(width / 240));
  const panel = spec.spec;
  let size = panel.width;
  if (size.step) size = size.step * new Set(spec.data.values.map((row) => row[panel.layer[0].encoding.x.field])).size;
  else size = panel.width = Math.min(size, width - labels / 2 - 70);
  spec.columns = Math.max(1, Math.min(spec.columns, Math.floor((width - labels / 2) / (size + 25))));
  box.classList.add("chart");
  const options = { actions: false, renderer: "svg", logLevel: 1, tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" } };
  const { view } = await vegaEmbed(box, spec, options);
  redraws.push(() => {
    for (const menu of menus) view.signal(`menu_${menu}`, selected(menu));
    return view.runAsync();
  });
}

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const numberOf = (text) => parseFloat(text.replace("−", "-").replaceAll(",", ""));
const MOST_ROWS = 500;

function drawTable(box, content) {
  const { columns, numbers, rows, bold, intervals } = content;
  const metrics = columns.filter((name) => SETTINGS.menus.Metric?.includes(name));
  let order = null; // [column, sign]
  const passes = (index) => menuNames.every((menu) => {
    const column = columns.indexOf(menu);
    const wanted = selected(menu);
    if (!wanted || column < 0) return true;
    const value = content.hidden[menu]?.[index] ?? rows[index][column];
    return value === wanted || value.startsWith(`${wanted},`);
  });
  const render = () => {
    const words = selected("search").toLowerCase();
    const only = metrics.includes(selected("Metric")) ? selected("Metric") : "";
    const shown = columns.map((_, i) => i).filter((i) => !only || columns[i] === only || !metrics.includes(columns[i]));
    let found = rows.map((_, i) => i).filter((i) => passes(i) && rows[i].join(" ").toLowerCase().includes(words));
    if (order) {
      const [column, sign] = order;
      const keys = found.map((i) => numbers[column] ? numberOf(rows[i][column]) : rows[i][column]);
      const rank = (a, b) => typeof a === "number" ? (isNaN(a) - isNaN(b)) || sign * (a - b) : sign * a.localeCompare(b, undefined, { numeric: true });
      found = found.map((i, n) => [i, keys[n]]).sort((a, b) => rank(a[1], b[1])).map(([i]) => i);
    }
    const head = shown.map((i) => `<th scope=col class=${numbers[i] ? "number" : "text"} aria-sort=${order?.[0] === i ? (order[1] > 0 ? "ascending" : "descending") : "none"}><button type=button data-column=${i}>${escaped(columns[i])}</button></th>`);
    const cell = (row, i) => {
      const text = escaped(rows[row][i]);
      const interval = intervals[i]?.[row];
      return `<td class=${numbers[i] ? "number" : "text"} title="${numbers[i] ? "" : text}">${bold[i]?.[row] ? `<b>${text}</b>` : text}${interval ? `<small>${interval}</small>` : ""}</td>`;
    };
    const body = found.slice(0, MOST_ROWS).map((row) => `<tr${rows[row].includes("Unpruned") ? " class=unpruned" : ""}>${shown.map((i) => cell(row, i)).join("")}</tr>`);
    const note = found.length > MOST_ROWS ? `<p>The first ${MOST_ROWS} of ${found.length} rows: choose in the menus, or search.</p>` : "";
    box.innerHTML = `<table><thead><tr>${head.join("")}</tr></thead><tbody>${body.join("")}</tbody></table>${note}`;
    box.closest("figure").hidden = words !== "" && found.length === 0;
  };
  box.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const column = Number(button.dataset.column);
    const first = numbers[column] ? -1 : 1;
    order = [column, order?.[0] === column ? -order[1] : first];
    render();
    box.querySelector(`button[data-column="${column}"]`).focus();
  });
  box.closest("figure").classList.toggle("wide", columns.length > 7);
  render();
  redraws.push(render);
}

async function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "drawn";
  const box = figure.querySelector(".scroll");
  try {
    const content = await itemOf(figure.dataset.item);
    await (content.data ? drawChart : drawTable)(box, content);
  } catch (error) {
    box.textContent = error.message;
  }
}
const drawAll = (element) => Promise.all([...element.querySelectorAll("[data-item]")].map(draw));

// The address keeps the menus' values, so that a link shows the same view.
function readAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of [...menuNames, "search"]) if (form.elements[name]) form.elements[name].value = state.get(name) ?? "";
}
function update() {
  const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", `#${state}`);
  if (selected("search")) for (const chapter of document.querySelectorAll(".chapter")) chapter.open = true;
  return Promise.all(redraws.map((redraw) => redraw()));
}

form.addEventListener("input", update);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(update));
addEventListener("hashchange", () => { readAddress(); update(); });
addEventListener("beforeprint", () => { for (const chapter of document.querySelectorAll(".chapter")) chapter.open = true; });
for (const chapter of document.querySelectorAll(".chapter")) chapter.addEventListener("toggle", () => drawAll(chapter));
readAddress();
addEventListener("DOMContentLoaded", () => drawAll(document.querySelector(".first")));
