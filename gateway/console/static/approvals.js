// Keys on the queue of approvals: j and k choose a call, y and n answer the one that is chosen.
"use strict";

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable], dialog[open]")) return;
  const asked = [...document.querySelectorAll(".ask")];
  const chosen = document.activeElement?.closest?.(".ask");
  const at = asked.indexOf(chosen);
  if (event.key === "j" || event.key === "k") {
    const next = asked[event.key === "j" ? at + 1 : at - 1];
    if (!next) return;
    event.preventDefault();
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  } else if (chosen && (event.key === "y" || event.key === "n")) {
    event.preventDefault();
    chosen.querySelector(event.key === "y" ? ".actions .primary" : ".actions .danger")?.click();
  }
});
