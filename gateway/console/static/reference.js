// Shows the interactive reference of the gateway that served this file.
const root = new URL(".", location.href);
const dark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);

async function showReference() {
  const answer = await fetch(new URL("schema/openapi.json", root));
  if (!answer.ok) throw new Error(`the document is not there: ${answer.status}`);
  const spec = await answer.json();
  // A proxy may serve the gateway below a path of its own, which the document does not know.
  spec.servers = [{ url: root.href.replace(/\/$/, "") }];
  SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    displayRequestDuration: true,
    docExpansion: "none",
    defaultModelsExpandDepth: -1,
    filter: true,
    validatorUrl: null,
  });
}

applyTheme();
dark.addEventListener("change", applyTheme);
showReference().catch((error) => {
  document.getElementById("reference").textContent = `The reference cannot be shown: ${error.message}`;
});
