// The server's routes as the page uses them, and errors as sentences.

import { sseData } from "./sse.js";

/** An error response, or a stream that broke. `status` is 0 where the error came inside the stream. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = "") {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const REASONS = {
  400: "The server refused the request",
  401: "The server wants an API key: enter it under Settings",
  403: "The server does not allow this",
  404: "The server does not know this model or address",
  413: "The request is too large for this server",
  429: "The server is busy and its queue is full",
  503: "The server is not ready: it is loading, shutting down or has failed",
};

/** Any error of this module, as a sentence. */
export function words(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (!(error instanceof ApiError)) return `The server cannot be reached (${error.message}).`;
  if (error.status === 0) return `The answer broke off: ${ended(error.message)}`;
  const reason = REASONS[error.status] ?? `The server answered with status ${error.status}`;
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return (error.message ? `${reason}. It says: ${ended(error.message)}` : `${reason}.`) + later;
}

function ended(sentence) {
  return /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
}

/** The server's routes. `key()` is called for each request, so that the key is kept in one place. */
export class Api {
  constructor(key, fetcher = (...args) => fetch(...args)) {
    this.key = key;
    this.fetcher = fetcher;
    this.missing = {}; // fields of a request that the engine behind the server lacks, and why
  }

  async models() {
    const models = (await (await this.#ask("/v1/models")).json()).data;
    this.missing = models[0]?.missing ?? {};
    return models;
  }

  async metrics() {
    return (await this.#ask("/metrics")).text();
  }

  /**
   * The chunks of a streamed chat, to its end; aborting `signal` cancels the request on the server too. Fields that the
   * engine lacks are left out.
   */
  async *chat(wanted, signal) {
    const body = Object.fromEntries(Object.entries(wanted).filter(([name]) => !(name in this.missing)));
    const response = await this.#ask("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of sseData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? "the server gave no reason");
      yield chunk;
    }
    throw new ApiError("the connection closed before the answer was complete");
  }

  async #ask(path, options = {}) {
    const headers = { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    const response = await this.fetcher(path, { headers, cache: "no-store", ...options });
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("the server sent something that is not JSON");
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null); // a proxy may answer with something else
  const message = body?.error?.message ?? "";
  return new ApiError(message, response.status, response.headers.get("Retry-After") ?? "");
}
