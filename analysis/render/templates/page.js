"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const key = (row, at) => {
    const cell = row.cells[at];
    if (cell.dataset.key === undefined) return cell.textContent.trim();
    return cell.dataset.key === "" ? null : Number(cell.dataset.key);
  };
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const at = head.cellIndex, number = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const way = before === "none" ? (number ? "descending" : "ascending") : before === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = key(a, at), y = key(b, at);
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (number ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    });
    for (const row of rows) { row.classList.remove("first"); table.tBodies[0].append(row); }
  });
}
for (const figure of document.querySelectorAll("figure.table")) {
  const table = figure.querySelector("table"), bar = figure.querySelector(".filters");
  const box = figure.querySelector("input.intervals");
  const show = () => figure.classList.toggle("with-intervals", box.checked);
  if (box) { box.addEventListener("change", show); show(); }
  const wanted = figure.dataset.filter ? figure.dataset.filter.split("|") : [];
  const rows = [...table.tBodies[0].rows];
  const shown = (cell) => cell.dataset.block ?? cell.textContent; // the unpruned model stands in several blocks
  const chosen = new Map();
  const apply = () => {
    for (const row of rows) row.hidden = [...chosen].some(([at, value]) => value !== "" && shown(row.cells[at]) !== value);
    for (const [at, value] of chosen) for (const row of table.rows) row.cells[at].hidden = value !== "";
  };
  for (const [place, name] of wanted.entries()) {
    const head = [...table.tHead.rows[0].cells].find((cell) => cell.textContent === name);
    if (!head) continue;
    const at = head.cellIndex, values = [...new Set(rows.map((row) => shown(row.cells[at])))];
    if (values.length < 2) continue;
    const select = document.createElement("select");
    select.setAttribute("aria-label", name);
    select.append(new Option(`${name}: all`, ""), ...values.map((value) => new Option(value, value)));
    const first = figure.dataset.first !== undefined;
    if (first) select.value = values[0];
    chosen.set(at, select.value);
    select.addEventListener("change", () => { chosen.set(at, select.value); apply(); });
    bar.append(select);
  }
  apply();
}
const viewer = document.getElementById("viewer");
const open = (figure) => {
  viewer.querySelector("div").replaceChildren(figure.querySelector("svg").cloneNode(true));
  viewer.showModal();
};
for (const figure of document.querySelectorAll("figure.plot")) {
  figure.querySelector(".large").addEventListener("click", () => open(figure));
  figure.querySelector(".scroll").addEventListener("click", () => open(figure));
}
viewer.addEventListener("click", (event) => { if (event.target.closest(".close") || event.target === viewer) viewer.close(); });
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const links = new Map([...document.querySelectorAll("nav li a")].map((link) => [link.hash.slice(1), link]));
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const link of links.values()) link.classList.remove("here");
    links.get(entry.target.id)?.classList.add("here");
  }
}, { rootMargin: "-20% 0px -70% 0px" });
for (const section of document.querySelectorAll("main > section")) watcher.observe(section);
