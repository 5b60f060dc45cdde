#include "eval/report/html.h"

namespace dropkv::eval {
namespace {

// Series colours tell apart for people with a colour vision deficiency, with a marker each beside them; the heat map's
// colours are those of viridis, which grow lighter evenly.
constexpr const char* kStyle = R"css(
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --raised: #f4f6f8;
  --link: #0550ae; --c0: #0072b2; --c1: #c44e00; --c2: #00805a; --c3: #a03d91; --c4: #8a6a00; --c5: #3b2fa0; --c6: #96244f;
  --c7: #4f5b66; }
@media (prefers-color-scheme: dark) { :root { --back: #0e1116; --text: #e6eaef; --soft: #9aa5b1; --line: #343c46;
  --raised: #171c23; --link: #7cb7ff; --c0: #56b4e9; --c1: #ff9147; --c2: #3ecfa0; --c3: #e48fd6; --c4: #e5c54a;
  --c5: #a79bff; --c6: #f47fa6; --c7: #b4bec9; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 4rem; max-width: 76rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.35rem; margin: 2.5rem 0 0.5rem; }
h3 { font-size: 1.15rem; margin: 2rem 0 0.25rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
h4 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p { margin: 0.25rem 0 0.75rem; max-width: 75ch; } .note, small, figcaption { color: var(--soft); }
.note, figcaption { font-size: 0.875rem; }
a { color: var(--link); } nav ul { padding-left: 1.2rem; margin: 0.25rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.scroll { overflow-x: auto; max-width: 100%; } .mark { margin-right: -0.55em; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
td, thead th { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--back); max-width: 14rem; }
tbody tr:hover th, tbody tr:hover td { background: var(--raised); }
thead th { vertical-align: bottom; padding: 0; } th button { font: inherit; font-weight: 600; color: inherit;
  background: none; border: 0; padding: 0.25rem 0.6rem; cursor: pointer; text-align: inherit; width: 100%; }
th[aria-sort=ascending] button::after { content: " \25B2"; } th[aria-sort=descending] button::after { content: " \25BC"; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: 0.15rem 1rem; font-size: 0.875rem; }
dt { color: var(--soft); } dd { margin: 0; white-space: pre-wrap; } dd.code { font-family: ui-monospace, monospace; }
details { margin: 0.75rem 0; } summary { cursor: pointer; font-weight: 600; }
figure { margin: 1rem 0; } .chart .scroll svg { width: 100%; min-width: 34rem; max-width: 60rem; height: auto;
  display: block; }
.chart text { font-size: 13px; fill: var(--text); } .grid { stroke: var(--line); }
.full { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 6 4; } .band { fill: var(--text); opacity: 0.08; }
.series { stroke: currentColor; fill: currentColor; } .series path.join { fill: none; stroke-width: 1.5; opacity: 0.5; }
.series line { stroke-width: 2; } .hollow { fill: var(--back); stroke-width: 2; } .stroke { fill: none; stroke-width: 2.5; }
.picked .scroll .series { opacity: 0.12; } .picked .scroll .series.on { opacity: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.25rem 0.5rem; padding: 0; margin: 0.5rem 0; }
.legend button { display: inline-flex; align-items: center; gap: 0.4rem; font: inherit; font-size: 0.875rem;
  color: var(--text); background: none; border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.15rem 0.5rem;
  cursor: pointer; text-align: left; }
.legend button[aria-pressed=true] { background: var(--raised); border-color: var(--text); }
.legend svg { width: 1.1rem; height: 1.1rem; flex: none; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.controls { display: none; flex-wrap: wrap; gap: 0.5rem 1rem; margin: 0.5rem 0; } .js .controls { display: flex; }
.controls select { font: inherit; max-width: 100%; } .pair { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; }
.pair > * { max-width: 100%; }
.heat { margin: 0 0 1rem; } .heat caption { text-align: left; font-weight: 600; padding: 0.25rem 0; }
.heat th, .heat thead th { padding: 0.2rem 0.5rem; font-weight: 400; border: 0; position: static; white-space: nowrap;
  vertical-align: middle; }
.heat td, tbody tr:hover td.h { border: 2px solid var(--back); text-align: center; min-width: 3.6rem;
  vertical-align: middle; }
.scale { display: flex; align-items: center; gap: 0.4rem; font-size: 0.875rem; } .scale i { width: 1.3rem; height: 0.9rem; }
td.none { color: var(--soft); }
.h0, tr:hover td.h0 { background: #440154; color: #fff; } .h1, tr:hover td.h1 { background: #482475; color: #fff; }
.h2, tr:hover td.h2 { background: #414487; color: #fff; } .h3, tr:hover td.h3 { background: #355f8d; color: #fff; }
.h4, tr:hover td.h4 { background: #2a788e; color: #fff; } .h5, tr:hover td.h5 { background: #21918c; color: #000; }
.h6, tr:hover td.h6 { background: #22a884; color: #000; } .h7, tr:hover td.h7 { background: #44bf70; color: #000; }
.h8, tr:hover td.h8 { background: #7ad151; color: #000; } .h9, tr:hover td.h9 { background: #bddf26; color: #000; }
.h10, tr:hover td.h10 { background: #fde725; color: #000; }
@media (max-width: 40rem) { .chart text { font-size: 17px; } dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.4rem; }
  tbody th { max-width: 9rem; } }
@media print { .scroll { overflow: visible; } .chart .scroll svg { min-width: 0; } }
)css";

// Without it the page shows everything, one below the other.
constexpr const char* kScript = R"js(
document.documentElement.classList.add("js");
document.querySelectorAll(".choose").forEach((box) => {
  const selects = [...box.querySelectorAll("select")];
  const panels = [...box.querySelectorAll("[data-key]")];
  const show = () => {
    const key = selects.map((select) => select.value).join("-");
    panels.forEach((panel) => { panel.hidden = panel.dataset.key !== key; });
    box.querySelectorAll("[data-none]").forEach((note) => { note.hidden = panels.some((panel) => !panel.hidden); });
  };
  selects.forEach((select) => select.addEventListener("change", show));
  show();
});
const compare = (column) => (a, b) => {
  const [left, right] = [a, b].map((row) => row.cells[column].textContent);
  if (column === 0) return left.localeCompare(right, undefined, { numeric: true });
  const [x, y] = [left, right].map(parseFloat);
  return Number.isNaN(x) ? (Number.isNaN(y) ? left.localeCompare(right) : -1) : Number.isNaN(y) ? 1 : x - y;
};
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th");
  const body = head.closest("table").tBodies[0];
  const descending = head.getAttribute("aria-sort") === "ascending";
  const rows = [...body.rows].sort(compare(head.cellIndex));
  body.append(...(descending ? rows.reverse() : rows));
  head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
}));
document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
  const figure = button.closest("figure");
  const on = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", on);
  figure.querySelector(".series[data-series='" + button.dataset.series + "']").classList.toggle("on", on);
  figure.classList.toggle("picked", figure.querySelector(".series.on") !== null);
}));
)js";

}  // namespace

const char* HtmlStyle() { return kStyle; }

const char* HtmlScript() { return kScript; }

}  // namespace dropkv::eval
