// The page: sends a request to /v1/completions, shows the text as it comes, and each token's probability. With a chat
// model, it first holds a conversation through /v1/chat/completions.

const N_ALTERNATIVES = 5;
const PER_FRAME = 250, PER_BLOCK = 250; // tokens: at most this many are added at once; about this many per block
const byId = (id) => document.getElementById(id);
const form = byId("form"), prompt = byId("prompt"), text = byId("text"), tip = byId("tip"), status = byId("status");
const tokens = new WeakMap(); // of a span: [{text, logprob, top}]
const fresh = []; // pieces that are not on the page yet
let drawing = Promise.resolve(); // resolves when they are
let running = null; // AbortController of the current request
const talk = []; // the messages of the conversation: {role, content}

fetch("v1/models").then((answer) => answer.json()).then(({ data: [model] }) => {
  byId("model").textContent = model.id + (model.max_model_len ? `, up to ${model.max_model_len} tokens` : "");
  form.elements.max_tokens.max = model.max_tokens;
  document.title = `${model.id} - log-gpt`;
  byId("view").hidden = !model.chat;
  show_chat(model.chat);
});

function show_chat(on) {
  document.body.classList.toggle("chat", on);
  byId("view").textContent = on ? "Continue a text" : "Chat";
}

for (const each of [form, byId("ask")]) {
  each.addEventListener("submit", (event) => {
    event.preventDefault();
    if (document.body.classList.contains("chat")) send();
    else generate();
  });
}
for (const name of ["stop", "stop_answer"]) byId(name).addEventListener("click", () => running?.abort());
byId("view").addEventListener("click", () => show_chat(!document.body.classList.contains("chat")));
byId("new").addEventListener("click", () => {
  talk.length = 0;
  byId("talk").replaceChildren();
  say("");
  buttons();
  byId("message").focus();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  send();
});
byId("continue").addEventListener("click", () => {
  prompt.value = text.textContent;
  generate();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") running?.abort();
});

async function generate() {
  if (running) return;
  const body = request();
  text.replaceChildren();
  tip.hidden = true;
  text.parentElement.scrollIntoView({ block: "nearest" }); // on a small screen it is below the form
  if (!body.echo && body.prompt) body.prompt.split(/(?<=\n)/).forEach((line) => show(line));
  await run("v1/completions", body, append);
}

// Send a message and show the answer. A stopped answer stays; a message that fails goes back to its place.
async function send() {
  const box = byId("message"), log = byId("talk"), content = box.value;
  if (running || !content.trim()) return;
  box.value = "";
  const system = byId("system").value ? [{ role: "system", content: byId("system").value }] : [];
  const shown = [message("user", content), message("assistant", "")];
  const answer = shown[1].appendChild(document.createElement("span"));
  talk.push({ role: "user", content });
  log.append(...shown);
  log.scrollTop = log.scrollHeight;
  log.ariaBusy = "true"; // a screen reader reads the whole answer
  const { prompt: _, echo: __, logprobs: ___, ...body } = request();
  const whole = await run("v1/chat/completions", { ...body, messages: [...system, ...talk] }, ({ delta }) => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.append(delta.content);
    if (atEnd) log.scrollTop = log.scrollHeight;
    return 1;
  });
  log.ariaBusy = "false";
  if (whole) {
    talk.push({ role: "assistant", content: answer.textContent });
  } else {
    talk.pop();
    shown.forEach((element) => element.remove());
    box.value ||= content;
  }
  buttons();
}

function message(role, content) {
  const element = document.createElement("div"), name = document.createElement("b");
  element.className = `message ${role}`;
  name.textContent = role === "user" ? "You" : "Model";
  element.append(name, content);
  return element;
}

// Send a request, and hand over each new part of a choice to `take`, which returns its number of tokens. Return whether
// there was no error; the user may have stopped it.
async function run(path, body, take) {
  running = new AbortController();
  let failed = false;
  say("waiting for a place");
  buttons();
  const started = performance.now();
  let first, n = 0, reused = "", reason = "stopped", told = 0;
  try {
    for await (const chunk of chunks(path, body, running.signal)) {
      first ??= performance.now();
      if (chunk.usage) {
        n = chunk.usage.completion_tokens;
        const cached = chunk.usage.prompt_tokens_details?.cached_tokens;
        if (cached) reused = `, ${cached} of ${chunk.usage.prompt_tokens} prompt tokens were read before`;
      }
      for (const choice of chunk.choices) {
        n += take(choice);
        reason = choice.finish_reason ?? reason;
      }
      if (performance.now() - told > 100) {
        say(progress(n, first));
        told = performance.now();
      }
    }
    const why = { stop: "the text ended", length: "stopped at the token limit" }[reason] ?? reason;
    const wait = ((first - started) / 1000).toFixed(2);
    const end = `${progress(n, first)}, ${why}; first after ${wait} s${reused}; seed ${body.seed}`;
    await drawing;
    say(end);
  } catch (error) {
    failed = error.name !== "AbortError";
    const end = failed ? error.message : `stopped; ${progress(n, first)}; seed ${body.seed}`;
    await drawing;
    say(end, failed);
  }
  running = null;
  buttons();
  return !failed;
}

// The form as a request. A missing seed is chosen here, so that it can be shown.
function request() {
  const number = (name) => (form.elements[name].value === "" ? null : Number(form.elements[name].value));
  const names = ["temperature", "top_k", "top_p", "min_p", "max_tokens"];
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  return {
    prompt: prompt.value,
    ...Object.fromEntries(names.map((name) => [name, number(name)])),
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 32),
    stop: stop.map((line) => line.replaceAll("\\n", "\n")),
    echo: byId("echo").checked,
    logprobs: N_ALTERNATIVES,
    stream: true,
    stream_options: { include_usage: true },
  };
}

// The objects of a stream of server-sent events.
async function* chunks(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server ended before the text did");
    const lines = value.split("\n"); // an event is one line, followed by an empty one
    lines[0] = rest + lines[0];
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// Show new text in spans, one per token, or one for several tokens that form one character.
function append({ text: piece, logprobs }) {
  const characters = [...piece]; // offsets count code points, not UTF-16 units
  const begin = logprobs.text_offset[0] ?? 0;
  let group = [], at = 0;
  logprobs.tokens.forEach((token, i) => {
    group.push({ text: token, logprob: logprobs.token_logprobs[i], top: logprobs.top_logprobs[i] ?? {} });
    const end = i + 1 < logprobs.tokens.length ? logprobs.text_offset[i + 1] - begin : characters.length;
    if (end === at) return;
    show(characters.slice(at, end).join(""), group);
    [group, at] = [[], end];
  });
  if (at < characters.length) show(characters.slice(at).join(""), group);
  return logprobs.tokens.length;
}

// Add words to the page with the next frame, so that everything that came by then costs one layout.
function show(words, group = null) {
  fresh.push([words, group]);
  if (fresh.length === 1) drawing = draw();
}

async function draw() {
  while (fresh.length) {
    await nextFrame();
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    for (const [words, group] of fresh.splice(0, PER_FRAME)) block().append(span(words, group));
    if (atEnd) text.scrollTop = text.scrollHeight;
  }
}

// A hidden tab gets no frames.
function nextFrame() {
  return new Promise((go) => (document.hidden ? setTimeout(go) : requestAnimationFrame(go)));
}

// The block to add text to. Browsers lay out each block separately, so adding text costs the layout of the last one only.
// A new block begins at the end of a line, or within a line that is longer than several blocks.
function block() {
  const last = text.lastElementChild, n = last?.childElementCount;
  const full = !last || (n >= PER_BLOCK && last.lastChild.textContent.endsWith("\n")) || n >= 4 * PER_BLOCK;
  if (full) text.append(document.createElement("div"));
  return text.lastElementChild;
}

// A null group is the prompt; an empty one is the rest of tokens that are already shown.
function span(words, group) {
  const element = document.createElement("span");
  element.textContent = words;
  if (!group) element.className = "prompt";
  else if (group.length) {
    const p = Math.exp(group.reduce((sum, token) => sum + (token.logprob ?? 0), 0));
    element.className = `token p${p < 0.01 ? 0 : p < 0.1 ? 1 : p < 0.5 ? 2 : 3}`;
    tokens.set(element, group);
  }
  return element;
}

function progress(n, first) {
  const seconds = (performance.now() - first) / 1000;
  return `${n} token${n === 1 ? "" : "s"}` + (n > 1 && seconds > 0.2 ? `, ${Math.round((n - 1) / seconds)} a second` : "");
}

function say(message, wrong = false) {
  status.textContent = message;
  status.classList.toggle("wrong", wrong);
}

function buttons() {
  byId("generate").disabled = running !== null;
  byId("stop").disabled = running === null;
  byId("continue").disabled = running !== null || text.textContent === "";
  byId("send").disabled = running !== null;
  byId("stop_answer").disabled = running === null;
  byId("new").disabled = running !== null || talk.length === 0;
}

text.addEventListener("mouseover", ({ target }) => {
  const group = tokens.get(target);
  tip.hidden = !group;
  if (!group) return;
  tip.replaceChildren(...group.map(table));
  const box = target.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - size.height - 6}px`;
});
text.addEventListener("mouseleave", () => (tip.hidden = true));
document.addEventListener("scroll", () => (tip.hidden = true), true); // of the text or of the whole page

// Copy the text itself: browsers would add a line break after each block.
text.addEventListener("copy", (event) => {
  event.clipboardData.setData("text/plain", getSelection().getRangeAt(0).toString());
  event.preventDefault();
});

// A token's probability, and those of the most likely tokens in its place.
function table(token) {
  const rows = Object.entries(token.top).sort((a, b) => b[1] - a[1]);
  const element = document.createElement("table");
  if (token.logprob === null) element.insertRow().insertCell().textContent = "nothing came before it";
  for (const [other, logprob] of rows) {
    const row = element.insertRow(), p = Math.exp(logprob), meter = document.createElement("meter");
    row.classList.toggle("came", other === token.text);
    row.insertCell().textContent = visible(other);
    row.insertCell().textContent = p >= 0.001 ? `${(100 * p).toFixed(1)} %` : p.toExponential(1);
    meter.value = p;
    row.insertCell().append(meter);
  }
  return element;
}

// A token with visible spaces.
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace("bytes:", "");
}
