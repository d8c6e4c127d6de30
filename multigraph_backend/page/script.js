
"use strict";
// Search among graphs, and folding.  Everything can be read without it.
const tools = document.querySelector(".tools");
const folds = () => document.querySelectorAll(".graph:not([hidden]) details");
if (tools) {
  tools.hidden = false;
  document.getElementById("search").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const graph of document.querySelectorAll(".graph")) {
      graph.hidden = !graph.textContent.toLowerCase().includes(wanted);
    }
  });
  document.getElementById("unfold").addEventListener("click", () => folds().forEach((entry) => { entry.open = true; }));
  document.getElementById("fold").addEventListener("click", () => folds().forEach((entry) => { entry.open = false; }));
}
// paper does not unfold
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((entry) => { entry.open = true; }));
