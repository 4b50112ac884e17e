import { type QueryKey, useQueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";
import { MACHINES, patch } from "./patches";
import { setReachable } from "./reachable";

export type Connection = "connecting" | "live" | "broken";

export const STREAM = "/api/v1/stream";
/** Minimum time between two refreshes of the same data. */
const REFRESH_MS = 1_000;
/** Polling interval without a stream. */
export const POLL_MS = 5_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** Kinds of stream events. */
const KINDS = ["job", "event", "fleet", "machines", "store"];
/** Queries that change with every update of a job; others change with its events. */
const PER_UPDATE = ["view", "metrics", "staleness", "subtasks", "cost"];

/** Data of the fleet, without the machines, which the stream contains. */
const isFleet = (key: QueryKey) => key[0] === "fleet" && key[1] !== MACHINES[1];

/** Returns a test for the queries that a stream event makes stale; `job` is its job, if any. */
export function stale(kind: string, job: string): (key: QueryKey) => boolean {
  const own = (key: QueryKey) => key[0] === "job" && key[1] === job;
  switch (kind) {
    case "job":
      return (key) => own(key) && PER_UPDATE.includes(String(key[2]));
    case "event":
      return own;
    case "machines":
      return (key) => isFleet(key) || (key[0] === "job" && key[2] === "machines");
    case "fleet":
      return isFleet;
    default:
      return (key) => key[0] === kind;
  }
}

let state: Connection = "connecting";
const listeners = new Set<() => void>();

function setConnection(next: Connection) {
  if (next === state) return;
  state = next;
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useConnection(): Connection {
  return useSyncExternalStore(subscribe, () => state);
}

/** Returns a `refetchInterval` that polls while there is no stream. */
export function usePolling(enabled = true): number | false {
  const connection = useConnection();
  return enabled && connection !== "live" ? POLL_MS : false;
}

/** Follows the stream while the component is mounted; only the shell uses it. */
export function useLive(): Connection {
  const queries = useQueryClient();
  useEffect(() => {
    const refresh = throttled((about) => {
      const [kind = "", job = ""] = about.split(" ");
      const isStale = stale(kind, job);
      queries.invalidateQueries({ predicate: ({ queryKey }) => isStale(queryKey) });
    }, REFRESH_MS);
    const onEvent = (kind: string, event: MessageEvent<string>) => {
      patch(queries, kind, event.data);
      refresh.call(`${kind} ${subject(kind, event.data)}`);
    };
    const stop = follow(STREAM, KINDS, onEvent, (next) => {
      // The stream may have missed events meanwhile.
      if (next === "live" && state === "broken") queries.invalidateQueries();
      // These requests tell whether only the stream is broken.
      if (next === "broken" && state === "live") queries.refetchQueries({ type: "active" });
      if (next === "live") setReachable(true);
      setConnection(next);
    });
    return () => {
      stop();
      refresh.stop();
      setConnection("connecting");
    };
  }, [queries]);
  return useConnection();
}

function subject(kind: string, data: string): string {
  if (kind !== "job" && kind !== "event") return "";
  const event = JSON.parse(data) as { id: string; job?: string };
  return kind === "event" ? (event.job ?? "") : event.id;
}

/**
 * Follows server-sent events. The browser resumes a broken stream after the last event; a refused
 * stream is reopened here with growing pauses. Hidden tabs have no stream, because a browser opens
 * only six connections to a site: with as many streams, no other page would load.
 */
export function follow(
  url: string,
  kinds: string[],
  onEvent: (kind: string, event: MessageEvent<string>) => void,
  onState: (state: Connection) => void,
): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let wait = FIRST_RETRY_MS;
  let lastId = "";
  const open = () => {
    const after = lastId ? `after=${encodeURIComponent(lastId)}` : "";
    const current = new EventSource(url + (after && `${url.includes("?") ? "&" : "?"}${after}`));
    source = current;
    current.onopen = () => {
      wait = FIRST_RETRY_MS;
      onState("live");
    };
    current.onerror = () => {
      onState("broken");
      if (current.readyState === EventSource.CLOSED) {
        timer = setTimeout(open, wait);
        wait = Math.min(2 * wait, LAST_RETRY_MS);
      }
    };
    for (const kind of kinds) {
      current.addEventListener(kind, (event) => {
        lastId = event.lastEventId || lastId;
        onEvent(kind, event);
      });
    }
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
  };
  const reopen = () => {
    close();
    if (!document.hidden) open();
  };
  const turned = () => {
    onState("connecting");
    reopen();
  };
  const lost = () => onState("broken");
  reopen();
  window.addEventListener("offline", lost);
  // Reconnect at once when the network returns.
  window.addEventListener("online", reopen);
  document.addEventListener("visibilitychange", turned);
  return () => {
    document.removeEventListener("visibilitychange", turned);
    window.removeEventListener("online", reopen);
    window.removeEventListener("offline", lost);
    close();
  };
}

/** Limits calls for the same key to one per `intervalMs`; the last call is never dropped. */
export function throttled(work: (key: string) => void, intervalMs: number) {
  const timers = new Map<string, ReturnType<typeof setTimeout>>();
  const last = new Map<string, number>();
  const run = (key: string) => {
    timers.delete(key);
    last.set(key, Date.now());
    // Bounds the memory of a page that stays open for days.
    for (const [other, at] of last) if (at + intervalMs < Date.now()) last.delete(other);
    work(key);
  };
  return {
    call: (key: string) => {
      if (timers.has(key)) return;
      const wait = Math.max(0, (last.get(key) ?? 0) + intervalMs - Date.now());
      timers.set(
        key,
        setTimeout(() => run(key), wait),
      );
    },
    stop: () => {
      for (const timer of timers.values()) clearTimeout(timer);
    },
  };
}
