import { useEffect, useState } from "react";
import { useOutage } from "../api/reachable";

/**
 * Returns Unix seconds, refreshed every `everyMs` while `active`. The clock stands while the API
 * can't be reached, because what is shown is as old.
 */
export function useNow(active = true, everyMs = 1000): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  const lostAt = useOutage()?.since ?? null;
  const runs = active && lostAt === null;
  useEffect(() => {
    if (!runs) return;
    setNow(Date.now() / 1000);
    const timer = setInterval(() => setNow(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [runs, everyMs]);
  return lostAt === null ? now : Math.min(now, lostAt);
}
