// What the console's pages do beyond links and forms. Without this file they can still be read and used.
"use strict";

document.documentElement.classList.remove("no-js");

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (zone) document.cookie = `tollgate_zone=${zone}; path=/console; max-age=31536000; samesite=lax`;

/* Copying: `data-copy` holds the text. */
async function copy(button) {
  await navigator.clipboard.writeText(button.dataset.copy);
  const was = button.innerHTML;
  button.textContent = button.classList.contains("copy") ? "✓" : "Copied";
  setTimeout(() => { button.innerHTML = was; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button).catch(() => getSelection().selectAllChildren(button.previousElementSibling));
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

/* Filters answer as they are changed. */
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-autosubmit]");
  if (!form) return;
  // A range that was chosen replaces one that was given by its ends.
  if (event.target.name === "range") form.querySelectorAll('[name="from"], [name="to"]').forEach((each) => each.remove());
  form.requestSubmit();
});

/* What destroys something is named, and asked for once more. */
function ask(form) {
  const dialog = document.createElement("dialog");
  const text = Object.assign(document.createElement("p"), { textContent: form.dataset.confirm });
  const actions = Object.assign(document.createElement("form"), { method: "dialog", className: "actions" });
  const yes = Object.assign(document.createElement("button"), {
    value: "yes", className: "danger primary", textContent: form.querySelector("button:not([type])")?.textContent || "Yes",
  });
  const no = Object.assign(document.createElement("button"), { value: "", textContent: "Cancel", autofocus: true });
  actions.append(yes, no);
  dialog.append(text, actions);
  dialog.setAttribute("aria-label", form.dataset.confirm);
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (dialog.returnValue !== "yes") return;
    const question = form.dataset.confirm;
    delete form.dataset.confirm;
    form.requestSubmit();
    form.dataset.confirm = question;
  });
  dialog.showModal();
}

document.addEventListener("submit", (event) => {
  if (!event.target.dataset?.confirm) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  ask(event.target);
}, true);

/* htmx: the token of forms goes with what no form sends; what was swapped in is where reading goes on. */
document.addEventListener("htmx:configRequest", (event) => {
  event.detail.headers["X-Form-Token"] = document.querySelector('meta[name="form-token"]').content;
});
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target?.id !== "main" && event.target.id !== "main") return;
  const main = document.getElementById("main");
  if (main && (document.activeElement === document.body || !document.activeElement)) main.focus({ preventScroll: true });
});

/* Keys: `/` searches, `g` and a letter goes, `?` tells; `data-key` gives an element a key of its own. */
let goes = 0;
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable], dialog[open]")) return;
  const going = Date.now() - goes < 3000;
  goes = 0;
  const found = going
    ? document.querySelector(`.places a[data-letter="${CSS.escape(event.key)}"]`)
    : document.querySelector(`#main [data-key="${CSS.escape(event.key)}"], [data-key="${CSS.escape(event.key)}"]`);
  if (found) {
    event.preventDefault();
    found.click();
  } else if (event.key === "g") {
    goes = Date.now();
  } else if (event.key === "?") {
    document.getElementById("help")?.showModal();
  }
});
