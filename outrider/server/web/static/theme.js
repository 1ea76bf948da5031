// The colour scheme the person chose, before the page is first drawn. A classic script: modules run too late for that.

try {
  document.documentElement.dataset.theme = localStorage.getItem("outrider-theme") ?? "auto";
} catch {
  document.documentElement.dataset.theme = "auto"; // storage is forbidden: as the system has it
}
