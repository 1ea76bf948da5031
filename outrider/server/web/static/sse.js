// Server-sent events out of a byte stream: the data of each event, as it completes.

/** Splits text that arrives in any pieces into the data of its events. */
export class SseParser {
  #line = "";
  #data = [];
  #afterCarriageReturn = false;

  /** Takes the next piece of text; returns the data of every event it completed. */
  push(text) {
    const done = [];
    for (const char of text) {
      const second = char === "\n" && this.#afterCarriageReturn; // the second half of a CRLF
      this.#afterCarriageReturn = char === "\r";
      if (second) continue;
      if (char === "\n" || char === "\r") this.#endLine(done);
      else this.#line += char;
    }
    return done;
  }

  #endLine(done) {
    const line = this.#line;
    this.#line = "";
    if (line === "") {
      if (this.#data.length) done.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      const value = line.slice(5);
      this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
    } // comments (":...") and the fields event, id, retry are ignored
  }
}

/** The data of each event of a ReadableStream of bytes. Leaving the loop cancels the stream. */
export async function* sseData(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    await reader.cancel().catch(() => {}); // already failed or closed: nothing left to cancel
  }
}
