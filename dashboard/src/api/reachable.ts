import { useSyncExternalStore } from "react";

/** Time since which the API can't be reached, in Unix seconds; null while it can. */
let lostAt: number | null = null;
const listeners = new Set<() => void>();

/** Records whether the last request got an answer. */
export function setReachable(reachable: boolean) {
  const next = reachable ? null : (lostAt ?? Date.now() / 1000);
  if (next === lostAt) return;
  lostAt = next;
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Returns the time since which the API can't be reached, or null: what is shown is that old. */
export function useLostAt(): number | null {
  return useSyncExternalStore(subscribe, () => lostAt);
}
