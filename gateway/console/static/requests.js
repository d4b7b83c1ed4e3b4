// Shows requests as they come: a button opens a stream, each event of which has rows of the table.
"use strict";

(() => {
  const MOST_ROWS = 200;
  let stream = null;

  const parts = () => {
    const button = document.getElementById("live");
    return { button, body: document.querySelector("#found tbody"), told: document.getElementById("live-told") };
  };

  const stop = (text) => {
    if (stream) stream.close();
    stream = null;
    const { button, told } = parts();
    if (button) {
      button.textContent = "Watch live";
      button.setAttribute("aria-pressed", "false");
    }
    if (told) told.textContent = text || "";
  };

  const add = (text) => {
    const { body } = parts();
    if (!body) return stop();
    const made = document.createElement("template");
    made.innerHTML = text;
    const rows = [...made.content.querySelectorAll("tbody tr")].filter(
      (row) => !document.getElementById(row.id));
    body.prepend(...rows);
    while (body.rows.length > MOST_ROWS) body.lastElementChild.remove();
  };

  const start = (button) => {
    stop();
    stream = new EventSource(button.dataset.live);
    button.textContent = "Pause";
    button.setAttribute("aria-pressed", "true");
    stream.addEventListener("open", () => { const { told } = parts(); if (told) told.textContent = "Live: new requests come in above."; });
    stream.addEventListener("rows", (event) => add(event.data));
    stream.addEventListener("refused", (event) => stop(event.data));
    stream.addEventListener("error", () => {
      if (stream && stream.readyState === EventSource.CLOSED) stop("The connection ended. Watch again to go on.");
    });
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("#live");
    if (!button) return;
    if (stream) stop("Paused."); else start(button);
  });
  // What is renewed elsewhere on the page, as the badges are each minute, ends nothing.
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { button, body } = parts();
    if ([button, body].some((part) => part && event.detail.target.contains(part))) stop();
  });
  window.addEventListener("pagehide", () => stop());
})();
