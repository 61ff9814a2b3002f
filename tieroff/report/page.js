// The table of decisions: search, sort, and how many rows there are. Text is only ever set as text.
(() => {
  "use strict";
  const ROWS_MAX = 300; // more would make the page slow; the search narrows them
  const [NAME, KIND, SIZE, WHERE, MOVES, MOVED, PREDICTED, MEASURED] = [0, 1, 2, 3, 4, 5, 6, 7];
  const rows = JSON.parse(document.getElementById("decision-rows").textContent);
  const body = document.querySelector("#decision-table tbody");
  const heads = [...document.querySelectorAll("#decision-table th")];
  const search = document.getElementById("search");
  const count = document.getElementById("count");
  const texts = rows.map((row) => [NAME, KIND, WHERE, MOVES].map((column) => row[column]).join(" ").toLowerCase());
  let sortedBy = SIZE;
  let isDescending = true;

  function formatBytes(size) {
    for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (size >= factor) return `${(size / factor).toFixed(2)} ${unit}`;
    }
    return size ? `${size} B` : "";
  }

  function formatTime(ns) {
    if (!ns) return "";
    return ns >= 1e9 ? `${(ns / 1e9).toFixed(2)} s` : `${(ns / 1e6).toFixed(ns >= 1e6 ? 1 : 3)} ms`;
  }

  const format = { [SIZE]: formatBytes, [MOVED]: formatBytes, [PREDICTED]: formatTime, [MEASURED]: formatTime };

  function before(a, b) {
    const [x, y] = [rows[a][sortedBy] ?? -1, rows[b][sortedBy] ?? -1];
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
    return (isDescending ? -order : order) || a - b;
  }

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = texts.map((_, i) => i).filter((i) => words.every((word) => texts[i].includes(word))).sort(before);
    body.replaceChildren(
      ...found.slice(0, ROWS_MAX).map((i) => {
        const line = document.createElement("tr");
        rows[i].forEach((value, column) => {
          const cell = document.createElement("td");
          cell.textContent = format[column] ? format[column](value) : value;
          if (format[column]) cell.className = "number";
          line.append(cell);
        });
        return line;
      }),
    );
    const shown = Math.min(found.length, ROWS_MAX);
    count.textContent = shown < found.length ? `first ${shown} of ${found.length} found` : `${found.length} of ${rows.length}`;
    heads.forEach((head, column) => head.setAttribute("aria-sort", column !== sortedBy ? "none" : isDescending ? "descending" : "ascending"));
  }

  heads.forEach((head, column) =>
    head.addEventListener("click", () => {
      isDescending = column === sortedBy ? !isDescending : Boolean(format[column]);
      sortedBy = column;
      show();
    }),
  );
  search.addEventListener("input", show);

  // A link may carry a search: report.html#search=attention
  function followLink() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("search");
    if (wanted !== null) search.value = wanted;
    show();
  }
  window.addEventListener("hashchange", followLink);
  followLink();

  document.body.dataset.drawn = document.querySelectorAll(".js-plotly-plot .main-svg").length ? document.querySelectorAll(".js-plotly-plot").length : 0;
})();
