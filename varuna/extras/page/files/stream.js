/** The session that a link gives, and the manager's events, for as long as the page is open. */

const KEY = "varuna-session";
const WAITS_S = [0.3, 0.6, 1, 2, 4, 8];
const SILENT_S = 25; // the manager says something every 10 s
let session = sessionStorage.getItem(KEY) ?? "";

/** A link's code is used up at once. The session is this tab's: neither a cookie nor in any address. */
export async function enter() {
  const code = new URLSearchParams(location.hash.slice(1)).get("login");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("login", { method: "POST", body: JSON.stringify({ code }) });
  if (answer.ok) {
    session = (await answer.json()).session;
    sessionStorage.setItem(KEY, session);
  }
}

/** Read something of the manager. */
export const read = (path) => fetch(path, { cache: "no-store", headers: { Authorization: `Bearer ${session}` } });

/** Ask for a change, with the operator's token: it is in a header, so no other page can send it. */
export const change = (path, token, body) =>
  fetch(path, { method: "POST", headers: { Authorization: `Bearer ${token}` }, body: JSON.stringify(body) });

/** Split a stream of server-sent events into {id, kind, value}; returns what is not complete yet. */
export function parse(text, take) {
  const frames = text.split("\n\n"), rest = frames.pop();
  for (const each of frames) {
    const fields = { id: "", event: "", data: "" };
    for (const line of each.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
    }
    if (fields.event) take({ id: fields.id, kind: fields.event, value: JSON.parse(fields.data) });
  }
  return rest;
}

/**
 * Listen for ever. `take(kind, value)` gets events, `tell(state, text)` the connection: "live", "connecting", "lost",
 * "closed" (the link does not open anything any more) or "over" (`isOver()` was true when the stream ended).
 */
export async function listen(take, tell, isOver) {
  let heard = "", failures = 0;
  for (;;) {
    try {
      await once();
    } catch (error) {
      if (isOver()) return tell("over", "");
      if (error.closed) return tell("closed", error.message);
      const wait_s = WAITS_S[Math.min(failures++, WAITS_S.length - 1)];
      tell("lost", error instanceof TypeError ? "The manager does not answer" : error.message);
      await new Promise((resolve) => setTimeout(resolve, wait_s * 1000));
    }
  }

  async function once() {
    const abort = new AbortController();
    let watch = setTimeout(() => abort.abort(), SILENT_S * 1000);
    const headers = { Authorization: `Bearer ${session}`, ...(heard ? { "Last-Event-ID": heard } : {}) };
    try {
      const answer = await fetch("events", { headers, cache: "no-store", signal: abort.signal });
      if (answer.status === 401) throw Object.assign(new Error("the link was used already, or has expired"), { closed: true });
      if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the manager answered ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { done, value } = await reader.read();
        if (done) throw new Error("the manager closed the connection");
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort(), SILENT_S * 1000);
        failures = 0;
        rest = parse(rest + value, ({ id, kind, value: said }) => {
          heard = id || heard;
          take(kind, said);
        });
        tell("live", "");
      }
    } finally {
      clearTimeout(watch);
      abort.abort();
    }
  }
}
