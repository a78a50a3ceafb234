// When a page is left, Gradio's client aborts its streams and reports them as errors: here they end instead. What it asks meanwhile is not
// answered.

const STREAMS = /\/(queue\/data|heartbeat\/)/;
const streams = new Set(); // functions that end a stream
const ask = window.fetch.bind(window);
let isLeft = false;

const ending = (answer) => {
  const reader = answer.body.getReader();
  let isOver = false;
  const body = new ReadableStream({
    start(controller) {
      this.end = () => {
        isOver = true;
        streams.delete(this.end);
        controller.close();
      };
      streams.add(this.end);
    },
    async pull(controller) {
      try {
        const { done, value } = await reader.read();
        if (done && !isOver) this.end();
        else if (!isOver) controller.enqueue(value);
      } catch (reason) {
        if (isOver) return;
        if (reason?.name === "AbortError") return this.end(); // the client's own
        streams.delete(this.end);
        throw reason;
      }
    },
    cancel(reason) {
      streams.delete(this.end);
      return reader.cancel(reason);
    },
  });
  return new Response(body, answer);
};

window.fetch = async (resource, options) => {
  try {
    const answer = await ask(resource, options);
    return answer.body && STREAMS.test(resource?.url ?? resource) ? ending(answer) : answer;
  } catch (reason) {
    if (isLeft || (reason?.name === "AbortError" && STREAMS.test(resource?.url ?? resource))) return new Promise(() => {});
    throw reason;
  }
};

addEventListener("pagehide", () => {
  isLeft = true;
  for (const end of streams) end();
});

addEventListener("pageshow", ({ persisted }) => {
  if (persisted) location.reload(); // its streams have ended; what was chosen is kept
});
