"use strict";

// Contents of charts and tables by id. Those in files beside the page come when they are shown.
const contents = {};
const packed = {};
const contentOf = (id) => contents[id] ??= load(id);
async function load(id) {
  const script = document.createElement("script");
  script.src = `data/${id}.js`;
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${script.src} is missing`));
    document.body.append(script);
  });
  const { body } = await fetch(`data:;base64,${packed[id]}`);
  return new Response(body.pipeThrough(new DecompressionStream("gzip"))).json();
}

const form = document.querySelector(".bar");
const menus = [...form.querySelectorAll("select")];
const selected = (menu) => form.elements[menu]?.value ?? "";
const redraws = []; // one function for each drawn item

// Whether all menus let a row pass. valueOf: menu -> the row's value; what has none always passes.
const passes = (valueOf, initial = {}) => menus.every(({ name, value }) => {
  const wanted = value || initial[name];
  const found = valueOf(name);
  return !wanted || !found || found === wanted || found.startsWith(`${wanted},`);
});

async function drawChart(box, spec) {
  box.closest("figure").classList.toggle("wide", spec.columns > 2);
  const width = box.clientWidth;
  const rows = spec.data.values;
  const shown = () => rows.filter((row) => passes((menu) => row[menu], spec.usermeta));
  spec.data = { name: "rows", values: shown() };
  delete spec.transform;
  const labels = width < 600 ? 110 : 260;
  spec.config.axis.labelLimit = labels;
  spec.config.header.labelLimit = width;
  spec.config.legend.columns = Math.max(1, Math.floor(width / 240));
  const panel = spec.spec;
  let size = panel.width;
  if (size.step) size = size.step * new Set(rows.map((row) => row[panel.layer[0].encoding.x.field])).size;
  else size = panel.width = Math.min(size, width - labels / 2 - 70);
  spec.columns = Math.max(1, Math.min(spec.columns, Math.floor((width - labels / 2 + 20) / (size + 20))));
  box.classList.add("chart");
  const { view } = await vegaEmbed(box, spec, { renderer: "svg", logLevel: 1, tooltip: { theme: "dark" } });
  return () => view.data("rows", shown()).runAsync();
}

// ---- Tables

const MOST_ROWS = 500;

// Fills a table with rows of HTML. pruned: number of an unpruned model's row -> its value for menus
function fill(table, { rows, pruned = {}, note = "" }) {
  const kinds = Array.from(table.rows[0].cells, (head) => head.className);
  const cell = (html, i) => `<td class=${kinds[i]}><div>${html}</div>`;
  const start = (i) => i in pruned ? `<tr data-pruned="${pruned[i]}">` : "<tr>";
  table.tBodies[0].innerHTML = rows.map((row, i) => start(i) + row.map(cell).join("")).join("");
  table.nextElementSibling.textContent = note;
}

// Hides the rows that the menus and the search leave out, and unselected metrics.
function arrange(table) {
  const [body] = table.tBodies;
  const columns = Array.from(table.rows[0].cells, (head) => head.textContent);
  const words = selected("search").toLowerCase();
  let found = 0;
  for (const row of body.rows) {
    const valueOf = (menu) => menu === "Pruned" && row.dataset.pruned || row.cells[columns.indexOf(menu)]?.textContent;
    const isFound = passes(valueOf) && row.textContent.toLowerCase().includes(words);
    row.hidden = !isFound || ++found > MOST_ROWS;
  }
  const metric = selected("Metric");
  const metrics = Array.from(form.elements.Metric ?? [], (option) => option.value);
  const isHidden = (name) => columns.includes(metric) && metrics.includes(name) && name !== metric;
  for (const row of table.rows) columns.forEach((name, i) => row.cells[i].hidden = isHidden(name));
  table.createCaption().textContent = found > MOST_ROWS ? `The first ${MOST_ROWS} of ${found} rows: choose in the menus, or search.` : "";
  table.closest("figure").hidden = words !== "" && found === 0;
}

// ---- Two plans A and B

// The rows in which A and B have a value, of a frame with a column for each plan
function pairs({ columns, index, data }, a, b) {
  const [ofA, ofB, units] = [a, b, `units ${a}`].map((name) => columns.indexOf(name));
  const rows = data.map((row, i) => ({ keys: [index[i]].flat(), a: row[ofA], b: row[ofB], weight: row[units] ?? 1 }));
  return rows.filter((row) => row.a != null && row.b != null);
}

const sum = (items, valueOf) => items.reduce((total, item) => total + valueOf(item), 0);
const { format } = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });
const texts = ({ keys, a, b }) => [...keys, format(a), format(b)];

// Number of items, means of A and B, their difference and its interval, as `moe-lab compare`
function difference(items, quantiles) {
  const n = items.length;
  const total = sum(items, ({ weight }) => weight);
  const [meanA, meanB] = ["a", "b"].map((plan) => sum(items, (item) => item.weight * item[plan]) / total);
  const mean = meanA - meanB;
  const squares = sum(items, ({ a, b, weight }) => (weight / total * (a - b - mean)) ** 2);
  const half = quantiles[n - 2] * Math.sqrt(n / (n - 1) * squares);
  const scores = [meanA, meanB, mean, mean - half, mean + half];
  return [format(n), ...scores.map((score) => score.toFixed(3).replace("-", "−"))];
}

// Whether an item is shown, by the verdicts on the unpruned model, A and B
const filters = {
  "": () => true,
  "right before, wrong after": (before, a, b) => before.startsWith("right") && `${a} ${b}`.includes("wrong"),
  "differs between A and B": (before, a, b) => a.split(",")[0] !== b.split(",")[0],
  "cut off": (before, a, b) => `${a} ${b}`.includes("cut off"),
  "loops": (before, a, b) => `${a} ${b}`.includes("loops"),
};

// Contents of the tables, by id
const planTables = {
  "plans-scores": ({ outcomes, quantiles, note }, a, b) => {
    const benchmarks = Map.groupBy(pairs(outcomes, a, b), ({ keys }) => keys[0]);
    return { rows: [...benchmarks].map(([name, items]) => [name, ...difference(items, quantiles)]), note };
  },
  "plans-costs": ({ costs }, a, b) => ({ rows: pairs(costs, a, b).map(texts) }),
  "plans-experts": ({ retained }, a, b) => ({ rows: pairs(retained, a, b).filter((row) => row.a !== row.b).map(texts) }),
  "plans-answers": async ({ cells }, a, b, before) => {
    const { items, note } = await contentOf(`answers-${form.elements.Benchmark.selectedIndex}`);
    const isShown = filters[selected("Show")];
    const plans = cells.data.filter(([, , unpruned]) => unpruned === before);
    const rows = [];
    for (const [item, prompt, rightAnswer, answers] of items) {
      const three = [before, a, b].map((cell) => answers.find(([, , members]) => members.includes(cell)) ?? ["–", ""]);
      if (!isShown(...three.map(([verdict]) => verdict))) continue;
      const all = answers.map(([verdict, answer, members]) => {
        const labels = plans.filter(([cell]) => members.includes(cell)).map(([, label]) => label);
        return labels.length ? `${verdict}\n${answer}\n${labels.join(", ")}\n\n` : "";
      });
      rows.push([`${item}\n${prompt}`, rightAnswer, ...three.map(([verdict, answer]) => `${verdict}\n${answer}`), all.join("")]);
    }
    return { rows, note: `${rows.length} items. ${note}` };
  },
};

// The contents of a table on the plans that the menus A and B choose, as HTML
async function planTable(id, plans) {
  const [[a, , before], [b]] = ["A", "B"].map((menu) => plans.cells.data[form.elements[menu].selectedIndex]);
  const { rows, note } = await planTables[id](plans, a, b, before);
  return { rows: rows.map((row) => row.map((text) => new Option(text).innerHTML)), note };
}

// ---- Drawing

async function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "drawn";
  const { id } = figure;
  const box = figure.querySelector(".scroll");
  const table = box.querySelector("table");
  try {
    const content = await contentOf(id in planTables ? "plans" : id);
    let redraw = () => arrange(table);
    if (content.spec) redraw = await drawChart(box, content);
    else if (content.rows) fill(table, content);
    else redraw = async () => {
      fill(table, await planTable(id, content));
      arrange(table);
    };
    redraws.push(redraw);
    await redraw();
  } catch (error) {
    box.textContent = error.message;
  }
}
const chapters = [...document.querySelectorAll("details")];
const drawAll = (element) => Promise.all([...element.querySelectorAll("figure")].map(draw));
function openAll() {
  for (const chapter of chapters) chapter.open = true;
}
async function printAll() {
  openAll();
  await drawAll(document);
  print();
}

// The address keeps the menus' values, so that a link shows the same view.
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (form.elements[name]) form.elements[name].value = value;
let drawing = Promise.resolve();
function update() {
  const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", `#${state}`);
  if (selected("search")) openAll();
  // one after the other, so that the last choice is shown
  drawing = drawing.finally(() => Promise.all(redraws.map((redraw) => redraw())));
}

document.addEventListener("input", update); // some menus are outside of the form
form.addEventListener("reset", () => setTimeout(update));
document.querySelector("#print").addEventListener("click", printAll);
addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.key !== "p") return;
  event.preventDefault();
  printAll();
});
addEventListener("hashchange", () => location.reload());
for (const chapter of chapters) chapter.addEventListener("toggle", () => drawAll(chapter));
addEventListener("DOMContentLoaded", () => drawAll(document.querySelector(".first")));
