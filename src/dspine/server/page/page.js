// The page: a conversation, and beside it what speculation does.

import { ServerError, getJson, streamChat } from "./stream.js";

const $ = (id) => document.getElementById(id);
const conversation = []; // {role, content}, as the server reads it
let running = null; // AbortController of the answer that is made
let slots = { drafted: [], accepted: [] };
let following = true; // the end of the conversation, until the reader scrolls away from it
let asking = null; // timer of the next look at the server
const touch = matchMedia("(pointer: coarse)").matches;
const narrow = matchMedia("(max-width: 46rem)").matches;

function element(kind, className, text = "") {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
}

function show(message) {
  const log = $("messages");
  if (!message.isConnected) log.append(message);
  if (following) log.scrollTop = log.scrollHeight;
}

function wish(messages) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const drafts = $("drafting").checked ? number("width") : 0;
  return {
    messages,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
    return_token_texts: true,
    ...(drafts === undefined ? {} : { speculative: { n_max: drafts } }),
  };
}

function history() {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...conversation] : [...conversation];
}

async function answer() {
  const message = element("div", "message assistant");
  const thought = element("div", "thought");
  const text = element("div", "text");
  message.append(text);
  show(message);
  let content = "";
  slots = { drafted: [], accepted: [] };
  let finished = null;
  let reason = "";
  setRunning(new AbortController());
  try {
    for await (const chunk of streamChat(wish(history()), $("key").value, running.signal)) {
      const choice = chunk.choices[0];
      const delta = choice?.delta ?? {};
      if (delta.reasoning_content) {
        if (!thought.isConnected) message.prepend(thought);
        thought.textContent += delta.reasoning_content;
      }
      if (delta.content) {
        content += delta.content;
        text.append(...coloured(delta.content, chunk.dspine));
      }
      count(chunk.dspine);
      if (chunk.timings) finished = chunk.timings;
      reason = choice?.finish_reason ?? reason;
      show(message);
    }
    if (!finished) throw new ServerError("the answer broke off");
    report(message, finished, reason);
  } catch (error) {
    if (error.name !== "AbortError") {
      const words = wordsOf(error);
      message.classList.add("fault");
      text.append(content ? `\n${words}` : words);
      show(message);
      connect(); // it may be gone, or want another key
    }
  } finally {
    setRunning(null);
    if (content) {
      conversation.push({ role: "assistant", content });
      message.append(copyButton(content));
      show(message);
    }
    $("again").disabled = conversation.length === 0;
    if (!touch) $("question").focus(); // where it would not open a keyboard over the answer
  }
}

function copyButton(text) {
  const button = element("button", "copy", "Copy answer");
  button.type = "button";
  button.addEventListener("click", async () => {
    // The words of the button are part of the log: a screen reader says them.
    button.textContent = (await copy(text)) ? "Copied" : "Not copied: select the text";
    setTimeout(() => { button.textContent = "Copy answer"; }, 3000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have no clipboard for pages from another machine without https.
  }
  const before = document.activeElement;
  const held = element("textarea", "hidden");
  held.value = text;
  document.body.append(held);
  held.select();
  const done = document.execCommand("copy");
  held.remove();
  before?.focus();
  return done;
}

function wordsOf(error) {
  return error instanceof ServerError ? error.message : "the server cannot be reached";
}

// The tokens of a chunk by who wrote them. Where the text is not just these tokens (thoughts and
// tool calls are taken out of it, characters held back), it stays without colours.
function coloured(text, origins) {
  const texts = origins?.texts ?? [];
  if (texts.join("") !== text) return [element("span", "token plain", text)];
  return tokenSpans(origins);
}

function tokenSpans({ steps, texts }) {
  const parts = [];
  let at = 0;
  for (const step of steps) {
    for (const [name, length] of shares(step)) {
      for (const text of texts.slice(at, at + length)) {
        if (text) parts.push(element("span", `token ${name}`, text));
      }
      at += length;
    }
  }
  return parts;
}

function shares(step) {
  const own = step.tokens - step.accepted;
  if (!step.drafted) return [["plain", own]];
  return [["drafted", step.accepted], ["bonus", own]].filter(([, length]) => length > 0);
}

function count(origins) {
  const steps = origins?.steps ?? [];
  for (const step of steps) {
    for (let slot = 0; slot < step.drafted; slot++) {
      slots.drafted[slot] = (slots.drafted[slot] ?? 0) + 1;
      slots.accepted[slot] = (slots.accepted[slot] ?? 0) + (slot < step.accepted ? 1 : 0);
    }
  }
  if (!steps.length) return;
  const last = steps[steps.length - 1];
  const before = steps.slice(0, -1).reduce((sum, step) => sum + step.tokens, 0);
  const texts = origins.texts.slice(before);
  const spans = tokenSpans({ steps: [last], texts });
  if (spans.length) $("block").replaceChildren(...spans); // an end token has no text
  $("block").title = `${last.proposer}: ${last.accepted} of ${last.drafted} drafts accepted`;
  chart();
}

function chart() {
  const n = Math.max(4, slots.drafted.length);
  const width = 240 / n;
  const parts = slots.drafted.map((drafted, i) => {
    const share = slots.accepted[i] / drafted;
    const bar = svg("rect", {
      x: i * width + 2, y: 75 - 70 * share, width: Math.max(1, width - 4), height: 70 * share,
    });
    bar.append(svg("title", {}, `slot ${i + 1}: ${slots.accepted[i]} of ${drafted}`));
    return [bar, svg("text", { x: i * width + width / 2 - 3, y: 87 }, String(i + 1))];
  });
  $("slots").replaceChildren(...parts.flat());
}

function svg(kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function report(message, t, reason) {
  const steps = t.predicted_n - (t.draft_n_accepted ?? 0);
  const speed = `${t.predicted_per_second.toFixed(1)} tokens/s`;
  const length = (t.predicted_n / Math.max(1, steps)).toFixed(2);
  $("speed").textContent = speed;
  $("length").textContent = length;
  $("rate").textContent = t.draft_n ? `${t.draft_n_accepted} of ${t.draft_n}` : "nothing drafted";
  $("prompt-speed").textContent = `${t.prompt_n} new, ${t.cache_n} from memory`;
  const cut = reason === "length" ? ", cut at the limit of tokens or context" : "";
  message.append(element("footer", "", `${speed}, ${length} tokens a verify${cut}`));
  show(message);
}

function setRunning(controller) {
  running = controller;
  $("stop").hidden = !controller;
  // A screen reader waits for the whole answer instead of reading token after token.
  $("messages").setAttribute("aria-busy", String(Boolean(controller)));
  for (const id of ["send", "clear", "measure-plain"]) $(id).disabled = Boolean(controller);
  if (controller) $("again").disabled = true;
}

async function send() {
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  following = true;
  // One without an answer is not asked again: templates want question and answer in turn.
  if (conversation.at(-1)?.role === "user") conversation.pop();
  conversation.push({ role: "user", content: question });
  show(element("div", "message user", question));
  await answer();
}

async function again() {
  if (running || !conversation.length) return;
  if (conversation.at(-1).role === "assistant") conversation.pop();
  const last = $("messages").lastElementChild;
  if (last?.classList.contains("assistant")) last.remove();
  await answer();
}

async function measurePlain() {
  if (running) return;
  $("plain-speed").textContent = "measuring";
  setRunning(new AbortController());
  try {
    const prompt = [{ role: "user", content: "Write a short text about the sea." }];
    const body = { ...wish(prompt), max_tokens: 64, speculative: { n_max: 0 }, ignore_eos: true };
    for await (const chunk of streamChat(body, $("key").value, running.signal)) {
      if (chunk.timings) {
        $("plain-speed").textContent = `${chunk.timings.predicted_per_second.toFixed(1)} tokens/s`;
      }
    }
  } catch (error) {
    $("plain-speed").textContent = error.name === "AbortError" ? "stopped" : wordsOf(error);
  } finally {
    setRunning(null);
    $("again").disabled = conversation.length === 0;
  }
}

async function connect() {
  clearTimeout(asking);
  try {
    await getJson("health");
    const props = await getJson("props", $("key").value);
    $("model").textContent = props.model_alias;
    const who = props.speculative;
    $("state").textContent = who.drafting_off
      ? "ready, drafting off" : `ready, drafts: ${who.drafter ?? who.proposer}`;
    $("state").title = who.drafting_off ?? "";
  } catch (error) {
    $("state").textContent = error instanceof ServerError ? error.message : "not reachable";
    clearTimeout(asking);
    asking = setTimeout(connect, 1500);
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("question").addEventListener("keydown", (event) => {
  // A touch keyboard has no other way to a new line.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", again);
$("measure-plain").addEventListener("click", measurePlain);
$("clear").addEventListener("click", () => {
  conversation.length = 0;
  $("messages").replaceChildren();
  $("again").disabled = true;
});
$("messages").addEventListener("scroll", () => {
  const log = $("messages");
  following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
});
function openPanel(open) {
  document.querySelector("main").classList.toggle("closed", !open);
  $("panel-switch").setAttribute("aria-expanded", String(open));
}
$("panel-switch").addEventListener("click", () => {
  openPanel(document.querySelector("main").classList.contains("closed"));
});
openPanel(!narrow);
if (touch) $("question").placeholder = "Ask something";
$("key").addEventListener("change", connect);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
connect();
