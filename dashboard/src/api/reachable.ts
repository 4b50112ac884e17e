import { useSyncExternalStore } from "react";

/** Why the API gives no answers, since when, in Unix seconds, and what helps. */
export type Outage = { since: number; problem: string | null; remedy: string | null };

/** Time after an answer that the API is unavailable in which others don't end the outage. */
const LASTS_MS = 8_000;

let outage: Outage | null = null;
let seenAt = 0;
const listeners = new Set<() => void>();

function set(next: Outage | null) {
  outage = next;
  for (const listener of listeners) listener();
}

/** Records that a request got no answer, or that one got an answer. */
export function setReachable(reachable: boolean) {
  if (!reachable) {
    if (!outage) set({ since: Date.now() / 1000, problem: null, remedy: null });
  } else if (outage && (outage.problem === null || Date.now() - seenAt > LASTS_MS)) {
    set(null);
  }
}

/** Records that the API answered that what it needs is unavailable. */
export function setUnavailable(problem: string, remedy: string | null) {
  seenAt = Date.now();
  if (outage?.problem === problem) return;
  set({ since: outage?.since ?? Date.now() / 1000, problem, remedy });
}

function subscribe(listener: () => void) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Returns why there are no answers, or null: what is shown is as old. */
export function useOutage(): Outage | null {
  return useSyncExternalStore(subscribe, () => outage);
}
