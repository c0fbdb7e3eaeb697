// Reads an answer as it comes: server-sent events of POST /v1/chat/completions.

export class ServerError extends Error {}

export async function* streamChat(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers, signal, body: JSON.stringify({ ...body, stream: true }),
  });
  if (!reply.ok) throw new ServerError(await reason(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const document = JSON.parse(event.slice(6));
      if (document.error) throw new ServerError(document.error.message);
      yield document;
    }
  }
}

export async function getJson(path, key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(path, { headers });
  if (!reply.ok) throw new ServerError(await reason(reply));
  return reply.json();
}

async function reason(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered with status ${reply.status}`;
  }
}
