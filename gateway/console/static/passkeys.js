// Passkeys, for browsers that have them: without this file the pages work with passwords alone.
"use strict";

const bytes = (text) =>
  Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
const text = (buffer) =>
  btoa(String.fromCharCode(...new Uint8Array(buffer)))
    .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

async function ask(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

function serve(form, work) {
  if (!form || !window.PublicKeyCredential) return;
  form.hidden = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = form.querySelector(".problem");
    problem.hidden = true;
    try {
      await work(form);
    } catch {
      problem.hidden = false;
    }
  });
}

serve(document.getElementById("passkey-sign-in"), async (form) => {
  const shared = { request: form.dataset.request, form_token: form.dataset.token };
  const publicKey = await ask("/oauth/passkeys/sign-in/options", shared);
  publicKey.challenge = bytes(publicKey.challenge);
  const made = await navigator.credentials.get({ publicKey });
  const { location } = await ask("/oauth/passkeys/sign-in", {
    ...shared,
    credential: {
      id: made.id,
      rawId: text(made.rawId),
      type: made.type,
      response: {
        authenticatorData: text(made.response.authenticatorData),
        clientDataJSON: text(made.response.clientDataJSON),
        signature: text(made.response.signature),
        userHandle: made.response.userHandle ? text(made.response.userHandle) : null,
      },
    },
  });
  window.location.assign(location);
});

serve(document.getElementById("passkey-register"), async (form) => {
  const shared = { form_token: form.dataset.token };
  const publicKey = await ask("/oauth/passkeys/register/options", shared);
  publicKey.challenge = bytes(publicKey.challenge);
  publicKey.user.id = bytes(publicKey.user.id);
  for (const known of publicKey.excludeCredentials ?? []) known.id = bytes(known.id);
  const made = await navigator.credentials.create({ publicKey });
  const { location } = await ask("/oauth/passkeys/register", {
    ...shared,
    name: new FormData(form).get("name"),
    credential: {
      id: made.id,
      rawId: text(made.rawId),
      type: made.type,
      response: {
        attestationObject: text(made.response.attestationObject),
        clientDataJSON: text(made.response.clientDataJSON),
      },
    },
  });
  window.location.assign(location);
});
