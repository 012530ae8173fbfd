// Requests to the server this page came from. A key, if the server wants one, lives in this tab only.

const KEY = "rootlace-key";

/** An answer that is not what was asked for; `status` is that of HTTP, 0 where nothing answered. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  // Asked with the key of before: the one that was entered meanwhile may be right.
  if (reply.status === 401 && key !== sessionStorage.getItem(KEY)) return ask(path, { body, signal });
  if (!reply.ok) throw new ApiError(reply.status, await message(reply));
  return reply;
}

async function message(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `status ${reply.status}`;
  }
}

let model = "";

/** Which of the server's models requests are about that say no other; "": the only one. */
export const setModel = (name) => {
  model = name;
};

/** The path of an endpoint that is about one model. */
export const ofModel = (path) =>
  model ? `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(model)}` : path;

export const getJson = async (path) => (await ask(path)).json();

export const getText = async (path) => (await ask(path)).text();

/** The events of a stream, decoded, until it ends; an error where it ends before its time. */
export async function* events(path, body, signal) {
  const reader = (await ask(path, { body, signal })).body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new ApiError(0, "the connection broke before the answer was complete");
    held += decoder.decode(value, { stream: true });
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(200, event.error.message);
      yield event;
    }
  }
}
