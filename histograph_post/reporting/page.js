"use strict";
// A click on a heading sorts its table: numbers by value, a missing one last, else as text, 9 before 10.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.textContent = heading.textContent;
    button.title = "sort by this column";
    heading.replaceChildren(button);
    const numeric = heading.classList.contains("number");
    button.addEventListener("click", () => {
      const sign = heading.ariaSort === "ascending" ? -1 : 1;
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.ariaSort = sign > 0 ? "ascending" : "descending";
      const keyed = [...table.tBodies[0].rows].map((row) => {
        const text = row.cells[column].textContent;
        return [numeric ? parseFloat(text.replace("\u2212", "-").replace(/,/g, "")) : text, row];
      });
      keyed.sort(([a], [b]) => {
        if (!numeric) return sign * a.localeCompare(b, undefined, { numeric: true });
        return Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0;
      });
      table.tBodies[0].append(...keyed.map(([, row]) => row));
      table.closest(".table").scrollTop = 0;
    });
  });
}
