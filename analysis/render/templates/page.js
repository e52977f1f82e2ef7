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
const selected = (menu) => form.elements[menu]?.value ?? "";
const redraws = []; // one function for each drawn item

// Whether all menus let a row pass. valueOf: menu -> the row's value; what has none always passes.
const passes = (valueOf, initial = {}) => Object.keys(MENUS).every((menu) => {
  const wanted = selected(menu) || initial[menu];
  const value = valueOf(menu);
  return !wanted || !value || value === wanted || value.startsWith(`${wanted},`);
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
  const options = { actions: { export: true, source: false, compiled: false, editor: false }, renderer: "svg", logLevel: 1, tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" } };
  const { view } = await vegaEmbed(box, spec, options);
  redraws.push(() => view.data("rows", shown()).runAsync());
}

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const numberOf = (text) => parseFloat(text.replace("−", "-").replaceAll(",", ""));
const MOST_ROWS = 500;

// read: returns the table, which can depend on menus
async function drawTable(box, read) {
  const figure = box.closest("figure");
  let order = null; // [column, sign]
  let latest = 0;
  const render = async () => {
    const turn = ++latest;
    const { columns, numbers, rows, bold, intervals, hidden, note = "" } = await read();
    if (turn < latest) return; // the menus have changed meanwhile
    const words = selected("search").toLowerCase();
    const isMetric = (name) => MENUS.Metric?.includes(name);
    const only = columns.find((name) => isMetric(name) && name === selected("Metric"));
    const shown = [...columns.keys()].filter((i) => !only || columns[i] === only || !isMetric(columns[i]));
    const found = [...rows.keys()].filter((i) => rows[i].join(" ").toLowerCase().includes(words) && passes((menu) => hidden?.[menu]?.[i] ?? rows[i][columns.indexOf(menu)]));
    if (order) {
      const [column, sign] = order;
      const byText = (a, b) => sign * a.localeCompare(b, undefined, { numeric: true });
      const byNumber = (a, b) => isNaN(a) - isNaN(b) || sign * (a - b);
      found.sort((a, b) => {
        const pair = [rows[a][column], rows[b][column]];
        return numbers[column] ? byNumber(...pair.map(numberOf)) : byText(...pair);
      });
    }
    const kind = (i) => numbers[i] ? "number" : "text";
    const head = shown.map((i) => `<th scope=col class=${kind(i)} aria-sort=${order?.[0] === i ? (order[1] > 0 ? "ascending" : "descending") : "none"}><button type=button data-column=${i}>${escaped(columns[i])}</button>`);
    const cell = (row, i) => {
      const text = escaped(rows[row][i]);
      const interval = intervals?.[i]?.[row];
      return `<td class=${kind(i)} title="${text}"><div>${bold?.[i]?.[row] ? `<b>${text}</b>` : text}</div>${interval ? `<small>${interval}</small>` : ""}`;
    };
    const body = found.slice(0, MOST_ROWS).map((row) => `<tr class=${rows[row].includes("Unpruned") ? "unpruned" : ""}>${shown.map((i) => cell(row, i)).join("")}`);
    const cut = found.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${found.length} rows: choose in the menus, or search.` : "";
    box.innerHTML = `<table><thead><tr>${head.join("")}<tbody>${body.join("")}</table><p>${note}${cut}`;
    figure.hidden = words !== "" && found.length === 0;
    figure.classList.toggle("wide", columns.length > 7);
  };
  box.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const column = Number(button.dataset.column);
    const first = button.closest(".number") ? -1 : 1;
    order = [column, order?.[0] === column ? -order[1] : first];
    await render();
    box.querySelector(`button[data-column="${column}"]`).focus();
  });
  await render();
  redraws.push(render);
}

// ---- Tables on two plans A and B

// The rows in which A and B have a value, of a frame with a column for each plan
function pairs({ columns, data }, a, b) {
  const [ofA, ofB, units] = [a, b, `units ${a}`].map((name) => columns.indexOf(name));
  const rows = data.map((row) => ({ keys: row, a: row[ofA], b: row[ofB], weight: row[units] ?? 1 }));
  return rows.filter((row) => row.a != null && row.b != null);
}

const sum = (items, valueOf) => items.reduce((total, item) => total + valueOf(item), 0);
const { format } = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });

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

// Which items are shown, by the verdicts on the unpruned model, A and B
const filters = {
  "all items": () => true,
  "right before, wrong after": (before, a, b) => before.startsWith("right") && `${a} ${b}`.includes("wrong"),
  "differs between A and B": (before, a, b) => a.split(",")[0] !== b.split(",")[0],
  "cut off": (before, a, b) => `${a} ${b}`.includes("cut off"),
  "loops": (before, a, b) => `${a} ${b}`.includes("loops"),
};
form.elements.Show?.append(...Object.keys(filters).map((name, i) => new Option(name, i ? name : "")));

const planTables = {
  "plans-scores": ({ outcomes, quantiles, note }, a, b) => {
    const benchmarks = Map.groupBy(pairs(outcomes, a, b), ({ keys }) => keys[0]);
    const rows = [...benchmarks].map(([name, items]) => [name, ...difference(items, quantiles)]);
    return { columns: ["Benchmark", "Items", "A", "B", "A − B", "low", "high"], numbers: Array(7).fill(true, 1), rows, note };
  },
  "plans-costs": ({ costs }, a, b) => {
    const rows = pairs(costs, a, b).map((cost) => [cost.keys[0], format(cost.a), format(cost.b)]);
    return { columns: ["Cost", "A", "B"], numbers: [false, true, true], rows };
  },
  "plans-experts": ({ retained }, a, b) => {
    const experts = pairs(retained, a, b).filter((expert) => expert.a !== expert.b);
    const names = (list) => list?.map(({ keys }) => keys[1]).join(", ") ?? "";
    const rows = [...Map.groupBy(experts, ({ keys }) => keys[0])].map(([layer, list]) => {
      const sides = Map.groupBy(list, (expert) => expert.a > expert.b);
      return [String(layer), names(sides.get(true)), names(sides.get(false))];
    });
    return { columns: ["Layer", "A keeps, B drops", "B keeps, A drops"], numbers: [true], rows };
  },
  "plans-answers": async ({ cells }, a, b, before) => {
    const { items, answers, note } = await contentOf(`answers-${form.elements.Benchmark.selectedIndex}`);
    const isShown = filters[selected("Show") || "all items"];
    const answersOf = Map.groupBy(answers, ([key]) => key);
    const rows = [];
    for (const [key, item, prompt, rightAnswer] of items.data) {
      const all = answersOf.get(key);
      const three = [before, a, b].map((cell) => all.find(([, , , members]) => members.includes(cell)) ?? [key, "–", ""]);
      if (!isShown(...three.map(([, verdict]) => verdict))) continue;
      const others = all.map(([, verdict, answer, members]) => {
        const plans = cells.data.filter(([cell, , unpruned]) => unpruned === before && members.includes(cell));
        return plans.length ? `${verdict} (${plans.length})\n${answer}\n${plans.map(([, label]) => label).join(", ")}` : "";
      });
      rows.push([`${item}\n${prompt}`, rightAnswer, ...three.map(([, verdict, answer]) => `${verdict}\n${answer}`), others.filter(Boolean).join("\n\n")]);
    }
    return { columns: ["Item", "Right answer", "Unpruned", "A", "B", "All plans of A's model"], numbers: [], rows, note: `${rows.length} items. ${note}` };
  },
};

// The table on the plans that the menus A and B choose
function planTable(name, plans) {
  const [[a, , before], [b]] = ["A", "B"].map((menu) => plans.cells.data[form.elements[menu].selectedIndex]);
  return planTables[name](plans, a, b, before);
}

async function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "drawn";
  const box = figure.querySelector(".scroll");
  const name = figure.id;
  try {
    const content = await contentOf(name in planTables ? "plans" : name);
    if (content.spec) await drawChart(box, content);
    else await drawTable(box, () => content.cells ? planTable(name, content) : content);
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
function readAddress() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (form.elements[name]) form.elements[name].value = value;
}
function update() {
  const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  history.replaceState(null, "", `#${state}`);
  if (selected("search")) openAll();
  return Promise.all(redraws.map((redraw) => redraw()));
}

document.addEventListener("input", update); // some menus are outside of the form
form.addEventListener("reset", () => setTimeout(update));
document.querySelector("#print").addEventListener("click", printAll);
addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.key !== "p") return;
  event.preventDefault();
  printAll();
});
addEventListener("beforeprint", openAll);
addEventListener("hashchange", () => { form.reset(); readAddress(); });
for (const chapter of chapters) chapter.addEventListener("toggle", () => drawAll(chapter));
readAddress();
addEventListener("DOMContentLoaded", () => drawAll(document.querySelector(".first")));
