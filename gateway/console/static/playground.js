// The playground: asks models at /console/playground/completions, which answers as the API does, and shows how
// the answer comes. What is written stays in this tab (sessionStorage); texts become text nodes, never markup.
"use strict";

(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  const page = JSON.parse(form.dataset.script);
  const KEPT = `tollgate.playground.${page.user}`;
  const PICO = 12;
  const KINDS = [
    ["uncached", "uncached", "uncached_input"], ["cached", "cached", "cache_read"],
    ["written", "written", "cache_write_5m"], ["output", "out", "output"],
  ];
  const TEXT_FIELDS = ["prompt", "system", "tools", "schema"];
  const NUMBERS = ["temperature", "max_tokens", "top_p", "seed"];
  const ABOUT = { response_format: "schema", messages: "prompt", stop: "prompt" };
  const models = new Map(page.models.map((each) => [each.name, each]));
  const field = (name) => form.elements.namedItem(name);
  const servers = [...form.querySelectorAll('[name="server"]')];
  const buttons = Object.fromEntries(["send", "stop", "clear"].map((id) => [id, document.getElementById(id)]));
  const compare = document.getElementById("compare");
  const told = document.getElementById("told");
  const talks = [];
  const asked = () => (compare.getAttribute("aria-pressed") === "true" ? talks : talks.slice(0, 1));
  const isRunning = () => talks.some((talk) => talk.running);
  let images = [];
  let language = "curl";

  function node(kind, className, text) {
    const made = document.createElement(kind);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // ---- money and counts: pico-USD as BigInt

  function usd(pico) {
    const digits = pico.toString().padStart(PICO + 1, "0");
    const whole = digits.slice(0, -PICO);
    const rest = digits.slice(-PICO).replace(/0+$/, "").padEnd(2, "0");
    return `$ ${whole}.${rest}`;
  }

  function picoOf(text) {
    const [whole, rest = ""] = text.split(".");
    return BigInt(whole + rest.slice(0, PICO).padEnd(PICO, "0"));
  }

  function counts(usage) {
    const input = usage.prompt_tokens_details || {};
    const cached = input.cached_tokens || 0;
    const written = input.cache_write_tokens || 0;
    return {
      uncached: Math.max(0, (usage.prompt_tokens || 0) - cached - written),
      cached, written, output: usage.completion_tokens || 0,
    };
  }

  function costSoFar(model, usage) {
    const prices = models.get(model)?.prices;
    if (!prices) return null;
    const used = counts(usage);
    return KINDS.reduce((sum, [kind, , price]) => sum + BigInt(used[kind]) * BigInt(prices[price] || prices.uncached_input || 0), 0n);
  }

  // What is left of the payer's cap: as the gateway said, less what runs and what has ended since.
  let cap = page.cap;
  let spent = 0n;
  function drawLeft() {
    const place = document.getElementById("left");
    if (!place || !cap) return;
    const running = talks.reduce((sum, talk) => sum + (talk.running ? talk.cost : 0n), 0n);
    const rest = BigInt(cap.left) - spent - running;
    const left = rest > 0n ? rest : 0n;
    place.querySelector("b").textContent = usd(left < BigInt(1e12) ? left - (left % 1000000n) : left - (left % BigInt(1e10)));
    const amount = BigInt(cap.amount);
    const gone = amount ? Number(((amount - left) * 1000n) / amount) / 1000 : 1;
    const bar = place.querySelector(".bar");
    bar.classList.toggle("near", gone >= 0.8 && gone < 1);
    bar.classList.toggle("over", gone >= 1);
    bar.querySelector("rect").setAttribute("width", 100 * gone);
  }

  // Others may spend under the same key: once all is settled, the gateway is asked anew.
  let asking = 0;
  function askLeft() {
    clearTimeout(asking);
    if (!cap) return;
    asking = setTimeout(async () => {
      const before = spent;
      const answer = await fetch(page.left_at, { headers: { "hx-request": "true" } }).catch(() => null);
      if (isRunning() || spent !== before || answer?.status !== 200) return;
      cap = await answer.json();
      spent = 0n;
      drawLeft();
    }, 2000);
  }

  const ms = (value) => (value < 0.1 ? "< 0.1 ms" : value < 10000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
  const many = (value) => value.toLocaleString("en-US");

  // ---- one conversation with one model

  class Talk {
    constructor(section) {
      this.section = section;
      this.select = section.querySelector("select");
      this.log = section.querySelector(".turns");
      this.turns = [];
      this.sent = null;
      this.running = null;
      this.cost = 0n;
      this.select.addEventListener("change", () => { this.describe(); if (!this.turns.length) this.show(); draw(); changed(); });
      this.describe();
    }

    get model() { return this.select.value; }

    describe() {
      const model = models.get(this.model);
      const facts = [];
      if (model) {
        const upstream = "as its upstream takes them";
        facts.push(model.takes_tools === null ? `tools and images ${upstream}` : model.takes_tools ? "text, tools, JSON schema" : "text, JSON schema");
        if (model.context) facts.push(`${many(model.context)} tokens`);
        facts.push(model.prices ? `${perMillion(model.prices.uncached_input)} in, ${perMillion(model.prices.output)} out per 1 M` : "no price");
      }
      this.section.querySelector(".abilities").replaceChildren(...facts.map((each) => node("span", "", each)));
      this.log.setAttribute("aria-label", `Conversation with ${this.model}`);
    }

    get calls() {
      const last = this.turns.at(-1);
      if (last?.role !== "assistant") return [];
      return (last.calls || []).filter((call) => call.result === undefined);
    }

    // The messages of the API; what failed and what was never said are left out.
    messages() {
      const said = [];
      const system = field("system").value.trim();
      if (system) said.push({ role: "system", content: system });
      for (const turn of this.turns) {
        if (turn.failed) continue;
        if (turn.role === "user") said.push({ role: "user", content: contentOf(turn) });
        if (turn.role !== "assistant" || (!turn.text && !turn.calls?.length)) continue;
        const message = { role: "assistant", content: turn.text || null };
        if (turn.calls?.length) {
          message.tool_calls = turn.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
        }
        said.push(message);
        for (const call of turn.calls || []) {
          if (call.result !== undefined) said.push({ role: "tool", tool_call_id: call.id, content: call.result });
        }
      }
      return said;
    }

    show() {
      this.log.replaceChildren(...this.turns.map((turn) => this.drawn(turn)));
      if (!this.turns.length) this.log.append(node("p", "dim hint", `Ask ${this.model} something below.`));
      this.log.scrollTop = this.log.scrollHeight;
    }

    drawn(turn) {
      const made = node("div", `turn ${turn.role}${turn.failed ? " failed" : ""}`);
      made.append(node("div", "by", turn.role === "user" ? "You" : turn.model || "Model"));
      for (const url of turn.images || []) made.append(picture(url));
      if (turn.thought) {
        const more = node("details", "more");
        more.append(node("summary", "", "What it thought"), node("div", "text dim", turn.thought));
        made.append(more);
      }
      for (const step of turn.steps || []) made.append(drawnStep(step));
      made.append(turn.text_node = node("div", "text", turn.text || ""));
      for (const call of turn.calls || []) made.append(this.drawnCall(call));
      if (turn.error) {
        const problem = node("div", "problem", turn.error);
        problem.setAttribute("role", "alert");
        made.append(problem);
      }
      if (turn.note) made.append(node("div", "note", turn.note));
      return made;
    }

    drawnCall(call) {
      const made = node("div", "call");
      made.append(node("div", "by", `calls ${call.name}`), node("code", "arguments", pretty(call.arguments)));
      if (call.result !== undefined) {
        made.append(node("div", "by", "you answered"), node("code", "arguments", call.result));
        return made;
      }
      const answer = node("textarea");
      answer.rows = 2;
      answer.setAttribute("aria-label", `Result of ${call.name}`);
      answer.placeholder = "What the tool answers";
      answer.value = call.draft || "";
      answer.addEventListener("input", () => { call.draft = answer.value; keep(); });
      const give = node("button", "small", "Answer the call");
      give.type = "button";
      give.addEventListener("click", () => this.answer(call));
      made.append(answer, give);
      return made;
    }

    answer(call) {
      call.result = call.draft || "";
      this.show();
      changed();
      if (!this.calls.length) this.run();
    }

    body() {
      const { tools, schema } = read();
      const body = { model: this.model, messages: this.messages() };
      for (const name of NUMBERS) {
        const text = field(name).value.trim();
        if (text) body[name] = Number.isFinite(Number(text)) ? Number(text) : text;
      }
      const asked = servers.filter((each) => each.checked).map((each) => ({ type: "mcp", server_label: each.value, require_approval: "never" }));
      if (tools || asked.length) body.tools = [...(tools || []), ...asked];
      if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
      body.stream = true;
      body.stream_options = { include_usage: true };
      return body;
    }

    async run() {
      let body;
      try { body = this.body(); } catch (error) { return fail(error); }
      const turn = { role: "assistant", model: this.model, text: "", calls: [], steps: [] };
      const clock = { begun: performance.now(), first: 0, last: 0, tokens: 0, pieces: 0 };
      this.turns.push(turn);
      this.show();
      this.running = new AbortController();
      this.cost = 0n;
      this.sent = body;
      draw();
      changed();
      try {
        // Usage in every chunk: what it costs is shown as it runs. A loop of tools has it at its end.
        const sent = body.tools?.some((each) => each.type === "mcp") ? body : { ...body, stream_options: { include_usage: true, continuous_usage_stats: true } };
        const answer = await fetch(`${page.completions}?payer=${encodeURIComponent(page.payer)}`, {
          method: "POST",
          headers: { "content-type": "application/json", "x-form-token": form.elements.form_token.value, "x-tollgate-cost": "true" },
          body: JSON.stringify(sent),
          signal: this.running.signal,
        });
        this.link(answer.headers.get("x-request-id"));
        if (!answer.ok) throw await refusal(answer);
        await this.take(answer, turn, clock);
      } catch (error) {
        if (error.name === "AbortError") turn.note = "Stopped. What was written until then is billed.";
        else this.failed(turn, error);
      } finally {
        this.running = null;
        spent += this.cost;
        drawLeft();
        askLeft();
        for (const call of turn.calls) call.id ||= `call_${Math.random().toString(36).slice(2)}`;
        this.show();
        draw();
        changed();
        told.textContent = turn.error ? "" : `${this.model} has answered`;
      }
    }

    async take(answer, turn, clock) {
      for await (const event of events(answer.body)) {
        if (event.error) throw Object.assign(new Error(event.error.message), { code: event.error.code, param: event.error.param });
        if (event.mcp_step) { turn.steps.push(event.mcp_step); this.show(); }
        const delta = event.choices?.[0]?.delta;
        if (delta) this.add(turn, delta, clock);
        const ended = event.choices?.[0]?.finish_reason;
        if (ended === "length") turn.note = "It ended at the bound of its length.";
        if (event.usage) this.measure(turn, event.usage, clock);
      }
    }

    add(turn, delta, clock) {
      const written = (delta.content || "") + (delta.reasoning_content || "") + (delta.tool_calls ? "c" : "");
      if (written) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        clock.pieces += 1;
      }
      const near = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      if (delta.content) {
        turn.text += delta.content;
        turn.text_node.append(delta.content);
      }
      if (delta.reasoning_content) {
        const begins = !turn.thought;
        turn.thought = (turn.thought || "") + delta.reasoning_content;
        if (begins) this.show();
        this.log.lastElementChild.querySelector("details.more .text").textContent = turn.thought;
      }
      for (const piece of delta.tool_calls || []) {
        const call = turn.calls[piece.index] ||= { id: "", name: "", arguments: "" };
        if (piece.id) call.id = piece.id;
        call.name += piece.function?.name || "";
        call.arguments += piece.function?.arguments || "";
      }
      if (near) this.log.scrollTop = this.log.scrollHeight;
      if (clock.first) this.time(clock);
    }

    time(clock) {
      this.tell("ttft", ms(clock.first - clock.begun));
      const between = Math.max(clock.tokens, clock.pieces) - 1;
      if (between > 0) this.tell("itl", ms((clock.last - clock.first) / between));
    }

    measure(turn, usage, clock) {
      const used = counts(usage);
      clock.tokens = used.output;
      const exact = usage.cost?.amount;
      const soFar = exact === undefined ? costSoFar(turn.model, usage) : null;
      this.cost = exact !== undefined ? picoOf(exact) : soFar ?? this.cost;
      drawLeft();
      this.tell("cost", exact !== undefined ? `$ ${exact}` : soFar === null ? "–" : `${usd(soFar)} so far`);
      this.tell("tokens", `${many(usage.prompt_tokens || 0)} in · ${many(used.output)} out`);
      const all = KINDS.reduce((sum, [kind]) => sum + used[kind], 0) || 1;
      const mix = this.section.querySelector(".mix");
      mix.replaceChildren();
      let at = 0;
      for (const [kind] of KINDS) {
        const part = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        part.setAttribute("class", kind);
        part.setAttribute("x", at);
        part.setAttribute("width", (used[kind] / all) * 100);
        part.setAttribute("height", 4);
        mix.append(part);
        at += (used[kind] / all) * 100;
      }
      const input = used.uncached + used.cached + used.written;
      const share = input ? ` (${Math.floor((used.cached / input) * 100)} %)` : "";
      this.section.querySelector(".kinds").replaceChildren(
        ...KINDS.filter(([kind]) => used[kind]).map(([kind, word]) => node("span", `key ${kind}`, `${many(used[kind])} ${word}${kind === "cached" ? share : ""}`)),
      );
      if (clock.first) this.time(clock);
    }

    tell(name, text) { this.section.querySelector(`.${name}`).textContent = text; }

    link(id) {
      for (const name of ["cost", "ttft", "itl", "tokens"]) this.tell(name, "–");
      this.section.querySelector(".mix").replaceChildren();
      this.section.querySelector(".kinds").replaceChildren();
      const place = this.section.querySelector(".request");
      place.replaceChildren();
      if (!id) return;
      const link = node("a", "", "The request");
      link.href = page.requests + encodeURIComponent(id);
      place.append(link);
    }

    failed(turn, error) {
      turn.error = error.name === "TypeError" ? "The gateway cannot be reached. Try again." : error.message;
      if (!turn.text && !turn.calls.length) {
        turn.failed = true;
        const prompt = this.turns.at(-2);
        if (prompt?.role === "user") prompt.failed = true;
        if (prompt?.failed && !field("prompt").value && asked().every((talk) => talk.turns.at(-1)?.failed)) {
          field("prompt").value = prompt.text;
          images = prompt.images || [];
          drawImages();
        }
      }
      mark(error.param);
      if (error.code === "signed_out") notice("You are signed out. What you wrote is kept in this tab.", page.login, "Sign in again");
      if (error.code === "stale_page") notice("This page is too old. What you wrote is kept in this tab.", location.href, "Load it again");
    }
  }

  // ---- what is read of an answer

  async function* events(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  }

  async function refusal(answer) {
    let error = {};
    try { error = (await answer.json()).error; } catch { error = { message: `The gateway answered ${answer.status}.` }; }
    return Object.assign(new Error(error.message), { code: error.code, param: error.param });
  }

  // ---- parts of the page

  function contentOf(turn) {
    if (!turn.images?.length) return turn.text;
    const pictures = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
    return turn.text ? [{ type: "text", text: turn.text }, ...pictures] : pictures;
  }

  function picture(url) {
    const made = node("img", "thumb");
    made.src = url;
    made.alt = "an image that you sent";
    return made;
  }

  function drawnStep(step) {
    const made = node("div", "call");
    const name = step.name ? `${step.server_label}: ${step.name}` : step.server_label;
    if (step.type === "mcp_list_tools") {
      made.append(node("div", "by", step.error ? `${step.server_label}: ${step.error}` : `${step.server_label} offers ${step.tools.length} tools`));
    } else if (step.type === "mcp_call") {
      made.append(node("div", "by", `${name} was called`), node("code", "arguments", pretty(step.arguments)));
      made.append(node("code", step.error ? "arguments bad" : "arguments", step.error ? JSON.stringify(step.error) : step.output ?? ""));
    } else if (step.type === "mcp_approval_request") {
      made.append(node("div", "by", `${name} waits for an administrator's yes`), node("code", "arguments", pretty(step.arguments)));
    } else {
      made.append(node("div", "by", `It ended early: ${String(step.reason).replaceAll("_", " ")}`));
    }
    return made;
  }

  function pretty(text) {
    try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text || ""; }
  }

  function perMillion(pico) {
    return pico === undefined ? "–" : usd(BigInt(pico) * 1000000n);
  }

  function notice(text, address, words) {
    const made = node("div", "message err");
    made.id = "notice";
    made.setAttribute("role", "alert");
    const link = node("a", "", words);
    link.href = address;
    made.append(node("span", "", text), link);
    document.getElementById("notice")?.remove();
    form.before(made);
  }

  function mark(param) {
    for (const each of form.querySelectorAll(".wrong")) {
      each.classList.remove("wrong");
      each.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
    }
    const name = String(param || "").split(/[.[]/, 1)[0];
    const found = form.querySelector(`.field [name="${CSS.escape(ABOUT[name] || name)}"]`);
    if (!found) return;
    found.closest(".field").classList.add("wrong");
    found.setAttribute("aria-invalid", "true");
  }

  function fail(error) {
    mark(error.param);
    notice(error.message, `#field-${error.param || "prompt"}`, "Look at it");
  }

  function read() {
    const found = {};
    for (const name of ["tools", "schema"]) {
      const text = field(name).value.trim();
      if (!text) continue;
      try { found[name] = JSON.parse(text); } catch (error) {
        throw Object.assign(new Error(`${name === "tools" ? "The tools are" : "The schema is"} not JSON: ${error.message}.`), { param: name });
      }
    }
    if (found.tools && !Array.isArray(found.tools)) throw Object.assign(new Error("The tools are a list: [ … ]."), { param: "tools" });
    return found;
  }

  // ---- asking

  function send() {
    if (isRunning()) return;
    const text = field("prompt").value.trim();
    document.getElementById("notice")?.remove();
    mark(null);
    if (asked().some((talk) => talk.calls.length)) return fail(Object.assign(new Error("The model waits for the results of its calls: answer them first."), { param: "prompt" }));
    if (!text && !images.length) return field("prompt").focus();
    try { read(); } catch (error) { return fail(error); }
    for (const talk of asked()) talk.turns.push({ role: "user", text, images });
    field("prompt").value = "";
    images = [];
    drawImages();
    for (const talk of asked()) talk.run();
  }

  function stop() {
    for (const talk of talks) talk.running?.abort();
  }

  function draw() {
    const takes = asked().some((talk) => models.get(talk.model)?.takes_images !== false);
    const input = form.querySelector("#attach input");
    input.disabled = !takes;
    input.parentElement.classList.toggle("off", !takes);
    input.parentElement.title = takes ? "" : "This model reads text alone.";
    buttons.stop.hidden = !isRunning();
    buttons.send.hidden = isRunning();
    if (document.activeElement === document.body) (isRunning() ? buttons.stop : field("prompt")).focus();
    buttons.clear.hidden = !talks.some((talk) => talk.turns.length);
    const both = compare.getAttribute("aria-pressed") === "true";
    compare.textContent = both ? "One model" : "Compare two models";
    form.classList.toggle("compared", both);
    if (talks[1]) talks[1].section.hidden = !both;
  }

  function setCompared(both) {
    if (both && !talks[1]) {
      const second = talks[0].section.cloneNode(true);
      const select = second.querySelector("select");
      select.removeAttribute("name");
      select.setAttribute("aria-label", "The other model");
      select.selectedIndex = [...select.options].findIndex((each) => each.value !== talks[0].model);
      if (select.selectedIndex < 0) select.selectedIndex = 0;
      talks[0].section.after(second);
      talks.push(new Talk(second));
      talks[1].link(null);
      talks[1].show();
    }
    compare.setAttribute("aria-pressed", String(both));
    draw();
  }

  // ---- images

  function drawImages() {
    form.querySelector(".thumbs").replaceChildren(...images.map((url, index) => {
      const made = node("span", "thumbed");
      const remove = node("button", "small", "Remove");
      remove.type = "button";
      remove.addEventListener("click", () => { images.splice(index, 1); drawImages(); changed(); });
      made.append(picture(url), remove);
      return made;
    }));
  }

  function attach(files) {
    for (const file of files) {
      if (images.length >= page.max_images) return notice(`At most ${page.max_images} images go with a message.`, "#field-prompt", "Go on");
      if (file.size > page.max_image_bytes) { notice(`${file.name} is larger than ${page.max_image_bytes >> 20} MiB.`, "#field-prompt", "Go on"); continue; }
      const reader = new FileReader();
      reader.addEventListener("load", () => { images.push(reader.result); drawImages(); changed(); });
      reader.readAsDataURL(file);
    }
  }

  // ---- the same by the API

  // What was sent last, or, while something is written, what would be sent; null: nothing yet.
  function request() {
    const talk = talks[0];
    const text = field("prompt").value.trim();
    if (!text && !images.length) return talk.sent;
    const body = talk.body();
    body.messages.push({ role: "user", content: contentOf({ text, images }) });
    return body;
  }

  const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

  // JSON's texts are Python's, too.
  function inPython(value, indent = "") {
    const deeper = `${indent}    `;
    if (value === null) return "None";
    if (value === true || value === false) return value ? "True" : "False";
    if (typeof value !== "object") return JSON.stringify(value);
    const isList = Array.isArray(value);
    const parts = isList ? value.map((each) => inPython(each, deeper)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${inPython(each, deeper)}`);
    const [open, close] = isList ? "[]" : "{}";
    const line = `${open}${parts.join(", ")}${close}`;
    return line.length < 80 && !line.includes("\n") ? line : `${open}\n${deeper}${parts.join(`,\n${deeper}`)},\n${indent}${close}`;
  }

  const CODE = {
    curl: (body) => `curl -sS --no-buffer ${inShell(`${page.api}/chat/completions`)} \\\n  -H "Authorization: Bearer $TOLLGATE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d ${inShell(JSON.stringify(body, null, 2))}`,
    python: (body) => `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(page.api)}, api_key=os.environ["TOLLGATE_API_KEY"])\nstream = client.chat.completions.create(\n${Object.entries(body).map(([name, value]) => `    ${name}=${inPython(value, "    ")},`).join("\n")}\n)\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n    if chunk.usage:\n        print("\\n", chunk.usage)`,
    typescript: (body) => `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${JSON.stringify(page.api)}, apiKey: process.env.TOLLGATE_API_KEY });\nconst stream = await client.chat.completions.create(${JSON.stringify(body, null, 2)});\nfor await (const chunk of stream) {\n  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");\n  if (chunk.usage) console.log("\\n", chunk.usage);\n}`,
  };

  function drawCode() {
    const shown = form.querySelector(".code pre");
    const copied = document.getElementById("copy-code");
    let body = null;
    let text = "Ask something: the request stands here as a program, as it was sent.";
    try {
      body = request();
      if (body) text = CODE[language](body);
    } catch (error) { text = `# ${error.message}`; }
    shown.textContent = text.replace(/(data:image\/[a-z]+;base64,[A-Za-z0-9+/]{24})[A-Za-z0-9+/=]+/g, "$1…");
    copied.dataset.copy = text;
    copied.disabled = !body;
    document.getElementById("code-when").textContent = !body ? "" : body === talks[0].sent ? "as it was sent" : "as it is sent next";
    for (const each of form.querySelectorAll("[data-language]")) each.setAttribute("aria-pressed", String(each.dataset.language === language));
  }

  // ---- the draft

  function bare(turn) {
    const { text_node, ...rest } = turn;
    return rest;
  }

  let leaving = false;
  function keep() {
    if (leaving) return;
    const draft = {
      fields: Object.fromEntries([...TEXT_FIELDS, ...NUMBERS].map((name) => [name, field(name).value])),
      servers: servers.filter((each) => each.checked).map((each) => each.value),
      talks: talks.map((talk) => ({ model: talk.model, turns: talk.turns.map(bare), sent: talk.sent })),
      compared: compare.getAttribute("aria-pressed") === "true",
      images, language, payer: page.payer,
    };
    try { sessionStorage.setItem(KEPT, JSON.stringify(draft)); } catch {
      // Images are too much for what a tab may keep: the texts are what matters.
      const lean = JSON.stringify(draft, (name, value) => (name === "images" ? [] : name === "sent" ? null : value));
      try { sessionStorage.setItem(KEPT, lean); } catch { sessionStorage.removeItem(KEPT); }
    }
  }

  function recall() {
    let draft = null;
    try { draft = JSON.parse(sessionStorage.getItem(KEPT)); } catch { sessionStorage.removeItem(KEPT); }
    if (!draft) return;
    // What paid last pays again, unless the address names another.
    const payers = [...document.querySelector('select[name="payer"]').options].map((each) => each.value);
    if (!location.search && draft.payer !== page.payer && payers.includes(draft.payer)) {
      leaving = true;
      location.replace(`?payer=${encodeURIComponent(draft.payer)}`);
      return;
    }
    for (const [name, value] of Object.entries(draft.fields)) if (!field(name).value) field(name).value = value;
    for (const each of servers) each.checked = draft.servers.includes(each.value);
    images = draft.images || [];
    language = CODE[draft.language] ? draft.language : "curl";
    setCompared(Boolean(draft.compared));
    draft.talks.slice(0, talks.length).forEach(({ model, turns, sent }, index) => {
      if (models.has(model)) talks[index].select.value = model;
      if (!talks[index].turns.length) Object.assign(talks[index], { turns, sent: sent || null });
      talks[index].describe();
    });
  }

  let pending = 0;
  function changed() {
    clearTimeout(pending);
    pending = setTimeout(() => { keep(); drawCode(); }, 150);
  }

  // ---- at work

  talks.push(new Talk(form.querySelector(".talk")));
  for (const each of JSON.parse(field("messages").value || "[]")) talks[0].turns.push({ role: each.role, text: each.content, model: talks[0].model });
  for (const each of form.querySelectorAll("[hidden]:not(#stop, #clear)")) each.hidden = false;
  recall();
  for (const talk of talks) talk.show();
  drawImages();
  draw();
  drawLeft();
  drawCode();
  form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
  form.addEventListener("input", changed);
  buttons.stop.addEventListener("click", stop);
  buttons.clear.addEventListener("click", () => {
    stop();
    for (const talk of talks) { talk.turns = []; talk.sent = null; talk.link(null); talk.show(); }
    draw();
    changed();
    field("prompt").focus();
  });
  compare.addEventListener("click", () => { setCompared(compare.getAttribute("aria-pressed") !== "true"); changed(); });
  form.querySelector("#attach input").addEventListener("change", (event) => { attach(event.target.files); event.target.value = ""; });
  for (const each of form.querySelectorAll("[data-language]")) {
    each.addEventListener("click", () => { language = each.dataset.language; drawCode(); keep(); });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) { event.preventDefault(); send(); }
    if (event.key === "Escape" && isRunning()) stop();
  });
  addEventListener("pagehide", keep);
})();
