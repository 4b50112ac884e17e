import { useEffect, useState } from "react";

/** Returns Unix seconds, refreshed every `everyMs` while `active`. */
export function useNow(active = true, everyMs = 1000): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    if (!active) return;
    const timer = setInterval(() => setNow(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [active, everyMs]);
  return now;
}
