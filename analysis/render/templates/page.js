"use strict";

// Sort a table by the column whose head is clicked: numbers first from high to low, missing numbers last.
for (const table of document.querySelectorAll("table.sortable")) {
  const sortKey = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.key === undefined) return cell.textContent.trim();
    return cell.dataset.key === "" ? null : Number(cell.dataset.key);
  };
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const column = head.cellIndex;
    const numeric = head.classList.contains("number");
    const order = head.getAttribute("aria-sort");
    const descending = order === "ascending" || (order === "none" && numeric);
    for (const cell of table.tHead.rows[0].cells) cell.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = sortKey(a, column);
      const y = sortKey(b, column);
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (numeric ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
    });
    for (const row of rows) {
      row.classList.remove("first");
      table.tBodies[0].append(row);
    }
  });
}

// Filter the rows of a table by the values of its text columns that repeat values.
for (const figure of document.querySelectorAll("figure.table")) {
  const table = figure.querySelector("table");
  const bar = figure.querySelector(".filters");
  const first = figure.dataset.first.split("|");
  const rows = [...table.tBodies[0].rows];
  // a row of the unpruned model has the value of its block, which differs from the printed one
  const valueOf = (cell) => cell.dataset.block ?? cell.textContent;
  const selected = new Map(); // column number -> selected value, "" for all
  const apply = () => {
    for (const row of rows) {
      row.hidden = [...selected].some(([column, value]) => value !== "" && valueOf(row.cells[column]) !== value);
    }
    for (const [column, value] of selected) {
      for (const row of table.rows) row.cells[column].hidden = value !== "";
    }
  };
  for (const head of table.tHead.querySelectorAll(".text")) {
    const name = head.textContent;
    const column = head.cellIndex;
    const values = [...new Set(rows.map((row) => valueOf(row.cells[column])))];
    if (values.length < 2 || values.length === rows.length) continue;
    const select = document.createElement("select");
    select.setAttribute("aria-label", name);
    select.append(new Option(`${name}: all`, ""), ...values.map((value) => new Option(value, value)));
    if (first.includes(name)) select.value = values[0];
    selected.set(column, select.value);
    select.addEventListener("change", () => {
      selected.set(column, select.value);
      apply();
    });
    bar.append(select);
  }
  apply();
}
